"""A plan as a value: steps, what they act on, and in which order.

Rules:

1. A step names only steps before it, so a plan is in an order that can be run and has no
   cycle. `PlanSpec.check` refuses everything else, whoever wrote the JSON.
2. Equal plans have equal digests. The digest covers kinds, nodes, artifacts by id, version
   and generation, options, edges, and the tokens of functions and their arguments; not who
   asks, nor by when.
3. A function and its arguments are not in here: they are pickled beside it (`payloads`), and
   only their token is in the digest. So JSON from a stranger is never unpickled.
4. What a step came to is a `StepOutcome` (`tensors.messages`); the first that is recorded counts.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from tensorcast_dask.exceptions import CorruptFile, InvalidArgument, InvalidName
from tensorcast_dask.tensors.contexts import Context
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    Generation,
    Version,
    check_name,
)
from tensorcast_dask.tensors.messages import (
    ArtifactInfo,
    Owner,
    Stage,
    StepOutcome,
    StepStatus,
)
from tensorcast_dask.tensors.views import View

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "MAX_PAYLOAD_BYTES",
    "MAX_STEPS",
    "MAX_VALUES_BYTES",
    "MAX_VALUE_BYTES",
    "ArtifactRef",
    "Kind",
    "NameRef",
    "PlanSpec",
    "Step",
    "StepRef",
    "check_step",
    "report_key",
    "task_key",
]

FORMAT: Final = 1
MAX_STEPS: Final = 10_000
#: Functions and arguments of one plan, pickled.
MAX_PAYLOAD_BYTES: Final = 8 << 20
#: What one function may return; what is larger belongs in an artifact.
MAX_VALUE_BYTES: Final = 1 << 20
#: What all functions of one plan may return together.
MAX_VALUES_BYTES: Final = 64 << 20
_MAX_RETRIES: Final = 100
_MAX_JSON_BYTES: Final = 64 << 20


class Kind(StrEnum):
    """What a step does: the session's call of that name."""

    PREFETCH = "prefetch"
    REPLICATE = "replicate"
    MIGRATE = "migrate"
    RELEASE = "release"
    PUBLISH = "publish"
    LATEST = "latest"
    DESTROY = "destroy"
    PIN = "pin"
    UNPIN = "unpin"
    ALIAS = "alias"
    LOAD = "load"
    COPY = "copy"  # the content under an id of its own
    SAVE = "save"
    VIEW = "view"
    DRAIN = "drain"
    NOOP = "noop"
    SUBMIT = "submit"  # the caller's own function
    CALL = "call"  # a function of an instance


