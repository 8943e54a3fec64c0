"""Which plans wait for which, and until when."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from tensorcast_dask.exceptions import Mismatch, NotFound, PlanFailed
from tensorcast_dask.scheduler_plugin.state.claims import Work, works_of
from tensorcast_dask.scheduler_plugin.state.events import PlanDropped
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ArtifactId, NodeId, RequestId
from tensorcast_dask.tensors.messages import RunStatus
from tensorcast_dask.tensors.plans import (
    ArtifactRef,
    Kind,
    NameRef,
    PlanSpec,
    Step,
    StepRef,
    Target,
)
from tensorcast_dask.tensors.views import View
from tests.kit.catalogs import Desk, Program
from tests.kit.plans import Runner, noop

X = ArtifactId("x")
ALL = frozenset({0})


def scene() -> tuple[Desk, Program]:
    d = Desk()
    d.node("a")
    d.node("b")
    return d, d.program()


def step(kind: Kind, on: Target | str | None = "x", **more: object) -> Step:
    if isinstance(on, str):
        on = NameRef(id=on)
    if kind is Kind.MIGRATE:
        more |= {"source": "a"}
    return Step(name=str(more.pop("name", "it")), kind=kind, target=on, **more)  # type: ignore[arg-type]


def plan(*steps: Step) -> PlanSpec:
    return PlanSpec(steps=steps).check()


DESTROY, PREFETCH = step(Kind.DESTROY), step(Kind.PREFETCH)


def asks(p: Program, key: str, spec: PlanSpec, deadline_s: float = 60.0) -> RequestId:
    """Ask for a run; who looks at the answers sees whether it began."""
    ask = m.OpenPlan(
        rid=p.rid(),
        key=key,
        digest=spec.digest(),
        spec=spec.to_json(),
        deadline_s=deadline_s,
        poll=deadline_s == 0,
    )
    p.ask(ask)
    p.desk.flush()
    return ask.rid


def ends(p: Program, key: str) -> None:
    p.call(m.EndPlan(rid=p.rid(), key=key, run=0, cancel=True), m.PlanState)


def counts(d: Desk) -> tuple[object, ...]:
    state = d.catalog.debug_state()
    return state["plans"], state["plans_waiting"], state["plan_claims"]


# ---------------------------------------------------------------- who undoes whom
@pytest.mark.parametrize(
    "taking", [Kind.DESTROY, Kind.MIGRATE, Kind.RELEASE, Kind.UNPIN]
)
@pytest.mark.parametrize(
    "keeping",
    [Kind.PREFETCH, Kind.REPLICATE, Kind.MIGRATE, Kind.PIN, Kind.PUBLISH],
)
def test_what_one_plan_takes_away_no_other_keeps_meanwhile(
    taking: Kind, keeping: Kind
) -> None:
    for first, second in itertools.permutations((step(taking), step(keeping))):
        d, p = scene()
        p.put("x")
        one = asks(p, "one", plan(first))
        two = asks(p, "two", plan(second))
        assert p.result(one, m.PlanState).started
        assert not p.answered(two)
        assert counts(d) == (1, 1, 1)
        ends(p, "one")
        assert p.result(two, m.PlanState).started
        assert counts(d) == (1, 0, 1)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (DESTROY, step(Kind.DESTROY)),
        (DESTROY, step(Kind.PREFETCH, "y")),
        (PREFETCH, step(Kind.PIN)),
        (DESTROY, step(Kind.SAVE, options={"path": "/p"})),
        (DESTROY, step(Kind.LATEST)),
    ],
)
def test_plans_that_undo_nothing_of_each_other_run_together(
    one: Step, two: Step
) -> None:
    d, p = scene()
    p.put("x")
    p.put("y")
    asks(p, "one", plan(one))
    assert p.result(asks(p, "two", plan(two)), m.PlanState).started
    assert counts(d)[:2] == (2, 0)


def test_versions_of_one_id_are_apart_and_an_id_is_all_of_them() -> None:
    _, p = scene()
    first = ArtifactRef.of(p.put("x"))
    second = ArtifactRef.of(p.put("x", version=2))
    one = plan(step(Kind.DESTROY, first))
    assert p.result(asks(p, "one", one), m.PlanState).started
    two = plan(step(Kind.PREFETCH, second))
    assert p.result(asks(p, "two", two), m.PlanState).started
    both: tuple[ArtifactRef | str, ...] = (first, "x")
    for at, on in enumerate(both):
        assert not p.answered(asks(p, f"late {at}", plan(step(Kind.PIN, on))))


def test_an_unpin_of_the_plans_own_pin_takes_nothing() -> None:
    _, p = scene()
    p.put("x")
    pin = step(Kind.PIN, name="pin")
    own = step(Kind.UNPIN, options={"pinned": "pin"}, uses=("pin",))
    for key in ("one", "two"):
        opened = asks(p, key, plan(pin, own))
        assert p.result(opened, m.PlanState).started


def test_what_a_step_acts_on_is_followed_through_steps_names_and_views() -> None:
    d, p = scene()
    info = p.put("x")
    names = d.catalog.names
    p.call(
        m.SetAlias(rid=p.rid(), name=ArtifactId("now"), generation=info.generation),
        m.AliasState,
    )
    of_steps = plan(
        step(Kind.LOAD, None, name="load", options={"path": "/p", "id": "x"}),
        step(Kind.SAVE, StepRef(step="load"), name="s", options={"path": "/q"}),
        step(Kind.DESTROY, StepRef(step="s")),
    )
    assert works_of(of_steps.steps, names) == ({X: Work(ALL, ALL)}, frozenset())
    of_alias = plan(
        step(Kind.VIEW, "now", name="v", view=View.of({"t": 0}).encode()),
        step(Kind.RELEASE, StepRef(step="v")),
    )
    assert works_of(of_alias.steps, names) == ({X: Work(ALL)}, frozenset())
    own = plan(
        step(Kind.COPY, "y", name="c", options={"id": "x"}),
        step(Kind.PIN, StepRef(step="c")),
    )
    assert works_of(own.steps, names) == ({X: Work(kept=ALL)}, frozenset())
    unknown = plan(
        step(Kind.SUBMIT, None, name="f", token="t"),
        step(Kind.DESTROY, StepRef(step="f")),
        step(Kind.SAVE, StepRef(step="f"), name="s", options={"path": "/p"}),
    )
    assert works_of(unknown.steps, names) == ({}, frozenset({"it"}))


# ---------------------------------------------------------------- waiting
def test_plans_that_wait_begin_in_their_order_and_others_pass_them() -> None:
    d, p = scene()
    p.put("x")
    p.put("y")
    asks(p, "pinning", plan(step(Kind.PIN)))
    taking = asks(p, "taking", plan(DESTROY))
    keeping = asks(p, "keeping", plan(PREFETCH))
    beside = asks(p, "beside", plan(step(Kind.DESTROY, "y")))
    assert [p.answered(one) for one in (taking, keeping, beside)] == [False] * 2 + [
        True
    ]
    ends(p, "pinning")
    assert (p.answered(taking), p.answered(keeping)) == (True, False)
    ends(p, "taking")
    assert p.answered(keeping)
    for key in ("keeping", "beside"):
        ends(p, key)
    assert counts(d) == (0, 0, 0)


def test_a_plan_waits_until_its_deadline_and_is_told_for_whom() -> None:
    d, p = scene()
    p.put("x")
    asks(p, "one", plan(DESTROY))
    two = asks(p, "two", plan(PREFETCH), 5.0)
    third = asks(p, "three", plan(step(Kind.DESTROY)), 50.0)
    assert not p.answered(third)  # it came after one that it would undo
    told = p.call(m.ExplainAsked(rid=p.rid(), ref="plan:two"), m.Explained)
    assert "waits for plan 'one'" in told.lines[-1][1]
    d.pass_time(5.5)
    fault = p.answers[two]
    assert isinstance(fault, m.Fault)
    assert (fault.kind, fault.data) == ("DeadlineExceeded", {"plan": "one"})
    assert p.answered(third)
    at_once = asks(p, "at once", plan(PREFETCH), 0)
    d.pass_time(0.1)
    assert isinstance(p.answers[at_once], m.Fault)
    assert counts(d) == (2, 0, 2)


def test_a_plan_that_waits_says_so_to_who_asks_for_its_run_and_can_be_cancelled() -> (
    None
):
    d, p = scene()
    p.put("x")
    asks(p, "first", plan(DESTROY))
    waiting = asks(p, "second", plan(PREFETCH))
    behind = asks(p, "third", plan(DESTROY))
    for request in (
        m.PlanAsked(rid=p.rid(), key="second"),
        m.ResumePlan(rid=p.rid(), key="second", run=1, deadline_s=1.0),
    ):
        with pytest.raises(NotFound, match="waits for plan 'first'"):
            p.call(request, m.PlanState)
    cancel = m.EndPlan(rid=p.rid(), key="second", run=0, cancel=True)
    assert p.call(cancel, m.PlanState).status is RunStatus.CANCELLED
    with pytest.raises(PlanFailed, match="before its turn"):
        p.result(waiting, m.PlanState)
    assert p.result(behind, m.PlanState).started  # it waited for that one alone
    assert counts(d) == (2, 0, 2)


def test_waiting_is_part_of_the_plans_time() -> None:
    d, p = scene()
    p.put("x")
    asks(p, "one", plan(DESTROY))
    two = asks(p, "two", plan(PREFETCH), 20.0)
    d.pass_time(8.0)
    ends(p, "one")
    assert p.result(two, m.PlanState).left_s == pytest.approx(12.0)


def test_the_same_plan_that_waits_twice_is_one_run_and_another_is_refused() -> None:
    d, p = scene()
    p.put("x")
    asks(p, "one", plan(DESTROY))
    two = [asks(p, "two", plan(PREFETCH)) for _ in range(2)]
    wrong = asks(p, "two", plan(step(Kind.PIN)))
    ends(p, "one")
    assert [p.result(one, m.PlanState).started for one in two] == [True, False]
    assert isinstance(p.answers[wrong], m.Fault)
    assert counts(d) == (1, 0, 1)


def test_a_plan_whose_caller_waits_no_longer_does_not_begin() -> None:
    d, p = scene()
    p.put("x")
    asks(p, "one", plan(DESTROY))
    other = d.program("other")
    two = asks(other, "two", plan(PREFETCH))
    three = asks(p, "three", plan(PREFETCH))
    four = asks(p, "four", plan(step(Kind.DESTROY)))
    other.call(m.CloseSession(rid=other.rid()), type(None))
    p.call(m.CancelAsked(rid=p.rid(), asked=three), type(None))
    fault = p.answers[three]
    assert isinstance(fault, m.Fault)
    assert (fault.kind, fault.data) == ("DeadlineExceeded", {"cancelled": True})
    assert p.answered(four)  # it came after those
    assert not other.answered(two)
    assert counts(d) == (2, 0, 2)
    ends(p, "one")
    ends(p, "four")
    assert counts(d) == (0, 0, 0)


# ---------------------------------------------------------------- ends
def test_a_plan_that_nobody_carries_on_lets_others_begin_and_is_resumed_after_them() -> (
    None
):
    d, p = scene()
    p.put("x")
    first = p.result(asks(p, "one", plan(DESTROY)), m.PlanState)
    two = asks(p, "two", plan(PREFETCH))
    d.tell(PlanDropped(key="one", run=first.run, why="its worker died"))
    d.flush()
    assert p.answered(two)
    ask = m.ResumePlan(rid=p.rid(), key="one", run=first.run, deadline_s=60.0)
    p.ask(ask)
    assert not p.answered(ask.rid)
    ends(p, "one")  # it does not go on after all
    with pytest.raises(PlanFailed, match="before its turn"):
        p.result(ask.rid, m.PlanState)
    ask = msgspec.structs.replace(ask, rid=p.rid())
    p.ask(ask)
    assert not p.answered(ask.rid)
    ends(p, "two")
    state = p.result(ask.rid, m.PlanState)
    assert (state.started, state.status) == (True, RunStatus.RUNNING)
    assert counts(d) == (1, 0, 1)


def test_a_restart_knows_what_the_runs_under_way_do() -> None:
    d, p = scene()
    p.put("x")
    asks(p, "one", plan(DESTROY))
    p.desk = d.restart()
    p.open()
    two = asks(p, "two", plan(PREFETCH))
    assert not p.answered(two)
    assert counts(p.desk) == (1, 1, 1)
    ends(p, "one")
    assert p.answered(two)


def test_what_only_a_running_step_can_name_is_claimed_then_or_refused() -> None:
    d, p = scene()
    info, other = p.put("x"), p.put("y")
    asks(p, "one", plan(step(Kind.PIN)))
    r = Runner(p, "two")
    r.open(
        plan(
            step(Kind.SUBMIT, None, name="f", token="t"),
            step(Kind.DESTROY, StepRef(step="f")),
        )
    )
    r.ended("f")

    def destroy(one: m.ArtifactInfo) -> m.Destroy:
        return m.Destroy(rid=p.rid(), id=one.id, generation=one.generation)

    refused = p.answers[r.effect("it", destroy(info))]
    assert isinstance(refused, m.Fault)
    assert (refused.kind, refused.data) == (Mismatch.__name__, {"plan": "one"})
    assert p.locate(info.generation)
    done = p.answers[r.effect("it", destroy(other), number=2)]
    assert isinstance(done, m.Destroyed)
    late = asks(p, "three", plan(step(Kind.PREFETCH, ArtifactRef.of(other))))
    assert not p.answered(late)
    r.ended("it")
    r.end()
    assert p.answered(late)
    assert d.nodes[NodeId("a")].link


def test_a_plan_without_claims_never_waits() -> None:
    d, p = scene()
    p.put("x")
    asks(p, "one", plan(DESTROY))
    assert p.result(asks(p, "two", plan(noop("n"))), m.PlanState).started
    assert counts(d) == (2, 0, 1)
