"""What each kind of step does, for whoever drives it.

Rules:

1. Each kind asks what the session's call of that name asks; nothing is done here that a program
   could not do itself.
2. What a step acts on is looked up when it runs: a handle is its generation for ever, a name is
   what it means now, an earlier step is its recorded value.
3. What takes a process with a session is wanted as `Local`: where a path without a root begins,
   the device that a process calls by a number, a view that is written to a file, content that is
   put under another id, whether a file has the content that is there already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias, cast

from tensorcast_dask.exceptions import AlreadyExists, InvalidArgument, Mismatch
from tensorcast_dask.tensors import requests, values
from tensorcast_dask.tensors.calling import Calling, arguments
from tensorcast_dask.tensors.devices import is_uuid
from tensorcast_dask.tensors.ids import ArtifactId, Generation, HostId, NodeId
from tensorcast_dask.tensors.messages import (
    AliasState,
    ArtifactInfo,
    Describe,
    Described,
    Destroy,
    Destroyed,
    Drained,
    DrainNode,
    Ensure,
    LoadFile,
    Migrate,
    Moved,
    Nodes,
    NodesAsked,
    Pinned,
    Release,
    Resolve,
    SaveFile,
    StepOutcome,
    StepStatus,
    Tier,
    Unpin,
    Wire,
    decode,
    encode,
)
from tensorcast_dask.tensors.plans import (
    ArtifactRef,
    Kind,
    NameRef,
    PlanSpec,
    Step,
    StepRef,
)
from tensorcast_dask.tensors.specs import Index
from tensorcast_dask.tensors.views import View
from tensorcast_dask.tensors.wants import NO_RID, Asking, Local, ask

__all__ = [
    "COPY",
    "DEVICE",
    "PATH",
    "SAME_FILE",
    "SAVE_VIEW",
    "Look",
    "call_instance",
    "carry_out",
    "handed_on",
    "needs_worker",
    "value_of",
]

#: Gives what an earlier step has come to: an `ArtifactInfo`, a receipt, a plain value.
Look: TypeAlias = Callable[[str], object]

#: What is wanted as `Local` (rule 3).
DEVICE: Final = "device"
PATH: Final = "path"
COPY: Final = "copy"
SAVE_VIEW: Final = "save_view"
SAME_FILE: Final = "same_file"

#: Values of steps, by their class on the wire.
_VALUES: Final[dict[str, type[Wire]]] = {
    kind.__name__: kind
    for kind in (ArtifactInfo, Pinned, AliasState, Destroyed, Drained, Moved)
}
_MOVES: Final = frozenset(
    {Kind.PREFETCH, Kind.REPLICATE, Kind.MIGRATE, Kind.SAVE, Kind.RELEASE}
)


def value_of(outcome: StepOutcome) -> object:
    """Give what a step has come to; None where it is nothing, or only Python can tell."""
    if outcome.kind == "plain":
        return values.unpack(outcome.value, lambda reference: reference)
    kind = _VALUES.get(outcome.kind)
    return None if kind is None else decode(outcome.value, kind)


def handed_on(step: Step, given: Mapping[str, StepOutcome]) -> StepOutcome:
    """Give what a step that does nothing was given."""
    if isinstance(step.target, StepRef):
        had = given[step.target.step]
        return StepOutcome(status=StepStatus.DONE, kind=had.kind, value=had.value)
    return StepOutcome(status=StepStatus.DONE)


def needs_worker(spec: PlanSpec) -> str:
    """Say why a plan takes the process of a Dask worker; "" where stores can carry it out."""
    for step in spec.steps:
        if step.kind is Kind.SUBMIT:
            return (
                f"step {step.name!r} runs a function of yours, which a store does not"
            )
        if step.kind is Kind.COPY:
            return f"step {step.name!r} reads and puts tensors, which takes a worker"
        path = str(step.options.get("path", "/"))
        if not path.startswith("/"):
            return f"step {step.name!r} names path {path!r}, which begins where a worker runs"
        device = str(step.options.get("device", ""))
        if device and device not in set(Tier) and not is_uuid(device):
            return (
                f"step {step.name!r} names device {device!r} as one process does; a store knows "
                "devices by UUID"
            )
        written = step.kind is Kind.SAVE and isinstance(step.target, ArtifactRef)
        if written and isinstance(step.target, ArtifactRef) and step.target.view:
            return f"step {step.name!r} writes a view, which takes a worker"
    return ""


def carry_out(step: Step, look: Look, *, host: HostId) -> Asking[StepOutcome]:
    """Do what a step says.

    Parameters
    ----------
    step : Step
        Not a function, not a call.
    look : callable
        Gives the values of earlier steps.
    host : HostId
        Of who drives it: where nothing else is said, bytes come there.
    """
    if step.kind in _MOVES:
        return (yield from _move(step, look, host))
    return _done((yield from _small(step, look, host)))


def call_instance(step: Step, look: Look, calling: Calling) -> Asking[StepOutcome]:
    """Have an instance do what a step says."""
    target = None if step.target is None else (yield from _target(step, look))
    return (yield from calling.make(arguments(step, target, look)))


def _done(value: Wire | None, *, moved: Moved | None = None) -> StepOutcome:
    return StepOutcome(
        status=StepStatus.DONE,
        kind="" if value is None else type(value).__name__,
        value=b"" if value is None else encode(value),
        node="" if moved is None else moved.location.card.node,
        moved_bytes=0 if moved is None else moved.moved_bytes,
    )


# -------------------------------------------------------------------- what it acts on
def _target(step: Step, look: Look) -> Asking[ArtifactInfo]:
    target = step.target
    match target:
        case ArtifactRef():
            return target.info()
        case NameRef():
            request = Resolve(rid=NO_RID, id=ArtifactId(target.id))
            return (yield from ask(request, ArtifactInfo))
        case StepRef():
            value = look(target.step)
            if isinstance(value, ArtifactInfo):
                return value
            message = (
                f"step {step.name!r} takes an artifact, and {target.step!r} gave "
                f"{type(value).__name__}"
            )
            raise Mismatch(message)
        case None:
            message = f"step {step.name!r} takes an artifact"
            raise Mismatch(message)


def _node(wanted: str) -> Asking[NodeId]:
    if not wanted:
        return NodeId("")
    there = yield from ask(NodesAsked(rid=NO_RID), Nodes)
    return requests.find_node(there, wanted)


def _where(device: object) -> Asking[tuple[Tier, str]]:
    """Read `device=`: a tier, or one device by its UUID."""
    name = str(device)
    if name in set(Tier):
        return Tier(name), ""
    if not is_uuid(name):
        name = str((yield Local(DEVICE, (name,))))
    return Tier.DEVICE, name


def _path(step: Step) -> Asking[str]:
    path = str(step.options["path"])
    return path if path.startswith("/") else str((yield Local(PATH, (path,))))


# -------------------------------------------------------------------- what acts on replicas
def _move(step: Step, look: Look, host: HostId) -> Asking[StepOutcome]:
    """Do what acts on replicas; the value is the artifact, for the steps after it."""
    tier, device = yield from _where(step.options.get("device", Tier.HOST))
    info = yield from _target(step, look)
    moved: Moved | None = None
    match step.kind:
        case Kind.PREFETCH | Kind.REPLICATE:
            ensure = Ensure(
                rid=NO_RID,
                generation=info.generation,
                node=(yield from _node(step.node)),
                deadline_s=0.0,
                tier=tier,
                host=host,
                why=str(step.kind),
                device=device,
            )
            moved = yield from ask(ensure, Moved)
        case Kind.MIGRATE:
            migrate = Migrate(
                rid=NO_RID,
                generation=info.generation,
                source=(yield from _node(step.source)),
                node=(yield from _node(step.node)),
                deadline_s=0.0,
                tier=tier,
                device=device,
            )
            moved = yield from ask(migrate, Moved)
        case Kind.SAVE:
            moved = yield from _save(step, info, host)
        case _:
            node = yield from _node(step.node)
            release = Release(rid=NO_RID, generation=info.generation, node=node)
            yield from ask(release, type(None))
    return _done(info, moved=moved)


def _save(step: Step, info: ArtifactInfo, host: HostId) -> Asking[Moved]:
    path = yield from _path(step)
    shard = step.options.get("max_shard_bytes", 0)
    if type(shard) is not int or shard < 0:
        message = f"max_shard_bytes must be bytes, or 0 for one file, not {shard!r}"
        raise InvalidArgument(message)
    if info.view:
        return cast("Moved", (yield Local(SAVE_VIEW, (info, path, shard))))
    save = SaveFile(
        rid=NO_RID,
        generation=info.generation,
        path=path,
        deadline_s=0.0,
        node=(yield from _node(step.node)),
        host=host,
        max_shard_bytes=shard,
    )
    return (yield from ask(save, Moved))


# -------------------------------------------------------------------- what acts on names
def _small(step: Step, look: Look, host: HostId) -> Asking[Wire | None]:
    options = step.options
    match step.kind:
        case Kind.LATEST:
            name = yield from _name_of(step, look)
            latest = Resolve(rid=NO_RID, id=ArtifactId(name), published=True)
            return (yield from ask(latest, ArtifactInfo))
        case Kind.DESTROY:
            generation = Generation(0)
            if isinstance(step.target, NameRef):
                name = step.target.id
            else:
                info = yield from _target(step, look)
                name, generation = info.id, info.generation
            gone = Destroy(rid=NO_RID, id=ArtifactId(name), generation=generation)
            return (yield from ask(gone, Destroyed))
        case Kind.LOAD:
            return (yield from _load(step, host))
        case Kind.DRAIN:
            drain = DrainNode(
                rid=NO_RID,
                node=(yield from _node(str(options["worker"]))),
                deadline_s=0.0,
                end=bool(options.get("end", True)),
            )
            return (yield from ask(drain, Drained))
        case Kind.ALIAS:
            generation = Generation(0)
            if step.target is not None:
                generation = (yield from _target(step, look)).generation
            alias = requests.set_alias(
                NO_RID, str(options["name"]), generation, options.get("expect")
            )
            return (yield from ask(alias, AliasState))
        case _:
            return (yield from _of_one(step, look))


def _of_one(step: Step, look: Look) -> Asking[Wire | None]:
    options = step.options
    info = yield from _target(step, look)
    match step.kind:
        case Kind.PUBLISH:
            publish = requests.publish(NO_RID, info, options.get("version"))
            return (yield from ask(publish, ArtifactInfo))
        case Kind.COPY:
            # A put, not an effect: a repeat finds what is there.
            version = requests.check_version(options.get("version"))
            copied = Local(COPY, (info, options["id"], version or None, step.node))
            return cast("ArtifactInfo", (yield copied))
        case Kind.PIN:
            node = yield from _node(step.node)
            ttl_s = options.get("ttl", float("inf"))
            pin = requests.pin(NO_RID, info.generation, ttl_s, node)
            return (yield from ask(pin, Pinned))
        case Kind.UNPIN:
            number = options.get("pin", 0)
            pinned = options.get("pinned")
            if isinstance(pinned, str):
                value = look(pinned)
                if not isinstance(value, Pinned):
                    message = (
                        f"step {step.name!r} takes a pin, and {pinned!r} gave none"
                    )
                    raise Mismatch(message)
                number = value.pin
            unpin = Unpin(rid=NO_RID, generation=info.generation, pin=int(number or 0))
            yield from ask(unpin, type(None))
            return None
        case _:
            assert step.kind is Kind.VIEW, f"plan: a kind that nobody does: {step.kind}"
            asked = Describe(rid=NO_RID, generation=info.generation)
            index = Index.decode((yield from ask(asked, Described)).index)
            view = requests.register_view(
                NO_RID,
                info,
                index,
                View.decode(step.view),
                str(options.get("name") or "") or None,
            )
            return (yield from ask(view, ArtifactInfo))


def _name_of(step: Step, look: Look) -> Asking[str]:
    if isinstance(step.target, NameRef):
        return step.target.id
    return (yield from _target(step, look)).id


def _load(step: Step, host: HostId) -> Asking[ArtifactInfo]:
    options = step.options
    load = LoadFile(
        rid=NO_RID,
        id=ArtifactId(str(options["id"])),
        path=(yield from _path(step)),
        deadline_s=0.0,
        version=requests.check_version(options.get("version")),
        node=(yield from _node(step.node)),
        host=host,
        replicas=requests.check_replicas(options.get("replicas", 1)),
    )
    try:
        return (yield from ask(load, ArtifactInfo))
    except AlreadyExists as error:
        same = yield Local(SAME_FILE, (load, error))
        if not isinstance(same, ArtifactInfo):
            raise
        return same
