"""Runs of plans: one a key, each effect once, each end recorded.

Rules:

1. A key opens one run, on disk before anybody is told. The same key with the same digest is
   that run, running or over; with another digest it is Mismatch. A run that is over is kept
   for a while, then its key is free.
2. A key has one life, however often it is resumed; what its steps change is known by it
   (`effects`), so that nothing is done twice.
3. A step ends once: the first outcome counts. Its effects are forgotten then, not before.
4. A run's number fences it: what steps of an earlier run, or of one that is over, ask for is
   refused as stale.
5. A run begins when no other one that is under way would undo its work (`claims`).
6. A run that is to stop (deadline, cancel) begins no further step but those that undo, which
   get `UNDO_S`. One that nobody carries on is interrupted, and can be resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

from tensorcast_dask.exceptions import (
    DeadlineExceeded,
    Mismatch,
    PlanFailed,
    StaleOwner,
    TensorCastError,
)
from tensorcast_dask.scheduler_plugin.state.checks import check_seconds
from tensorcast_dask.scheduler_plugin.state.claims import Claims, Works, works_of
from tensorcast_dask.scheduler_plugin.state.effects import Effects
from tensorcast_dask.scheduler_plugin.state.events import Row
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.operations import Caller
from tensorcast_dask.scheduler_plugin.state.runs import (
    PlanRow,
    Run,
    StepRow,
    begun_before,
    bind,
    bounded,
    check_journal,
    check_plan,
    found_run,
    not_begun,
    progress_of,
    row_of,
    run_of,
    state_of,
    step_at,
    step_row,
    to_do_again,
    verdict,
    waits_of,
)
from tensorcast_dask.tensors.ids import Generation
from tensorcast_dask.tensors.messages import (
    BeginStep,
    EndPlan,
    EndStep,
    Fault,
    OpenPlan,
    PlanAsked,
    ResumePlan,
    RunStatus,
    SessionRequest,
    StepEffect,
    StepOutcome,
    StepState,
    StepStatus,
)
from tensorcast_dask.tensors.plans import (
    Kind,
    PlanSpec,
    Step,
    report_key,
)
from tensorcast_dask.tensors.signals import Reading, Signal

__all__ = ["POLL_S", "STEP_LINES", "UNDO_S", "Plans"]

#: What a run whose deadline is 0 may take to have each step look once.
POLL_S: Final = 2.0
#: Lines on steps that the story of a plan has; each step has one of its own.
STEP_LINES: Final = 40
#: What undoing may take after the deadline.
UNDO_S: Final = 30.0


class Plans:
    """All runs that are known.

    Attributes
    ----------
    runs : dict
        By key, in the order in which the keys were opened.
    """

    def __init__(self, ground: Ground, *, ttl_s: float) -> None:
        self._outbox = ground.outbox
        self._timers = ground.timers
        self._stories = ground.stories
        self._effects = Effects(ground)
        self._names = ground.names
        self._ttl_s = ttl_s
        self.runs: dict[str, Run] = {}
        self.claims = Claims(ground)
        #: Gives the number of the signals' last change.
        self.mark: Callable[[], int] = lambda: 0
        #: Gives the signals that changed since a number.
        self.changes: Callable[[int], tuple[Signal, ...]] = lambda _: ()

    def __len__(self) -> int:
        return sum(one.status is RunStatus.RUNNING for one in self.runs.values())

    @property
    def kept(self) -> int:
        """How many runs are over and still known."""
        return len(self.runs) - len(self)

    def running(self) -> tuple[tuple[str, int, str], ...]:
        """Key, number and Dask task of every run that is under way."""
        return tuple(
            (one.key, one.run, one.report or report_key(one.key, f"{one.run:x}"))
            for one in self.runs.values()
            if one.status is RunStatus.RUNNING
        )

    def readings(self) -> Iterator[tuple[str, Reading]]:
        """How far each run is, for signals."""
        for one in self.runs.values():
            yield f"plan/{one.key}", progress_of(one)

    def waits(self, ref: str) -> list[str]:
        """Say what a run that is under way waits for; `ref` is `plan:KEY`."""
        run = self.runs.get(ref.removeprefix("plan:"))
        under_way = run is not None and run.status is RunStatus.RUNNING
        if run is None or not under_way or run.subject != ref:
            return []
        return waits_of(run)

    # ------------------------------------------------------------ runs
    def open(self, caller: Caller, ask: OpenPlan, *, until_s: float = 0.0) -> None:
        """Open a run, or find it (rule 1); with an instant, one that has waited for its turn."""
        known = self.runs.get(ask.key)
        if known is not None:
            if known.digest != ask.digest:
                message = (
                    f"key {ask.key!r} is another plan's, which is {known.status}; "
                    "take another key for this one"
                )
                raise Mismatch(message)
            self._tell(caller, known)
            return
        self._writes()
        spec = check_plan(ask)
        works, unsaid = works_of(spec.steps, self._names)
        until_s = until_s or self._turn(
            caller, ask, works, lambda at_s: self.open(caller, ask, until_s=at_s)
        )
        if not until_s:
            return
        life = self._names.numbers.mint()
        run = self.runs[ask.key] = Run(
            key=ask.key,
            life=life,
            run=life,
            digest=ask.digest,
            spec=spec,
            raw=ask.spec,
            payloads=dict(ask.payloads),
            until_s=until_s,
            poll=ask.poll,
            report=ask.report,
            steps={one.name: one for one in spec.steps},
            unsaid=unsaid,
        )
        self.claims.take(run.key, works)
        run.since = self.mark()
        self._outbox.persist(row_of(run, now_s=self._outbox.now_s))
        self._note(run, "submit: {} steps by {}", len(run.steps), run.spec.context.id)
        left_s = run.until_s - self._outbox.now_s
        self._note(run, "admit: run {}, at most {} s", run.run, round(left_s, 3))
        self._begin_time(run)
        self._tell(caller, run, started=True)

    def _turn(
        self,
        caller: Caller,
        ask: OpenPlan | ResumePlan,
        works: Works,
        begin: Callable[[float], None],
    ) -> float:
        """Give until when a run may take; 0 where it waits for its turn (rule 5)."""
        given_s = check_seconds(ask.deadline_s, what="deadline_s")
        now_s = self._outbox.now_s
        until_s = now_s + (max(given_s, POLL_S) if ask.poll else given_s)
        latest_s = now_s if ask.poll else until_s
        waits = self.claims.wait(
            ask.key, works, caller, partial(begin, until_s), until_s=latest_s
        )
        return 0.0 if waits else until_s

    def asked(self, caller: Caller, ask: PlanAsked) -> None:
        """Tell how a run stands, now or at its end."""
        run = found_run(self.runs, ask.key, ttl_s=self._ttl_s)
        wait_s = check_seconds(ask.wait_s, what="wait_s")
        over = run.status is not RunStatus.RUNNING or ask.step in run.outcomes
        if over or not wait_s:
            self._tell(caller, run, whole=ask.whole)
            return
        run.waiting[caller.rid] = (caller, ask.step)

        def enough() -> None:
            if run.waiting.pop(caller.rid, None) is not None:
                self._tell(caller, run)

        self._timers.at(self._outbox.now_s + wait_s, enough)

    def resume(self, caller: Caller, ask: ResumePlan, *, until_s: float = 0.0) -> None:
        """Go on where a run stopped; what is done, and was not undone, stays."""
        run = found_run(self.runs, ask.key, ttl_s=self._ttl_s)
        over = run.status not in {RunStatus.RUNNING, RunStatus.DONE}
        if not over or run.run != ask.run:
            self._tell(caller, run, whole=True)
            return
        self._writes()
        works, run.unsaid = works_of(run.spec.steps, self._names)
        until_s = until_s or self._turn(
            caller, ask, works, lambda at_s: self.resume(caller, ask, until_s=at_s)
        )
        if not until_s:
            return
        self.claims.take(run.key, works)
        for name in to_do_again(run):
            run.call_again(name)
            run.note(name, None)
            self._outbox.persist(step_row(run, name))
        self._effects.forget_faults(run)
        run.run = self._names.numbers.mint()
        run.status, run.fault, run.stopping = RunStatus.RUNNING, None, None
        run.until_s, run.poll = until_s, ask.poll
        run.report = ask.report
        run.since, run.signals = self.mark(), ()
        self._outbox.persist(row_of(run, now_s=self._outbox.now_s))
        self._note(run, "resume: run {}", run.run)
        self._begin_time(run)
        self._tell(caller, run, started=True, whole=True)

    def end(self, caller: Caller, ask: EndPlan) -> None:
        """Take the word that a run is over, or stop it."""
        run = found_run(self.runs, ask.key, ttl_s=self._ttl_s)
        other = run.run != ask.run and not (ask.cancel and not ask.run)
        if run.status is not RunStatus.RUNNING or other:
            self._tell(caller, run)
            return
        if ask.cancel:
            self._stop(run, Fault.of(PlanFailed("the plan was cancelled")))
            self._tell(caller, run)
            return
        left = [one.name for one in run.spec.ordinary if one.name not in run.outcomes]
        if left and run.stopping is None:
            message = f"plan {run.key!r} is not over: {left[0]!r} has not ended"
            raise Mismatch(message)
        self._close(run)
        self._tell(caller, run)

    def dropped(self, key: str, run_number: int, why: str) -> None:
        """Dask has lost what carries a run on."""
        run = self.runs.get(key)
        if run is None or run.run != run_number or run.status is not RunStatus.RUNNING:
            return
        message = (
            f"plan {key!r} was interrupted: {why}; resume it by its key, what is done "
            "stays done"
        )
        self._over(run, RunStatus.INTERRUPTED, Fault.of(PlanFailed(message)))

    # ------------------------------------------------------------ steps
    def begin(self, caller: Caller, ask: BeginStep) -> None:
        """Let a step run, or say what it has come to."""
        run, step = step_at(self.runs, ask.key, ask.run, ask.step)
        known = run.outcomes.get(step.name)
        if known is not None:
            self._say(caller, StepState(outcome=known))
            return
        passed_over = not_begun(run, step)
        if passed_over is not None:
            self._settle(caller, run, step, passed_over)
            return
        if step.once and not self._begun_first(run, step):
            self._settle(caller, run, step, begun_before(step))
            return
        since, again = 0, False
        if ask.attachment:
            bound = bind(run, step, ask.attachment)
            if isinstance(bound, StepOutcome):
                self._settle(caller, run, step, bound)
                return
            since, again = bound
            if not again:
                # Not waited for: lost only with a scheduler that dies at once.
                self._outbox.persist(step_row(run, step.name))
        self._tell_of(run, step, "execute: {} at {}", ask.node or "any node")
        run.begun_s.setdefault(step.name, self._outbox.now_s)
        left_s = max(0.0, run.until_s - self._outbox.now_s)
        after = self._outbox.here if step.once else 0
        state = StepState(left_s=left_s, poll=run.poll, since=since, again=again)
        self._say(caller, state, after=after)

    def _settle(
        self, caller: Caller, run: Run, step: Step, outcome: StepOutcome
    ) -> None:
        """End a step that does not begin."""
        self._say(caller, StepState(outcome=self._record(run, step, outcome)))

    def _begun_first(self, run: Run, step: Step) -> bool:
        if step.name in run.begun:
            return False
        self._writes()
        run.begun[step.name] = None
        self._outbox.persist(row_of(run, now_s=self._outbox.now_s))
        return True

    def effect(
        self, caller: Caller, ask: StepEffect, change: SessionRequest
    ) -> Caller | None:
        """Say under which name a change is to be made; None when it is answered (rule 2)."""
        run, step = step_at(self.runs, ask.key, ask.run, ask.step)
        if step.name in run.outcomes:
            message = f"step {step.name!r} has ended; its outcome is recorded"
            raise StaleOwner(message)
        if run.stopping is not None and not step.compensates:
            raise run.stopping.error()
        self._writes()
        if step.name in run.unsaid:
            generation = Generation(getattr(change, "generation", 0))
            self.claims.take_late(run.key, step, self._names.versions.get(generation))
        return self._effects.ask(caller, run, ask)

    def ended(self, caller: Caller, ask: EndStep) -> None:
        """Record how a step ended; the first outcome counts (rule 3)."""
        run, step = step_at(self.runs, ask.key, ask.run, ask.step)
        known = run.outcomes.get(step.name)
        if known is None:
            self._writes()
            if step.kind is Kind.NOOP:  # it is not let begin, it is over at once
                where = ask.outcome.node or "any node"
                self._tell_of(run, step, "execute: {} at {}", where)
            known = self._record(run, step, bounded(run, step, ask.outcome))
        self._say(caller, known, after=self._outbox.here if step.once else 0)

    def _record(self, run: Run, step: Step, outcome: StepOutcome) -> StepOutcome:
        run.note(step.name, outcome, now_s=self._outbox.now_s)
        # Lost with the scheduler it would be asked for again; what it changed would be known.
        # Who is told of the whole run waits for it.
        row, name = step_row(run, step.name), Generation(run.life)
        self._outbox.persist(row, name, lazy=not step.once)
        said = outcome.fault.message if outcome.fault is not None else ""
        self._tell_of(run, step, "record: {} is {} {}", str(outcome.status), said)
        if outcome.status is StepStatus.DONE:
            self._effects.forget(run, step.name)
        self._outbox.emit(
            "plan_step", plan=run.key, step=step.name, status=str(outcome.status)
        )
        for caller, awaited in list(run.waiting.values()):
            if awaited == step.name:
                del run.waiting[caller.rid]
                self._tell(caller, run)
        return outcome

    # ------------------------------------------------------------ ends
    def _begin_time(self, run: Run) -> None:
        def late() -> None:
            message = f"plan {run.key!r} did not end within its deadline; give it more with ddl="
            self._stop(run, Fault.of(DeadlineExceeded(message)))

        self._appoint(run, run.until_s - self._outbox.now_s, late)

    def _appoint(self, run: Run, within_s: float, act: Callable[[], None]) -> None:
        """Set the one alarm that a run has."""
        run.disarm()
        run.until_s = self._outbox.now_s + within_s
        run.timer = self._timers.at(run.until_s, act)

    def _stop(self, run: Run, why: Fault) -> None:
        """Begin no further step; undoing has a moment of its own (rule 6)."""
        if run.stopping is not None:
            return
        run.stopping = why
        self._note(run, "stop: {}", why.message)
        self._effects.stop(run)
        if not run.undone:
            self._close(run)
            return
        self._appoint(run, UNDO_S, lambda: self._close(run))

    def _close(self, run: Run) -> None:
        for step in run.spec.ordinary:
            if step.name not in run.outcomes:
                outcome = StepOutcome(status=StepStatus.CANCELLED, fault=run.stopping)
                self._record(run, step, outcome)
        self._over(run, *verdict(run))

    def _over(self, run: Run, status: RunStatus, fault: Fault | None) -> None:
        run.status, run.fault = status, fault
        run.disarm()
        self._effects.stop(run)
        if status is RunStatus.DONE:  # it is never run again
            self._effects.forget(run)
            run.payloads = {}
        self._outbox.persist(row_of(run, now_s=self._outbox.now_s))
        self._note(run, "report: {}", str(status))
        self._outbox.emit("plan_ended", plan=run.key, status=str(status))
        run.ended_s = self._outbox.now_s
        if run.since:
            run.signals = self.changes(run.since)
        waiting, run.waiting = run.waiting, {}
        for caller, _ in waiting.values():
            self._tell(caller, run)
        self._forget_later(run)
        self.claims.release(run.key)

    def _forget_later(self, run: Run) -> None:
        number = run.run

        def forget() -> None:
            same = self.runs.get(run.key) is run and run.run == number
            if same and run.status is not RunStatus.RUNNING:
                del self.runs[run.key]
                self._effects.forget(run)
                self._outbox.persist(Row(kind="plan", key=run.key, blob=None))
                for name in {**run.outcomes, **run.called}:
                    row = step_row(run, name)
                    self._outbox.persist(Row(kind="step", key=row.key, blob=None))

        self._timers.at(self._outbox.now_s + self._ttl_s, forget)

    # ------------------------------------------------------------ small parts
    def _writes(self) -> None:
        check_journal(self._outbox.stalled)

    def _say(self, caller: Caller, value: object, *, after: int = 0) -> None:
        self._outbox.reply(caller.session, caller.rid, value, after=after)  # type: ignore[arg-type]

    def _tell(
        self, caller: Caller, run: Run, *, started: bool = False, whole: bool = False
    ) -> None:
        state = state_of(run, self._outbox.now_s, started=started, whole=whole)
        after = max(self._outbox.firm, self._outbox.pending(Generation(run.life)))
        if started or run.status is not RunStatus.RUNNING:
            after = self._outbox.here
        self._outbox.reply(caller.session, caller.rid, state, after=after)

    def _tell_of(self, run: Run, step: Step, form: str, *parts: str | float) -> None:
        """Tell of a step: in its own story, and of the first ones in the plan's."""
        subjects = [f"{run.subject}/{step.name}"]
        if run.told < STEP_LINES:
            run.told += 1
            subjects += [run.subject, run.asker]
        self._stories.tell(self._outbox.now_s, tuple(subjects), form, step.name, *parts)

    def _note(self, run: Run, form: str, *parts: str | float) -> None:
        subjects = (run.subject, run.asker)
        self._stories.tell(self._outbox.now_s, subjects, form, *parts)

    # ------------------------------------------------------------ recovery
    def recover(self, rows: Iterable[PlanRow], steps: Iterable[StepRow]) -> list[str]:
        """Take runs from the journal; returns what has to be said."""
        said = []
        for row in rows:
            try:
                spec = PlanSpec.from_json(row.spec)
            except TensorCastError as error:
                said.append(f"plan {row.key!r} is lost: {error.message}")
                continue
            run = run_of(row, spec, now_s=self._outbox.now_s)
            self.runs[row.key] = run
            if run.status is RunStatus.RUNNING:
                works, run.unsaid = works_of(spec.steps, self._names)
                self.claims.take(run.key, works)
                self._begin_time(run)
            else:
                self._forget_later(run)
        for step in steps:
            found = self.runs.get(step.key)
            if found is None or step.step not in found.steps:
                continue
            if step.attachment:
                found.called[step.step] = (step.attachment, step.since)
            if step.outcome:
                found.note(step.step, step.outcome)
        self._effects.keep_only(self.runs.values())
        return said