class _Value(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """Base of what stands in a plan."""


class StepRef(_Value, frozen=True, kw_only=True, tag="step", tag_field="is"):
    """The result of an earlier step."""

    step: str


class NameRef(_Value, frozen=True, kw_only=True, tag="name", tag_field="is"):
    """Whatever a name means when the step runs."""

    id: str


class ArtifactRef(_Value, frozen=True, kw_only=True, tag="artifact", tag_field="is"):
    """One version, or a view of it: what of a handle never changes."""

    id: ArtifactId
    version: Version
    generation: Generation
    owner: Owner = Owner.SYSTEM
    nbytes: int = 0
    tensors: int = 0
    index_digest: str = ""
    base: ArtifactId = ArtifactId("")
    view: bytes = b""

    @classmethod
    def of(cls, info: ArtifactInfo) -> ArtifactRef:
        """Take from a handle's facts those that stay."""
        return cls(
            id=info.id,
            version=info.version,
            generation=info.generation,
            owner=info.owner,
            nbytes=info.nbytes,
            tensors=info.tensors,
            index_digest=info.index_digest,
            base=info.base,
            view=info.view,
        )

    def info(self) -> ArtifactInfo:
        """Give what a handle is made of."""
        return ArtifactInfo(
            id=self.id,
            version=self.version,
            generation=self.generation,
            stage=Stage.COMMITTED,
            owner=self.owner,
            nbytes=self.nbytes,
            tensors=self.tensors,
            index_digest=self.index_digest,
            base=self.base,
            view=self.view,
        )


Target: TypeAlias = StepRef | NameRef | ArtifactRef
Option: TypeAlias = str | int | float | bool | None


class Step(_Value, frozen=True, kw_only=True):
    """One operation.

    Attributes
    ----------
    name : str
        Unique in the plan.
    kind : Kind
        What it does.
    node : str
        Where: identity, name or Dask address of a node; "" anywhere.
    roles : tuple of str
        With `node` "": only at a node that has all of these.
    target : StepRef, NameRef, ArtifactRef or None
        What it acts on.
    source : str
        Of a migration: the node that it leaves.
    options : dict
        Arguments of the call that are plain values.
    view : bytes
        Of a view: its encoded description.
    uses : tuple of str
        Steps whose results a function takes.
    after : tuple of str
        Steps that must be over before, whose results it does not take.
    retries : int
        How often it is tried again after an error that may pass.
    compensates : str
        The step that it undoes when the plan fails; it runs at no other time.
    token : str
        Of a function: Dask's token of it and its arguments.
    once : bool
        Of a function: never begun a second time, see `docs/plans.md`.
    instance : str
        Of a call: whom.
    args : bytes
        Of a call: its arguments, as `tensors.values` packs them. An artifact that it acts on
        comes before them.
    """

    name: str
    kind: Kind
    node: str = ""
    roles: tuple[str, ...] = ()
    target: Target | None = None
    source: str = ""
    options: dict[str, Option] = {}
    view: bytes = b""
    uses: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    retries: int = 2
    compensates: str = ""
    token: str = ""
    once: bool = False
    instance: str = ""
    args: bytes = b""

    @property
    def needs(self) -> tuple[str, ...]:
        """Every step that must be over before, once, in order."""
        took = (self.target.step,) if isinstance(self.target, StepRef) else ()
        undone = (self.compensates,) if self.compensates else ()
        return tuple(dict.fromkeys((*took, *self.uses, *self.after, *undone)))


class PlanSpec(_Value, frozen=True, kw_only=True):
    """A whole plan.

    Attributes
    ----------
    context : Context
        Who asks, by when, under which key.
    steps : tuple of Step
        In an order in which they can run.
    """

    context: Context = Context()
    steps: tuple[Step, ...] = ()
    format: int = FORMAT

    # ------------------------------------------------------------ as JSON
    def to_json(self) -> bytes:
        """Write it; equal plans are equal bytes."""
        return msgspec.json.encode(self, order="deterministic")

    @classmethod
    def from_json(cls, text: str | bytes, *, check: bool = True) -> PlanSpec:
        """Read what `to_json` wrote, or what anybody wrote by hand.

        Without `check` it is taken for a plan that was checked before.

        Raises
        ------
        InvalidArgument
            When it is no plan; the message says where.
        """
        if len(text) > _MAX_JSON_BYTES:
            message = f"a plan takes at most {_MAX_JSON_BYTES} bytes of JSON"
            raise InvalidArgument(message)
        try:
            spec = msgspec.json.decode(text, type=cls)
        except (
            msgspec.MsgspecError,
            UnicodeError,
            RecursionError,
            InvalidName,
        ) as error:
            message = f"this is no plan: {error}"
            if "].kind" in message:
                message += f"; kinds are {', '.join(Kind)}"
            raise InvalidArgument(message) from error
        return spec.check() if check else spec

    def digest(self) -> str:
        """Tell plans apart (rule 2)."""
        raw = msgspec.json.encode([self.format, self.steps], order="deterministic")
        return hashlib.blake2b(raw, digest_size=16).hexdigest()

    # ------------------------------------------------------------ as a graph
    def check(self) -> PlanSpec:
        """Return it when it can be run.

        Raises
        ------
        InvalidArgument
            When it cannot; the message names the step.
        """
        if self.format != FORMAT:
            message = f"plans of format {self.format} are not known here, {FORMAT} is"
            raise InvalidArgument(message)
        if len(self.steps) > MAX_STEPS:
            message = (
                f"a plan has at most {MAX_STEPS} steps, this has {len(self.steps)}"
            )
            raise InvalidArgument(message)
        before: dict[str, Step] = {}
        for step in self.steps:
            check_step(step, before)
            before[step.name] = step
        return self

    def step(self, name: str) -> Step | None:
        """Find a step."""
        return next((one for one in self.steps if one.name == name), None)

    @property
    def ordinary(self) -> tuple[Step, ...]:
        """Steps that run when nothing fails."""
        return tuple(one for one in self.steps if not one.compensates)

    def why_not(self, step: Step, outcomes: dict[str, StepOutcome]) -> str:
        """Say why a step is skipped, given what is known of those before it; "" if it is not."""
        for name in step.needs:
            known = outcomes.get(name)
            if known is None or known.status is StepStatus.DONE:
                continue
            if known.status is StepStatus.FAILED and known.fault is not None:
                return f"skipped: step {name!r} failed because {known.fault.message}"
            said = known.fault.message if known.fault is not None else ""
            # The reason of the first step that failed, not a chain of skips.
            return said or f"skipped: step {name!r} was {known.status}"
        return ""


def task_key(name: str, key: str, run: str) -> str:
    """Name the Dask task of a step: the step first, so that people see what it is."""
    return f"{name}-{key}-{run}"


def report_key(key: str, run: str) -> str:
    """Name the Dask task that ends a run."""
    return task_key("report", key, run)


def _check_name(name: str, taken: Iterable[str]) -> None:
    try:
        check_name(name, what="the name of a step")
    except InvalidName as error:
        raise InvalidArgument(error.message) from error
    if name in taken:
        message = f"two steps are called {name!r}; give one another name"
        raise InvalidArgument(message)


#: Kinds that act on an artifact.
_TARGETED: Final = frozenset(
    {
        Kind.PREFETCH,
        Kind.REPLICATE,
        Kind.MIGRATE,
        Kind.RELEASE,
        Kind.PUBLISH,
        Kind.DESTROY,
        Kind.PIN,
        Kind.UNPIN,
        Kind.COPY,
        Kind.SAVE,
        Kind.VIEW,
        Kind.LATEST,
    }
)
#: Options of each kind, with the types that they may have.
_OPTIONS: Final[dict[Kind, dict[str, tuple[type, ...]]]] = {
    Kind.PREFETCH: {"device": (str,)},
    Kind.REPLICATE: {"device": (str,)},
    Kind.MIGRATE: {"device": (str,)},
    Kind.RELEASE: {},
    Kind.PUBLISH: {"version": (int,)},
    Kind.LATEST: {},
    Kind.DESTROY: {},
    Kind.PIN: {"ttl": (int, float)},
    Kind.UNPIN: {"pin": (int,), "pinned": (str,)},
    Kind.ALIAS: {"name": (str,), "expect": (int,)},
    Kind.LOAD: {
        "path": (str,),
        "id": (str,),
        "version": (int, str),
        "replicas": (int,),
    },
    Kind.COPY: {"id": (str,), "version": (int,)},
    Kind.SAVE: {"path": (str,), "max_shard_bytes": (int,)},
    Kind.VIEW: {"name": (str,)},
    Kind.DRAIN: {"worker": (str,), "end": (bool,)},
    Kind.NOOP: {},
    Kind.SUBMIT: {},
    Kind.CALL: {"function": (str,)},
}
_NEEDED: Final[dict[Kind, tuple[str, ...]]] = {
    Kind.ALIAS: ("name",),
    Kind.LOAD: ("path", "id"),
    Kind.COPY: ("id",),
    Kind.SAVE: ("path",),
    Kind.DRAIN: ("worker",),
    Kind.CALL: ("function",),
}


def check_step(step: Step, before: Mapping[str, Step]) -> None:
    """Check a step that comes after some others.

    Raises
    ------
    InvalidArgument
        When it cannot; the message names it.
    """
    _check_name(step.name, before)
    where = f"step {step.name!r} ({step.kind})"
    for name in step.needs:
        if name not in before:
            message = (
                f"{where} refers to {name!r}, which is no earlier step of this plan"
            )
            raise InvalidArgument(message)
        if before[name].compensates and name != step.compensates:
            message = f"{where} refers to {name!r}, which runs only when the plan fails"
            raise InvalidArgument(message)
    if step.compensates and before[step.compensates].compensates:
        message = f"{where} undoes {step.compensates!r}, which itself undoes a step"
        raise InvalidArgument(message)
    if not 0 <= step.retries <= _MAX_RETRIES:
        message = f"{where}: retries must be 0 to {_MAX_RETRIES}, not {step.retries}"
        raise InvalidArgument(message)
    _check_target(step, where)
    _check_options(step, where, before)
    _check_own(step, where)


def _check_target(step: Step, where: str) -> None:
    if (step.target is None) == (step.kind in _TARGETED):
        if step.kind in {Kind.ALIAS, Kind.NOOP, Kind.CALL}:
            return  # without one: the alias is removed, nothing is handed on
        message = f"{where} takes {'an' if step.target is None else 'no'} artifact"
        raise InvalidArgument(message)
    if isinstance(step.target, NameRef | ArtifactRef):
        try:
            check_name(step.target.id)
        except InvalidName as error:
            message = f"{where}: {error.message}"
            raise InvalidArgument(message) from error


def _check_options(step: Step, where: str, before: Mapping[str, Step]) -> None:
    known = _OPTIONS[step.kind]
    for name, value in step.options.items():
        kinds = known.get(name)
        if kinds is None:
            message = f"{where} has no option {name!r}; there are: {', '.join(known)}"
            raise InvalidArgument(message)
        if isinstance(value, bool) and bool not in kinds:
            kinds = ()
        if not isinstance(value, kinds):
            message = f"{where}: option {name!r} cannot be {value!r}"
            raise InvalidArgument(message)
    for name in _NEEDED.get(step.kind, ()):
        if name not in step.options:
            message = f"{where} needs option {name!r}"
            raise InvalidArgument(message)
    pinned = step.options.get("pinned")
    if pinned is not None and (pinned not in step.uses or pinned not in before):
        message = f"{where}: {pinned!r} must be a step that it uses"
        raise InvalidArgument(message)


def _check_own(step: Step, where: str) -> None:
    """Check what only some kinds have."""
    owners = {
        "view": (Kind.VIEW, bool(step.view)),
        "token": (Kind.SUBMIT, bool(step.token)),
        "source": (Kind.MIGRATE, bool(step.source)),
        "instance": (Kind.CALL, bool(step.instance)),
        "args": (Kind.CALL, bool(step.args)),
    }
    for field, (kind, given) in owners.items():
        if given != (step.kind is kind):
            message = f"{where} {'has no' if given else 'needs a'} {field}"
            raise InvalidArgument(message)
    if step.instance and (step.node or step.roles):
        message = f"{where} goes where its instance is; it names no other place"
        raise InvalidArgument(message)
    if step.once and step.kind is not Kind.SUBMIT:
        message = f"{where}: only functions can be marked once; other steps always are"
        raise InvalidArgument(message)
    if step.view:
        try:
            View.decode(step.view)
        except CorruptFile as error:
            message = f"{where}: {error.message}"
            raise InvalidArgument(message) from error
