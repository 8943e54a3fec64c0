"""One run of a plan: what is known of it, and its rows in the journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tensorcast_dask.exceptions import (
    CatalogUnavailable,
    InvalidArgument,
    Mismatch,
    NotFound,
    PlanFailed,
    StaleOwner,
    Unknown,
)
from tensorcast_dask.scheduler_plugin.state.checks import check_name
from tensorcast_dask.scheduler_plugin.state.events import Row
from tensorcast_dask.scheduler_plugin.state.operations import Caller
from tensorcast_dask.scheduler_plugin.state.records import packed
from tensorcast_dask.scheduler_plugin.state.timers import Timer
from tensorcast_dask.tensors.contexts import Context
from tensorcast_dask.tensors.ids import NodeId, RequestId
from tensorcast_dask.tensors.messages import (
    Fault,
    OpenPlan,
    PlanState,
    RunStatus,
    StepOutcome,
    StepStatus,
)
from tensorcast_dask.tensors.plans import (
    MAX_PAYLOAD_BYTES,
    MAX_VALUES_BYTES,
    PlanSpec,
    Step,
)
from tensorcast_dask.tensors.signals import Reading, Signal

__all__ = [
    "PlanRow",
    "Run",
    "StepRow",
    "begun_before",
    "bind",
    "bounded",
    "check_journal",
    "check_plan",
    "failure_of",
    "found_run",
    "not_begun",
    "progress_of",
    "row_of",
    "run_of",
    "state_of",
    "step_at",
    "step_row",
    "to_do_again",
    "verdict",
    "waits_of",
]


_NAMELESS: Final = Context().id
_NOBODY: Final = NodeId("")
_NOTHING: Final = RequestId("")
#: Faults that leave it open whether a call was made.
_IN_DOUBT: Final = frozenset({"Unknown", "DeadlineExceeded", "PeerLost"})


class PlanRow(msgspec.Struct, array_like=True, frozen=True):
    """A run in the journal."""

    key: str = ""
    life: int = 0
    run: int = 0
    digest: str = ""
    spec: bytes = b""
    payloads: dict[str, bytes] = {}
    #: Seconds that were left when the row was written.
    left_s: float = 0.0
    poll: bool = False
    report: str = ""
    status: RunStatus = RunStatus.RUNNING
    fault: Fault | None = None
    #: Functions that were begun and must not be begun again.
    begun: tuple[str, ...] = ()
    #: The store that drives it; "" where Dask does.
    driver: str = ""
    concurrency: int = 0
    own_key: bool = False
    #: Why no further step begins.
    stopping: Fault | None = None


class StepRow(msgspec.Struct, array_like=True, frozen=True):
    """An outcome in the journal."""

    key: str = ""
    step: str = ""
    kind: str = ""
    outcome: StepOutcome | None = None
    #: Of a call of an instance: the life that it went to, and the run in which it did.
    attachment: str = ""
    since: int = 0


@dataclass(slots=True, kw_only=True)
class Run:
    """One key."""

    key: str
    #: Names the effects; stays when the run is resumed.
    life: int
    run: int
    digest: str
    spec: PlanSpec
    raw: bytes
    payloads: dict[str, bytes]
    until_s: float
    poll: bool
    report: str
    #: The store that drives it, with so many steps at once (0: any number); "" where Dask does.
    driver: NodeId = _NOBODY
    concurrency: int = 0
    #: Nobody but its caller has the key, and waits: the request that it waits with.
    own_key: bool = False
    opener: RequestId = _NOTHING
    status: RunStatus = RunStatus.RUNNING
    fault: Fault | None = None
    #: Why no further step begins.
    stopping: Fault | None = None
    steps: dict[str, Step] = field(default_factory=dict)
    outcomes: dict[str, StepOutcome] = field(default_factory=dict)
    begun: dict[str, None] = field(default_factory=dict)
    #: Steps whose artifact is known only when they run.
    unsaid: frozenset[str] = frozenset()
    #: Calls of instances: the life that each went to ("" where it is to be made anew), and the
    #: run since which it has its name.
    called: dict[str, tuple[str, int]] = field(default_factory=dict)
    timer: Timer | None = None
    #: Bytes of the values of `outcomes`.
    held_bytes: int = 0
    #: The number of the signals' last change when it began; what changed until it ended.
    since: int = 0
    signals: tuple[Signal, ...] = ()
    ended_s: float = 0.0
    #: When steps were let begin and when they ended, in this life of the scheduler.
    begun_s: dict[str, float] = field(default_factory=dict)
    over_s: dict[str, float] = field(default_factory=dict)
    #: Lines on its steps that its story has.
    told: int = 0
    #: Who waits for the end of it, or of a step.
    waiting: dict[RequestId, tuple[Caller, str]] = field(default_factory=dict)

    def disarm(self) -> None:
        """Forget its alarm."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def note(
        self, step: str, outcome: StepOutcome | None, *, now_s: float | None = None
    ) -> None:
        """Set, or take back, how a step ended; `now_s` when it did just now."""
        before = self.outcomes.pop(step, None)
        if before is not None:
            self.held_bytes -= len(before.value)
        if outcome is None:
            self.begun_s.pop(step, None)
            self.over_s.pop(step, None)
        elif now_s is not None:
            self.over_s[step] = now_s
        if outcome is not None:
            self.outcomes[step] = outcome
            self.held_bytes += len(outcome.value)

    def call_again(self, step: str) -> None:
        """Forget a call that is known to be over, so that a resumed run makes it anew.

        One whose end nobody knows stays: it is asked after, not made again.
        """
        outcome = self.outcomes.get(step)
        if outcome is None or step not in self.called:
            return
        if outcome.fault is None or outcome.fault.kind not in _IN_DOUBT:
            self.called[step] = ("", self.run)

    def told_signals(self, now_s: float) -> tuple[Signal, ...]:
        """Tell what changed while it ran, as old as it is now."""
        ago_s = now_s - self.ended_s
        return tuple(one.older(ago_s) for one in self.signals)

    @property
    def subject(self) -> str:
        """What `explain` calls it."""
        return f"plan:{self.key}"

    @property
    def asker(self) -> str:
        """What `explain` calls who asked; "" for one that has no name of its own."""
        name = self.spec.context.id
        return "" if name == _NAMELESS else f"context:{name}"

    @property
    def undone(self) -> bool:
        """Whether it has steps that undo."""
        return any(one.compensates for one in self.spec.steps)


