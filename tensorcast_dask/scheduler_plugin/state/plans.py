"""Runs of plans: one a key, each effect once, each end recorded.

Rules:

1. A key opens one run, on disk before anybody is told. The same key with the same digest is
   that run, running or over; with another digest it is Mismatch. A run that is over is kept
   for a while, then its key is free.
2. A key has one life, however often it is resumed; what its steps change is known by it
   (`effects`), so that nothing is done twice.
3. A run's number fences it: what is said of an earlier run, or of one that is over, is stale.
4. A run begins when no other one that is under way would undo its work (`claims`).
5. A run that is to stop (deadline, cancel) begins no further step but those that undo, which
   get `UNDO_S`. One that nobody carries on is interrupted, and can be resumed.
6. A run that a store drives (`drivers`) is told to it whole, and to another one under another
   number when that one is gone: what the first still says is stale.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

import msgspec

from tensorcast_dask.exceptions import (
    DeadlineExceeded,
    Mismatch,
    NotFound,
    PlanFailed,
    TensorCastError,
)
from tensorcast_dask.scheduler_plugin.state.checks import check_seconds
from tensorcast_dask.scheduler_plugin.state.claims import Claims, Works, works_of
from tensorcast_dask.scheduler_plugin.state.drivers import Drivers
from tensorcast_dask.scheduler_plugin.state.effects import Effects
from tensorcast_dask.scheduler_plugin.state.events import Row
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.operations import Caller
from tensorcast_dask.scheduler_plugin.state.plan_steps import PlanSteps
from tensorcast_dask.scheduler_plugin.state.plan_stories import Telling
from tensorcast_dask.scheduler_plugin.state.runs import (
    PlanRow,
    Run,
    StepRow,
    check_plan,
    found_run,
    progress_of,
    row_of,
    run_of,
    state_of,
    step_row,
    to_do_again,
    verdict,
    waits_of,
)
from tensorcast_dask.tensors.ids import Generation, NodeId
from tensorcast_dask.tensors.messages import (
    EndPlan,
    Fault,
    OpenPlan,
    PlanAsked,
    PlanState,
    ResumePlan,
    RunStatus,
    StepOutcome,
    StepStatus,
)
from tensorcast_dask.tensors.plans import Kind, PlanSpec, report_key
from tensorcast_dask.tensors.signals import Reading, Signal

__all__ = ["KEPT_OWN", "POLL_S", "UNDO_S", "Plans"]

#: What a run whose deadline is 0 may take to have each step look once.
POLL_S: Final = 2.0
#: So many runs that are over are kept whose plans had no key of their caller's.
KEPT_OWN: Final = 1000
#: Steps that change nothing at a node which the node does not tell by itself.
_STILL: Final = frozenset({Kind.NOOP, Kind.LATEST, Kind.CALL})
#: What undoing may take after the deadline.
UNDO_S: Final = 30.0


class Plans:
    """All runs that are known.

    Attributes
    ----------
    runs : dict
        By key, in the order in which the keys were opened.
    """

    def __init__(self, ground: Ground, drivers: Drivers, *, ttl_s: float) -> None:
        self._drivers = drivers
        self._outbox = ground.outbox
        self._timers = ground.timers
        self._telling = Telling(ground)
        self._effects = Effects(ground)
        self._names = ground.names
        self._ttl_s = ttl_s
        self.runs: dict[str, Run] = {}
        self.claims = Claims(ground)
        self.steps = PlanSteps(
            ground, self._effects, self.claims, self.runs, self._tell
        )
        drivers.begin, drivers.drop = self.steps.let, self.dropped
        #: Those that are over whose keys nobody else has, the oldest first.
        self._own: deque[Run] = deque()
        #: Gives the number of the signals' last change.
        self.mark: Callable[[], int] = lambda: 0
        #: Gives the signals that changed since a number, as they are or were a moment ago.
        self.changes: Callable[[int, bool], tuple[Signal, ...]] = lambda *_: ()

    def __len__(self) -> int:
        return sum(one.status is RunStatus.RUNNING for one in self.runs.values())

    @property
    def kept(self) -> int:
        """How many runs are over and still known."""
        return len(self.runs) - len(self)

    def running(self) -> tuple[tuple[str, int, str], ...]:
        """Key, number and Dask task of every run that is under way by Dask."""
        return tuple(
            (one.key, one.run, one.report or report_key(one.key, f"{one.run:x}"))
            for one in self.runs.values()
            if one.status is RunStatus.RUNNING and not one.driver
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
            self._wait(caller, known, ask.wait_s)
            return
        self.steps.check_writes()
        spec = check_plan(ask)
        wait_s = check_seconds(ask.wait_s, what="wait_s")
        works, unsaid = works_of(spec.steps, self._names)
        until_s = until_s or self._turn(
            caller, ask, works, lambda at_s: self.open(caller, ask, until_s=at_s)
        )
        if not until_s:
            return
        driver = self._drivers.choose(spec, caller.host) if ask.rpc else NodeId("")
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
            driver=driver,
            concurrency=ask.concurrency,
            own_key=ask.own_key and bool(wait_s),
            opener=caller.rid,
            steps={one.name: one for one in spec.steps},
            unsaid=unsaid,
        )
        self.claims.take(run.key, works)
        run.since = self.mark()
        # Under a key of its own nobody is told that it is open: what it changes comes after it.
        row = row_of(run, now_s=self._outbox.now_s)
        self._outbox.persist(row, lazy=run.own_key)
        self._telling.note(
            run, "submit: {} steps by {}", len(run.steps), run.spec.context.id
        )
        left_s = run.until_s - self._outbox.now_s
        self._telling.note(
            run, "admit: run {}, at most {} s", run.run, round(left_s, 3)
        )
        self._begin_time(run)
        if not driver:
            self._tell(caller, run, started=True)
            return
        self._wait(caller, run, wait_s)
        self._drivers.drive(run)

    def _turn(
        self,
        caller: Caller,
        ask: OpenPlan | ResumePlan,
        works: Works,
        begin: Callable[[float], None],
    ) -> float:
        """Give until when a run may take; 0 where it waits for its turn (rule 4)."""
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
        run = self._found(ask.key)
        if ask.whole:
            self._tell(caller, run, whole=True)
            return
        self._wait(caller, run, ask.wait_s, step=ask.step)

    def _found(self, key: str) -> Run:
        """Find a run.

        Raises
        ------
        NotFound
            When there is none, or the plan has not begun.
        """
        said = "" if key in self.runs else self.claims.waits(key)
        if said:
            message = f"{said}; it has no run until then"
            raise NotFound(message)
        return found_run(self.runs, key, ttl_s=self._ttl_s)

    def _wait(self, caller: Caller, run: Run, wait_s: float, *, step: str = "") -> None:
        """Tell at the end of a run, or of a step of it, or after a while."""
        wait_s = check_seconds(wait_s, what="wait_s")
        over = run.status is not RunStatus.RUNNING or step in run.outcomes
        if over or not wait_s:
            self._tell(caller, run)
            return
        run.waiting[caller.rid] = (caller, step)

        def enough() -> None:
            if run.waiting.pop(caller.rid, None) is not None:
                self._tell(caller, run)

        self._timers.at(self._outbox.now_s + wait_s, enough)

    def resume(self, caller: Caller, ask: ResumePlan, *, until_s: float = 0.0) -> None:
        """Go on where a run stopped; what is done, and was not undone, stays."""
        run = self._found(ask.key)
        over = run.status not in {RunStatus.RUNNING, RunStatus.DONE}
        if not over or run.run != ask.run:
            self._tell(caller, run, whole=True)
            return
        self.steps.check_writes()
        works, run.unsaid = works_of(run.spec.steps, self._names)
        until_s = until_s or self._turn(
            caller, ask, works, lambda at_s: self.resume(caller, ask, until_s=at_s)
        )
        if not until_s:
            return
        if run.driver:
            run.driver = self._drivers.choose(run.spec, caller.host)
        self.claims.take(run.key, works)
        run.run = self._names.numbers.mint()
        for name in to_do_again(run):
            run.call_again(name)
            run.note(name, None)
            self._outbox.persist(step_row(run, name))
        self._effects.forget_faults(run)
        run.status, run.fault, run.stopping = RunStatus.RUNNING, None, None
        run.until_s, run.poll = until_s, ask.poll
        run.report = ask.report
        run.since, run.signals = self.mark(), ()
        self._outbox.persist(row_of(run, now_s=self._outbox.now_s))
        self._telling.note(run, "resume: run {}", run.run)
        self._begin_time(run)
        if run.driver:
            self._tell(caller, run)
            self._drivers.drive(run)
            return
        self._tell(caller, run, started=True, whole=True)

    def end(self, caller: Caller, ask: EndPlan) -> None:
        """Take the word that a run is over, or stop it."""
        why = Fault.of(PlanFailed("the plan was cancelled before its turn came"))
        waited = ask.cancel and self.claims.waits(ask.key)
        if waited:
            self.claims.give_up(ask.key, why)
        if waited and ask.key not in self.runs:
            state = PlanState(
                key=ask.key,
                run=0,
                digest="",
                status=RunStatus.CANCELLED,
                message=why.message,
                fault=why,
            )
            self._outbox.reply(caller.session, caller.rid, state)
            return
        run = self._found(ask.key)
        other = run.run != ask.run and not (ask.cancel and not ask.run)
        if run.status is not RunStatus.RUNNING or other:
            self._tell(caller, run)
            return
        if ask.cancel:
            self._stop(run, Fault.of(PlanFailed("the plan was cancelled")))
            self._tell(caller, run)
            return
        self.steps.take(run, ask.ended)
        if ask.left:
            self.dropped(run.key, run.run, ask.left)
            self._tell(caller, run)
            return
        left = [one.name for one in run.spec.ordinary if one.name not in run.outcomes]
        if left and run.stopping is None:
            message = f"plan {run.key!r} is not over: {left[0]!r} has not ended"
            raise Mismatch(message)
        self._close(run)
        self._tell(caller, run, brief=bool(run.driver))

    def dropped(self, key: str, run_number: int, why: str) -> None:
        """Nobody carries a run on any more."""
        run = self.runs.get(key)
        if run is None or run.run != run_number or run.status is not RunStatus.RUNNING:
            return
        message = (
            f"plan {key!r} was interrupted: {why}; resume it by its key, what is done "
            "stays done"
        )
        self._over(run, RunStatus.INTERRUPTED, Fault.of(PlanFailed(message)))

    # ------------------------------------------------------------ ends
    def _begin_time(self, run: Run) -> None:
        def late() -> None:
            message = f"plan {run.key!r} did not end within its deadline; give it more with ddl="
            self._stop(run, Fault.of(DeadlineExceeded(message)))

        def enough() -> None:
            self._close(run)

        act = late if run.stopping is None else enough
        self._appoint(run, run.until_s - self._outbox.now_s, act)

    def _appoint(self, run: Run, within_s: float, act: Callable[[], None]) -> None:
        """Set the one alarm that a run has."""
        run.disarm()
        run.until_s = self._outbox.now_s + within_s
        run.timer = self._timers.at(run.until_s, act)

    def _stop(self, run: Run, why: Fault) -> None:
        """Begin no further step; undoing has a moment of its own (rule 5)."""
        if run.stopping is not None:
            return
        run.stopping = why
        self._telling.note(run, "stop: {}", why.message)
        self._effects.stop(run)
        if not run.undone:
            self._close(run)
            return
        run.until_s = self._outbox.now_s + UNDO_S
        self._begin_time(run)
        # Who is told that it stops is told of what stays so after a restart.
        row = row_of(run, now_s=self._outbox.now_s)
        self._outbox.persist(row, Generation(run.life))

    def _close(self, run: Run) -> None:
        for step in run.spec.ordinary:
            if step.name not in run.outcomes:
                outcome = StepOutcome(status=StepStatus.CANCELLED, fault=run.stopping)
                self.steps.record(run, step, outcome)
        self._over(run, *verdict(run))

    def _over(self, run: Run, status: RunStatus, fault: Fault | None) -> None:
        run.status, run.fault = status, fault
        run.disarm()
        self._drivers.over(run)
        self._effects.stop(run)
        if status is RunStatus.DONE:  # it is never run again
            self._effects.forget(run)
            run.payloads = {}
        row = row_of(run, now_s=self._outbox.now_s)
        self._outbox.persist(row, lazy=run.own_key)
        self._telling.note(run, "report: {}", str(status))
        self._outbox.emit("plan_ended", plan=run.key, status=str(status))
        run.ended_s = self._outbox.now_s
        if run.since:
            moved = any(one.kind not in _STILL for one in run.spec.steps)
            run.signals = self.changes(run.since, moved)
        waiting, run.waiting = run.waiting, {}
        for rid, (caller, _) in waiting.items():
            self._tell(caller, run, at_once=run.own_key and rid == run.opener)
        self._forget_later(run)
        self.claims.release(run.key)

    def _forget_later(self, run: Run) -> None:
        number = run.run

        def forget() -> None:
            if run.run == number:
                self._forget(run)

        self._timers.at(self._outbox.now_s + self._ttl_s, forget)
        if run.own_key:
            self._own.append(run)
            if len(self._own) > KEPT_OWN:
                self._forget(self._own.popleft())

    def _forget(self, run: Run) -> None:
        same = self.runs.get(run.key) is run
        if not same or run.status is RunStatus.RUNNING:
            return
        del self.runs[run.key]
        self._effects.forget(run)
        self._outbox.persist(Row(kind="plan", key=run.key, blob=None), lazy=True)
        for name in {**run.outcomes, **run.called}:
            row = step_row(run, name)
            none = Row(kind="step", key=row.key, blob=None)
            self._outbox.persist(none, lazy=True)

    # ------------------------------------------------------------ small parts
    def _tell(
        self,
        caller: Caller,
        run: Run,
        *,
        started: bool = False,
        whole: bool = False,
        brief: bool = False,
        at_once: bool = False,
    ) -> None:
        state = state_of(run, self._outbox.now_s, started=started, whole=whole)
        if brief:
            state = msgspec.structs.replace(state, outcomes={}, signals=())
        after = max(self._outbox.firm, self._outbox.pending(Generation(run.life)))
        if started or run.status is not RunStatus.RUNNING:
            after = self._outbox.here
        if at_once:
            after = 0
        self._outbox.reply(caller.session, caller.rid, state, after=after)

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
                self._drivers.look_for(run)
            else:
                self._forget_later(run)
        for step in steps:
            found = self.runs.get(step.key)
            if found is None or step.step not in found.steps:
                continue
            if step.since:
                found.called[step.step] = (step.attachment, step.since)
            if step.outcome:
                found.note(step.step, step.outcome)
        self._effects.keep_only(self.runs.values())
        return said
