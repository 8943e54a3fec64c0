"""Steps of runs: which may begin, what they change, how they ended.

Rules:

1. A step ends once: the first outcome counts. Its effects are forgotten then, not before.
2. What steps of an earlier run ask for, or of one that is over, is refused as stale.
3. A run that stops lets no step begin but those that undo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tensorcast_dask.exceptions import (
    StaleOwner,
)
from tensorcast_dask.scheduler_plugin.state.claims import Claims
from tensorcast_dask.scheduler_plugin.state.effects import Effects
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.operations import Caller
from tensorcast_dask.scheduler_plugin.state.plan_stories import Telling
from tensorcast_dask.scheduler_plugin.state.runs import (
    Run,
    begun_before,
    bind,
    bounded,
    check_journal,
    not_begun,
    row_of,
    step_at,
    step_row,
)
from tensorcast_dask.tensors.ids import Generation
from tensorcast_dask.tensors.messages import (
    BeginStep,
    EndStep,
    SessionRequest,
    StepEffect,
    StepOutcome,
    StepState,
    StepStatus,
)
from tensorcast_dask.tensors.plans import Kind, Step

__all__ = ["PlanSteps"]


class PlanSteps:
    """The steps of all runs.

    Parameters
    ----------
    ground : Ground
        What all parts stand on.
    effects : Effects
        What steps have changed.
    claims : Claims
        What runs work on.
    runs : mapping
        All runs by key.
    tell : callable
        Tells a caller how a run stands.
    """

    def __init__(
        self,
        ground: Ground,
        effects: Effects,
        claims: Claims,
        runs: Mapping[str, Run],
        tell: Callable[[Caller, Run], None],
    ) -> None:
        self._outbox = ground.outbox
        self._names = ground.names
        self._effects = effects
        self._claims = claims
        self._telling = Telling(ground)
        self._runs = runs
        self._tell = tell

    def begin(self, caller: Caller, ask: BeginStep) -> None:
        """Let a step run, or say what it has come to."""
        run, step = step_at(self._runs, ask.key, ask.run, ask.step)
        self.take(run, ask.ended)
        state = self.let(run, step, ask.node, ask.attachment)
        self._say(caller, state, after=self._outbox.here if step.once else 0)

    def let(self, run: Run, step: Step, node: str, attachment: str) -> StepState:
        """Let a step of a run begin at a node, or say what it has come to."""
        known = run.outcomes.get(step.name) or not_begun(run, step)
        if step.once and known is None and not self._begun_first(run, step):
            known = begun_before(step)
        since, again = 0, False
        # Where it is not there now, it is the one that was asked before.
        attachment = attachment or run.called.get(step.name, ("", 0))[0]
        if attachment and known is None:
            bound = bind(run, step, attachment)
            if isinstance(bound, StepOutcome):
                known = bound
            else:
                since, again = bound
                if not again:
                    # Not waited for: lost only with a scheduler that dies at once. Under a
                    # key of its own nobody resumes the run.
                    self._outbox.persist(step_row(run, step.name), lazy=run.own_key)
        if known is not None:
            if step.name not in run.outcomes:
                known = self.record(run, step, known)
            return StepState(outcome=known)
        self._telling.of_step(run, step, "execute: {} at {}", node or "any node")
        run.begun_s.setdefault(step.name, self._outbox.now_s)
        left_s = max(0.0, run.until_s - self._outbox.now_s)
        return StepState(
            left_s=left_s,
            poll=run.poll,
            since=since,
            again=again,
            attachment=attachment,
        )

    def _begun_first(self, run: Run, step: Step) -> bool:
        if step.name in run.begun:
            return False
        self.check_writes()
        run.begun[step.name] = None
        self._outbox.persist(row_of(run, now_s=self._outbox.now_s))
        return True

    def effect(
        self, caller: Caller, ask: StepEffect, change: SessionRequest
    ) -> Caller | None:
        """Say under which name a change is to be made; None when it is answered (rule 2)."""
        run, step = step_at(self._runs, ask.key, ask.run, ask.step)
        if step.name in run.outcomes:
            message = f"step {step.name!r} has ended; its outcome is recorded"
            raise StaleOwner(message)
        if run.stopping is not None and not step.compensates:
            raise run.stopping.error()
        self.check_writes()
        if step.name in run.unsaid:
            generation = Generation(getattr(change, "generation", 0))
            self._claims.take_late(run.key, step, self._names.versions.get(generation))
        return self._effects.ask(caller, run, ask)

    def ended(self, caller: Caller, ask: EndStep) -> None:
        """Record how a step ended; the first outcome counts (rule 3)."""
        run, step = step_at(self._runs, ask.key, ask.run, ask.step)
        known = run.outcomes.get(step.name) or self._ended(run, step, ask.outcome)
        self._say(caller, known, after=self._outbox.here if step.once else 0)

    def _ended(self, run: Run, step: Step, outcome: StepOutcome) -> StepOutcome:
        self.check_writes()
        if step.kind is Kind.NOOP:  # it is not let begin, it is over at once
            self._telling.of_step(
                run, step, "execute: {} at {}", outcome.node or "any node"
            )
        return self.record(run, step, bounded(run, step, outcome))

    def take(self, run: Run, ended: Mapping[str, StepOutcome]) -> None:
        """Take outcomes that came with another word."""
        for name, outcome in ended.items():
            step = run.steps.get(name)
            if step is not None and name not in run.outcomes:
                self._ended(run, step, outcome)

    def record(self, run: Run, step: Step, outcome: StepOutcome) -> StepOutcome:
        """Record how a step ended, and tell who waits for it."""
        run.note(step.name, outcome, now_s=self._outbox.now_s)
        # Lost with the scheduler it would be asked for again; what it changed would be known.
        # Who is told of the whole run waits for it.
        row, name = step_row(run, step.name), Generation(run.life)
        self._outbox.persist(row, name, lazy=not step.once)
        said = outcome.fault.message if outcome.fault is not None else ""
        self._telling.of_step(
            run, step, "record: {} is {} {}", str(outcome.status), said
        )
        if step.instance:
            self._telling.of_call(run, step, outcome)
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

    def _say(self, caller: Caller, value: object, *, after: int = 0) -> None:
        self._outbox.reply(caller.session, caller.rid, value, after=after)  # type: ignore[arg-type]

    def check_writes(self) -> None:
        """Refuse to go on while the journal cannot write."""
        check_journal(self._outbox.stalled)
