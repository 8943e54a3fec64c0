from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import StaleOwner
from tensorcast_dask.scheduler_plugin.state.events import PlanDropped
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ArtifactId, NodeId, RequestId
from tensorcast_dask.tensors.messages import StepStatus
from tests.kit.catalogs import Desk, FakeNode, Program
from tests.kit.plans import Runner, chain

ANY = RequestId("any")


def scene() -> tuple[Desk, FakeNode, Program, Runner, m.ArtifactInfo]:
    d = Desk()
    d.node("a")
    b = d.node("b")
    p = d.program()
    info = p.put("x")
    r = Runner(p)
    r.open(chain("s", "t"))
    return d, b, p, r, info


def pin(info: m.ArtifactInfo, ttl_s: float = 5.0) -> m.Pin:
    return m.Pin(rid=ANY, generation=info.generation, ttl_s=ttl_s)


def ensure(info: m.ArtifactInfo, deadline_s: float = 9.0) -> m.Ensure:
    return m.Ensure(
        rid=ANY, generation=info.generation, node=NodeId("b"), deadline_s=deadline_s
    )


def test_a_change_is_made_once_and_a_repeat_gets_the_first_answer() -> None:
    d, _, p, r, info = scene()
    first = p.result(r.effect("s", pin(info)), m.Pinned)
    other = Runner(d.program("another worker"))
    other.run = r.run
    again = other.effect("s", pin(info, ttl_s=77.0))
    assert other.program.result(again, m.Pinned) == first
    assert d.catalog.debug_state()["pins"] == 1


def test_another_step_or_place_is_another_change() -> None:
    d, _, p, r, info = scene()
    pins = {
        p.result(r.effect(step, pin(info), number=number), m.Pinned).pin
        for step in ("s", "t")
        for number in (1, 2)
    }
    assert len(pins) == 4
    assert d.catalog.debug_state()["pins"] == 4


def test_who_asks_while_it_is_under_way_waits_for_it() -> None:
    d, b, p, r, info = scene()
    b.obedient = False
    first = r.effect("s", ensure(info))
    other = Runner(d.program("another worker"))
    other.run = r.run
    second = other.effect("s", ensure(info, deadline_s=1.0))
    orders = [one for one in b.inbox if isinstance(one, m.DoPull)]
    assert len(orders) == 1
    assert not p.answered(first)
    b.obedient = True
    b.obey(orders[0])
    d.flush()
    assert p.result(first, m.Moved) == other.program.result(second, m.Moved)


def test_after_a_fault_only_a_higher_attempt_makes_it_anew() -> None:
    _, b, p, r, info = scene()
    b.fail_next = m.Fault(kind="CapacityError", message="full")
    first = p.answers[r.effect("s", ensure(info))]
    assert isinstance(first, m.Fault)
    assert p.answers[r.effect("s", ensure(info))] == first
    moved = p.result(r.effect("s", ensure(info), attempt=2), m.Moved)
    for attempt in (1, 2, 3):
        rid = r.effect("s", ensure(info), attempt=attempt)
        assert p.result(rid, m.Moved) == moved


def test_what_is_durable_is_known_after_a_restart_too() -> None:
    d, _, p, r, info = scene()
    first = p.result(r.effect("s", pin(info)), m.Pinned)
    d = d.restart()
    for node in d.nodes.values():
        node.join()
    p.open()
    assert p.result(r.effect("s", pin(info)), m.Pinned) == first
    assert d.catalog.debug_state()["pins"] == 1


def test_a_resumed_run_finds_what_its_steps_have_changed() -> None:
    d, _, p, r, info = scene()
    first = p.result(r.effect("s", pin(info)), m.Pinned)
    d.tell(PlanDropped(key="k", run=r.run, why="gone"))
    assert r.resume().started
    assert p.result(r.effect("s", pin(info)), m.Pinned) == first


def test_a_resumed_run_tries_again_what_failed() -> None:
    _, b, p, r, info = scene()
    b.fail_next = m.Fault(kind="CapacityError", message="full")
    r.effect("s", ensure(info))
    r.ended("s", StepStatus.FAILED, fault=m.Fault(kind="CapacityError", message="full"))
    r.begin("t")
    r.end()
    assert r.resume().started
    p.result(r.effect("s", ensure(info)), m.Moved)


def test_changes_are_forgotten_with_the_end_of_their_step() -> None:
    d, _, _, r, info = scene()
    idle = d.catalog.debug_state()["outcome_sessions"]
    r.effect("s", pin(info))
    assert d.catalog.debug_state()["outcome_sessions"] == idle + 1  # type: ignore[operator]
    r.ended("s")
    assert d.catalog.debug_state()["outcome_sessions"] == idle
    with pytest.raises(StaleOwner):
        r.program.result(r.effect("s", pin(info)), m.Pinned)


def test_a_run_that_stops_cancels_what_is_under_way() -> None:
    d, b, p, r, info = scene()
    b.obedient = False
    rid = r.effect("s", ensure(info))
    r.end(cancel=True)
    assert isinstance(p.answers[rid], m.Fault)
    assert d.catalog.debug_state()["operations"] == 0
    late = p.answers[r.effect("s", ensure(info))]
    assert isinstance(late, m.Fault)
    assert late.kind == "StaleOwner"


def test_what_is_no_change_of_a_step_is_refused() -> None:
    _, _, p, r, _ = scene()
    for request in (
        m.Resolve(rid=ANY, id=ArtifactId("x")),
        m.CloseSession(rid=ANY),
        m.EndPlan(rid=ANY, key="k", run=r.run),
    ):
        answer = p.answers[r.effect("s", request)]
        assert isinstance(answer, m.Fault)
        assert answer.kind == "Unimplemented"
