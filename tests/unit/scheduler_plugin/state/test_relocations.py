from __future__ import annotations

import msgspec
import pytest

from tensorcast_dask.exceptions import (
    CapacityError,
    DataLost,
    DeadlineExceeded,
    Gone,
    Mismatch,
    NotFound,
    PeerLost,
)
from tensorcast_dask.scheduler_plugin.state.events import NodeRetired, WorkerGone
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    Generation,
    HostId,
    NodeId,
    RequestId,
)
from tests.kit.catalogs import Desk, Program


def desk(*names: str) -> tuple[Desk, Program]:
    d = Desk()
    for name in names:
        d.node(name)
    return d, d.program()


def ensure(
    p: Program, generation: int, node: str = "", host: str = "", deadline_s: float = 9.0
) -> m.Ensure:
    return m.Ensure(
        rid=p.rid(),
        generation=Generation(generation),
        node=NodeId(node),
        host=HostId(host),
        deadline_s=deadline_s,
    )


def migrate(
    p: Program, generation: int, source: str, node: str, deadline_s: float = 9.0
) -> m.Migrate:
    return m.Migrate(
        rid=p.rid(),
        generation=Generation(generation),
        source=NodeId(source),
        node=NodeId(node),
        deadline_s=deadline_s,
    )


def test_ensure_brings_a_replica_and_finds_one_that_is_there() -> None:
    _d, p = desk("a", "b")
    info = p.put("x", node=NodeId("a"))
    moved = p.call(ensure(p, info.generation, "b"), m.Moved)
    assert (moved.location.card.node, moved.moved_bytes, moved.via) == ("b", 100, "tcp")
    again = p.call(ensure(p, info.generation, "b"), m.Moved)
    assert (again.moved_bytes, again.via) == (0, "here")
    assert sorted(p.locate(info.generation)) == ["a", "b"]


def test_ensure_on_a_host_takes_a_node_of_that_host_and_joins_a_move_to_it() -> None:
    d, p = desk("a")
    d.node("b1", "hb", obedient=False)
    d.node("b2", "hb", obedient=False)
    info = p.put("x", node=NodeId("a"))
    first = p.ask(ensure(p, info.generation, host="hb"))
    second = p.ask(ensure(p, info.generation, host="hb"))
    pulls = [
        one
        for node in ("b1", "b2")
        for one in d.nodes[NodeId(node)].inbox
        if isinstance(one, m.DoPull)
    ]
    assert len(pulls) == 1
    for node in ("b1", "b2"):
        d.nodes[NodeId(node)].obey_all()
    one, two = p.result(first, m.Moved), p.result(second, m.Moved)
    assert one.location.card.node == two.location.card.node


def test_ensure_with_no_place_named_takes_another_host_than_the_holders() -> None:
    d, p = desk("a", "b")
    d.node("a2", "h-a")
    info = p.put("x", node=NodeId("a"))
    assert p.call(ensure(p, info.generation), m.Moved).location.card.node == "b"
    assert p.call(ensure(p, info.generation), m.Moved).location.card.node == "a2"


def test_p29_ensure_fails_over_when_its_target_dies_and_ends_typed_when_none_is_left() -> (
    None
):
    d, p = desk("a", "b")
    info = p.put("x", node=NodeId("a"))
    b = d.nodes[NodeId("b")]
    b.obedient = False
    rid = p.ask(ensure(p, info.generation, deadline_s=60.0))
    named = p.ask(ensure(p, info.generation, "b", deadline_s=60.0))
    d.node("c")
    b.lose_link()
    d.pass_time(7.0)
    assert p.result(rid, m.Moved).location.card.node == "c"
    with pytest.raises(PeerLost):
        p.result(named, m.Moved)


def test_ensure_ends_at_its_deadline_and_stops_the_move_when_nobody_wants_it() -> None:
    d, p = desk("a", "b")
    info = p.put("x", node=NodeId("a"))
    b = d.nodes[NodeId("b")]
    b.obedient = False
    short = p.ask(ensure(p, info.generation, "b", deadline_s=1.0))
    longer = p.ask(ensure(p, info.generation, "b", deadline_s=2.0))
    d.pass_time(1.5)
    with pytest.raises(DeadlineExceeded):
        p.result(short, m.Moved)
    assert not p.answered(longer)
    assert d.catalog.debug_state()["moves"] == 1
    d.pass_time(1.0)
    with pytest.raises(DeadlineExceeded):
        p.result(longer, m.Moved)
    state = d.catalog.debug_state()
    assert (state["moves"], state["tasks"], state["operations"]) == (0, 0, 0)


