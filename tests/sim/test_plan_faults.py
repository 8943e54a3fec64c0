"""Every kind of step, struck at every point: the effect is there at most once, the caller is told in
time, and nothing is left behind.

The steps are those that run (`tensors.steps`), the catalog is the one that runs, nodes and journal are
on paper. A worker's death is a step that nobody drives on and a session that is gone; Dask runs it
again elsewhere. The scheduler's death takes its workers along and leaves what the journal has.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from tensorcast_dask.exceptions import DataLost, TensorCastError
from tensorcast_dask.scheduler_plugin.state.events import PlanDropped
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors import steps
from tensorcast_dask.tensors.ids import ArtifactId, HostId, NodeId
from tensorcast_dask.tensors.messages import RunStatus, StepStatus
from tensorcast_dask.tensors.plans import ArtifactRef, Kind, PlanSpec, Step
from tensorcast_dask.tensors.views import View
from tensorcast_dask.tensors.wants import Ask, Effects, Ticket
from tests.kit.catalogs import Desk, Program

A, B = NodeId("a"), NodeId("b")
#: Before the effect, while it is under way, after it and before its answer was heard, before and after
#: the outcome was recorded.
POINTS = ("begun", "asked", "made", "changed", "recorded")
WHO = ("worker", "scheduler", "node a", "node b", "client")
#: The plan's deadline, and what may come on top of it.
DDL_S, SLACK_S = 100.0, 40.0
NOTHING = m.StepOutcome(status=StepStatus.FAILED)
#: What must be as before once all artifacts are destroyed.
REST = (
    "held",
    "artifacts",
    "versions",
    "views",
    "creations",
    "replicas",
    "nodes",
    "pins",
    "tasks",
    "moves",
    "endings",
    "operations",
    "plans",
    "plans_waiting",
    "plan_claims",
)


@dataclass
class Scene:
    """A catalog, two nodes, a program that made `x`, and the worker of now."""

    desk: Desk
    client: Program
    worker: Program
    info: m.ArtifactInfo
    pin: int = 0
    run: int = 0
    workers: int = 1
    begun_s: float = 0.0
    outcome: m.StepOutcome = NOTHING
    #: Orders of each kind that nodes were given.
    orders: dict[str, set[int]] = field(default_factory=dict)

    # ------------------------------------------------------------ what goes on
    def work(self) -> None:
        """Let the nodes do what they were told."""
        for _ in range(8):
            for node in self.desk.nodes.values():
                for order in node.inbox:
                    task = getattr(order, "task", None)
                    if task is not None:
                        kind = type(order).__name__
                        self.orders.setdefault(kind, set()).add(task)
                if node.link:
                    node.obey_all()
            self.desk.flush()

    def answered(self, program: Program, request: m.SessionRequest) -> object:
        """Wait for an answer, in time."""
        for _ in range(int(DDL_S + SLACK_S)):
            self.desk.flush()
            if program.answered(request.rid):
                return program.answers[request.rid]
            self.work()
            if not program.answered(request.rid):
                self.desk.pass_time(1.0)
        pytest.fail(f"no answer to {request}")

    def ask(self, program: Program, request: m.SessionRequest) -> object:
        program.ask(request)
        return self.answered(program, request)

    # ------------------------------------------------------------ a step, as a task runs it
    def step(self, step: Step) -> Iterator[str]:
        """Drive it, and tell each point; the end is recorded."""
        who = self.worker
        begin = m.BeginStep(rid=who.rid(), key="k", run=self.run, step=step.name)
        state = self.ask(who, begin)
        if not isinstance(state, m.StepState) or state.outcome is not None:
            return
        yield "begun"
        outcome = m.StepOutcome(status=StepStatus.FAILED)
        for attempt in range(1, 4):
            try:
                outcome = yield from self._attempt(who, step, attempt)
                break
            except TensorCastError as error:
                fault = m.Fault.of(error)
                outcome = m.StepOutcome(status=StepStatus.FAILED, fault=fault)
                if not error.retryable:
                    break
        yield "changed"
        end = m.EndStep(
            rid=who.rid(), key="k", run=self.run, step=step.name, outcome=outcome
        )
        self.ask(who, end)
        yield "recorded"

    def _attempt(
        self, who: Program, step: Step, attempt: int
    ) -> Generator[str, None, m.StepOutcome]:
        effects = Effects(Ticket("k", self.run), step.name, attempt)
        doing = steps.carry_out(step, lambda _: None, host=HostId("h-client"))
        want = next(doing)
        try:
            while True:
                assert isinstance(want, Ask)
                request = effects.wrapped(want.request, who.rid(), DDL_S)
                who.ask(request)  # type: ignore[arg-type]
                if isinstance(request, m.StepEffect):
                    yield "asked"
                value = self.answered(who, request)  # type: ignore[arg-type]
                if isinstance(request, m.StepEffect):
                    yield "made"
                if isinstance(value, m.Fault):
                    want = doing.throw(value.error())
                else:
                    want = doing.send(value)
        except StopIteration as end:
            return end.value

    # ------------------------------------------------------------ deaths
    def next_worker(self) -> None:
        """Dask has another worker run what was not recorded."""
        self.workers += 1
        self.worker = self.desk.program(f"w{self.workers}", host="h-b")

    def strike(self, who: str) -> None:
        match who:
            case "worker":
                self.worker.lose_comm()
                self.next_worker()
            case "client":
                self.client.lose_comm()
                self.client = self.desk.program("another")
            case "scheduler":
                self.desk = self.desk.restart()
                for node in self.desk.nodes.values():
                    node.join()
                self.desk.programs.pop(self.worker.session)
                self.client.open()
                self.desk.pass_time(11.0)
                dropped = PlanDropped(key="k", run=self.run, why="its tasks are gone")
                self.desk.tell(dropped)
                self.next_worker()
                ask = m.ResumePlan(
                    rid=self.client.rid(), key="k", run=self.run, deadline_s=DDL_S
                )
                state = self.client.call(ask, m.PlanState)
                self.run = state.run
            case _:
                node = self.desk.nodes[NodeId(who[-1])]
                node.inbox.clear()
                node.lose_link()
                self.desk.pass_time(self.desk.settings.lease_ttl_s * 2)

    # ------------------------------------------------------------ ends
    def finish(self, step: Step) -> m.PlanState:
        """Run it to its end, whatever has to be run again, and end the plan."""
        for _ in range(3):
            for _ in self.step(step):
                pass
        look = m.PlanAsked(rid=self.client.rid(), key="k")
        state = self.ask(self.client, look)
        assert isinstance(state, m.PlanState)
        if state.status is RunStatus.RUNNING:
            end = m.EndPlan(rid=self.worker.rid(), key="k", run=self.run)
            state = self.ask(self.worker, end)
        assert isinstance(state, m.PlanState), state
        return state

    def clean(self) -> None:
        """Destroy what there is; nodes that went come back with what they held."""
        for node in self.desk.nodes.values():
            if not node.link:
                node.join()
        self.work()
        p = self.client
        alias = m.SetAlias(rid=p.rid(), name=ArtifactId("now"), generation=0)  # type: ignore[arg-type]
        self.ask(p, alias)
        for name in ("x", "new", "head"):
            self.ask(p, m.Destroy(rid=p.rid(), id=ArtifactId(name)))
        self.work()
        self.desk.pass_time(1.0)
        self.work()


def begin(kind: str) -> tuple[Scene, object]:
    desk = Desk()
    for name in "ab":
        desk.node(name)
    client = desk.program("client")
    before = {key: desk.catalog.debug_state()[key] for key in REST}
    scene = Scene(desk, client, desk.program("w1", host="h-b"), client.put("x", node=A))
    generation = scene.info.generation
    if kind == "release":
        ensure = m.Ensure(
            rid=client.rid(), generation=generation, node=B, deadline_s=9.0
        )
        client.call(ensure, m.Moved)
    if kind == "unpin":
        pin = m.Pin(rid=client.rid(), generation=generation, ttl_s=1e6)
        scene.pin = client.call(pin, m.Pinned).pin
    for node in desk.nodes.values():
        node.obedient = False
    return scene, before


def opened(scene: Scene, step: Step) -> None:
    spec = PlanSpec(steps=(step,)).check()
    p = scene.client
    ask = m.OpenPlan(
        rid=p.rid(),
        key="k",
        digest=spec.digest(),
        spec=spec.to_json(),
        deadline_s=DDL_S,
    )
    scene.run = p.call(ask, m.PlanState).run
    scene.begun_s = scene.desk.now_s


class Case(NamedTuple):
    """A kind of step."""

    make: Callable[[Scene], dict[str, object]]
    #: How often what it does is there.
    times: Callable[[Scene], int]
    #: What nodes are told for it.
    order: str = ""


def count(key: str) -> Callable[[Scene], int]:
    def times(scene: Scene) -> int:
        value = scene.desk.catalog.debug_state()[key]
        assert isinstance(value, int)
        return value

    return times


def holders(scene: Scene) -> set[NodeId]:
    try:
        return set(scene.client.locate(scene.info.generation))
    except DataLost:  # until its node is back
        return set()


def at_b(scene: Scene) -> int:
    return int(scene.info.generation in scene.desk.nodes[B].held)


def drained(scene: Scene) -> int:
    """Moved, or told that it could not be."""
    receipt = steps.value_of(scene.outcome)
    assert isinstance(receipt, m.Drained)
    return len(receipt.moved) + len(receipt.stayed)


def versions(scene: Scene) -> int:
    found = scene.desk.catalog.names.artifacts.get(ArtifactId("new"))
    return 0 if found is None else len(found.versions)


def alias_moves(scene: Scene) -> int:
    found = scene.desk.catalog.names.aliases.get(ArtifactId("now"))
    return 0 if found is None else found.alias_generation


CASES = {
    "pin": Case(lambda _: {"node": "a", "options": {"ttl": 1e6}}, count("pins")),
    "unpin": Case(
        lambda s: {"options": {"pin": s.pin}}, lambda s: 1 - count("pins")(s)
    ),
    "publish": Case(
        lambda _: {},
        lambda s: int(s.desk.catalog.names.versions[s.info.generation].published),
    ),
    "prefetch": Case(lambda _: {"node": "b"}, at_b, "DoPull"),
    "replicate": Case(lambda _: {"node": "b"}, at_b, "DoPull"),
    "migrate": Case(lambda _: {"node": "b", "source": "a"}, at_b, "DoPull"),
    "release": Case(lambda _: {"node": "b"}, lambda s: int(B not in holders(s))),
    "destroy": Case(
        lambda _: {},
        lambda s: int(s.info.generation not in s.desk.catalog.names.versions),
    ),
    "alias": Case(lambda _: {"options": {"name": "now", "expect": 0}}, alias_moves),
    "load": Case(
        lambda _: {"node": "b", "target": None, "options": {"path": "/p", "id": "new"}},
        versions,
        "DoLoad",
    ),
    "save": Case(
        lambda _: {"node": "a", "options": {"path": "/out"}},
        lambda s: min(1, len(s.orders["DoSave"])),
        "DoSave",
    ),
    "view": Case(
        lambda _: {
            "view": View.of({"t": slice(0, 9)}).encode(),
            "options": {"name": "head"},
        },
        count("views"),
    ),
    "drain": Case(
        lambda _: {"target": None, "options": {"worker": "a", "end": False}},
        drained,
        "DoPull",
    ),
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("kind", CASES)
def test_p26_whoever_dies_at_whatever_point_of_a_step(
    kind: str, who: str, point: str
) -> None:
    case = CASES[kind]
    scene, before = begin(kind)
    given = {"target": ArtifactRef.of(scene.info)} | case.make(scene)
    step = Step(name="it", kind=Kind(kind), **given)  # type: ignore[arg-type]
    opened(scene, step)
    driven = scene.step(step)
    assert point in driven  # and no further
    scene.strike(who)
    if who in {"client", "node a", "node b"}:
        for _ in driven:  # the worker lives
            pass
    state = scene.finish(step)
    assert scene.desk.now_s - scene.begun_s <= 2 * (DDL_S + SLACK_S)
    if state.status is RunStatus.DONE:
        scene.outcome = state.outcomes["it"]
        assert scene.outcome.status is StepStatus.DONE
        assert case.times(scene) == 1
    else:
        assert state.fault is not None
        assert who.startswith("node")  # others only delay
    if case.order and who in {"worker", "client"}:
        assert len(scene.orders[case.order]) == 1
    work = {
        key: scene.desk.catalog.debug_state()[key]
        for key in ("operations", "moves", "tasks", "plans", "plan_claims")
    }
    assert set(work.values()) == {0}, work
    scene.clean()
    after = {key: scene.desk.catalog.debug_state()[key] for key in REST}
    assert after == before
    assert not any(node.held for node in scene.desk.nodes.values())
