"""Random plans on a few artifacts, opened, ended, dropped and resumed by chance: never two at once
that would undo each other, and whoever waits begins or is told.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tensorcast_dask.scheduler_plugin.state.events import PlanDropped
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import RequestId
from tensorcast_dask.tensors.plans import Kind, NameRef, PlanSpec, Step
from tests.kit.catalogs import Desk, Program

KINDS = (Kind.DESTROY, Kind.PIN, Kind.MIGRATE, Kind.UNPIN, Kind.SAVE, Kind.PREFETCH)
TAKING = {Kind.DESTROY, Kind.MIGRATE, Kind.UNPIN}
KEEPING = {Kind.PIN, Kind.MIGRATE, Kind.PREFETCH}
PAIRS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from("xyz")), min_size=1, max_size=3
)
KEY = st.sampled_from([f"plan-{at}" for at in range(8)])
OVER = {"failed", "cancelled", "interrupted"}
Pairs = tuple[tuple[Kind, str], ...]


def spec_of(pairs: Pairs) -> PlanSpec:
    steps = [
        Step(
            name=f"s{at}",
            kind=kind,
            target=NameRef(id=name),
            source="a" if kind is Kind.MIGRATE else "",
            options={"path": "/p"} if kind is Kind.SAVE else {},
        )
        for at, (kind, name) in enumerate(pairs)
    ]
    return PlanSpec(steps=tuple(steps)).check()


def undo_each_other(some: Pairs, others: Pairs) -> bool:
    """The plain rule, pair by pair."""
    return any(
        one == other
        and ((a in TAKING and b in KEEPING) or (a in KEEPING and b in TAKING))
        for a, one in some
        for b, other in others
    )


class Turns(RuleBasedStateMachine):
    """Eight keys, three artifacts."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk()
        self.desk.node("a")
        self.program: Program = self.desk.program()
        for name in "xyz":
            self.program.put(name)
        self.plans: dict[str, Pairs] = {}
        self.running: dict[str, int] = {}
        self.over: dict[str, int] = {}
        #: Requests that have not been answered, in their order.
        self.asked: dict[RequestId, str] = {}

    def ask(self, key: str, request: m.SessionRequest) -> None:
        """Ask, and see who was answered."""
        self.asked[request.rid] = key
        self.program.ask(request)
        self.settle()

    def settle(self) -> None:
        self.desk.flush()
        for rid, key in list(self.asked.items()):
            answer = self.program.answers.get(rid)
            if answer is None:
                continue
            del self.asked[rid]
            if isinstance(answer, m.PlanState) and answer.status == "running":
                self.running[key] = answer.run
                self.over.pop(key, None)

    def look(self, key: str) -> m.PlanState:
        return self.program.call(
            m.PlanAsked(rid=self.program.rid(), key=key), m.PlanState
        )

    def reconcile(self) -> None:
        """See who is over, and who began after that, perhaps only to be late at once."""
        self.settle()
        while over := [one for one in self.running if self.look(one).status in OVER]:
            for key in over:
                self.over[key] = self.running.pop(key)
            self.settle()

    @rule(key=KEY, pairs=PAIRS, deadline_s=st.sampled_from([1.0, 60.0, 1e6]))
    def open(self, key: str, pairs: list[tuple[Kind, str]], deadline_s: float) -> None:
        """A program asks for a plan; the key's plan stays what it was first."""
        mine = self.plans.setdefault(key, tuple(pairs))
        spec = spec_of(mine)
        self.ask(
            key,
            m.OpenPlan(
                rid=self.program.rid(),
                key=key,
                digest=spec.digest(),
                spec=spec.to_json(),
                deadline_s=deadline_s,
            ),
        )

    @rule(key=KEY, dropped=st.booleans())
    def end(self, key: str, *, dropped: bool) -> None:
        """A run is cancelled, or whoever carried it on dies."""
        if key not in self.running:
            return
        if dropped:
            run = self.running[key]
            self.desk.tell(PlanDropped(key=key, run=run, why="gone"))
        else:
            ask = m.EndPlan(rid=self.program.rid(), key=key, run=0, cancel=True)
            self.program.call(ask, m.PlanState)
        self.reconcile()

    @rule(key=KEY)
    def resume(self, key: str) -> None:
        """It goes on, when it may."""
        if key in self.over and key not in self.asked.values():
            ask = m.ResumePlan(
                rid=self.program.rid(), key=key, run=self.over[key], deadline_s=1e6
            )
            self.ask(key, ask)

    @rule(seconds=st.sampled_from([0.5, 1.5, 100.0]))
    def wait(self, seconds: float) -> None:
        """Deadlines pass."""
        self.desk.pass_time(seconds)
        self.reconcile()

    @rule()
    def restart(self) -> None:
        """The scheduler is killed; what was not answered is asked again."""
        self.desk.flush()
        self.desk = self.desk.restart()
        for node in list(self.desk.nodes.values()):
            node.join()
        self.program.open()
        for rid in list(self.asked):
            self.program.ask(self.program.asked[rid])
        self.settle()

    @invariant()
    def no_two_undo_each_other(self) -> None:
        """What runs gets along, and the catalog counts it so."""
        keys = sorted(self.running)
        for at, one in enumerate(keys):
            for other in keys[:at]:
                assert not undo_each_other(self.plans[one], self.plans[other])
        state = self.desk.catalog.debug_state()
        assert state["plans"] == len(keys)
        assert state["plans_waiting"] == len(self.asked)

    @invariant()
    def whoever_waits_has_a_reason(self) -> None:
        """It would undo what somebody before it does."""
        waiting = list(self.asked.values())
        for at, key in enumerate(waiting):
            before = [*self.running, *waiting[:at]]
            assert any(
                one != key and undo_each_other(self.plans[key], self.plans[one])
                for one in before
            )

    def teardown(self) -> None:
        """When runs end, all that wait begin, and nothing is left."""
        while self.running:
            key = next(iter(self.running))
            self.end(key, dropped=False)
        assert not self.asked
        state = self.desk.catalog.debug_state()
        assert (state["plans_waiting"], state["plan_claims"]) == (0, 0)


TestTurns = Turns.TestCase
TestTurns.settings = settings(
    max_examples=max(60, settings().max_examples // 2),
    stateful_step_count=30,
    deadline=None,
)
