"""Random runs of random plans against a simple model: what is told, and what was done once.

Several workers carry one plan on, some of them out of date: Dask runs tasks twice, at once, or
long after. The scheduler is restarted, runs are cancelled, dropped and resumed.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tensorcast_dask.exceptions import Mismatch, StaleOwner
from tensorcast_dask.scheduler_plugin.state.events import PlanDropped
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import RequestId
from tensorcast_dask.tensors.messages import RunStatus, StepStatus
from tensorcast_dask.tensors.plans import PlanSpec, Step
from tests.kit.catalogs import Desk
from tests.kit.plans import Runner, noop

STEPS = ("a", "b", "c", "d")
WHO = st.integers(0, 2)
STEP = st.sampled_from(STEPS)
DONE, FAILED = StepStatus.DONE, StepStatus.FAILED
SKIPPED, CANCELLED = StepStatus.SKIPPED, StepStatus.CANCELLED
FAULT = m.Fault(kind="Gone", message="it went")
OVER = (RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.INTERRUPTED)


class Runs(RuleBasedStateMachine):
    """One key, three workers, and what they may expect."""

    desk: Desk

    @initialize(needs=st.lists(st.sets(STEP), min_size=4, max_size=4))
    def begin_all(self, needs: list[set[str]]) -> None:
        """One plan, by chance."""
        steps: list[Step] = []
        for at, name in enumerate(STEPS):
            before = [one for one in STEPS[:at] if one in needs[at]]
            steps.append(noop(name, *before))
        self.spec = PlanSpec(steps=tuple(steps)).check()
        self.needs = {one.name: one.needs for one in self.spec.steps}
        self.desk = Desk()
        self.desk.node("a")
        self.programs = [self.desk.program(f"w{at}") for at in range(3)]
        self.info = self.programs[0].put("x")
        self.workers = [Runner(one) for one in self.programs]
        #: What the model knows.
        self.status: RunStatus | None = None
        self.run = 0
        self.outcomes: dict[str, StepStatus] = {}
        self.pinned: dict[str, int] = {}
        self.open(0)

    # ------------------------------------------------------------ the model
    def expected_stale(self, who: int) -> bool:
        stale = self.workers[who].run != self.run
        return stale or self.status is not RunStatus.RUNNING

    def why_skipped(self, step: str) -> bool:
        return any(
            name in self.outcomes and self.outcomes[name] is not DONE
            for name in self.needs[step]
        )

    # ------------------------------------------------------------ what workers do
    @rule(who=WHO)
    def open(self, who: int) -> None:
        """Ask for the plan; only the first is told to carry it out."""
        state = self.workers[who].open(self.spec, deadline_s=1e6)
        assert state.started == (self.status is None)
        if self.status is None:
            self.status, self.run = RunStatus.RUNNING, state.run
        assert (state.run, state.status) == (self.run, self.status)

    @rule(who=WHO)
    def another_plan(self, who: int) -> None:
        """The key is this plan's."""
        other = PlanSpec(steps=(noop("other"),))
        worker = Runner(self.programs[who])
        with pytest.raises(Mismatch):
            worker.open(other)

    @rule(who=WHO, step=STEP)
    def begin(self, who: int, step: str) -> None:
        """A task begins, perhaps again."""
        if self.expected_stale(who):
            with pytest.raises(StaleOwner):
                self.workers[who].begin(step)
            return
        told = self.workers[who].begin(step).outcome
        if step not in self.outcomes and self.why_skipped(step):
            self.outcomes[step] = SKIPPED
        expected = self.outcomes.get(step)
        assert (told.status if told is not None else None) == expected

    @rule(who=WHO, step=STEP, attempt=st.integers(1, 2))
    def change(self, who: int, step: str, attempt: int) -> None:
        """A task changes something: once, and everybody is told the same."""
        pin = m.Pin(
            rid=RequestId("any"), generation=self.info.generation, ttl_s=1e6 + who
        )
        rid = self.workers[who].effect(step, pin, attempt=attempt)
        answer = self.programs[who].answers[rid]
        if self.expected_stale(who) or step in self.outcomes:
            assert isinstance(answer, m.Fault)
            assert answer.kind == "StaleOwner"
            return
        assert isinstance(answer, m.Pinned)
        assert self.pinned.setdefault(step, answer.pin) == answer.pin

    @rule(who=WHO, step=STEP, status=st.sampled_from([DONE, FAILED]))
    def end_step(self, who: int, step: str, status: StepStatus) -> None:
        """A task says how it ended; the first word counts."""
        fault = FAULT if status is FAILED else None
        if self.expected_stale(who):
            with pytest.raises(StaleOwner):
                self.workers[who].ended(step, status, fault=fault)
            return
        told = self.workers[who].ended(step, status, fault=fault)
        assert self.outcomes.setdefault(step, status) is told.status

    @rule(who=WHO)
    def report(self, who: int) -> None:
        """The last task."""
        worker = self.workers[who]
        open_steps = set(STEPS) - set(self.outcomes)
        if not self.expected_stale(who) and open_steps:
            with pytest.raises(Mismatch):
                worker.end()
            return
        if not self.expected_stale(who):
            good = all(one is DONE for one in self.outcomes.values())
            self.status = RunStatus.DONE if good else RunStatus.FAILED
        assert worker.end().status is self.status

    # ------------------------------------------------------------ what comes between
    @rule(who=WHO)
    def cancel(self, who: int) -> None:
        """Somebody stops it."""
        worker = self.workers[who]
        stale = self.expected_stale(who) and worker.run != 0
        state = worker.end(cancel=True)
        if not stale and self.status is RunStatus.RUNNING:
            self.status = RunStatus.CANCELLED
            for step in STEPS:
                self.outcomes.setdefault(step, CANCELLED)
        assert state.status is self.status

    @rule(old=st.booleans())
    def drop(self, *, old: bool) -> None:
        """Dask loses its tasks."""
        run = self.run - 1 if old else self.run
        self.desk.tell(PlanDropped(key="k", run=run, why="gone"))
        if not old and self.status is RunStatus.RUNNING:
            self.status = RunStatus.INTERRUPTED

    @precondition(lambda self: self.status in OVER)
    @rule(who=WHO)
    def resume(self, who: int) -> None:
        """Go on; what is done stays."""
        worker = self.workers[who]
        seen = worker.run == self.run
        state = worker.resume()
        assert state.started == seen
        assert (state.run != self.run) == seen
        if seen:
            self.status, self.run = RunStatus.RUNNING, state.run
            self.outcomes = {
                name: one for name, one in self.outcomes.items() if one is DONE
            }
        assert (state.run, state.status) == (self.run, self.status)

    @rule()
    def restart(self) -> None:
        """The scheduler is killed; the journal is what is left."""
        self.desk.flush()
        self.desk = self.desk.restart()
        for node in list(self.desk.nodes.values()):
            node.join()
        for program in self.programs:
            program.open()

    @rule(seconds=st.sampled_from([0.5, 1.0, 100.0]))
    def wait(self, seconds: float) -> None:
        """Nothing happens for a while."""
        self.desk.pass_time(seconds)

    # ------------------------------------------------------------ always
    @invariant()
    def every_change_was_made_once(self) -> None:
        """Pins are as many as steps that made one, whatever was asked how often."""
        if hasattr(self, "pinned"):
            self.desk.flush()
            state = self.desk.catalog.debug_state()
            assert state["pins"] == len(self.pinned)
            assert state["plans"] == (self.status is RunStatus.RUNNING)

    @invariant()
    def what_is_told_is_what_was_recorded(self) -> None:
        """A look shows the first outcome of each step."""
        if getattr(self, "status", None) is not None:
            state = Runner(self.programs[0]).look()
            told = {name: one.status for name, one in state.outcomes.items()}
            assert told == self.outcomes


TestRuns = Runs.TestCase
TestRuns.settings = settings(
    max_examples=max(200, settings().max_examples),
    stateful_step_count=40,
    deadline=None,
)
