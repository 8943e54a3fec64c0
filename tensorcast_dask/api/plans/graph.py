"""A plan as a Dask graph: one layer and one task a step, and one that ends the run.

Rules:

1. A step's task is pinned to its node's worker and stolen by nobody. The annotation
   `tensorcast-node` says which node is meant, so that the scheduler plugin finds the task
   another worker when that one goes.
2. The names of tasks begin with the step's, so that Dask's dashboard shows what they are, and
   end with the run's, so that no two runs meet.
3. `concurrency` adds edges: of n steps in a row the one n places before must be over. They bind
   the order only; a failure does not pass along them.
4. Steps that undo have no task: the last task runs them, when it has to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dask import threaded
from dask._task_spec import Task, TaskRef
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from tensorcast_dask.api.plans.tasks import open_run, report, run_step
from tensorcast_dask.tensors.messages import OpenPlan, StepOutcome
from tensorcast_dask.tensors.plans import report_key, task_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tensorcast_dask.tensors.plans import PlanSpec, Step
    from tensorcast_dask.tensors.wants import Ticket

__all__ = ["NODE", "Compiled", "Place", "Places", "compile_plan", "place_of"]

#: Annotation that names the node of a task; the scheduler plugin reads it.
NODE: Final = "tensorcast-node"


class Place(NamedTuple):
    """Where a step goes."""

    #: Identity of the node.
    node: str
    #: Dask address of its worker; "" where it has none.
    worker: str = ""
    #: Of an instance: the life of it that is there.
    attachment: str = ""


#: By what steps call them.
Places = dict[str, Place]


def place_of(step: Step) -> str:
    """Give what a step calls its place; "" where it goes anywhere."""
    return f"instance {step.instance}" if step.instance else step.node


class Compiled:
    """The graph of one run, as a Dask collection of the task that ends it.

    Parameters
    ----------
    graph : HighLevelGraph
        The graph.
    key : str
        Of that task.
    """

    def __init__(self, graph: HighLevelGraph, key: str) -> None:
        self._graph = graph
        self._key = key

    def __dask_graph__(self) -> HighLevelGraph:
        return self._graph

    def __dask_keys__(self) -> list[str]:
        return [self._key]

    def __dask_tokenize__(self) -> tuple[str, str]:
        return ("tensorcast-run", self._key)

    def __dask_postcompute__(self) -> tuple[Any, tuple[()]]:
        return _only, ()

    def __dask_postpersist__(self) -> tuple[Any, tuple[str]]:
        return Compiled.kept, (self._key,)

    @staticmethod
    def kept(graph: Any, key: str, **_: Any) -> Compiled:
        """Make it of what Dask keeps of it."""
        if not isinstance(graph, HighLevelGraph):
            graph = HighLevelGraph.from_collections("kept", graph)
        return Compiled(graph, key)

    __dask_optimize__ = None
    __dask_scheduler__ = staticmethod(threaded.get)


def _only(results: Any) -> Any:
    return results[0] if isinstance(results, list | tuple) else results


def compile_plan(
    spec: PlanSpec,
    payloads: Mapping[str, bytes],
    places: Places,
    *,
    ticket: Ticket | OpenPlan,
    name: str,
    done: Mapping[str, StepOutcome] | None = None,
    concurrency: int | None = None,
    role_workers: Mapping[tuple[str, ...], list[str]] | None = None,
) -> tuple[HighLevelGraph, str]:
    """Make the graph.

    Parameters
    ----------
    spec : PlanSpec
        The plan.
    payloads : mapping
        Functions and arguments by step.
    places : dict
        Where each place is now.
    ticket : Ticket or OpenPlan
        The run, or how a task of the graph is to open it.
    name : str
        Of the run; ends the names of tasks.
    done : mapping, optional
        Steps that have no task: how they ended.
    concurrency : int, optional
        Most steps under way at once.
    role_workers : mapping, optional
        Workers whose nodes have some roles.

    Returns
    -------
    graph : HighLevelGraph
    key : str
        Of the task that ends the run.
    """
    made = _Graph(spec, name=name, key=ticket.key)
    opened: Any = ticket
    if isinstance(ticket, OpenPlan):
        key = task_key("open", made.key, name)
        made.add("open", Task(key, open_run, ticket), set(), {})
        opened = TaskRef(key)
    finished = dict(done or {})
    for step in spec.ordinary:
        if step.name not in finished:
            before = made.before(step, concurrency)
            spots = _spot(step, places, role_workers or {}, spec.context.priority)
            payload = _payload(step, payloads, places)
            made.step(step, opened, payload, before, finished, spots)
    undoing = {
        one.name: payload
        for one in spec.steps
        if one.compensates and (payload := _payload(one, payloads, places))
    }
    return made.finish(opened, undoing, finished)


def _payload(step: Step, payloads: Mapping[str, bytes], places: Places) -> bytes:
    """Give what goes with a step: a function packed, or the life of its instance and its node."""
    if step.instance:
        place = places[place_of(step)]
        return f"{place.attachment} {place.node}".encode()
    return payloads.get(step.name, b"")


class _Graph:
    """Layers in the making."""

    def __init__(self, spec: PlanSpec, *, name: str, key: str) -> None:
        self.key = key
        self._spec = spec
        self._name = name
        self._layers: dict[str, MaterializedLayer] = {}
        self._needs: dict[str, set[str]] = {}
        self._order: list[str] = []

    def add(
        self, label: str, task: Task, needs: set[str], annotations: dict[str, Any]
    ) -> None:
        """Add a layer of one task."""
        layer = MaterializedLayer({task.key: task}, annotations=annotations or None)
        self._layers[label] = layer
        self._needs[label] = needs

    def before(self, step: Step, concurrency: int | None) -> dict[str, None]:
        """Give the steps whose tasks must be over, those for the order's sake included."""
        names = dict.fromkeys(step.needs)
        if concurrency is not None and len(self._order) >= concurrency:
            names[self._order[-concurrency]] = None
        self._order.append(step.name)
        return names

    def step(
        self,
        step: Step,
        ticket: Any,
        payload: bytes,
        before: dict[str, None],
        finished: dict[str, StepOutcome],
        annotations: dict[str, Any],
    ) -> None:
        """Add a step."""
        given = [self._outcome(name, finished) for name in before]
        key = task_key(step.name, self.key, self._name)
        task = Task(key, run_step, ticket, step, payload, tuple(before), *given)
        needs = {self._label(name) for name in before if name not in finished}
        if isinstance(ticket, TaskRef):
            needs.add("open")
        self.add(self._label(step.name), task, needs, annotations)

    def finish(
        self, ticket: Any, payloads: dict[str, bytes], finished: dict[str, StepOutcome]
    ) -> tuple[HighLevelGraph, str]:
        """Add the last task."""
        names = tuple(one.name for one in self._spec.ordinary)
        given = [self._outcome(name, finished) for name in names]
        key = report_key(self.key, self._name)
        raw = self._spec.to_json()
        task = Task(key, report, ticket, raw, payloads, names, *given)
        self.add("report", task, set(self._layers), {})
        return HighLevelGraph(self._layers, self._needs), key

    def _outcome(self, name: str, finished: dict[str, StepOutcome]) -> Any:
        known = finished.get(name)
        return known or TaskRef(task_key(name, self.key, self._name))

    def _label(self, name: str) -> str:
        return f"step {name}"


def _spot(
    step: Step,
    places: Places,
    role_workers: Mapping[tuple[str, ...], list[str]],
    priority: int,
) -> dict[str, Any]:
    annotations: dict[str, Any] = {"retries": 2}
    if priority:
        annotations["priority"] = priority
    place = place_of(step)
    if place:
        node, address, _ = places[place]
        annotations[NODE] = node
        if address:
            annotations |= {"workers": [address], "allow_other_workers": False}
    elif step.roles:
        workers = role_workers.get(step.roles, [])
        annotations |= {"workers": workers, "allow_other_workers": False}
    return annotations
