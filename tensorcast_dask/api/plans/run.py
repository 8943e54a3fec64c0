"""A run of a plan, and what came of it.

Rules:

1. The truth about a run is the catalog's. A handle asks for it by key, whoever began the run,
   and may be thrown away: the run goes on.
2. `result()` raises what a failed run failed of; `outcome()` never raises it.
3. For Dask a handle is the Future of a task that waits for the end (`futures`). What the handle's
   own methods say is the catalog's word, and needs no worker.
4. The catalog is asked for as long as somebody waits for the answer, and no longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
from distributed import Future, fire_and_forget

from tensorcast_dask.api.connection.deadlines import MAX_S, deadline
from tensorcast_dask.api.connection.progress import meter
from tensorcast_dask.api.current import current_session
from tensorcast_dask.api.plans import futures
from tensorcast_dask.api.plans.doing import value_of
from tensorcast_dask.api.plans.graph import Compiled, compile_plan
from tensorcast_dask.api.plans.places import places_of
from tensorcast_dask.dataplane import tracing
from tensorcast_dask.exceptions import (
    CatalogUnavailable,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    TensorCastError,
    UnsupportedPlatform,
)
from tensorcast_dask.notebook.cards import result_card
from tensorcast_dask.tensors.contexts import check_ddl
from tensorcast_dask.tensors.messages import (
    EndPlan,
    OpenPlan,
    PlanAsked,
    PlanState,
    ResumePlan,
    RunStatus,
    StepStatus,
)
from tensorcast_dask.tensors.plans import PlanSpec
from tensorcast_dask.tensors.wants import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.api.connection.deadlines import Deadline
    from tensorcast_dask.tensors.messages import StepOutcome
    from tensorcast_dask.tensors.signals import Signal

__all__ = [
    "PlanResult",
    "PlanRun",
    "StepResult",
    "came_to",
    "carry_on",
    "find",
    "open_run",
    "opening",
]

#: How long one question about a run waits at the catalog.
_LOOK_S: Final = 20.0
#: How often what is shown is looked at.
_SHOW_S: Final = 0.5
#: How often a task looks whether it is wanted still.
_WANTED_S: Final = 1.0


class StepResult:
    """What one step came to.

    Attributes
    ----------
    name : str
        The step.
    status : str
        `done`, `failed`, `skipped` or `cancelled`.
    node : str
        Identity of the node where it ran.
    bytes : int
        Bytes that it moved.
    seconds : float
        From its first attempt to its end.
    attempts : int
        How often it was tried; 0 when it never ran.
    """

    def __init__(self, name: str, outcome: StepOutcome, session: Any) -> None:
        self.name = name
        self.status = str(outcome.status)
        self.node = outcome.node
        self.bytes = outcome.moved_bytes
        self.seconds = outcome.seconds
        self.attempts = outcome.attempts
        self._outcome = outcome
        self._session = session

    @property
    def value(self) -> Any:
        """An `Artifact`, a receipt, or what the function returned; None without one."""
        if self._outcome.status is not StepStatus.DONE:
            return None
        return value_of(self._outcome, self._session)

    @property
    def error(self) -> Exception | None:
        """Why it is not done: the function's own exception where it raised one."""
        if self._outcome.kind == "exception":
            from distributed.protocol.pickle import loads

            raised: Exception = loads(self._outcome.value)  # type: ignore[no-untyped-call]
            return raised
        return self.fault

    @property
    def fault(self) -> TensorCastError | None:
        """Why it is not done, as an error of this package: nothing is unpickled."""
        fault = self._outcome.fault
        return None if fault is None else fault.error()

    @property
    def pickled(self) -> bool:
        """Whether `value` or `error` unpickles what a function gave."""
        return self._outcome.kind in {"pickle", "exception"}

    def __repr__(self) -> str:
        said = "" if self.error is None else f": {self.error}"
        return f"<StepResult {self.name!r} {self.status}{said}>"


