from __future__ import annotations

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
