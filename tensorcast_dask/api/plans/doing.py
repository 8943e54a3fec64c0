"""Steps of plans, as calls of a session.

Rules:

1. Each kind is the session's call of that name; nothing is done here that a program could not
   do itself.
2. What a step acts on is looked up when it runs: a handle is its generation for ever, a name is
   what it means now, an earlier step is its recorded value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from distributed.protocol.pickle import loads

from tensorcast_dask.api.actions import instances
from tensorcast_dask.api.artifact import Artifact
from tensorcast_dask.api.plans.calling import arguments
from tensorcast_dask.exceptions import Mismatch, UnsupportedDtype
from tensorcast_dask.tensors import messages
from tensorcast_dask.tensors.messages import (
    Moved,
    StepOutcome,
    StepStatus,
    Wire,
    encode,
)
from tensorcast_dask.tensors.plans import ArtifactRef, Kind, NameRef, Step, StepRef
from tensorcast_dask.tensors.views import View

if TYPE_CHECKING:
    from tensorcast_dask.api.connection.deadlines import Deadline
    from tensorcast_dask.api.plans.calling import Caller

__all__ = [
    "StepArgument",
    "call",
    "call_instance",
    "carry_out",
    "handed_on",
    "value_of",
]

#: Values of steps, by their class on the wire.
_VALUES: Final = {
    kind.__name__: kind
    for kind in (
        messages.ArtifactInfo,
        messages.Pinned,
        messages.AliasState,
        messages.Destroyed,
        messages.Drained,
        messages.Moved,
    )
}


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
    if not outcome.kind or outcome.kind == "exception":
        return None
    if outcome.kind == "plain":
        return instances.result_of(outcome.value, session)
    if outcome.kind == "pickle":
        return loads(outcome.value)  # type: ignore[no-untyped-call]
    value = messages.decode(outcome.value, _VALUES[outcome.kind])
    if isinstance(value, messages.ArtifactInfo):
        return Artifact(value, session)
    return value


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


def carry_out(
    session: Any, step: Step, given: dict[str, StepOutcome], limit: Deadline
) -> StepOutcome:
    """Do what a step says and give its outcome."""
    if step.kind is Kind.NOOP:
        return handed_on(step, given)
    within = _within(limit)
    if step.kind in _MOVES:
        return _move(session, step, given, within)
    value = _small(session, step, given, within)
    if isinstance(value, Artifact):
        return _done(value.info)
    return _done(value)


def _within(limit: Deadline) -> dict[str, Any]:
    """Give the arguments that hold a call to what is left."""
    return {"deadline": 0 if limit.poll else limit.left_s()}


def handed_on(step: Step, given: dict[str, StepOutcome]) -> StepOutcome:
    """Give what a step that does nothing was given."""
    if isinstance(step.target, StepRef):
        had = given[step.target.step]
        return StepOutcome(status=StepStatus.DONE, kind=had.kind, value=had.value)
    return StepOutcome(status=StepStatus.DONE)


def call_instance(
    session: Any,
    step: Step,
    given: dict[str, StepOutcome],
    caller: Caller,
    limit: Deadline,
) -> StepOutcome:
    """Have an instance do what a step says."""

    def value(name: str) -> Any:
        if name not in given:
            message = (
                f"step {step.name!r} does not wait for {name!r}, whose result it takes"
            )
            raise Mismatch(message)
        return value_of(given[name], session)

    target = None
    if step.target is not None:
        target = _target(session, step, given, _within(limit))
    return caller.make(arguments(step, target, value), limit)


def _done(value: Wire | None, *, moved: Moved | None = None) -> StepOutcome:
    return StepOutcome(
        status=StepStatus.DONE,
        kind="" if value is None else type(value).__name__,
        value=b"" if value is None else encode(value),
        node="" if moved is None else moved.location.card.node,
        moved_bytes=0 if moved is None else moved.moved_bytes,
    )


def _target(
    session: Any, step: Step, given: dict[str, StepOutcome], within: dict[str, Any]
) -> Artifact:
    target = step.target
    match target:
        case ArtifactRef():
            return Artifact(target.info(), session)
        case NameRef():
            found: Artifact = session.artifact(target.id, **within)
            return found
        case StepRef():
            value = value_of(given[target.step], session)
            if isinstance(value, Artifact):
                return value
            message = (
                f"step {step.name!r} takes an artifact, and {target.step!r} gave "
                f"{type(value).__name__}"
            )
            raise Mismatch(message)
        case None:
            message = f"step {step.name!r} takes an artifact"
            raise Mismatch(message)


_MOVES: Final = frozenset(
    {Kind.PREFETCH, Kind.REPLICATE, Kind.MIGRATE, Kind.SAVE, Kind.RELEASE}
)


def _move(
    session: Any, step: Step, given: dict[str, StepOutcome], within: dict[str, Any]
) -> StepOutcome:
    """Do what acts on replicas; the value is the artifact, for the steps after it."""
    artifact = _target(session, step, given, within)
    node = step.node or None
    options = {**step.options, **within}
    match step.kind:
        case Kind.PREFETCH:
            done = session.prefetch(artifact, worker=node, wait=True, **options)
        case Kind.REPLICATE:
            done = session.replicate(artifact, node, **options)
        case Kind.MIGRATE:
            done = session.migrate(artifact, step.source, node, **options)
        case Kind.SAVE:
            path = options.pop("path")
            done = session.save(artifact, path, worker=node, **options)
        case _:
            done = session.release(artifact, worker=node, **options)
    moved = done.result()
    return _done(artifact.info, moved=moved if isinstance(moved, Moved) else None)


def _small(
    session: Any, step: Step, given: dict[str, StepOutcome], within: dict[str, Any]
) -> Any:
    options = dict(step.options)
    match step.kind:
        case Kind.LATEST:
            found = _name_of(session, step, given, within)
            return session.latest(found, **within)
        case Kind.DESTROY:
            whole = step.target.id if isinstance(step.target, NameRef) else None
            gone = whole or _target(session, step, given, within)
            return session.destroy(gone, **within).result()
        case Kind.LOAD | Kind.COPY:
            return _new(session, step, given, within)
        case Kind.DRAIN:
            return session.drain(options.pop("worker"), **options, **within).result()
        case Kind.ALIAS:
            name = options.pop("name")
            to = None if step.target is None else _target(session, step, given, within)
            return session.alias(name, to, **options, **within)
        case _:
            return _of_one(session, step, given, within)


def _of_one(
    session: Any, step: Step, given: dict[str, StepOutcome], within: dict[str, Any]
) -> Any:
    options = dict(step.options)
    artifact = _target(session, step, given, within)
    match step.kind:
        case Kind.PUBLISH:
            number = options.get("version")
            return session.publish(artifact, number, **within).result()
        case Kind.PIN:
            node = step.node or None
            return session.pin(artifact, worker=node, **options, **within)
        case Kind.UNPIN:
            pinned = options.get("pinned")
            number = options.get("pin", 0)
            if isinstance(pinned, str):
                number = value_of(given[pinned]).pin
            return session.unpin(artifact, number, **within)
        case _:
            assert step.kind is Kind.VIEW, f"plan: a kind that nobody does: {step.kind}"
            name = options.get("name") or None
            return session.view(artifact, View.decode(step.view), name, **within)


def _new(
    session: Any, step: Step, given: dict[str, StepOutcome], within: dict[str, Any]
) -> Any:
    """Make an artifact: of a file, or of another one."""
    options = {**step.options, **within, "worker": step.node or None}
    name = options.pop("id")
    if step.kind is Kind.LOAD:
        return session.load(options.pop("path"), name, **options).result()
    tensors = _content(_target(session, step, given, within), within)
    return session.put(tensors, name, **options)


def _content(artifact: Artifact, within: dict[str, Any]) -> Any:
    """Read what is copied; torch is imported only for what numpy has no name for."""
    try:
        return artifact.tensor_dict(framework="numpy", **within)
    except UnsupportedDtype:
        return artifact.tensor_dict(framework="torch", **within)


def _name_of(
    session: Any, step: Step, given: dict[str, StepOutcome], within: dict[str, Any]
) -> str:
    if isinstance(step.target, NameRef):
        return step.target.id
    return _target(session, step, given, within).id