class PlanResult:
    """What a run came to, step by step: indexed by a step's handle or name.

    Attributes
    ----------
    key : str
        The plan's key.
    status : str
        `done`, `failed`, `cancelled`, `interrupted`, or `running`.
    message : str
        Why it is not done; "" when it is.
    """

    def __init__(self, state: PlanState, session: Any) -> None:
        self.key = state.key
        self.status = str(state.status)
        self.message = state.message
        self._state = state
        self._session = session
        self._read = time.time()  # noqa: TID251 - for people

    @property
    def error(self) -> TensorCastError | None:
        """What the run failed of."""
        fault = self._state.fault
        return None if fault is None else fault.error()

    @property
    def signals(self) -> list[Signal]:
        """What changed while it ran: nodes, links and instances as they were at its end, events.

        The run's own changes and everybody else's, at most 256, the earliest first; none of a
        run that ended before the scheduler was restarted.
        """
        return [one.read_at(self._read) for one in self._state.signals]

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanResult, (self._state, None)

    def __getitem__(self, step: Any) -> StepResult:
        name = step if isinstance(step, str) else step.name
        outcome = self._state.outcomes.get(name)
        if outcome is None:
            message = f"step {name!r} of plan {self.key!r} has not ended"
            raise NotFound(message)
        return StepResult(name, outcome, self._session)

    def __iter__(self) -> Iterator[str]:
        return iter(self._state.outcomes)

    def __len__(self) -> int:
        return len(self._state.outcomes)

    def __contains__(self, step: object) -> bool:
        return getattr(step, "name", step) in self._state.outcomes

    def __repr__(self) -> str:
        return f"<PlanResult {self.key!r} {self.status}, {len(self)} steps ended>"

    def _repr_html_(self) -> str:
        state = self._state
        return result_card(self.key, self.status, self.message, state.outcomes)


