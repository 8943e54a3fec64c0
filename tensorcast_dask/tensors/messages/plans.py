"""What a session and the tasks of a plan say to the scheduler plugin about runs of plans."""

from __future__ import annotations

from enum import StrEnum

from tensorcast_dask.tensors.ids import RequestId
from tensorcast_dask.tensors.messages.shared import Fault, Message, NodeCard, Wire
from tensorcast_dask.tensors.signals import Signal

__all__ = [
    "BeginStep",
    "DoRun",
    "EndPlan",
    "EndStep",
    "InstancePlace",
    "OpenPlan",
    "PlanAsked",
    "PlanState",
    "ResumePlan",
    "RunStatus",
    "StepEffect",
    "StepOutcome",
    "StepState",
    "StepStatus",
]


class StepStatus(StrEnum):
    """How a step of a plan ended."""

    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"  # a step before it failed
    CANCELLED = "cancelled"


class RunStatus(StrEnum):
    """How a run of a plan stands."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    #: Nobody carries it on: its Dask tasks are gone. It can be resumed.
    INTERRUPTED = "interrupted"


class StepOutcome(Wire, frozen=True, kw_only=True):
    """How a step ended; the first that is recorded counts."""

    status: StepStatus
    #: Class of the value on the wire; "pickle" for what a function returned, "" for none.
    kind: str = ""
    value: bytes = b""
    #: Where it ran.
    node: str = ""
    moved_bytes: int = 0
    #: From its first attempt to its end.
    seconds: float = 0.0
    attempts: int = 0
    fault: Fault | None = None


class OpenPlan(Message, frozen=True, kw_only=True):
    """Open a run under a key, or find the run that is there. Answer: `PlanState`.

    Mismatch when the key is another plan's. The key is on disk before the answer, so
    before the first effect.
    """

    rid: RequestId
    key: str
    digest: str
    #: JSON of the plan.
    spec: bytes
    #: Functions and arguments by step, pickled; opaque here.
    payloads: dict[str, bytes] = {}
    deadline_s: float
    #: Each step looks once.
    poll: bool = False
    #: Name of the Dask task that ends the run.
    report: str = ""
    #: A store is to drive it (`DoRun`), not Dask; so many steps at once, 0 = any number.
    rpc: bool = False
    concurrency: int = 0
    #: Wait so long for its end.
    wait_s: float = 0.0
    #: Nobody else has the key: the run need not be on disk for its own sake.
    own_key: bool = False


class PlanState(Wire, frozen=True, kw_only=True):
    """A run of a plan."""

    key: str
    #: This run; a resumed one has another number.
    run: int
    digest: str
    status: RunStatus
    #: The request made this run: whoever asked has to carry it out.
    started: bool = False
    left_s: float = 0.0
    poll: bool = False
    #: Why it is not done.
    message: str = ""
    fault: Fault | None = None
    outcomes: dict[str, StepOutcome] = {}
    #: What changed while it ran, of a run that is over and ended in this life of the catalog.
    signals: tuple[Signal, ...] = ()
    #: Only where they were asked for.
    spec: bytes = b""
    payloads: dict[str, bytes] = {}


class PlanAsked(Message, frozen=True, kw_only=True):
    """How does a run stand? Answer: `PlanState`, at its end or after `wait_s`.

    With a `step` the end of that step is enough.
    """

    rid: RequestId
    key: str
    wait_s: float = 0.0
    #: With the plan and its payloads.
    whole: bool = False
    step: str = ""


class ResumePlan(Message, frozen=True, kw_only=True):
    """Go on with a run that ended before it was done. Answer: `PlanState`, whole.

    What is done stays done. `run` is the one that was seen to end: of several who ask, one
    is told `started`.
    """

    rid: RequestId
    key: str
    run: int
    deadline_s: float
    poll: bool = False
    report: str = ""


class EndPlan(Message, frozen=True, kw_only=True):
    """A run is over, or (`cancel`, with `run` 0 whichever runs) is to be. Answer: `PlanState`."""

    rid: RequestId
    key: str
    run: int
    cancel: bool = False
    #: Steps that have ended, as `EndStep` tells it.
    ended: dict[str, StepOutcome] = {}
    #: Why whoever drives it drives it no more.
    left: str = ""


class BeginStep(Message, frozen=True, kw_only=True):
    """May this step run? Answer: `StepState`. StaleOwner when its run is over."""

    rid: RequestId
    key: str
    run: int
    step: str
    node: str = ""
    #: Of a call of an instance: the life that it is to go to. It goes to no other, whoever
    #: begins the step again.
    attachment: str = ""
    #: Other steps that have ended, as `EndStep` tells it.
    ended: dict[str, StepOutcome] = {}


class StepState(Wire, frozen=True, kw_only=True):
    """What a step has come to, or how long it may take."""

    outcome: StepOutcome | None = None
    left_s: float = 0.0
    poll: bool = False
    #: Of a call of an instance: the run in which it was begun first, which names it; and
    #: whether that was before this request, so that it may have been made.
    since: int = 0
    again: bool = False
    #: Of a call of an instance: the life that it is held to.
    attachment: str = ""


class StepEffect(Message, frozen=True, kw_only=True):
    """One change of a step, carried out once however often it is asked for.

    The change is known by its run, step and place among the step's changes (`number`), not
    by its content: the first answer that is no fault stands. Answer: that of the change.
    """

    rid: RequestId
    key: str
    run: int
    step: str
    number: int
    #: From 1; a higher one tries a change again that ended in a fault.
    attempt: int
    #: A `SessionRequest`, packed; its own `rid` is of no account.
    request: bytes


class EndStep(Message, frozen=True, kw_only=True):
    """A step has ended. Answer: the `StepOutcome` that is recorded, which may be another."""

    rid: RequestId
    key: str
    run: int
    step: str
    outcome: StepOutcome


class InstancePlace(Wire, frozen=True, kw_only=True):
    """Where an instance is attached, and which life of it is there."""

    attachment: str
    card: NodeCard


class DoRun(Message, frozen=True, kw_only=True):
    """Catalog -> store: drive this run of a plan, to its end.

    Said again to a node that has joined anew; who drives the run already takes no notice. It is
    answered by what the steps ask for, in a session of the store's own, and by `EndPlan`.
    """

    key: str
    run: int
    #: JSON of the plan.
    spec: bytes
    left_s: float
    #: Steps at once; 0 = any number.
    concurrency: int = 0
    #: What has ended already.
    outcomes: dict[str, StepOutcome] = {}
    #: Steps that may begin, as `BeginStep` answers it.
    begun: dict[str, StepState] = {}
    #: Instances that steps call, where they are now.
    places: dict[str, InstancePlace] = {}
    trace: str = ""  # the span that it follows from, `tensors.traces`
