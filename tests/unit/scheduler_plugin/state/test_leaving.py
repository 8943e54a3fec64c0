from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import Mismatch
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import NodeId, RequestId
from tests.kit.catalogs import Desk, FakeNode, Program


def scene() -> tuple[Desk, FakeNode, FakeNode, Program, m.ArtifactInfo]:
    d = Desk()
    a, b = d.node("a"), d.node("b")
    p = d.program()
    info = p.put("x", replicas=2)
    return d, a, b, p, info


def release(p: Program, info: m.ArtifactInfo, node: str) -> RequestId:
    ask = m.Release(rid=p.rid(), generation=info.generation, node=NodeId(node))
    return p.ask(ask)


def test_a_copy_that_leaves_is_no_copy_whatever_its_node_says_meanwhile() -> None:
    d, a, b, p, info = scene()
    a.obedient = False
    rid = release(p, info, "a")
    a.say(m.ReplicaReady(record=a.held[info.generation]))
    a.announce()
    assert p.locate(info.generation) == [b.node]
    with pytest.raises(Mismatch, match="last copy"):
        p.result(release(p, info, "b"), type(None))
    assert d.catalog.debug_state()["leaving"] == 1
    a.obey_all()
    d.flush()
    assert p.result(rid, type(None)) is None
    assert d.catalog.debug_state()["leaving"] == 0


def test_nothing_is_brought_to_a_node_before_it_has_dropped_its_earlier_copy() -> None:
    d, a, _b, p, info = scene()
    a.obedient = False
    release(p, info, "a")
    drops = list(a.inbox)
    ensure = m.Ensure(
        rid=p.rid(), generation=info.generation, node=a.node, deadline_s=9.0
    )
    rid = p.ask(ensure)
    d.pass_time(0.5)
    assert not any(isinstance(one, m.DoPull) for one in a.inbox)
    a.obedient = True
    a.inbox.clear()
    for one in drops:
        a.obey(one)
    d.pass_time(0.5)
    assert p.result(rid, m.Moved).location.card.node == "a"
    assert sorted(p.locate(info.generation)) == ["a", "b"]


def test_a_copy_given_up_with_leave_is_leaving_until_its_node_says_that_it_went() -> (
    None
):
    d, a, _b, p, info = scene()
    p.call(
        m.Ensure(rid=p.rid(), generation=info.generation, node=a.node, deadline_s=9.0),
        m.Moved,
    )
    d.node("c")
    p.call(
        m.Ensure(
            rid=p.rid(), generation=info.generation, node=NodeId("c"), deadline_s=9.0
        ),
        m.Moved,
    )
    record = a.held.pop(info.generation)  # so that the kit does not say at once: gone
    a.say(m.MayDrop(rid=RequestId("r"), generations=(info.generation,)))
    a.say(m.ReplicaReady(record=record))  # it was on its way
    assert sorted(p.locate(info.generation)) == ["b", "c"]
    gone = m.ReplicaDropped(generation=info.generation, tier=m.Tier.HOST, why="evicted")
    a.say(gone)
    a.hold(record)
    assert sorted(p.locate(info.generation)) == ["a", "b", "c"]
