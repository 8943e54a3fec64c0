"""Plans: operations put together by the caller, carried out across the cluster.

Rules:

1. Building a plan does nothing but check it. A step's handle is an argument of later steps, so
   a plan has no cycle.
2. A plan is a Dask collection: `client.compute(plan)`, `client.persist(plan)` and
   `dask.visualize(plan)` take it. Its name there follows from its key and digest alone.
3. Under one key there is one run, whoever asks: see `docs/plans.md`.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
from dask import threaded
from dask.base import tokenize
from distributed.protocol.pickle import dumps

from tensorcast_dask.api.plans.builder import StepBuilder
from tensorcast_dask.api.plans.futures import of_step
from tensorcast_dask.api.plans.graph import Compiled, compile_plan
from tensorcast_dask.api.plans.handles import StepHandle
from tensorcast_dask.api.plans.instances import InstanceSteps
from tensorcast_dask.api.plans.places import places_of
from tensorcast_dask.api.plans.pricing import price
from tensorcast_dask.api.plans.run import (
    PlanResult,
    PlanRun,
    came_to,
    open_run,
    opening,
)
from tensorcast_dask.exceptions import (
    InvalidArgument,
    Unimplemented,
    UnsupportedPlatform,
    WrongPeer,
)
from tensorcast_dask.notebook.cards import plan_card
from tensorcast_dask.notebook.drawing import Picture, as_svg
from tensorcast_dask.tensors import values
from tensorcast_dask.tensors.contexts import Context
from tensorcast_dask.tensors.messages import RunStatus
from tensorcast_dask.tensors.plans import (
    PlanSpec,
    Step,
    StepRef,
    check_step,
    report_key,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dask.highlevelgraph import HighLevelGraph
    from distributed import Future

    from tensorcast_dask.api.instance import InstanceHandle
    from tensorcast_dask.api.plans.pricing import DryRun
    from tensorcast_dask.api.worker import Worker
    from tensorcast_dask.tensors.messages import PlanState

__all__ = ["Plan", "context"]


def context(
    id: str = "plan",  # noqa: A002 - the paper's word
    ddl: float | None = None,
    key: str | None = None,
    *,
    priority: int = 0,
    tags: Iterable[str] = (),
    labels: Mapping[str, str] | None = None,
) -> Context:
    """Say who asks, by when, and under which key.

    Parameters
    ----------
    id : str
        Who, for people.
    ddl : float, optional
        Seconds for the whole plan, from its submission: None the service's default
        (`deadline.default`), 0 one look at each step. No retry adds to it.
    key : str, optional
        Idempotency key: one key is one run, whoever asks and how often.
    priority : int
        Of the steps among other Dask tasks; higher runs sooner.
    tags : iterable of str
        For whoever reads the plan later.
    labels : mapping of str to str, optional
        For whoever reads the plan later.

    Raises
    ------
    InvalidArgument, InvalidName
        When one of them is not legal: negative, NaN, of another type.
    """
    return Context(
        id=id,
        ddl=ddl,
        key="" if key is None else key,
        priority=priority,
        tags=tuple(tags),
        labels=dict(labels or {}),
    )


class Plan:
    """A graph of operations in the making. Made by `Session.plan`.

    Attributes
    ----------
    context : Context
        Who asks, by when, under which key.
    key : str
        The idempotency key: the context's, else one of its own.
    """

    def __init__(self, session: Any, context: Context | None = None) -> None:
        given: object = context
        if given is not None and not isinstance(given, Context):
            message = "plan takes what context(...) gave, or nothing"
            raise InvalidArgument(message)
        self._session = session
        self._core = session._core  # noqa: SLF001 - the plan's own session
        self.context = context or Context()
        self.key = self.context.key or f"plan-{secrets.token_hex(8)}"
        self._steps: dict[str, Step] = {}
        self._payloads: dict[str, bytes] = {}
        self._told: list[tuple[float, str]] = []
        #: Of the last run: its number, and the Futures of steps that were asked for.
        self._run = 0
        self._values: dict[str, Future[Any]] = {}
        #: Of the nodes whose handles were given: the names that people know them by.
        self._names: dict[str, str] = {}

    # ------------------------------------------------------------ building
    def on_worker(self, worker: Worker | str) -> StepBuilder:
        """Add steps at a node: its handle, name, Dask address or identity."""
        node = worker if isinstance(worker, str) else worker.node
        if not isinstance(worker, str):
            self._names[node] = worker.name
        if not node:
            message = f"on_worker takes a worker's handle or name, not {worker!r}"
            raise InvalidArgument(message)
        return StepBuilder(self, node=node)

    def on_instance(self, instance: InstanceHandle | str) -> InstanceSteps:
        """Add steps that an instance carries out: its handle or name."""
        return InstanceSteps(self, instance)

    def on_any(self, roles: Iterable[str] = ()) -> StepBuilder:
        """Add steps at whichever node: by policy, or one that has all of these roles."""
        return StepBuilder(self, roles=tuple(roles))

    def compensate(self, step: StepHandle) -> StepBuilder:
        """Add steps that undo `step`, at its node, when the plan fails after it was done.

        They run in the reverse order of their making, after everything else.
        """
        made = self._steps.get(step.name)
        if made is None:
            message = f"{step.name!r} is no step of this plan"
            raise InvalidArgument(message)
        return StepBuilder(self, node=made.node, roles=made.roles, undoes=step.name)

    def add(self, step: Step, call: tuple[Any, ...] | None = None) -> StepHandle:
        """Add a step that is described already; what `StepBuilder` does.

        Parameters
        ----------
        step : Step
            The step; one without a name is given one.
        call : tuple, optional
            Of a function: it, its arguments and its keyword arguments.
        """
        if not step.name:
            called = str(step.options.get("function", step.kind))
            step = msgspec.structs.replace(step, name=self._free_name(called))
        payload = b""
        if call is not None:
            payload = dumps(call)  # type: ignore[no-untyped-call]
            token = self._token(step.name, call, payload)
            step = msgspec.structs.replace(step, token=token)
        check_step(step, self._steps)
        if step.args:
            _check_args(step)
        self._steps[step.name] = step
        if payload:
            self._payloads[step.name] = payload
        return StepHandle(self, step.name)

    def _free_name(self, kind: str) -> str:
        at = len(self._steps)
        while f"{kind}-{at}" in self._steps:
            at += 1
        return f"{kind}-{at}"

    def _token(self, name: str, call: tuple[Any, ...], payload: bytes) -> str:
        try:
            return str(tokenize(*call, ensure_deterministic=True))
        except RuntimeError as error:
            if not self.context.key:
                return str(tokenize(payload))
            message = (
                f"step {name!r} has no token that is the same each time ({error}); a plan "
                "with a key needs one: give plain values, or define __dask_tokenize__"
            )
            raise InvalidArgument(message) from error

    # ------------------------------------------------------------ as a value
    @property
    def spec(self) -> PlanSpec:
        """The plan as a value."""
        return PlanSpec(context=self.context, steps=tuple(self._steps.values()))

    def to_spec(self) -> str:
        """Give the plan as JSON text, without the functions of its `submit` steps."""
        return self.spec.to_json().decode()

    @classmethod
    def from_spec(cls, session: Any, text: str | bytes) -> Self:
        """Make a plan of what `to_spec` gave: its steps, and who asks, by when, under which key.

        Raises
        ------
        InvalidArgument
            As `load_spec`.
        """
        return cls(session, PlanSpec.from_json(text).context).load_spec(text)

    def load_spec(self, text: str | bytes) -> Self:
        """Add the steps of a plan that was written as JSON.

        Raises
        ------
        InvalidArgument
            When it is no plan, or has steps that are functions: those are not in the JSON.
        """
        for step in PlanSpec.from_json(text).steps:
            if step.token:
                message = (
                    f"step {step.name!r} is a function, which JSON does not hold; submit it "
                    "here instead"
                )
                raise InvalidArgument(message)
            self.add(step)
        return self

    # ------------------------------------------------------------ running
    def run(
        self,
        concurrency: int | None = None,
        *,
        executor: str = "graph",
        raise_on_error: bool = True,
        progress: bool = False,
    ) -> Any:
        """Run it and wait for its end.

        Parameters
        ----------
        concurrency : int, optional
            Most steps under way at once.
        executor : str
            `graph`: Dask tasks. `rpc`: the store of a gateway node drives the steps, in a
            millisecond; it runs no function of yours.
        raise_on_error : bool
            Whether a failure is raised; else it stands in the result.
        progress : bool
            Whether to show how many steps have ended, in a terminal or a notebook.

        Returns
        -------
        PlanResult

        Raises
        ------
        PlanFailed, DeadlineExceeded, Mismatch
        Unimplemented
            When a step needs the other executor; nothing has begun.
        """

        async def work() -> PlanResult:
            state = await self._open(concurrency, executor, wait=not progress)
            if state.status is not RunStatus.RUNNING and not progress:
                return came_to(state, self._session, raises=raise_on_error)
            run = PlanRun(self._session, self.key, state.run)
            if progress:
                await run._show(len(self))  # noqa: SLF001 - one room
            return await run._ending(None, raise_on_error)  # noqa: SLF001

        return self._core.bridge(work)

    def submit(self, concurrency: int | None = None, *, executor: str = "graph") -> Any:
        """Begin it; give a `PlanRun`, which behaves as a Dask Future.

        The run goes on when this program goes away, and is found again by its key.
        """

        async def work() -> PlanRun:
            return (await self._submit(concurrency, executor))._offer()  # noqa: SLF001

        return self._core.bridge(work)

    async def _submit(self, concurrency: int | None, executor: str) -> PlanRun:
        state = await self._open(concurrency, executor, wait=False)
        return PlanRun(self._session, self.key, state.run)

    async def _open(
        self, concurrency: int | None, executor: str, *, wait: bool
    ) -> PlanState:
        told: list[tuple[float, str]] = []
        state = await open_run(
            self._core,
            self.spec,
            self._payloads,
            self.key,
            concurrency=concurrency,
            executor=executor,
            wait=wait,
            tell=lambda line: told.append((time.monotonic(), line)),
        )
        self._told = told or self._told
        if self._run != state.run:
            self._run, self._values = state.run, {}
        return state

    def _value_of(self, step: str) -> Future[Any]:
        """Give the Dask Future of what a step comes to, in a plan that was submitted.

        Raises
        ------
        InvalidArgument
            When it was not.
        """
        if not self._run:
            message = f"step {step!r} is of a plan that does not run yet; call plan.submit() first"
            raise InvalidArgument(message)
        if step not in self._values:
            client = self._core.client
            self._values[step] = of_step(client, self.key, self._run, step)
        return self._values[step]

    def dry_run(self) -> Any:
        """Price it without running it; a `DryRun`.

        Bytes by link, seconds by what was measured there, what would have to make room, and which
        steps would be refused as things stand. What a function brings forth cannot be known.
        """

        async def work() -> DryRun:
            return await price(self._core, self.spec, self._core.deadline(None))

        return self._core.bridge(work)

    def story(self) -> Any:
        """Give the stations of the last run: lines from `submit` to `report`, in order."""
        return self._core.bridge(self._story)

    async def _story(self) -> list[str]:
        limit = self._core.deadline(None)
        lines = await self._core.told_of(f"plan:{self.key}", limit)
        now_s = time.monotonic()
        own = [f"{now_s - at_s:8.2f} s ago  {line}" for at_s, line in self._told]
        at = next((n for n, line in enumerate(lines) if "  admit:" in line), -1) + 1
        return [*lines[:at], *own, *lines[at:]]

    def visualize(self, filename: str | Path | None = None) -> Any:
        """Give it as text, which a notebook shows as a picture; with a file name draw it there.

        A name that ends in `.svg` needs nothing, and gives the picture's text too. Others are drawn by
        Dask.

        Raises
        ------
        UnsupportedPlatform
            When Dask is to draw, and graphviz is not there.
        """
        if filename is None or str(filename).endswith(".svg"):
            text, svg = self._drawn()
            if filename is None:
                return Picture(text, svg)
            Path(filename).write_text(svg, encoding="utf-8")
            return Picture(svg, svg)
        from dask.base import visualize

        try:
            return visualize(self, filename=str(filename))
        except (ImportError, RuntimeError) as error:
            message = (
                f"only .svg is drawn without graphviz ({error}); install the Python package "
                "graphviz and the program dot, or take plan.svg"
            )
            raise UnsupportedPlatform(message) from error

    def _drawn(self) -> tuple[str, str]:
        """Give it as text, and as a picture."""
        steps = list(self._steps.values())
        says = {step.name: _doing(step, self._names) for step in steps}
        text = "\n".join(_line(step, self._names) for step in steps)
        return text, as_svg(steps, says)

    # ------------------------------------------------------------ as a Dask collection
    def _compiled(self) -> Compiled:
        spec = self.spec
        name = spec.digest()[:12]
        request = opening(self._core, spec, self._payloads, self.key)
        request = msgspec.structs.replace(request, report=report_key(self.key, name))
        if self._core.asynchronous:
            message = (
                "on an event loop a plan cannot ask where its nodes are while Dask waits for "
                "the graph; await plan.submit() or plan.run()"
            )
            raise Unimplemented(message)
        places, roles = self._core.call(lambda: places_of(self._core, spec))
        graph, key = compile_plan(
            spec,
            self._payloads,
            places,
            ticket=request,
            name=name,
            role_workers=roles,
        )
        return Compiled(graph, key)

    def __dask_graph__(self) -> HighLevelGraph:
        return self._compiled().__dask_graph__()

    def __dask_keys__(self) -> list[str]:
        return [report_key(self.key, self.spec.digest()[:12])]

    def __dask_tokenize__(self) -> tuple[str, str, str]:
        return ("tensorcast-plan", self.key, self.spec.digest())

    def __dask_postcompute__(self) -> tuple[Any, tuple[()]]:
        return _result_of, ()

    def __dask_postpersist__(self) -> tuple[Any, tuple[str]]:
        return Compiled.kept, (self.__dask_keys__()[0],)

    __dask_optimize__ = None
    __dask_scheduler__ = staticmethod(threaded.get)

    # ------------------------------------------------------------ small parts
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        return f"<Plan {self.key!r} {len(self)} steps>"

    def _repr_html_(self) -> str:
        return plan_card(self.key, self.context, *self._drawn(), steps=len(self))


def _check_args(step: Step) -> None:
    """Refuse arguments that take the result of a step which is not waited for."""
    try:
        references = list(values.references(step.args))
    except WrongPeer as error:
        message = f"step {step.name!r} has args that are no values: {error.message}"
        raise InvalidArgument(message) from error
    for reference in references:
        if isinstance(reference, StepRef) and reference.step not in step.uses:
            message = f"step {step.name!r} takes {reference.step!r}, which is not among its uses"
            raise InvalidArgument(message)


def _result_of(results: Any) -> Any:
    return PlanResult(results[0], None)


def _doing(step: Step, names: Mapping[str, str]) -> str:
    node = names.get(step.node) or step.node
    where = step.instance or node or ", ".join(step.roles) or "any"
    return f"{step.options.get('function', step.kind)} on {where}"


def _line(step: Step, names: Mapping[str, str]) -> str:
    needs = ", ".join(step.needs)
    undoes = f" undoes {step.compensates}" if step.compensates else ""
    text = f"{step.name}: {_doing(step, names)}{undoes}"
    return text + (f" after {needs}" if needs and not undoes else "")