def check_plan(ask: OpenPlan) -> PlanSpec:
    """Return the plan that is to be run.

    Raises
    ------
    InvalidName, InvalidArgument, Mismatch
        When it cannot be.
    """
    check_name(ask.key, what="the plan's key")
    size = sum(map(len, ask.payloads.values()))
    if size > MAX_PAYLOAD_BYTES:
        message = (
            f"functions and arguments of a plan take at most {MAX_PAYLOAD_BYTES} "
            f"bytes, these take {size}; put large arguments as artifacts"
        )
        raise InvalidArgument(message)
    spec = PlanSpec.from_json(ask.spec)
    if spec.digest() != ask.digest:
        message = "the plan and its digest do not fit; use one release everywhere"
        raise Mismatch(message)
    return spec


def check_journal(stalled: str) -> None:
    """Refuse to go on while nothing can be written down.

    Raises
    ------
    CatalogUnavailable
        Saying what is in the way.
    """
    if stalled:
        message = (
            f"the journal cannot write ({stalled}), so no plan goes on; "
            "try again when it is back"
        )
        raise CatalogUnavailable(message)


def begun_before(step: Step) -> StepOutcome:
    """Give what a step that is marked once comes to when it would be begun again."""
    message = (
        f"step {step.name!r} was begun before and nobody knows how it ended; look, "
        "then decide: it is marked once, so it is not begun again"
    )
    fault = Fault.of(Unknown(message))
    return StepOutcome(status=StepStatus.FAILED, fault=fault)


def found_run(runs: Mapping[str, Run], key: str, *, ttl_s: float) -> Run:
    """Find a run.

    Raises
    ------
    NotFound
        When there is none; `ttl_s` says how long one is kept.
    """
    run = runs.get(key)
    if run is None:
        message = (
            f"no plan has the key {key!r}: it was never run here, or ended more than "
            f"{ttl_s:.0f} s ago"
        )
        raise NotFound(message)
    return run