def test_p26_migrate_copies_switches_and_then_frees_the_source() -> None:
    d, p = desk("a", "b")
    info = p.put("x", node=NodeId("a"))
    moved = p.call(migrate(p, info.generation, "a", "b"), m.Moved)
    assert moved.location.card.node == "b"
    assert p.locate(info.generation) == ["b"]
    assert d.nodes[NodeId("a")].held == {}


def test_p26_migrate_to_itself_is_nothing_and_to_nowhere_a_typed_error() -> None:
    _d, p = desk("a", "b")
    info = p.put("x", node=NodeId("a"))
    moved = p.call(migrate(p, info.generation, "a", "a"), m.Moved)
    assert moved.moved_bytes == 0
    for source, target in (("a", "zz"), ("zz", "a"), ("b", "a")):
        with pytest.raises(NotFound):
            p.call(migrate(p, info.generation, source, target), m.Moved)
    assert p.locate(info.generation) == ["a"]


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_p26_a_target_that_dies_leaves_the_source_readable_unpinned_and_free(
    when: str,
) -> None:
    d, p = desk("a", "b", "c")
    info = p.put("x", node=NodeId("a"))
    b = d.nodes[NodeId("b")]
    b.obedient = False
    if when == "before":
        b.lose_link()
    rid = p.ask(migrate(p, info.generation, "a", "b", deadline_s=60.0))
    if when == "after":
        pull = next(one for one in b.inbox if isinstance(one, m.DoPull))
        record = d.nodes[NodeId("a")].held[info.generation]
        b.say(m.ReplicaReady(record=record))
        assert pull.generation == info.generation
    if when != "before":
        b.lose_link()
    d.pass_time(7.0)
    with pytest.raises(PeerLost):
        p.result(rid, m.Moved)
    assert p.locate(info.generation) == ["a"]
    state = d.catalog.debug_state()
    assert (state["pins"], state["moves"], state["tasks"]) == (0, 0, 0)
    p.call(migrate(p, info.generation, "a", "c"), m.Moved)
    assert p.locate(info.generation) == ["c"]
    assert p.destroy("x") == (1,)


def test_p26_a_failed_copy_leaves_everything_as_it_was() -> None:
    d, p = desk("a", "b")
    info = p.put("x", node=NodeId("a"))
    d.nodes[NodeId("b")].fail_next = m.Fault(kind="CapacityError", message="full")
    with pytest.raises(CapacityError, match="full"):
        p.call(migrate(p, info.generation, "a", "b"), m.Moved)
    assert p.locate(info.generation) == ["a"]


def test_a_destroyed_version_ends_the_moves_of_it() -> None:
    d, p = desk("a", "b")
    info = p.put("x", node=NodeId("a"))
    d.nodes[NodeId("b")].obedient = False
    rid = p.ask(migrate(p, info.generation, "a", "b"))
    p.ask(m.Destroy(rid=p.rid(), id=info.id))
    with pytest.raises(Gone):
        p.result(rid, m.Moved)


def drain(p: Program, node: str, deadline_s: float = 30.0) -> m.DrainNode:
    return m.DrainNode(rid=p.rid(), node=NodeId(node), deadline_s=deadline_s)


def test_drain_moves_what_a_node_alone_holds_and_then_ends_it() -> None:
    d, p = desk("a", "b")
    alone = [p.put(f"x{n}", node=NodeId("a")).generation for n in range(10)]
    shared = p.put("y", node=NodeId("a")).generation
    p.call(ensure(p, shared, "b"), m.Moved)
    receipt = p.call(drain(p, "a"), m.Drained)
    assert sorted(receipt.moved) == alone
    assert (receipt.moved_bytes, receipt.stayed) == (1000, ())
    assert any(isinstance(one, m.DoEnd) for one in d.nodes[NodeId("a")].inbox)
    for generation in [*alone, shared]:
        assert p.locate(generation) == ["b"]
    with pytest.raises(PeerLost, match="drained, and ended"):
        p.call(drain(p, "a"), m.Drained)


@pytest.mark.parametrize("end", [True, False])
def test_what_is_still_written_at_a_node_that_is_emptied_is_not_committed_there(
    end: bool,
) -> None:
    """Else its answer could come with the node's end, and nobody else has it."""
    d, p = desk("a", "b")
    created = p.create("x", node=NodeId("a"))
    d.auto = False
    if not end:  # its worker retires
        d.tell(WorkerGone(address=d.catalog.nodes.records[NodeId("a")].card.worker))
    asked = drain(p, "a")
    p.ask(msgspec.structs.replace(asked, end=end))
    p.fill("x", created)
    commit = m.CommitCreated(rid=p.rid(), generation=created.generation, deadline_s=9.0)
    p.ask(commit)
    d.flush()
    assert isinstance(p.answers[asked.rid], m.Drained)
    assert isinstance(p.answers[commit.rid], m.Fault)
    d.auto = True
    assert p.put("x", node=NodeId("b")).version == 1


