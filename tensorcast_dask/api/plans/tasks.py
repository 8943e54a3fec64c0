"""What a worker does for a plan: the tasks of its graph.

Rules:

1. A task never raises for what a step came to: the outcome is a value, recorded by the catalog
   before it is handed on. So a failed step leaves the others alone, and the last task knows all.
2. Dask may run a task again, or twice at once. The catalog is asked first: a step that has
   ended gives its recorded outcome; a change that was made gives its recorded answer.
3. What a step asks for is the same wherever it is driven (`tensors.steps`); each change is named
   by run, step and place.
4. Retries, their waits included, share what is left of the plan's deadline.
5. What a task does is in the trace of the call that ran the plan.
"""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any, Final

import msgspec
from distributed import get_worker, secede
from distributed.protocol.pickle import dumps, loads

from tensorcast_dask.api.connection.deadlines import Deadline, deadline
from tensorcast_dask.api.current import current_session
from tensorcast_dask.api.plans import doing
from tensorcast_dask.dataplane import faults, tracing
from tensorcast_dask.exceptions import (
    InvalidArgument,
    Mismatch,
    PeerLost,
    PlanFailed,
    TensorCastError,
)
from tensorcast_dask.tensors import steps
from tensorcast_dask.tensors.calling import Calling
from tensorcast_dask.tensors.messages import (
    BeginStep,
    EndPlan,
    EndStep,
    Fault,
    OpenPlan,
    PlanState,
    StepOutcome,
    StepState,
    StepStatus,
)
from tensorcast_dask.tensors.plans import MAX_VALUE_BYTES, Kind, PlanSpec, Step
from tensorcast_dask.tensors.traces import cause_of
from tensorcast_dask.tensors.wants import Effects, Ticket, pause_s
from tensorcast_dask.worker_plugin.context import node_of

__all__ = ["open_run", "report", "run_step"]

_LOG = logging.getLogger(__name__)
#: How long the catalog is waited for where nothing else says.
_ANSWER_S: Final = 60.0


# -------------------------------------------------------------------- tasks
def open_run(request: OpenPlan) -> Ticket:
    """Open the run of a plan that Dask was handed as a collection, or find it."""
    secede()  # type: ignore[no-untyped-call]  # it may wait for another plan, whose steps need the place
    core = current_session()._core  # noqa: SLF001 - the worker's own session
    limit = deadline(request.deadline_s + _ANSWER_S)
    trace = cause_of(request.rid)
    with tracing.span("plan open", trace, plan=request.key):
        request = msgspec.structs.replace(request, rid=core.link.next_rid())
        state = core.bridge(core.ask, request, PlanState, limit)
    return Ticket(state.key, state.run, trace)


def run_step(
    ticket: Ticket,
    step: Step,
    payload: bytes,
    names: tuple[str, ...],
    *outcomes: StepOutcome,
) -> StepOutcome:
    """Carry a step out, once however often this is called; give how it ended."""
    given = dict(zip(names, outcomes, strict=True))
    with tracing.span(f"step {step.name}", ticket.trace, plan=ticket.key) as note:
        outcome = _run_step(ticket, step, payload, given)
        if outcome.fault is not None:
            note(outcome.fault.error())
        return outcome


def _run_step(
    ticket: Ticket, step: Step, payload: bytes, given: dict[str, StepOutcome]
) -> StepOutcome:
    core = current_session()._core  # noqa: SLF001
    own = node_of(get_worker()).card.node
    begun_s = time.monotonic()
    attempts = 0
    try:
        if _is_nothing(step, given):
            outcome = msgspec.structs.replace(
                steps.handed_on(step, given), node=own, attempts=1
            )
            return _record(core, ticket, step, outcome)
        begin = BeginStep(
            rid=core.link.next_rid(),
            key=ticket.key,
            run=ticket.run,
            step=step.name,
            node=own,
            attachment=payload.decode().partition(" ")[0] if step.instance else "",
        )
        state = core.bridge(core.ask, begin, StepState, deadline(_ANSWER_S))
        if state.outcome is not None:
            recorded: StepOutcome = state.outcome
            return recorded
        limit = Deadline(begun_s + state.left_s, poll=state.poll)
        faults.point("plan.step_begun", step.name)
        calling = _calling(ticket, step, payload, state)
        for attempts in itertools.count(1):
            outcome, again = _attempt(
                core, ticket, step, calling or payload, given, limit, attempts
            )
            if not again or attempts > step.retries or not _wait(attempts, limit):
                break
        faults.point("plan.step_changed", step.name)
        outcome = msgspec.structs.replace(
            outcome,
            node=outcome.node or own,
            seconds=time.monotonic() - begun_s,
            attempts=attempts,
        )
        outcome = _record(core, ticket, step, outcome)
        faults.point("plan.step_recorded", step.name)
        return outcome  # noqa: TRY300 - what a point raises is caught too
    except TensorCastError as error:
        # The catalog refused or was not there: of this run nothing more is recorded.
        _LOG.info("step %r of plan %r: %s", step.name, ticket.key, error)
        return StepOutcome(status=StepStatus.CANCELLED, fault=Fault.of(error))


def report(
    ticket: Ticket,
    raw: bytes,
    payloads: dict[str, bytes],
    names: tuple[str, ...],
    *outcomes: StepOutcome,
) -> PlanState:
    """Undo what has to be undone, in reverse order, and end the run."""
    with tracing.span("plan report", ticket.trace, plan=ticket.key):
        return _report(ticket, raw, payloads, dict(zip(names, outcomes, strict=True)))


