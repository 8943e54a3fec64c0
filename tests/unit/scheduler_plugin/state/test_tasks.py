from __future__ import annotations

import pytest

from tensorcast_dask.scheduler_plugin.state.tasks import MAX_LINES
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import NodeId
from tests.kit.catalogs import Desk, FakeNode, Program


def scene() -> tuple[Desk, FakeNode, Program, m.DoPull]:
    d = Desk()
    d.node("a")
    b = d.node("b")
    b.obedient = False
    p = d.program()
    info = p.put("x", node=NodeId("a"))
    p.ask(
        m.Ensure(rid=p.rid(), generation=info.generation, node=b.node, deadline_s=99.0)
    )
    (pull,) = [one for one in b.inbox if isinstance(one, m.DoPull)]
    return d, b, p, pull


def test_an_open_order_is_repeated_to_a_node_that_comes_back() -> None:
    _d, b, _, pull = scene()
    b.lose_link()
    b.inbox.clear()
    b.join()
    assert [one for one in b.inbox if isinstance(one, m.DoPull)] == [pull]


def test_what_a_node_tells_of_an_order_is_in_the_stories_of_all_that_it_concerns() -> (
    None
):
    d, b, p, pull = scene()
    (ensure,) = [one.rid for one in p.asked.values() if isinstance(one, m.Ensure)]
    d.pass_time(3.0)
    fault = m.Fault(kind="Gone", message="gone")
    lines = ((2.0, "asks w-a for its bytes"), (1.0, "leaves w-a: {it} died"))
    b.say(m.TaskDone(task=pull.task, fault=fault, lines=lines * 20))
    for ref in ("x", b.node, ensure):
        told = p.call(m.ExplainAsked(rid=p.rid(), ref=ref), m.Explained).lines
        said = [(ago_s, line) for ago_s, line in told if line.startswith("node ")]
        asks = [ago_s for ago_s, line in said if "asks w-a for its bytes" in line]
        assert asks, ref
        assert asks[0] == pytest.approx(2.0, abs=0.01)
        assert any("leaves w-a: {it} died" in line for _, line in said)
        assert len(said) <= MAX_LINES + 2  # what it is like now begins alike
        ages = [ago_s for ago_s, _ in told]
        assert ages == sorted(ages, reverse=True)


def test_p30_news_of_an_order_that_is_not_open_is_thanked_for_and_ignored() -> None:
    d, b, _p, pull = scene()
    b.thanked.clear()
    b.say(m.TaskDone(task=12345))
    assert b.thanked == [12345]
    a = d.nodes[NodeId("a")]
    a.say(m.TaskDone(task=pull.task))  # not its order
    assert d.catalog.debug_state()["tasks"] == 1
    a.say(m.TaskProgress(task=pull.task, done_bytes=5, total_bytes=5))


def test_order_numbers_are_not_used_again_after_a_restart() -> None:
    d, b, p, pull = scene()
    d = d.restart()
    for node in d.nodes.values():
        node.inbox.clear()
        node.join()
    p.open()
    info = p.resolve("x")
    p.ask(
        m.Ensure(rid=p.rid(), generation=info.generation, node=b.node, deadline_s=99.0)
    )
    (again,) = [one for one in b.inbox if isinstance(one, m.DoPull)]
    assert again.task >> 40 > pull.task >> 40


def test_a_cancelled_order_is_told_to_its_node_and_leaves_nothing() -> None:
    d, b, p, pull = scene()
    (rid,) = [one for one, ask in p.asked.items() if isinstance(ask, m.Ensure)]
    p.call(m.CancelAsked(rid=p.rid(), asked=rid), type(None))
    assert not [one for one in b.inbox if isinstance(one, m.DoPull)]
    assert d.catalog.debug_state()["tasks"] == 0
    b.obey(pull)
    assert d.catalog.debug_state()["tasks"] == 0