@pytest.mark.parametrize("linked", [True, False])
def test_a_node_whose_worker_retired_ends_and_says_so(linked: bool) -> None:
    d, p = desk("a", "b")
    a = d.nodes[NodeId("a")]
    if not linked:
        a.lose_link()
    d.tell(NodeRetired(node=a.node, why="its worker retired"))
    if not linked:
        a.join()
    assert m.DoEnd(why="its worker retired") in a.inbox
    assert [one.node for one in d.catalog.nodes.facts() if one.live] == ["b"]
    d.pass_time(20.0)
    topics = [one.topic for one in d.emitted if one.facts.get("node") == "a"]
    assert "node_ended" in topics
    assert "node_lapsed" not in topics
    assert not [one for one in d.logs if "lapsed" in one.text]
    with pytest.raises(PeerLost, match="its worker retired, and ended"):
        p.call(drain(p, "a"), m.Drained)


def test_a_node_that_was_ended_without_a_link_is_told_when_it_comes_back() -> None:
    d, p = desk("a", "b")
    info = p.put("x", node=NodeId("a"))
    p.call(ensure(p, info.generation, "b"), m.Moved)
    a = d.nodes[NodeId("a")]
    a.lose_link()
    p.call(drain(p, "a"), m.Drained)
    rid = p.ask(m.Destroy(rid=p.rid(), id=info.id, deadline_s=60.0))
    d.pass_time(2.0)
    assert not p.answered(rid), "node a does not know of it and has its lease"
    a.join()
    assert any(isinstance(one, m.DoEnd) for one in a.inbox)
    a.lose_link()
    d.pass_time(6.0)
    assert p.result(rid, m.Destroyed).versions == (1,)


def test_a_destroy_waits_for_the_lease_of_a_node_that_was_ended_meanwhile() -> None:
    d, p = desk("a", "b")
    info = p.put("x", node=NodeId("a"))
    d.nodes[NodeId("a")].lose_link()
    rid = p.ask(m.Destroy(rid=p.rid(), id=info.id, deadline_s=60.0))
    d.flush()
    p.call(drain(p, "a"), m.Drained)
    d.pass_time(2.0)
    assert not p.answered(rid)
    d.pass_time(6.0)
    assert p.result(rid, m.Destroyed).versions == (1,)


def test_what_a_drain_has_moved_is_kept_there_while_the_node_still_empties() -> None:
    d, p = desk("a", "b")
    moved = p.put("x", node=NodeId("a")).generation
    p.put("y", node=NodeId("a"))
    b = d.nodes[NodeId("b")]
    b.obedient = False
    rid = p.ask(drain(p, "a"))
    pulls = [one for one in b.inbox if isinstance(one, m.DoPull)]
    b.obey(next(one for one in pulls if one.generation == moved))
    d.flush()
    assert p.locate(moved) == ["a", "b"]
    b.say(m.MayDrop(rid=RequestId("r"), generations=(moved,)))
    assert b.granted == []
    with pytest.raises(Mismatch):
        p.call(m.Release(rid=p.rid(), generation=moved, node=b.node), type(None))
    b.obey(next(one for one in pulls if one.generation != moved))
    assert p.result(rid, m.Drained).stayed == ()
    assert p.locate(moved) == ["b"]


def test_drain_that_cannot_move_all_says_what_stayed_and_does_not_end_the_node() -> (
    None
):
    _d, p = desk("a")
    info = p.put("x")
    receipt = p.call(drain(p, "a"), m.Drained)
    assert [generation for generation, _ in receipt.stayed] == [info.generation]
    assert p.locate(info.generation) == ["a"]
    assert p.put("y").version == 1


def test_drain_takes_its_deadline_as_the_end_and_gives_the_receipt() -> None:
    d, p = desk("a", "b")
    info = p.put("x", node=NodeId("a"))
    d.nodes[NodeId("b")].obedient = False
    rid = p.ask(drain(p, "a", deadline_s=1.0))
    d.pass_time(1.5)
    receipt = p.result(rid, m.Drained)
    assert receipt.stayed[0][0] == info.generation
    assert d.catalog.debug_state()["moves"] == 0


