from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import CorruptFile, Gone, PeerLost
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import NodeId, RequestId
from tests.kit.catalogs import Desk, Program


def scene() -> tuple[Desk, Program, m.ArtifactInfo]:
    d = Desk()
    d.node("a")
    d.node("b").obedient = False
    p = d.program()
    return d, p, p.put("x", node=NodeId("a"))


def ensure(p: Program, info: m.ArtifactInfo, deadline_s: float = 9.0) -> m.Ensure:
    return m.Ensure(
        rid=p.rid(),
        generation=info.generation,
        node=NodeId("b"),
        deadline_s=deadline_s,
    )


def pulls(d: Desk) -> list[m.DoPull]:
    return [one for one in d.nodes[NodeId("b")].inbox if isinstance(one, m.DoPull)]


def test_wishes_for_the_same_replica_share_one_order_and_all_are_answered() -> None:
    d, p, info = scene()
    rids = [p.ask(ensure(p, info)) for _ in range(5)]
    assert len(pulls(d)) == 1
    d.nodes[NodeId("b")].obey_all()
    d.flush()
    assert {p.result(rid, m.Moved).moved_bytes for rid in rids} == {100}
    assert d.catalog.debug_state()["moves"] == 0


def test_an_order_names_its_sources_with_the_time_that_is_left() -> None:
    d, p, info = scene()
    p.ask(ensure(p, info, deadline_s=4.0))
    (pull,) = pulls(d)
    assert [one.card.node for one in pull.sources] == ["a"]
    assert (pull.deadline_s, pull.nbytes, pull.tier) == (4.0, 100, m.Tier.HOST)


@pytest.mark.parametrize("kind", ["PeerLost", "Gone", "NotFound"])
def test_p29_a_fault_that_may_pass_is_tried_again_within_the_deadline(
    kind: str,
) -> None:
    d, p, info = scene()
    b = d.nodes[NodeId("b")]
    rid = p.ask(ensure(p, info))
    b.fail_next = m.Fault(kind=kind, message="the source stalled, or let go of it")
    b.obey_all()
    d.flush()
    assert not p.answered(rid)
    b.obedient = True
    d.pass_time(0.2)
    assert p.result(rid, m.Moved).location.card.node == "b"


def test_a_fault_that_will_not_pass_ends_the_move_at_once() -> None:
    d, p, info = scene()
    b = d.nodes[NodeId("b")]
    rid = p.ask(ensure(p, info))
    b.fail_next = m.Fault(kind="CorruptFile", message="bad bytes")
    b.obey_all()
    with pytest.raises(CorruptFile):
        p.result(rid, m.Moved)


def test_p29_a_source_that_is_gone_for_good_ends_the_move_typed() -> None:
    d, p, info = scene()
    rid = p.ask(ensure(p, info, deadline_s=60.0))
    d.nodes[NodeId("a")].lose_link()
    b = d.nodes[NodeId("b")]
    d.pass_time(7.0)
    b.obey_all()
    b.obedient = True
    d.pass_time(5.0)
    with pytest.raises(Exception, match="lost") as ended:
        p.result(rid, m.Moved)
    assert ended.type.__name__ == "DataLost"


def test_progress_of_a_move_is_told_to_who_asks() -> None:
    d, p, info = scene()
    rid = p.ask(ensure(p, info))
    (pull,) = pulls(d)
    progress = m.TaskProgress(task=pull.task, done_bytes=40, total_bytes=100)
    d.nodes[NodeId("b")].say(progress)
    state = p.call(m.OperationAsked(rid=p.rid(), asked=rid), m.OperationState)
    assert (state.status, state.done_bytes, state.total_bytes) == ("running", 40, 100)


def test_a_move_to_a_node_whose_lease_lapses_ends_with_peer_lost() -> None:
    d, p, info = scene()
    rid = p.ask(ensure(p, info, deadline_s=60.0))
    d.nodes[NodeId("b")].lose_link()
    d.pass_time(7.0)
    with pytest.raises(PeerLost):
        p.result(rid, m.Moved)


