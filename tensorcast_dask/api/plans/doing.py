"""Steps of plans, as a process with a session carries them out.

Rule: what a step asks for stands in `tensors.steps`; here it is asked, one thing after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.protocol.pickle import loads

from tensorcast_dask.api.actions import instances, moves, reads
from tensorcast_dask.api.artifact import Artifact
from tensorcast_dask.api.connection.deadlines import Deadline, deadline
from tensorcast_dask.exceptions import TensorCastError, UnsupportedDtype
from tensorcast_dask.tensors import steps
from tensorcast_dask.tensors.messages import ArtifactInfo
from tensorcast_dask.tensors.wants import Ask, Call

if TYPE_CHECKING:
    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.tensors.messages import StepOutcome
    from tensorcast_dask.tensors.wants import Asking, Effects, Local, Want

__all__ = ["StepArgument", "call", "driven", "looked_at", "value_of"]


class StepArgument:
    """Stands in a function's arguments for the result of a step."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __dask_tokenize__(self) -> tuple[str, str]:
        return ("tensorcast-step", self.name)

    def __reduce__(self) -> tuple[type[StepArgument], tuple[str]]:
        return StepArgument, (self.name,)


def value_of(outcome: StepOutcome, session: Any = None) -> Any:
    """Give what a step has come to, as a program meets it; None where it is nothing."""
    if outcome.kind == "plain":
        return instances.result_of(outcome.value, session)
    if outcome.kind == "pickle":
        return loads(outcome.value)  # type: ignore[no-untyped-call]
    value = steps.value_of(outcome)
    return Artifact(value, session) if isinstance(value, ArtifactInfo) else value


def looked_at(outcome: StepOutcome) -> object:
    """Give what a step has come to, as other steps meet it."""
    value = value_of(outcome)
    return value.info if isinstance(value, Artifact) else value


def call(payload: bytes, given: dict[str, StepOutcome], session: Any) -> Any:
    """Call the caller's function, with results of steps in place."""
    function, args, kwargs = loads(payload)  # type: ignore[no-untyped-call]

    def put_in(value: Any) -> Any:
        if isinstance(value, StepArgument):
            return value_of(given[value.name], session)
        if type(value) in {list, tuple, set}:
            return type(value)(map(put_in, value))
        if type(value) is dict:
            return {key: put_in(one) for key, one in value.items()}
        return value

    return function(*put_in(list(args)), **put_in(kwargs))


def driven(
    session: Any, doing: Asking[StepOutcome], effects: Effects, limit: Deadline
) -> StepOutcome:
    """Give a step what it wants, until it has come to something."""
    want = next(doing)
    try:
        while True:
            try:
                value = _given(session, want, effects, limit)
            except TensorCastError as error:
                want = doing.throw(error)
            else:
                want = doing.send(value)
    except StopIteration as end:
        outcome: StepOutcome = end.value
        return outcome


def _given(session: Any, want: Want, effects: Effects, limit: Deadline) -> object:
    core: Core = session._core  # noqa: SLF001 - the worker's own session
    match want:
        case Ask(request=request, kind=kind):
            if limit.poll:
                limit = deadline(0)
            rid = core.link.next_rid()
            request = effects.wrapped(request, rid, limit.left_s())
            return core.bridge(core.ask, request, kind, limit)
        case Call(card=card, request=request):
            return instances.call(core, card, request, limit)
        case _:
            return _local(session, core, want, limit)


def _local(session: Any, core: Core, want: Local, limit: Deadline) -> object:
    args: Any = want.args
    match want.act:
        case steps.PATH:
            return moves.absolute(args[0])
        case steps.DEVICE:
            return moves.where(core, args[0]).device
        case steps.SAME_FILE:
            return core.bridge(moves.same_file, core, *args, limit)
        case steps.COPY:
            return _copied(session, args, limit)
        case _:
            assert want.act == steps.SAVE_VIEW, f"plan: nobody does {want.act}"
            info, path, shard = args

            async def save() -> object:
                return await reads.save_view(
                    core,
                    info,
                    path,
                    metadata=None,
                    max_shard_bytes=shard,
                    limit=limit,
                )

            return core.bridge(save)


def _copied(session: Any, what: tuple[Any, ...], limit: Deadline) -> ArtifactInfo:
    """Put the content of an artifact under another id."""
    info, name, version, node = what
    within: dict[str, Any] = {"deadline": 0 if limit.poll else limit.left_s()}
    artifact = Artifact(info, session)
    try:
        tensors = artifact.tensor_dict(framework="numpy", **within)
    except UnsupportedDtype:  # torch is imported only for what numpy has no name for
        tensors = artifact.tensor_dict(framework="torch", **within)
    made: Artifact = session.put(
        tensors, name, version=version, worker=node or None, **within
    )
    return made.info