def waiting(kind: str) -> tuple[Desk, Program, m.ArtifactInfo, RequestId]:
    """A request that waits for a node to claim its replica after a restart."""
    d, p = desk("a", "b")
    info = p.put("x", node=NodeId("a"))
    d = d.restart()
    p.open()
    d.nodes[NodeId("b")].join()
    if kind == "ensure":
        rid = p.ask(ensure(p, info.generation, deadline_s=60.0))
    elif kind == "migrate":
        rid = p.ask(migrate(p, info.generation, "a", "b", deadline_s=60.0))
    else:
        rid = p.ask(
            m.SaveFile(
                rid=p.rid(), generation=info.generation, path="/o", deadline_s=60.0
            )
        )
    d.flush()
    assert not p.answered(rid)
    return d, p, info, rid


@pytest.mark.parametrize("kind", ["ensure", "migrate", "save"])
def test_p31_a_request_waits_for_the_claim_after_a_restart_and_goes_on(
    kind: str,
) -> None:
    d, p, _, rid = waiting(kind)
    d.nodes[NodeId("a")].join()
    d.flush()
    assert p.result(rid, m.Moved).location.card.node in {"a", "b"}


@pytest.mark.parametrize("kind", ["ensure", "migrate", "save"])
def test_a_request_that_waits_for_a_claim_ends_when_it_is_lost_or_destroyed(
    kind: str,
) -> None:
    d, p, _, rid = waiting(kind)
    d.pass_time(11.0)
    with pytest.raises(DataLost):
        p.result(rid, m.Moved)
    d, p, _, rid = waiting(kind)
    p.ask(m.Destroy(rid=p.rid(), id=ArtifactId("x")))
    d.flush()
    with pytest.raises(Gone):
        p.result(rid, m.Moved)
    d, p, _, rid = waiting(kind)
    p.call(m.CancelAsked(rid=p.rid(), asked=rid), type(None))
    d.nodes[NodeId("a")].join()
    with pytest.raises(DeadlineExceeded):
        p.result(rid, m.Moved)


def test_a_migration_whose_source_was_pinned_meanwhile_keeps_both() -> None:
    d, p = desk("a", "b")
    info = p.put("x", node=NodeId("a"))
    d.nodes[NodeId("b")].obedient = False
    rid = p.ask(migrate(p, info.generation, "a", "b"))
    pin = m.Pin(rid=p.rid(), generation=info.generation, ttl_s=60.0, node=NodeId("a"))
    p.call(pin, m.Pinned)
    d.nodes[NodeId("b")].obey_all()
    d.flush()
    with pytest.raises(Mismatch, match="pinned"):
        p.result(rid, m.Moved)
    assert sorted(p.locate(info.generation)) == ["a", "b"]


def test_a_migration_that_has_switched_ends_well_at_its_deadline() -> None:
    d, p = desk("a", "b")
    info = p.put("x", node=NodeId("a"))
    d.nodes[NodeId("a")].obedient = False
    rid = p.ask(migrate(p, info.generation, "a", "b", deadline_s=1.0))
    d.pass_time(1.5)
    assert p.result(rid, m.Moved).location.card.node == "b"
    assert p.locate(info.generation) == ["b"]


def test_a_disk_copy_on_the_host_is_brought_up_there() -> None:
    d, p = desk("a")
    b = d.node("b", "hb")
    info = p.put("x", node=NodeId("a"))
    disk = msgspec.structs.replace(
        d.nodes[NodeId("a")].held[info.generation], tier=m.Tier.DISK
    )
    b.hold(disk)
    moved = p.call(ensure(p, info.generation, host="hb"), m.Moved)
    assert moved.location.card.node == "b"
    assert moved.location.tier is m.Tier.HOST


def test_a_drain_passes_over_what_is_destroyed_meanwhile_and_can_be_cancelled() -> None:
    d, p = desk("a", "b")
    for number in range(12):
        p.put(f"x{number}", node=NodeId("a"))
    d.nodes[NodeId("b")].obedient = False
    rid = p.ask(drain(p, "a"))
    for number in range(12):
        p.ask(m.Destroy(rid=p.rid(), id=ArtifactId(f"x{number}")))
    d.flush()
    assert p.result(rid, m.Drained).moved == ()
    d, p = desk("a", "b")
    p.put("x", node=NodeId("a"))
    d.nodes[NodeId("b")].obedient = False
    rid = p.ask(drain(p, "a"))
    p.call(m.CancelAsked(rid=p.rid(), asked=rid), type(None))
    assert d.catalog.debug_state()["moves"] == 0
    assert p.put("y", node=NodeId("a")).version == 1
