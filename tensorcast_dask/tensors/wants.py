"""What a step of a plan wants, one thing after the other, of whoever drives it.

Rules:

1. A step is a generator: it yields what it wants, is sent the answer or thrown the error, and
   returns its outcome. It has no clock and no connection, so a Dask task and a store drive the
   same steps.
2. Requests are made without an id and without a deadline; `fitted` puts both in. So what is left
   of a deadline is counted by whoever has a clock.
3. A change goes to the catalog wrapped in a `StepEffect`, which names it by run, step and place.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import Final, NamedTuple, TypeAlias, TypeVar, cast

import msgspec

from tensorcast_dask.tensors.ids import RequestId
from tensorcast_dask.tensors.messages import (
    READS,
    CallInstance,
    Message,
    NodeCard,
    StepEffect,
    encode,
)

__all__ = [
    "NO_RID",
    "Ask",
    "Asking",
    "Call",
    "Effects",
    "Local",
    "Ticket",
    "Want",
    "ask",
    "fitted",
    "pause_s",
]

T = TypeVar("T")

#: Of a request that is not sent yet.
NO_RID: Final = RequestId("")
_BACKOFF_S: Final = 0.05
_LONGEST_S: Final = 2.0


class Ticket(NamedTuple):
    """One run of one plan."""

    key: str
    run: int
    #: The span that its steps follow from, `tensors.traces`.
    trace: str = ""


class Ask(NamedTuple):
    """Ask the catalog; the answer is of this kind."""

    request: Message
    kind: type[object]


class Call(NamedTuple):
    """Call an instance by way of its node; the answer is what it returned, packed."""

    card: NodeCard
    request: CallInstance


class Local(NamedTuple):
    """Have something done that takes a process with a session: `act` says what."""

    act: str
    args: tuple[object, ...]


Want: TypeAlias = Ask | Call | Local
#: A generator of wants that comes to something.
Asking: TypeAlias = Generator[Want, object, T]


def ask(request: Message, kind: type[T]) -> Asking[T]:
    """Want the catalog's answer to one request."""
    answer = yield Ask(request, kind)
    return cast("T", answer)


def fitted(request: Message, rid: RequestId, left_s: float) -> Message:
    """Put id and deadline into a request (rule 2)."""
    more: dict[str, object] = {"rid": rid}
    if "deadline_s" in request.__struct_fields__:
        more["deadline_s"] = left_s
    return msgspec.structs.replace(request, **more)


class Effects:
    """The changes that one attempt of a step asks for (rule 3)."""

    def __init__(self, ticket: Ticket, step: str, attempt: int) -> None:
        self._ticket = ticket
        self._step = step
        self._attempt = attempt
        self._numbers = itertools.count(1)

    def wrapped(self, request: Message, rid: RequestId, left_s: float) -> Message:
        """Make what is sent of what is asked."""
        request = fitted(request, rid, left_s)
        if type(request).__name__ in READS:
            return request
        return StepEffect(
            rid=rid,
            key=self._ticket.key,
            run=self._ticket.run,
            step=self._step,
            number=next(self._numbers),
            attempt=self._attempt,
            request=encode(request),
        )


def pause_s(attempts: int) -> float:
    """How long to wait before a step is tried again: a little longer each time."""
    return min(_BACKOFF_S * 2.0 ** (attempts - 1), _LONGEST_S)
