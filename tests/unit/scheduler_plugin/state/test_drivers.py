from __future__ import annotations

from typing import Any

import pytest

from tensorcast_dask.exceptions import NotFound, StaleOwner, Unimplemented
from tensorcast_dask.scheduler_plugin.state.drivers import SUCCESSOR_S
from tensorcast_dask.scheduler_plugin.state.events import CatalogSettings
from tensorcast_dask.scheduler_plugin.state.plans import KEPT_OWN
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors import values
from tensorcast_dask.tensors.messages import RunStatus
from tensorcast_dask.tensors.plans import Kind, PlanSpec, Step
from tests.kit.catalogs import Desk, FakeNode
from tests.kit.drives import DrivingStore, orders
from tests.kit.plans import Runner, chain, noop

CALL = Step(
    name="a",
    kind=Kind.CALL,
    instance="e",
    options={"function": "f"},
    args=values.pack([[], {}]),
)
CALLS = PlanSpec(steps=(CALL,)).check()


def scene(**settings: Any) -> tuple[Desk, Runner, FakeNode, FakeNode]:
    d = Desk(settings=CatalogSettings(token=b"t", **settings))
    near, far = d.node("near", host="h"), d.node("far", host="elsewhere")
    return d, Runner(d.program(host="h")), near, far


def attach(node: FakeNode, attachment: str = "life") -> None:
    record = m.InstanceRecord(name="e", attachment=attachment)
    node.say(m.InstancesHere(records=(record,)))


def ask(r: Runner, spec: PlanSpec, **more: Any) -> m.OpenPlan:
    return m.OpenPlan(
        rid=r.program.rid(),
        key=r.key,
        digest=spec.digest(),
        spec=spec.to_json(),
        deadline_s=60.0,
        rpc=True,
        **more,
    )


def test_a_store_of_the_callers_host_is_told_all_that_it_has_to_know() -> None:
    _, r, near, far = scene()
    attach(far)
    steps = (
        CALL,
        noop("b", "a"),
        Step(name="c", kind=Kind.DRAIN, options={"worker": "w"}),
    )
    spec = PlanSpec(steps=steps).check()
    state = r.open(spec, rpc=True, concurrency=3)
    assert (state.status, state.started) == (RunStatus.RUNNING, False)
    (order,) = orders(near)
    assert orders(far) == []
    may = m.StepState(left_s=60.0)
    assert order == m.DoRun(
        key="k",
        run=state.run,
        spec=spec.to_json(),
        left_s=60.0,
        concurrency=3,
        begun={
            "a": m.StepState(left_s=60.0, since=state.run, attachment="life"),
            "c": may,
        },
        places={"e": m.InstancePlace(attachment="life", card=far.card)},
    )


def test_only_as_many_steps_have_leave_as_may_be_under_way() -> None:
    _, r, near, _ = scene()
    drains = [
        Step(name=name, kind=Kind.DRAIN, options={"worker": "w"}) for name in "abc"
    ]
    r.open(PlanSpec(steps=tuple(drains)).check(), rpc=True, concurrency=2)
    (order,) = orders(near)
    assert list(order.begun) == ["a", "b"]


def test_runs_go_to_the_store_that_drives_least() -> None:
    d, _, near, _ = scene()
    other = d.node("another", host="h")
    for key in "abc":
        Runner(d.programs[next(iter(d.programs))], key).open(chain("a"), rpc=True)
    assert (len(orders(near)), len(orders(other))) == (1, 2)


def test_what_takes_a_worker_is_refused_before_anything_is_opened() -> None:
    d, r, _, _ = scene()
    function = Step(name="a", kind=Kind.SUBMIT, token="t")
    with pytest.raises(Unimplemented, match="executor='graph'"):
        r.open(PlanSpec(steps=(function,)).check(), rpc=True)
    with pytest.raises(NotFound):
        r.look()
    assert d.catalog.debug_state()["plans"] == 0


def test_without_a_gateway_it_is_refused() -> None:
    d = Desk()
    r = Runner(d.program())
    with pytest.raises(NotFound, match="role gateway"):
        r.open(chain("a"), rpc=True)


def test_who_waits_is_told_of_the_end() -> None:
    d, r, near, _ = scene()
    store = DrivingStore(d, near)
    request = ask(r, chain("a", "b"), wait_s=30.0)
    r.program.ask(request)
    d.flush()
    assert not r.program.answered(request.rid)
    while store.turn():
        d.flush()
    state = r.program.result(request.rid, m.PlanState)
    assert state.status is RunStatus.DONE
    assert state.outcomes["b"].node == "near"
    assert d.catalog.debug_state()["plans"] == 0


@pytest.mark.parametrize("own", [True, False])
def test_only_under_a_key_of_its_own_a_plan_is_told_before_it_is_on_disk(
    own: bool,
) -> None:
    d, r, near, _ = scene()
    store = DrivingStore(d, near)
    d.auto = False
    request = ask(r, chain("a"), wait_s=30.0, own_key=own)
    r.program.ask(request)
    while store.turn():
        pass
    assert r.program.answered(request.rid) is own
    d.flush()
    assert r.program.result(request.rid, m.PlanState).status is RunStatus.DONE