class PlanRun(Future):  # type: ignore[type-arg]
    """Handle of a run: a Dask Future, and found again by its plan's key.

    `as_completed`, `wait`, `client.gather` and tasks take it as any Future; its value is the
    `PlanResult`.

    Attributes
    ----------
    plan : str
        The plan's key.
    key : str
        What Dask calls the run; `Session.plan_run` takes it too.
    """

    def __init__(self, session: Any, plan: str, run: int) -> None:
        self._session = session
        self._core: Core = session._core  # noqa: SLF001 - the handle's own session
        self.plan = plan
        self.run = run
        self._end: asyncio.Task[PlanState] | None = None
        self._waiters = 0
        super().__init__(futures.run_key(plan, run))

    def _offer(self) -> PlanRun:
        """Let Dask know of it, where this program has a client."""
        client = self._core.client
        if client is not None:
            made = futures.of_run(client, self.plan, self.run)
            self.bind_client(client)  # type: ignore[no-untyped-call]
            del made  # not before another one holds it
        return self

    # ------------------------------------------------------------ as a Future
    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end; give the `PlanResult`, or raise what the run failed of.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait here; None for as long as the run takes.

        Raises
        ------
        PlanFailed, DeadlineExceeded
            The second also when it still runs after `timeout`.
        """
        return self._core.bridge(self._ending, timeout, True)  # noqa: FBT003

    def outcome(self, timeout: float | None = None) -> Any:
        """Wait for the end; give the `PlanResult`, whatever came of it."""
        return self._core.bridge(self._ending, timeout, False)  # noqa: FBT003

    def exception(self, timeout: float | None = None) -> Any:  # type: ignore[override]
        """Wait for the end; give what the run failed of, or None."""
        return self._core.bridge(self._failure, timeout)

    def done(self) -> Any:
        """Whether it is over, in whatever way."""
        return self._core.bridge(self._done)

    def cancel(self) -> Any:  # type: ignore[override]
        """Begin no further step; what is done is left alone, or undone where steps say how."""
        return self._core.bridge(self._cancel)

    def add_done_callback(self, function: Callable[[PlanRun], Any]) -> Any:
        """Call `function` with this handle once the run is over, in another thread."""
        return self._core.bridge(self._call_back, function)

    def resume(self, ddl: float | None = None) -> Any:
        """Go on with a run that failed, was cancelled or was interrupted.

        Steps that are done stay done, but for those that were undone. Gives the handle of what
        goes on.

        Parameters
        ----------
        ddl : float, optional
            Seconds from now for what is left; as in `context`.
        """
        seconds = check_ddl(ddl)
        return self._core.bridge(self._resume, seconds)

    def state(self) -> Any:
        """How it stands now: a `PlanResult` of the steps that have ended."""
        return self._core.bridge(self._now)

    def explain(self) -> Any:
        """Tell what the catalog knows of the run, oldest first."""
        limit = deadline(60.0)
        return self._core.bridge(self._core.told_of, f"plan:{self.plan}", limit)

    def __await__(self) -> Generator[Any, None, PlanResult]:
        return self._ending(None, raises=True).__await__()

    def __reduce__(self) -> tuple[Any, ...]:
        return _here, (self.plan, self.run)

    def __repr__(self) -> str:
        return f"<PlanRun {self.plan!r}>"

    def _repr_html_(self) -> str:
        core = self._core
        state = core.glimpse(lambda limit: _ask(core, self.plan, limit=limit))
        if state is None:
            return result_card(self.plan, "not known", "", {})
        return PlanResult(state, self._session)._repr_html_()

    # ------------------------------------------------------------ the work
    def _watch(self) -> asyncio.Task[PlanState]:
        """Have the end waited for by one more."""
        if self._end is None:
            self._end = asyncio.ensure_future(self._ended())
            self._end.add_done_callback(lambda end: end.cancelled() or end.exception())
        self._waiters += 1
        return self._end

    @contextlib.contextmanager
    def _watched(self) -> Iterator[asyncio.Task[PlanState]]:
        """Have the end waited for in a block (rule 4)."""
        end = self._watch()
        try:
            yield end
        finally:
            self._waiters -= 1
            if not self._waiters and not end.done():
                self._end = None
                end.cancel()

    async def _ended(self) -> PlanState:
        while True:
            state = await self._ask(wait_s=_LOOK_S)
            if state.status is not RunStatus.RUNNING:
                return state

    async def _ask(self, *, wait_s: float = 0.0, step: str = "") -> PlanState:
        return await _ask(self._core, self.plan, wait_s=wait_s, step=step)

    async def _value(self, step: str, wanted: Callable[[], bool]) -> Any:
        """Wait for the end of a step; give its value, or raise what it failed of.

        Given up, with None, when nobody wants it any more.
        """
        state = await self._ask(wait_s=_LOOK_S, step=step)
        while state.status is RunStatus.RUNNING and step not in state.outcomes:
            if not wanted():
                return None
            state = await self._ask(wait_s=_LOOK_S, step=step)
        ended = PlanResult(state, self._session)
        error = ended[step].error if step in ended else ended.error
        if error is not None:
            raise error
        return ended[step].value

    async def _ending(
        self,
        timeout: float | None,
        raises: bool,  # noqa: FBT001
    ) -> PlanResult:
        limit = deadline(math.inf if timeout is None else timeout)
        with self._watched() as end:
            left_s = None if timeout is None else limit.left_s()
            if limit.poll:
                left_s = 2.0 if await self._done() else 0.0
            await asyncio.wait({end}, timeout=left_s)
            if not end.done():
                message = f"plan {self.plan!r} still runs; wait longer or cancel it"
                raise DeadlineExceeded(message)
            return came_to(end.result(), self._session, raises=raises)

    async def _while(self, wanted: Callable[[], bool]) -> PlanResult | None:
        """Wait for the end, as `result`, for as long as somebody wants it; else None."""
        with self._watched() as end:
            while not end.done() and wanted():
                await asyncio.wait({end}, timeout=_WANTED_S)
            if not end.done():
                return None
            return came_to(end.result(), self._session, raises=True)

    async def _show(self, steps: int) -> None:
        """Show how many steps have ended, until the run is over."""
        shown = await self._core.in_thread(meter, f"plan {self.plan}", of="steps")
        if shown is None:
            return
        with self._watched() as end:
            while not end.done():
                shown.show(len(await self._now()), steps)
                await asyncio.wait({end}, timeout=_SHOW_S)
            with contextlib.suppress(TensorCastError):  # its waiter is told
                state = end.result()
                shown.show(len(state.outcomes), steps)
                shown.close(str(state.status))

    async def _failure(self, timeout: float | None) -> TensorCastError | None:
        return (await self._ending(timeout, raises=False)).error

    async def _done(self) -> bool:
        return (await self._ask()).status is not RunStatus.RUNNING

    async def _now(self) -> PlanResult:
        return PlanResult(await self._ask(), self._session)

    async def _cancel(self) -> None:
        request = EndPlan(
            rid=self._core.link.next_rid(), key=self.plan, run=0, cancel=True
        )
        await self._core.ask(request, PlanState, deadline(60.0))

    async def _call_back(self, function: Callable[[PlanRun], Any]) -> None:
        def over(_: asyncio.Task[PlanState]) -> None:
            asyncio.ensure_future(self._core.in_thread(function, self))  # noqa: RUF006

        self._watch().add_done_callback(over)

    async def _resume(self, ddl: float | None) -> PlanRun:
        seen = await self._ask()
        left_s = self._core.deadline_default_s if ddl is None else min(ddl, MAX_S)
        request = ResumePlan(
            rid=self._core.link.next_rid(),
            key=self.plan,
            run=seen.run,
            deadline_s=left_s,
            poll=ddl == 0,
        )
        patience = deadline(left_s + 60.0)
        state = await self._core.ask(request, PlanState, patience)
        if state.started:
            spec = PlanSpec.from_json(state.spec)
            await carry_on(self._core, spec, state.payloads, state)
        run = PlanRun(self._session, self.plan, state.run)
        return run._offer()


def came_to(state: PlanState, session: Any, *, raises: bool) -> PlanResult:
    """Give what a run came to, or raise what it failed of."""
    result = PlanResult(state, session)
    if raises and result.error is not None:
        raise result.error
    return result


def _here(plan: str, run: int) -> PlanRun:
    """Make a handle that was sent here."""
    return PlanRun(current_session(), plan, run)


async def _ask(
    core: Core,
    plan: str,
    *,
    wait_s: float = 0.0,
    step: str = "",
    limit: Deadline | None = None,
) -> PlanState:
    request = PlanAsked(rid=core.link.next_rid(), key=plan, wait_s=wait_s, step=step)
    return await core.ask(request, PlanState, limit or deadline(wait_s + 60.0))


async def find(session: Any, key: str, *, offer: bool = True) -> PlanRun:
    """Give the run of a plan's key, or of what Dask calls the run; `offer` it to Dask.

    Raises
    ------
    NotFound
        When there is none.
    """
    core = session._core  # noqa: SLF001 - the handle's own session
    try:
        state = await _ask(core, key)
    except NotFound:
        if not (inner := futures.plan_in(key)):
            raise
        state = await _ask(core, inner)
    run = PlanRun(session, state.key, state.run)
    return run._offer() if offer else run  # noqa: SLF001 - of this module


async def open_run(
    core: Core,
    spec: PlanSpec,
    payloads: Mapping[str, bytes],
    key: str,
    *,
    concurrency: int | None,
    executor: str,
    wait: bool,
    tell: Callable[[str], None],
) -> PlanState:
    """Open the run under its key, and carry it out where this call made it.

    With `wait` a run that a store drives is waited for, as long as one question may.
    """
    if executor not in {"graph", "rpc"}:
        message = f"executor must be 'graph' or 'rpc', not {executor!r}"
        raise InvalidArgument(message)
    rpc = executor == "rpc"
    if core.client is None and not rpc:
        message = (
            "a plan is run from a program that has a Dask client, not from a task; "
            "executor='rpc' needs none"
        )
        raise UnsupportedPlatform(message)
    number: object = concurrency
    if number is not None and not (type(number) is int and number > 0):
        message = f"concurrency must be a positive whole number, not {concurrency!r}"
        raise InvalidArgument(message)
    request = opening(core, spec, payloads, key)
    wait_s = _LOOK_S if rpc and wait else 0.0
    if rpc:
        request = msgspec.structs.replace(
            request,
            payloads={},
            rpc=True,
            concurrency=concurrency or 0,
            wait_s=wait_s,
            own_key=not spec.context.key,
        )
    # It may have to wait for another plan: until its own deadline, then it is told.
    patience = deadline(request.deadline_s + wait_s + 60.0)
    state = await core.ask(request, PlanState, patience)
    if state.started:
        await carry_on(core, spec, payloads, state, concurrency=concurrency, tell=tell)
    return state


def opening(
    core: Core, spec: PlanSpec, payloads: Mapping[str, bytes], key: str
) -> OpenPlan:
    """Make the message that opens a run."""
    ddl = spec.context.ddl
    return OpenPlan(
        rid=core.link.next_rid(),
        key=key,
        digest=spec.digest(),
        spec=spec.to_json(),
        payloads=dict(payloads),
        deadline_s=core.deadline_default_s if ddl is None else min(ddl, MAX_S),
        poll=ddl == 0,
    )


async def carry_on(
    core: Core,
    spec: PlanSpec,
    payloads: Mapping[str, bytes],
    state: PlanState,
    *,
    concurrency: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Hand the graph of a run to Dask, which keeps it though this program may go."""
    places, roles = await places_of(core, spec)
    tell(f"resolve: {len(places)} nodes")
    graph, key = compile_plan(
        spec,
        payloads,
        places,
        ticket=Ticket(state.key, state.run, tracing.here()),
        name=f"{state.run:x}",
        done=state.outcomes,
        concurrency=concurrency,
        role_workers=roles,
    )
    tell(f"compile: {len(graph.layers)} tasks")
    await _hand_over(core, state, Compiled(graph, key))
    tell(f"dispatch: {key}")


async def _hand_over(core: Core, state: PlanState, compiled: Compiled) -> None:
    """Give the graph to Dask's scheduler, and be told that it has it."""
    future = core.client.compute(compiled, traverse=False)
    fire_and_forget(future)  # type: ignore[no-untyped-call]
    has_it = await core.client.scheduler.tensorcast_handed_over(
        key=state.key, run=state.run
    )
    if not has_it:
        message = (
            f"Dask's scheduler did not take the tasks of plan {state.key!r}; is it busy? "
            "resume the plan by its key"
        )
        raise CatalogUnavailable(message)
