"""One run of a plan, as the store that drives it carries it on.

Rules:

1. The catalog has the run; this only does what a step asks for (`tensors.steps`). A step begins
   when the catalog lets it, and how it ended is told before anything that rests on it is asked.
   What only hands on needs no leave, and is told with the next word.
2. A run that is not ours any more (over, or another store's) is left alone at once.
3. At most `concurrency` steps are under way. Retries, their waits included, share what is left of
   the plan's deadline. Steps that undo come last, one after the other, in reverse order.
4. Nothing is waited for without an end: an answer that does not come in the step's time is an
   error of the step, and a run whose time is long over is left.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tensorcast_dask.exceptions import (
    DeadlineExceeded,
    Mismatch,
    NotFound,
    StaleOwner,
    TensorCastError,
    Unimplemented,
)
from tensorcast_dask.store.state.driving_words import GiveUp, Instruction, Make, Say
from tensorcast_dask.tensors import steps
from tensorcast_dask.tensors.calling import Calling
from tensorcast_dask.tensors.ids import HostId, NodeId
from tensorcast_dask.tensors.messages import (
    Answer,
    BeginStep,
    CallInstance,
    DoRun,
    EndPlan,
    EndStep,
    Fault,
    Message,
    StepOutcome,
    StepState,
    StepStatus,
    decode,
)
from tensorcast_dask.tensors.plans import Kind, PlanSpec, Step
from tensorcast_dask.tensors.wants import (
    NO_RID,
    Ask,
    Asking,
    Call,
    Effects,
    Local,
    Ticket,
    Want,
    fitted,
    pause_s,
)

__all__ = ["AGAIN_S", "GRACE_S", "LEAVE_S", "Drive"]

#: How long after a step's time an answer that is on its way is waited for.
GRACE_S: Final = 2.0
#: How long after a run's time it is left: undoing has its own.
LEAVE_S: Final = 60.0
#: When the catalog is asked again for what it could not give.
AGAIN_S: Final = 0.5


@dataclass(slots=True, eq=False)
class _Life:
    """One step that is under way."""

    step: Step
    begun_s: float
    until_s: float
    poll: bool = False
    attempts: int = 0
    calling: Calling | None = None
    doing: Asking[StepOutcome] | None = None
    effects: Effects | None = None
    #: What it waits for: the number of an answer, and what kind it is; or when it goes on.
    number: int = 0
    kind: type[object] = object
    calls: bool = False
    again_s: float | None = None
    #: What its request for leave tells besides.
    told: dict[str, StepOutcome] = field(default_factory=dict)


class Drive:
    """A run that this store drives.

    Parameters
    ----------
    order : DoRun
        What is to be driven.
    node, host
        Of this store.
    now_s : float
        The instant.
    """

    def __init__(
        self, order: DoRun, *, node: NodeId, host: HostId, now_s: float
    ) -> None:
        self.ticket = Ticket(order.key, order.run, order.trace)
        self._order = order
        self._spec = PlanSpec.from_json(order.spec, check=False)
        self._node = node
        self._host = host
        self._now_s = now_s
        self._until_s = now_s + order.left_s + LEAVE_S
        self._outcomes = dict(order.outcomes)
        #: Outcomes that the catalog does not know yet; those that are on their way, by number.
        self._untold: dict[str, StepOutcome] = {}
        self._telling: dict[int, dict[str, StepOutcome]] = {}
        #: When to tell again what the catalog could not take.
        self._again_s = float("inf")
        self._lives: dict[str, _Life] = {}
        self._numbers = 0
        self._asked: dict[int, _Life] = {}
        #: By step: how many before it have not ended; whom it holds up.
        self._missing: dict[str, int] = {}
        self._holds: dict[str, list[Step]] = {}
        self._ready: deque[Step] = deque()
        self._left = 0
        self._undo: list[Step] | None = None
        #: The number of the last word.
        self._end = 0
        self._out: list[Instruction] = []
        #: It is over, or not ours any more.
        self.over = False

    # ------------------------------------------------------------ events
    def begin(self) -> list[Instruction]:
        """Begin with what can begin."""
        for step in self._spec.ordinary:
            if step.name in self._outcomes:
                continue
            self._left += 1
            missing = [one for one in step.needs if one not in self._outcomes]
            for name in missing:
                self._holds.setdefault(name, []).append(step)
            if missing:
                self._missing[step.name] = len(missing)
            else:
                self._ready.append(step)
        return self._go_on()

    def answered(
        self, number: int, answer: Answer, *, now_s: float
    ) -> list[Instruction]:
        """Take an answer of the catalog."""
        self._now_s = now_s
        fault = None if answer.fault is None else answer.fault.error()
        told = self._telling.pop(number, None)
        if told is not None:
            return self._was_told(number, told, fault)
        life = self._asked.pop(number, None)
        if life is None:
            return []  # too late
        life.number = 0
        if life.doing is None:
            self._may_begin(life, answer, fault)
        elif fault is not None:
            self._advance(life, error=fault)
        else:
            self._advance(life, decode(answer.value, life.kind))
        return self._go_on()

    def called(
        self, number: int, outcome: bytes | TensorCastError, *, now_s: float
    ) -> list[Instruction]:
        """Take what a call came to."""
        self._now_s = now_s
        life = self._asked.pop(number, None)
        if life is None:
            return []
        life.number, life.calls = 0, False
        error = outcome if isinstance(outcome, TensorCastError) else None
        self._advance(life, outcome, error=error)
        return self._go_on()

    def next_s(self) -> float:
        """When to look at the clock."""
        times = [self._until_s, self._again_s]
        for life in self._lives.values():
            if life.again_s is not None:
                times.append(life.again_s)
            else:
                times.append(life.until_s if life.calls else life.until_s + GRACE_S)
        return min(times)

    def tick(self, *, now_s: float) -> list[Instruction]:
        """Look at the clock (rule 4)."""
        self._now_s = now_s
        if now_s >= self._until_s:
            self.over = True
            return []
        if now_s >= self._again_s:
            self._again_s = float("inf")
        for life in list(self._lives.values()):
            if life.again_s is not None:
                if now_s >= life.again_s:
                    life.again_s = None
                    self._try(life)
            elif life.calls and now_s >= life.until_s:
                life.calls = False
                self._out.append(GiveUp(number=life.number))
            elif life.number and now_s >= life.until_s + GRACE_S:
                self._asked.pop(life.number, None)
                life.number = 0
                message = (
                    f"step {life.step.name!r} was not answered in time; give it more "
                    "with ddl="
                )
                self._advance(life, error=DeadlineExceeded(message))
        return self._go_on()

    # ------------------------------------------------------------ the run
    def _go_on(self) -> list[Instruction]:
        if not self.over:
            self._proceed()
        out, self._out = self._out, []
        return out

    def _proceed(self) -> None:
        """Begin what can begin, tell what has ended, end what is over."""
        most = self._order.concurrency
        while self._ready and not (most and len(self._lives) >= most):
            self._start(self._ready.popleft())
        while self._at_rest() and self._undo_next():
            pass
        if self._at_rest() and not self._telling and self._again_s == float("inf"):
            key, run, _ = self.ticket
            told = self._take()
            end = EndPlan(rid=NO_RID, key=key, run=run, ended=told)
            self._end = self._tell(end, told)
        elif self._again_s == float("inf"):
            for name, outcome in self._take().items():
                key, run, _ = self.ticket
                ended = EndStep(
                    rid=NO_RID, key=key, run=run, step=name, outcome=outcome
                )
                self._tell(ended, {name: outcome})

    def _at_rest(self) -> bool:
        return not (self._left or self._lives or self._end)

    def _undo_next(self) -> bool:
        """Begin the next step that undoes; False when there is none."""
        if self._undo is None:
            failed = any(
                self._outcomes[one.name].status is not StepStatus.DONE
                for one in self._spec.ordinary
            )
            self._undo = [
                one
                for one in self._spec.steps
                if failed
                and one.compensates
                and one.name not in self._outcomes
                and self._outcomes[one.compensates].status is StepStatus.DONE
            ]
        if not self._undo:
            return False
        self._start(self._undo.pop())
        return True

    # ------------------------------------------------------------ telling
    def _take(self) -> dict[str, StepOutcome]:
        taken, self._untold = self._untold, {}
        return taken

    def _tell(self, request: Message, told: dict[str, StepOutcome]) -> int:
        self._numbers += 1
        self._telling[self._numbers] = told
        self._out.append(Say(number=self._numbers, request=request))
        return self._numbers

    def _was_told(
        self,
        number: int,
        told: dict[str, StepOutcome],
        fault: TensorCastError | None,
    ) -> list[Instruction]:
        last = number == self._end
        if fault is not None and fault.retryable:
            self._untold = told | self._untold
            self._again_s = self._now_s + AGAIN_S
            self._end = 0 if last else self._end
            return []
        if fault is not None:
            self._leave(fault)
        self.over = self.over or last
        return self._go_on()

    def _leave(self, fault: TensorCastError) -> None:
        """Drive it no more; where it is ours still, the catalog tells its caller."""
        self.over = True
        key, run, _ = self.ticket
        left = EndPlan(rid=NO_RID, key=key, run=run, left=fault.message)
        self._out.append(Say(number=0, request=left))

    def _say(self, request: Message, life: _Life) -> None:
        self._numbers += 1
        life.number = self._numbers
        self._asked[life.number] = life
        self._out.append(Say(number=life.number, request=request))

    # ------------------------------------------------------------ a step
    def _start(self, step: Step) -> None:
        before = [self._outcomes[name] for name in step.needs]
        done = all(one.status is StepStatus.DONE for one in before)
        if step.kind is Kind.NOOP and done:
            outcome = steps.handed_on(step, self._outcomes)
            self._close(step, outcome, attempts=1, seconds=0.0)
            return
        life = _Life(step, self._now_s, self._until_s)
        self._lives[step.name] = life
        granted = self._order.begun.get(step.name)
        if granted is not None:
            self._begun(life, granted)
        else:
            self._try(life)

    def _try(self, life: _Life) -> None:
        """Ask for leave to begin, or make the next attempt."""
        if life.attempts:
            self._attempt(life)
            return
        place = self._order.places.get(life.step.instance)
        life.told = self._take()
        begin = BeginStep(
            rid=NO_RID,
            key=self.ticket.key,
            run=self.ticket.run,
            step=life.step.name,
            node=self._node,
            attachment="" if place is None else place.attachment,
            ended=life.told,
        )
        self._say(begin, life)

    def _may_begin(
        self, life: _Life, answer: Answer, fault: TensorCastError | None
    ) -> None:
        if isinstance(fault, StaleOwner | NotFound | Mismatch):
            self._leave(fault)  # rule 2
        elif fault is not None:
            self._untold = life.told | self._untold
            life.again_s = self._now_s + AGAIN_S
        else:
            self._begun(life, decode(answer.value, StepState))

    def _begun(self, life: _Life, state: StepState) -> None:
        step = life.step
        if state.outcome is not None:
            del self._lives[step.name]
            self._note(step, state.outcome)
            return
        life.until_s = self._now_s + state.left_s
        life.poll = state.poll
        if step.instance:
            place = self._order.places.get(step.instance)
            life.calling = Calling(
                step,
                state.attachment,
                f"{self.ticket.key}/{step.name}/{state.since:x}",
                card=None if place is None else place.card,
                again=state.again,
            )
        self._attempt(life)

    def _attempt(self, life: _Life) -> None:
        step = life.step
        life.attempts += 1
        life.effects = Effects(self.ticket, step.name, life.attempts)
        if step.kind is Kind.NOOP:  # it undoes, and nothing before it was done
            self._end_of(life, steps.handed_on(step, self._outcomes))
            return
        if life.calling is not None:
            life.doing = steps.call_instance(step, self._look, life.calling)
        else:
            life.doing = steps.carry_out(step, self._look, host=self._host)
        if not life.poll and self._now_s >= life.until_s:
            message = (
                f"the deadline passed while step {step.name!r} was to begin; give it more "
                "with ddl="
            )
            self._failed(life, DeadlineExceeded(message))
            return
        self._advance(life, None)

    def _look(self, name: str) -> object:
        return steps.value_of(self._outcomes[name])

    def _advance(
        self,
        life: _Life,
        value: object = None,
        *,
        error: TensorCastError | None = None,
    ) -> None:
        """Give a step what it waited for, and see what it wants next."""
        assert life.doing is not None, "driving: a step that has not begun"
        try:
            while True:
                if error is not None:
                    want = life.doing.throw(error)
                else:
                    want = life.doing.send(value)
                if not isinstance(want, Local):
                    break
                value, error = _refused(want)
        except StopIteration as end:
            outcome: StepOutcome = end.value
            self._end_of(life, outcome)
        except TensorCastError as failure:
            self._failed(life, failure)
        else:
            self._want(life, want)

    def _want(self, life: _Life, want: Want) -> None:
        left_s = 0.0 if life.poll else max(0.0, life.until_s - self._now_s)
        assert life.effects is not None, "driving: a step that has not begun"
        if isinstance(want, Ask):
            life.kind = want.kind
            self._say(life.effects.wrapped(want.request, NO_RID, left_s), life)
            return
        assert isinstance(want, Call), f"driving: nobody does {want}"
        left_s = max(0.0, life.until_s - self._now_s)
        request = fitted(want.request, NO_RID, left_s)
        assert isinstance(request, CallInstance), "driving: a call is a call"
        self._numbers += 1
        life.number, life.calls = self._numbers, True
        self._asked[life.number] = life
        self._out.append(Make(number=life.number, card=want.card, request=request))

    def _failed(self, life: _Life, error: TensorCastError) -> None:
        wait_s = pause_s(life.attempts)
        again = error.retryable and life.attempts <= life.step.retries
        if again and not life.poll and self._now_s + wait_s < life.until_s:
            life.again_s = self._now_s + wait_s
            return
        outcome = StepOutcome(status=StepStatus.FAILED, fault=Fault.of(error))
        self._end_of(life, outcome)

    def _end_of(self, life: _Life, outcome: StepOutcome) -> None:
        del self._lives[life.step.name]
        seconds = self._now_s - life.begun_s
        self._close(life.step, outcome, attempts=life.attempts, seconds=seconds)

    def _close(
        self, step: Step, outcome: StepOutcome, *, attempts: int, seconds: float
    ) -> None:
        outcome = msgspec.structs.replace(
            outcome,
            node=outcome.node or self._node,
            attempts=attempts,
            seconds=seconds,
        )
        self._untold[step.name] = outcome
        self._note(step, outcome)

    def _note(self, step: Step, outcome: StepOutcome) -> None:
        """Go on with what waited for a step."""
        self._outcomes[step.name] = outcome
        if not step.compensates:
            self._left -= 1
        for held in self._holds.pop(step.name, ()):
            self._missing[held.name] -= 1
            if not self._missing[held.name]:
                self._ready.append(held)


def _refused(want: Local) -> tuple[object, TensorCastError | None]:
    """Say what of a process with a session a store does not have."""
    if want.act == steps.SAME_FILE:
        return None, None  # it cannot compare: the name is taken
    message = (
        f"a store does not do this ({want.act}); run the plan with executor='graph'"
    )
    return None, Unimplemented(message)
