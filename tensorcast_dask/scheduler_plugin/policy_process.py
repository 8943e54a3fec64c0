"""The process in which one policy runs: it reads views, and writes what the policy decides.

Rules:

1. One frame in, one frame out, over the pipes it was started with. What the policy prints goes to
   the log of errors, not between the frames.
2. It ends with the scheduler, also while the policy is busy: a thread of its own waits for the
   end of the pipe.
3. What the policy returns is checked here; what does not fit its role is its failure.
"""

from __future__ import annotations

import os
import pickle
import queue
import struct
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, Final

import msgspec

from tensorcast_dask.policies.views import (
    Copy,
    Decided,
    Migrate,
    MoveRequest,
    Role,
    View,
    Wanted,
)

__all__ = ["LENGTH", "Answered", "Question", "checked", "main"]

#: Before each frame: how long it is.
LENGTH: Final = struct.Struct("<I")


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """First the policy (`blob`), then what it is to decide."""

    number: int = 0
    blob: bytes = b""
    view: View | None = None
    wanted: Wanted | None = None


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """That the policy was loaded (`number` 0), its decision, or its failure."""

    number: int = 0
    decided: Decided | None = None
    error: str = ""


def checked(role: Role, value: Any) -> Decided:  # noqa: ANN401 - whatever a policy returns
    """Take what a policy returned for what its role may return.

    Raises
    ------
    TypeError
        When it is something else.
    """
    match role:
        case Role.PLACE if value is None or isinstance(value, str):
            return Decided(node=value or "")
        case Role.ADMIT if value is None or isinstance(value, str):
            return Decided(refusal=value or "")
        case Role.EVICT if isinstance(value, Mapping):
            return Decided(weights={int(n): float(one) for n, one in value.items()})
        case Role.REPLICATE | Role.REBALANCE if isinstance(value, Iterable):
            actions = tuple(value)
            if all(isinstance(one, Copy | Migrate | MoveRequest) for one in actions):
                return Decided(actions=actions)
    message = f"a policy that is to {role} cannot return {value!r:.200}"
    raise TypeError(message)


def main(source: BinaryIO, sink: BinaryIO) -> None:
    """Serve until the pipe ends."""
    questions: queue.SimpleQueue[Question] = queue.SimpleQueue()
    decoder = msgspec.msgpack.Decoder(Question)

    def read() -> None:
        while (raw := _frame(source)) is not None:
            questions.put(decoder.decode(raw))
        os._exit(0)  # rule 2

    threading.Thread(target=read, name="tensorcast-policy-pipe", daemon=True).start()
    policy: Any = None
    while True:
        question = questions.get()
        answer = Answered(number=question.number)
        try:
            if question.view is None:
                policy = pickle.loads(question.blob)  # noqa: S301 - from who may run code here
                Role(policy.role)
            else:
                value = policy.decide(question.view, question.wanted)
                answer = Answered(
                    number=question.number, decided=checked(Role(policy.role), value)
                )
        except Exception as error:  # noqa: BLE001 - any failure of a policy is told
            text = f"{type(error).__name__}: {error}"
            answer = Answered(number=question.number, error=text[:2000])
        raw = msgspec.msgpack.encode(answer)
        sink.write(LENGTH.pack(len(raw)) + raw)
        sink.flush()


def _frame(source: BinaryIO) -> bytes | None:
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    raw = source.read(length)
    return raw if len(raw) == length else None


if __name__ == "__main__":
    # Rule 1: whoever prints, prints elsewhere.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    main(sys.stdin.buffer, out)