def resting(d: Desk, p: Program, info: m.ArtifactInfo, deadline_s: float) -> RequestId:
    """Have a move fail in a way that may pass, so that it rests before its next try."""
    rid = p.ask(ensure(p, info, deadline_s=deadline_s))
    b = d.nodes[NodeId("b")]
    b.fail_next = m.Fault(kind="PeerLost", message="stalled")
    b.obey_all()
    return rid


def test_a_resting_move_that_nobody_wants_any_more_does_not_start_again() -> None:
    d, p, info = scene()
    rid = resting(d, p, info, 9.0)
    p.call(m.CancelAsked(rid=p.rid(), asked=rid), type(None))
    d.pass_time(1.0)
    assert pulls(d) == []
    assert d.catalog.debug_state()["moves"] == 0


def test_a_resting_move_ends_with_its_version_or_its_node() -> None:
    d, p, info = scene()
    rid = resting(d, p, info, 90.0)
    p.ask(m.Destroy(rid=p.rid(), id=info.id))
    with pytest.raises(Gone):
        p.result(rid, m.Moved)
    d, p, info = scene()
    rid = resting(d, p, info, 90.0)
    d.catalog.nodes.give_up(d.catalog.nodes.live(NodeId("b")), why="told so")
    d.pass_time(1.0)
    with pytest.raises(PeerLost):
        p.result(rid, m.Moved)


def test_a_move_gives_up_after_some_tries() -> None:
    d, p, info = scene()
    rid = p.ask(ensure(p, info, deadline_s=90.0))
    b = d.nodes[NodeId("b")]
    for _ in range(4):
        b.fail_next = m.Fault(kind="PeerLost", message="stalled")
        b.obey_all()
        d.pass_time(0.2)
    with pytest.raises(PeerLost, match="stalled"):
        p.result(rid, m.Moved)


def test_nothing_is_brought_to_a_node_that_still_drops_an_earlier_copy() -> None:
    d, p, info = scene()
    b = d.nodes[NodeId("b")]
    p.ask(ensure(p, info))
    b.obey_all()
    release = m.Release(rid=p.rid(), generation=info.generation, node=b.node)
    p.ask(release)
    d.flush()
    rid = p.ask(ensure(p, info))
    d.pass_time(1.0)
    assert pulls(d) == []
    b.obey_all()  # the drop
    d.pass_time(1.0)
    assert len(pulls(d)) == 1
    b.obey_all()
    d.flush()
    assert p.result(rid, m.Moved).moved_bytes == 100
    assert p.locate(info.generation) == [NodeId("a"), b.node]


def test_a_task_that_left_nothing_is_tried_again() -> None:
    d, p, info = scene()
    b = d.nodes[NodeId("b")]
    rid = p.ask(ensure(p, info))
    (pull,) = pulls(d)
    b.inbox.clear()
    b.say(m.TaskDone(task=pull.task, moved_bytes=100))
    assert not p.answered(rid)
    assert p.locate(info.generation) == [NodeId("a")]
    d.pass_time(1.0)
    b.obey_all()
    d.flush()
    assert p.result(rid, m.Moved).location.card.node == b.node


def test_a_better_way_that_was_left_is_in_the_story_and_an_event() -> None:
    d, p, info = scene()
    p.ask(ensure(p, info))
    d.nodes[NodeId("b")].leaves = "tcp in place of UCX"
    d.nodes[NodeId("b")].obey_all()
    d.flush()
    told = p.call(m.ExplainAsked(rid=p.rid(), ref="x"), m.Explained)
    assert any("tcp in place of UCX" in line for _, line in told.lines)
    (left,) = [one for one in d.emitted if one.topic == "way_left"]
    assert (left.facts["node"], left.facts["why"]) == ("b", "tcp in place of UCX")