@pytest.mark.parametrize("own", [True, False])
def test_a_plan_that_calls_under_anybodys_key_is_on_disk_before_it_is_driven(
    own: bool,
) -> None:
    d, r, near, _ = scene()
    attach(near)
    d.auto = False
    r.program.ask(ask(r, CALLS, wait_s=30.0, own_key=own))
    told = orders(near)
    assert bool(told) is own
    d.flush()
    (order,) = told or orders(near)
    assert order.begun["a"].since == (1 if own else order.run)


def test_a_node_that_joins_anew_is_told_again() -> None:
    _, r, near, _ = scene()
    r.open(chain("a"), rpc=True)
    first = orders(near)
    near.lose_link()
    near.join()
    assert orders(near) == first


def test_another_store_follows_one_that_is_gone_and_the_first_is_stale() -> None:
    d, r, near, far = scene(lease_ttl_s=6.0)
    attach(far)
    r.open(CALLS, rpc=True)
    (first,) = orders(near)
    near.lose_link()
    d.pass_time(20.0)
    (order,) = orders(far)
    assert order.run != first.run
    assert order.begun["a"].again
    with pytest.raises(StaleOwner):
        r.ended("a")
    r.run = order.run
    r.ended("a")
    assert r.end().status is RunStatus.DONE


def test_with_no_store_left_the_run_is_interrupted_and_can_be_resumed() -> None:
    d, r, near, far = scene(lease_ttl_s=6.0)
    r.open(chain("a"), rpc=True, deadline_s=200.0)
    near.lose_link()
    far.lose_link()
    d.pass_time(8.0)
    assert r.look().status is RunStatus.RUNNING  # one may come yet
    d.pass_time(SUCCESSOR_S)
    state = r.look()
    assert state.status is RunStatus.INTERRUPTED
    assert "which drove it, is gone" in state.message
    far.join()
    again = r.resume()
    assert (again.status, again.started) == (RunStatus.RUNNING, False)
    (order,) = orders(far)
    assert order.run == again.run


def test_a_store_that_comes_when_none_was_left_follows_at_once() -> None:
    d, r, near, far = scene(lease_ttl_s=6.0)
    state = r.open(chain("a"), rpc=True)
    near.lose_link()
    far.lose_link()
    d.pass_time(8.0)
    fresh = d.node("fresh")
    (order,) = orders(fresh)
    assert order.run != state.run
    d.pass_time(1.0)
    assert r.look().status is RunStatus.RUNNING


def test_who_drives_it_may_give_it_back() -> None:
    _, r, near, _ = scene()
    r.open(chain("a"), rpc=True)
    (order,) = orders(near)
    left = m.EndPlan(rid=r.program.rid(), key="k", run=order.run, left="it failed")
    state = r.program.call(left, m.PlanState)
    assert state.status is RunStatus.INTERRUPTED
    assert "it failed" in state.message


@pytest.mark.parametrize("back", [True, False])
def test_after_a_restart_its_store_goes_on_or_another_follows(back: bool) -> None:
    d, r, near, far = scene(lease_ttl_s=6.0)
    r.open(chain("a"), rpc=True)
    (first,) = orders(near)
    d = d.restart()
    r.program.open()
    far.join()
    if back:
        near.join()
    d.pass_time(20.0)
    (order,) = orders(near if back else far)
    assert (order.run == first.run) is back
    assert r.look().status is RunStatus.RUNNING


def test_a_plan_that_is_opened_before_any_store_is_back_waits_for_one() -> None:
    d, r, near, _ = scene(lease_ttl_s=6.0)
    d = d.restart()
    r.program.open()
    state = r.open(chain("a"), rpc=True)
    near.join()
    (order,) = orders(near)
    assert order.run == state.run


def test_a_plan_that_waits_for_a_store_that_does_not_come_is_interrupted() -> None:
    d, r, _, _ = scene(lease_ttl_s=6.0)
    d = d.restart()
    r.program.open()
    r.open(chain("a"), rpc=True, deadline_s=200.0)
    d.pass_time(20.0 + SUCCESSOR_S)
    assert r.look().status is RunStatus.INTERRUPTED


def test_outcomes_that_come_with_another_word_count_once() -> None:
    _, r, _, _ = scene()
    state = r.open(chain("a", "b"), rpc=True)
    done = m.StepOutcome(status=m.StepStatus.DONE, value=b"1", kind="plain")
    other = m.StepOutcome(status=m.StepStatus.DONE, value=b"2", kind="plain")
    ask = m.BeginStep(
        rid=r.program.rid(), key="k", run=state.run, step="b", ended={"a": done}
    )
    assert r.program.call(ask, m.StepState).outcome is None
    end = m.EndPlan(
        rid=r.program.rid(),
        key="k",
        run=state.run,
        ended={"a": other, "b": other, "nobody": done},
    )
    # Who drives knows the outcomes: it is told only that the run is over.
    assert r.program.call(end, m.PlanState).outcomes == {}
    assert r.look().outcomes == {"a": done, "b": other}


def test_of_plans_without_a_key_only_the_last_are_kept() -> None:
    d, r, near, _ = scene()
    store = DrivingStore(d, near)
    for at in range(KEPT_OWN + 3):
        r.key = f"own-{at}"
        r.program.ask(ask(r, chain("a"), wait_s=30.0, own_key=True))
        while store.turn():
            pass
    assert d.catalog.debug_state()["plans_kept"] == KEPT_OWN
    r.key = "own-2"
    with pytest.raises(NotFound):
        r.look()
    r.key = "own-3"
    assert r.look().status is RunStatus.DONE
