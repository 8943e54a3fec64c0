"""Calls of instances, by way of the store that each is attached to."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tensorcast_dask.api.artifact import Artifact
from tensorcast_dask.api.current import NOT_FORKED
from tensorcast_dask.exceptions import (
    PeerLost,
    Unknown,
    UnsupportedPlatform,
)
from tensorcast_dask.tensors import values
from tensorcast_dask.tensors.calling import found
from tensorcast_dask.tensors.messages import (
    ArtifactInfo,
    CallAnswered,
    CallInstance,
    Instances,
    InstancesAsked,
    Refused,
)

if TYPE_CHECKING:
    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.api.connection.deadlines import Deadline
    from tensorcast_dask.dataplane.direct import Direct
    from tensorcast_dask.tensors.messages import InstanceState, NodeCard

__all__ = ["call", "find", "listed", "packed", "result_of"]

_ANSWERS = CallAnswered | Refused
#: What a call that only looks may take.
_POLL_S: Final = 0.05
#: A call without arguments.
_NO_ARGUMENTS: Final = values.pack([[], {}])


async def listed(core: Core, limit: Deadline) -> tuple[InstanceState, ...]:
    """Ask the catalog for all instances."""
    request = InstancesAsked(rid=core.link.next_rid())
    there = await core.ask(request, Instances, limit)
    core.stores.learn(state.card for state in there.instances)
    return there.instances


async def find(core: Core, name: str, limit: Deadline) -> InstanceState:
    """Find one by its name.

    Raises
    ------
    NotFound
        When none is attached under it.
    """
    return found(await listed(core, limit), name)


def packed(args: Any, kwargs: dict[str, Any]) -> bytes:
    """Pack the arguments of a call."""
    if not args and not kwargs:
        return _NO_ARGUMENTS

    def lowered(value: Any) -> Any:
        if isinstance(value, Artifact):
            return value.info
        if isinstance(value, list | tuple):
            return [lowered(one) for one in value]
        if isinstance(value, dict):
            return {name: lowered(one) for name, one in value.items()}
        return value

    return values.pack([lowered(list(args)), lowered(kwargs)], what="the arguments")


def call(
    core: Core,
    card: NodeCard,
    request: CallInstance,
    limit: Deadline,
) -> bytes:
    """Call an instance by way of its node. Blocks."""
    if core.forked:
        raise UnsupportedPlatform(NOT_FORKED)
    left_s = max(limit.left_s(), _POLL_S) if limit.poll else limit.left_s()
    request = msgspec.structs.replace(request, deadline_s=left_s)
    if card.host == core.host and request.attachment and left_s > 0:
        direct = core.stores.directs.take(card, request, limit)
        if direct is not None and _sent(direct, request):
            return _answer(core, direct, request, left_s)
        core.stores.directs.forget(request.attachment)
    frame = core.stores.ask(card, request, CallAnswered, limit)
    return frame.message.value


def _sent(direct: Direct, request: CallInstance) -> bool:
    """Send a call with nobody between; False when it did not get there."""
    try:
        direct.send(request)
    except PeerLost:  # it lay idle, and the instance is gone: its node knows
        direct.close()
        return False
    return True


def _answer(core: Core, direct: Direct, request: CallInstance, left_s: float) -> bytes:
    try:
        answer: CallAnswered | Refused = direct.receive(
            _ANSWERS,  # type: ignore[arg-type]  # a union, decoded as one
            until_s=time.monotonic() + left_s,
        )
    except PeerLost as error:
        direct.close()
        message = (
            f"instance {request.instance!r} is gone with the call under way; nobody knows how "
            "far it came: look at its effects before you call again"
        )
        raise Unknown(message, {"instance": request.instance}) from error
    except BaseException:
        direct.close()
        raise
    core.stores.directs.give(request.attachment, direct)
    if isinstance(answer, Refused):
        raise answer.fault.error()
    return answer.value


def result_of(raw: bytes, session: Any) -> Any:
    """Give what a function returned, as a program meets it."""

    def meet(reference: values.Reference) -> object:
        assert isinstance(reference, ArtifactInfo), "instances: results have no steps"
        return Artifact(reference, session)

    return values.unpack(raw, meet)