def step_at(
    runs: Mapping[str, Run], key: str, number: int, name: str
) -> tuple[Run, Step]:
    """Find a step of a run that is under way.

    Raises
    ------
    StaleOwner, NotFound
        When that run is over, or has no such step.
    """
    run = runs.get(key)
    if run is None or run.run != number or run.status is not RunStatus.RUNNING:
        message = f"this run of plan {key!r} is over; its steps change nothing more"
        raise StaleOwner(message)
    step = run.steps.get(name)
    if step is None:
        message = f"plan {key!r} has no step {name!r}"
        raise NotFound(message)
    return run, step


def not_begun(run: Run, step: Step) -> StepOutcome | None:
    """Give what a step comes to that does not begin, since its run stops or one before it failed."""
    if step.compensates:
        return None
    if run.stopping is not None:
        return StepOutcome(status=StepStatus.CANCELLED, fault=run.stopping)
    why = run.spec.why_not(step, run.outcomes)
    if not why:
        return None
    fault = Fault.of(PlanFailed(why))
    return StepOutcome(status=StepStatus.SKIPPED, fault=fault)


def bind(run: Run, step: Step, attachment: str) -> tuple[int, bool] | StepOutcome:
    """Hold a call to one life of its instance.

    Returns
    -------
    (int, bool) or StepOutcome
        The run since which it has its name, and whether it was begun before; or what it came to,
        where it went to another life.
    """
    # A name does not rest on what a scheduler forgets that is killed at once: the instance knows
    # a call by it. The first run of a key that is used once may be forgotten whole.
    first = 1 if run.own_key else run.life
    went, since = run.called.get(step.name, ("", first))
    if not went:
        run.called[step.name] = (attachment, since)
        return since, False
    if went == attachment:
        return since, True
    message = (
        f"step {step.name!r} was asked of instance {step.instance!r} before, of a process that is "
        "gone; nobody knows how far it came. It is not asked of its successor: look at its "
        "effects, then make a new plan"
    )
    fault = Fault.of(Unknown(message, {"instance": step.instance}))
    return StepOutcome(status=StepStatus.FAILED, fault=fault)


def bounded(run: Run, step: Step, outcome: StepOutcome) -> StepOutcome:
    """Keep the values of a run within what the catalog may hold of them."""
    if run.held_bytes + len(outcome.value) <= MAX_VALUES_BYTES:
        return outcome
    message = (
        f"the values of plan {run.key!r} take more than {MAX_VALUES_BYTES} bytes with that "
        f"of {step.name!r}; put what is large as artifacts"
    )
    fault = Fault.of(InvalidArgument(message))
    return StepOutcome(status=StepStatus.FAILED, fault=fault, node=outcome.node)


def run_of(row: PlanRow, spec: PlanSpec, *, now_s: float) -> Run:
    """Make a run again from its row."""
    return Run(
        key=row.key,
        life=row.life,
        run=row.run,
        digest=row.digest,
        spec=spec,
        raw=row.spec,
        payloads=row.payloads,
        until_s=now_s + row.left_s,
        poll=row.poll,
        report=row.report,
        status=row.status,
        fault=row.fault,
        steps={one.name: one for one in spec.steps},
        begun=dict.fromkeys(row.begun),
        driver=NodeId(row.driver),
        concurrency=row.concurrency,
        own_key=row.own_key,
        stopping=row.stopping,
    )


def state_of(run: Run, now_s: float, *, started: bool, whole: bool) -> PlanState:
    """Tell how it stands."""
    return PlanState(
        key=run.key,
        run=run.run,
        digest=run.digest,
        status=run.status,
        started=started,
        left_s=max(0.0, run.until_s - now_s),
        poll=run.poll,
        message="" if run.fault is None else run.fault.message,
        fault=run.fault,
        outcomes=dict(run.outcomes),
        signals=run.told_signals(now_s),
        spec=run.raw if whole else b"",
        payloads=run.payloads if whole else {},
    )