def _report(
    ticket: Ticket,
    raw: bytes,
    payloads: dict[str, bytes],
    known: dict[str, StepOutcome],
) -> PlanState:
    core = current_session()._core  # noqa: SLF001
    if any(one.status is not StepStatus.DONE for one in known.values()):
        for step in reversed(PlanSpec.from_json(raw).steps):
            undone = known.get(step.compensates)
            if undone is not None and undone.status is StepStatus.DONE:
                payload = payloads.get(step.name, b"")
                run_step(ticket, step, payload, tuple(known), *known.values())
    faults.point("plan.report", ticket.key)
    end = EndPlan(rid=core.link.next_rid(), key=ticket.key, run=ticket.run)
    state: PlanState = core.bridge(core.ask, end, PlanState, deadline(_ANSWER_S))
    return state


# -------------------------------------------------------------------- parts
def _attempt(
    core: Any,
    ticket: Ticket,
    step: Step,
    how: bytes | Calling,
    given: dict[str, StepOutcome],
    limit: Deadline,
    attempt: int,
) -> tuple[StepOutcome, bool]:
    """Try once; give the outcome, and whether another try could end otherwise."""

    def look(name: str) -> object:
        if name not in given:
            message = (
                f"step {step.name!r} does not wait for {name!r}, whose result it takes"
            )
            raise Mismatch(message)
        return doing.looked_at(given[name])

    try:
        limit.check(f"step {step.name!r} of plan {ticket.key!r} was to begin")
        if step.kind is Kind.SUBMIT:
            _stand_at(step)
            assert isinstance(how, bytes), "plans: a function is packed"
            value = doing.call(how, given, current_session())
            return _valued(step, value), False
        if step.kind is Kind.NOOP:  # it undoes, and nothing before it was done
            return steps.handed_on(step, given), False
        what = (
            steps.call_instance(step, look, how)
            if isinstance(how, Calling)
            else steps.carry_out(step, look, host=core.host)
        )
        effects = Effects(ticket, step.name, attempt)
        return doing.driven(current_session(), what, effects, limit), False
    except TensorCastError as error:
        outcome = StepOutcome(status=StepStatus.FAILED, fault=Fault.of(error))
        return outcome, error.retryable
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        return _raised(error), False


def _calling(
    ticket: Ticket, step: Step, payload: bytes, state: StepState
) -> Calling | None:
    """Give who calls the instance of a step; None where it has none."""
    if not step.instance:
        return None
    key = f"{ticket.key}/{step.name}/{state.since:x}"
    attachment, _, node = payload.decode().partition(" ")
    own = node_of(get_worker()).card
    card = own if own.node == node else None
    return Calling(step, attachment, key, card=card, again=state.again)


def _is_nothing(step: Step, before: dict[str, StepOutcome]) -> bool:
    """Say whether a step only hands on: it needs no leave to begin, one request is enough."""
    return step.kind is Kind.NOOP and all(
        one.status is StepStatus.DONE for one in before.values()
    )


def _stand_at(step: Step) -> None:
    """Refuse to run a function elsewhere than at its node."""
    own = node_of(get_worker()).card
    if step.node and step.node not in {own.node, own.name, own.worker}:
        message = (
            f"node {step.node!r} has no worker, so {step.name!r} cannot run beside its "
            "bytes; resume the plan when it is back, or choose another node"
        )
        raise PeerLost(message)


def _valued(step: Step, value: Any) -> StepOutcome:
    packed: bytes = dumps(value)  # type: ignore[no-untyped-call]
    if len(packed) > MAX_VALUE_BYTES:
        message = (
            f"step {step.name!r} returned {len(packed)} bytes; at most {MAX_VALUE_BYTES} "
            "are kept. Put what is large as an artifact, and return that"
        )
        raise InvalidArgument(message)
    return StepOutcome(status=StepStatus.DONE, kind="pickle", value=packed)


def _raised(error: Exception) -> StepOutcome:
    said = f"{type(error).__name__}: {error}"
    fault = Fault.of(PlanFailed(said, {"exception": type(error).__name__}))
    try:
        packed = dumps(error)  # type: ignore[no-untyped-call]
        loads(packed)  # type: ignore[no-untyped-call]
    except Exception:  # noqa: BLE001 - of one that cannot travel the sentence is left
        packed = b""
    if len(packed) > MAX_VALUE_BYTES:
        packed = b""
    return StepOutcome(
        status=StepStatus.FAILED,
        kind="exception" if packed else "",
        value=packed,
        fault=fault,
    )


def _wait(attempts: int, limit: Deadline) -> bool:
    """Wait a little longer each time; False when there is no time for another try."""
    wait_s = pause_s(attempts)
    if limit.poll or limit.left_s() <= wait_s:
        return False
    time.sleep(wait_s)
    return True


def _record(core: Any, ticket: Ticket, step: Step, outcome: StepOutcome) -> StepOutcome:
    request = EndStep(
        rid=core.link.next_rid(),
        key=ticket.key,
        run=ticket.run,
        step=step.name,
        outcome=outcome,
    )
    recorded: StepOutcome = core.bridge(
        core.ask, request, StepOutcome, deadline(_ANSWER_S)
    )
    return recorded