def row_of(run: Run, *, now_s: float) -> Row:
    """Write a run down."""
    row = PlanRow(
        key=run.key,
        life=run.life,
        run=run.run,
        digest=run.digest,
        spec=run.raw,
        payloads=run.payloads,
        left_s=max(0.0, run.until_s - now_s),
        poll=run.poll,
        report=run.report,
        status=run.status,
        fault=run.fault,
        begun=tuple(run.begun),
        driver=run.driver,
        concurrency=run.concurrency,
        own_key=run.own_key,
        stopping=run.stopping,
    )
    return packed("plan", run.key, row)


def step_row(run: Run, name: str) -> Row:
    """Write down how a step ended, or that it has not."""
    outcome = run.outcomes.get(name)
    key = f"{run.life:x}/{name}"
    attachment, since = run.called.get(name, ("", 0))
    if outcome is None and not since:
        return Row(kind="step", key=key, blob=None)
    kind = str(run.steps[name].kind)
    row = StepRow(
        key=run.key,
        step=name,
        kind=kind,
        outcome=outcome,
        attachment=attachment,
        since=since,
    )
    return packed("step", key, row)


def to_do_again(run: Run) -> list[str]:
    """Give the steps that a resumed run has before it: not done, or undone."""
    undone = {
        run.steps[name].compensates
        for name, one in run.outcomes.items()
        if one.status is StepStatus.DONE and run.steps[name].compensates
    }
    return [
        name
        for name, one in run.outcomes.items()
        if one.status is not StepStatus.DONE
        or name in undone
        or run.steps[name].compensates
    ]


def progress_of(run: Run) -> Reading:
    """Count how far a run is."""
    ended = [one.status for one in run.outcomes.values()]
    return {
        "status": str(run.status),
        "steps": len(run.steps),
        **{str(one): ended.count(one) for one in StepStatus},
        "moved_bytes": sum(one.moved_bytes for one in run.outcomes.values()),
    }


def verdict(run: Run) -> tuple[RunStatus, Fault | None]:
    """Say how a run ended whose steps have all ended."""
    if run.stopping is not None:
        cancelled = run.stopping.kind == "PlanFailed"
        return RunStatus.CANCELLED if cancelled else RunStatus.FAILED, run.stopping
    ended = [run.outcomes[one.name] for one in run.spec.ordinary]
    if all(one.status is StepStatus.DONE for one in ended):
        return RunStatus.DONE, None
    return RunStatus.FAILED, failure_of(run)


def waits_of(run: Run) -> list[str]:
    """Say what the steps of a run that is under way wait for."""
    lines = []
    for step in run.spec.ordinary:
        if step.name in run.outcomes:
            continue
        before = [repr(one) for one in step.needs if one not in run.outcomes]
        if before:
            lines.append(f"step {step.name!r} waits for {', '.join(before)}")
        else:
            where = step.node or "any node"
            lines.append(f"step {step.name!r} may run, or runs, at {where}")
    if run.stopping is not None:
        lines.append(f"it stops: {run.stopping.message}")
    return lines


def failure_of(run: Run) -> Fault:
    """Say which steps ran and which did not."""

    def those(status: StepStatus, *, undoing: bool = False) -> str:
        return ", ".join(
            repr(step.name)
            for step in run.spec.steps
            if bool(step.compensates) is undoing
            and step.name in run.outcomes
            and run.outcomes[step.name].status is status
        )

    first = next(
        (name, one)
        for name, one in run.outcomes.items()
        if one.status is StepStatus.FAILED and not run.steps[name].compensates
    )
    why = first[1].fault.message if first[1].fault is not None else "it failed"
    parts = [
        f"plan {run.key!r} failed: step {first[0]!r} failed because {why}",
        f"done: {those(StepStatus.DONE) or 'none'}",
    ]
    for word, names in (
        ("skipped", those(StepStatus.SKIPPED)),
        ("undone by", those(StepStatus.DONE, undoing=True)),
        ("not undone", those(StepStatus.FAILED, undoing=True)),
    ):
        if names:
            parts.append(f"{word}: {names}")
    kind = first[1].fault.kind if first[1].fault is not None else ""
    data = {"plan": run.key, "step": first[0], "kind": kind}
    return Fault.of(PlanFailed("; ".join(parts), data))
