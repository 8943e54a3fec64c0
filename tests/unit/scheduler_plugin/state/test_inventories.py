from __future__ import annotations

import msgspec
import pytest

from tensorcast_dask.exceptions import DataLost, Gone, NotFound
from tensorcast_dask.scheduler_plugin.state.catalog import Catalog
from tensorcast_dask.scheduler_plugin.state.events import NodeSaid
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    Generation,
    NodeId,
    RequestId,
    Version,
)
from tests.kit.catalogs import Desk, index_of


def test_p30_a_new_life_of_a_node_has_what_it_announces_and_nothing_else() -> None:
    d = Desk()
    a = d.node("a")
    p = d.program()
    one, two = p.put("one"), p.put("two")
    old_link = a.link
    a.incarnation = 2
    del a.held[two.generation]
    a.join(announce=False)
    assert d.catalog.holders.listed(d.catalog.names.versions[one.generation]) == []
    a.announce()
    assert p.locate(one.generation) == [a.node]
    with pytest.raises(DataLost):
        p.locate(two.generation)
    late = d.record(two.generation, "two", 1, index_of(100))
    d.tell(_said(old_link, m.ReplicaReady(record=late)))
    with pytest.raises(DataLost):
        p.locate(two.generation)


def _said(link: int, message: m.FromNode) -> NodeSaid:
    return NodeSaid(link=link, message=message)


def test_p31_unknown_leftovers_are_reported_and_dropped_never_used() -> None:
    d = Desk()
    a = d.node("a")
    stray = d.record(Generation(77), "stray", 1, index_of(10))
    a.held[stray.generation] = stray
    a.join()
    assert a.held == {}
    assert any(one.topic == "leftover" for one in d.emitted)
    with pytest.raises(NotFound):
        d.program().resolve("stray")


def test_late_news_of_a_generation_of_this_life_is_dropped_without_alarm() -> None:
    d = Desk()
    a = d.node("a")
    p = d.program()
    info = p.put("x", node=a.node)
    p.destroy("x")
    a.hold(d.record(info.generation, "x", 1, index_of(100)))
    assert a.held == {}
    assert not any(one.topic == "leftover" for one in d.emitted)


def test_a_replica_of_other_content_than_the_catalog_knows_is_a_leftover() -> None:
    d = Desk()
    a, b = d.node("a"), d.node("b")
    p = d.program()
    info = p.put("x", node=a.node)
    b.hold(d.record(info.generation, "x", 1, index_of(200)))
    b.hold(d.record(info.generation, "y", 1, index_of(100)))
    assert p.locate(info.generation) == [a.node]
    assert b.held == {}


def test_p31_with_the_journal_lost_the_catalog_is_rebuilt_from_its_nodes() -> None:
    d = Desk()
    a, b = d.node("a"), d.node("b")
    p = d.program()
    infos = [p.put(f"x{n}", labels={"n": str(n)}) for n in range(5)]
    p.put("x0", version=-1)
    p.publish(infos[0].generation)
    for node in (a, b):
        for generation, mark in node.marks.items():
            if generation in node.held:
                node.held[generation] = msgspec.structs.replace(
                    node.held[generation], published=mark.published
                )
    p.destroy("x4")
    d = d.restart(lost=True)
    a.join()
    b.join()
    assert a.welcome is not None
    assert a.welcome.need_index
    p.open()
    assert p.resolve("x0", published=True).version == 1
    assert p.resolve("x0", 2).generation > infos[0].generation
    for number in range(4):
        found = p.resolve(f"x{number}")
        assert found.labels == {"n": str(number)}
        assert p.locate(found.generation)
    with pytest.raises(NotFound):
        p.resolve("x4")
    assert p.put("x0", version=-1).version == 3


@pytest.mark.parametrize("lost", [True, False])
def test_a_publish_that_the_journal_does_not_have_is_taken_back_where_rows_are_lost(
    lost: bool,
) -> None:
    """Elsewhere nobody was told of it: it was not, and the node that was told hears so."""
    d = Desk()
    a, p = d.node("a"), d.program()
    info = p.put("x")
    rows = tuple(d.rows)
    p.publish(info.generation)
    held = a.held[info.generation]
    a.held[info.generation] = msgspec.structs.replace(held, published=True)
    a.marks.clear()
    d = d.restart(lost=lost)
    recovered = msgspec.structs.replace(d.recovered, rows=rows)
    d.catalog = Catalog(d.settings, recovered)
    a.join()
    p.open()
    assert d.catalog.names.versions[info.generation].published is lost
    if lost:
        assert p.resolve("x", published=True).generation == info.generation
    else:
        assert a.marks[info.generation].published is False


def test_what_a_node_was_ordered_to_drop_is_not_taken_back_from_it_but_from_others() -> (
    None
):
    d = Desk()
    a, b, p = d.node("a"), d.node("b"), d.program()
    info = p.put("x", replicas=2)
    d = d.restart(lost=True)
    a.obedient = False
    held = a.held.pop(info.generation)
    a.join()
    # It was on its way while the catalog was away, and is told of without its index.
    a.say(m.ReplicaReady(record=msgspec.structs.replace(held, index=b"")))
    assert [one.generation for one in a.inbox if isinstance(one, m.DoDrop)] == [
        info.generation
    ]
    a.held[info.generation] = held
    a.join()
    p.open()
    with pytest.raises(NotFound):
        p.resolve("x")
    b.join()
    assert p.locate(p.resolve("x").generation) == [b.node]


def test_p31_what_a_rebuilt_catalog_destroyed_does_not_come_back() -> None:
    d = Desk()
    a = d.node("a")
    p = d.program()
    info = p.put("x")
    d = d.restart(lost=True)
    a.join()
    p.open()
    stale = dict(a.held)
    p.destroy("x")
    a.held = stale
    a.join()
    assert a.held == {}
    with pytest.raises(Gone):
        p.locate(info.generation)


def test_a_broken_index_from_a_node_does_not_make_an_artifact() -> None:
    d = Desk().restart(lost=True)
    a = d.node("a")
    good = d.record(Generation(5), "x", 1, index_of(10))
    for bad in (
        msgspec.structs.replace(good, index=b"\xff"),
        msgspec.structs.replace(good, id=ArtifactId(" ")),
        msgspec.structs.replace(good, version=Version(0)),
        msgspec.structs.replace(good, index=b""),
    ):
        a.hold(bad)
        assert a.held == {}
    a.hold(good)
    assert list(a.held) == [5]


def test_a_dropped_tier_leaves_the_others_and_the_last_one_the_list() -> None:
    d = Desk()
    a = d.node("a")
    p = d.program()
    info = p.put("x")
    disk = msgspec.structs.replace(a.held[info.generation], tier=m.Tier.DISK)
    a.say(m.ReplicaReady(record=disk))
    record = d.catalog.names.versions[info.generation]
    assert record.holders[a.node].tiers == (m.Tier.HOST, m.Tier.DISK)
    gone = m.ReplicaDropped(generation=info.generation, tier=m.Tier.HOST, why="spilled")
    a.say(gone)
    assert record.holders[a.node].nearest is m.Tier.DISK
    a.say(m.ReplicaDropped(generation=info.generation, tier=m.Tier.DISK, why="bad"))
    with pytest.raises(DataLost):
        p.locate(info.generation)
    a.say(m.ReplicaDropped(generation=Generation(999), tier=m.Tier.DISK, why=""))


def test_p24_leave_to_drop_is_given_for_spare_copies_and_for_strays_only() -> None:
    d = Desk()
    a, b = d.node("a"), d.node("b")
    p = d.program()
    single, double = p.put("one", node=a.node), p.put("two", node=a.node)
    p.call(
        m.Ensure(
            rid=p.rid(), generation=double.generation, node=b.node, deadline_s=5.0
        ),
        m.Moved,
    )
    asked = (single.generation, double.generation, Generation(12345))
    a.say(m.MayDrop(rid=RequestId("r1"), generations=asked))
    assert a.granted == [double.generation, 12345]
    assert p.locate(double.generation) == [b.node]
    b.say(m.MayDrop(rid=RequestId("r2"), generations=asked))
    assert double.generation not in b.granted
    assert p.locate(double.generation) == [b.node]


def test_what_is_ready_while_an_inventory_arrives_counts_as_claimed() -> None:
    d = Desk()
    a = d.node("a")
    p = d.program()
    info = p.put("x")
    record = a.held[info.generation]
    a.incarnation = 2
    a.join(announce=False)
    a.say(m.Inventory(replicas=(), more=True))
    a.say(m.ReplicaReady(record=record))
    a.say(m.Inventory(replicas=()))
    assert p.locate(info.generation) == [a.node]


def test_a_rebuilt_catalog_does_not_commit_what_its_own_writers_gave_back() -> None:
    d = Desk().restart(lost=True)
    a = d.node("a")
    p = d.program()
    created = p.create("x")
    p.fill("x", created)
    stale = dict(a.held)
    abort = m.AbortCreated(rid=p.rid(), generation=created.generation)
    p.call(abort, type(None))
    a.held = stale
    a.join()
    assert a.held == {}
    with pytest.raises(NotFound):
        p.resolve("x")


def test_what_is_dropped_while_an_inventory_arrives_is_not_claimed() -> None:
    d = Desk()
    a = d.node("a")
    p = d.program()
    info = p.put("x")
    record = a.held[info.generation]
    a.incarnation = 2
    a.join(announce=False)
    a.say(m.Inventory(replicas=(record,), more=True))
    a.say(m.ReplicaDropped(generation=info.generation, tier=m.Tier.HOST, why="full"))
    a.say(m.Inventory(replicas=()))
    with pytest.raises(DataLost):
        p.locate(info.generation)


def test_a_tier_that_a_new_life_does_not_have_is_taken_off() -> None:
    d = Desk()
    a = d.node("a")
    p = d.program()
    info = p.put("x")
    disk = msgspec.structs.replace(a.held[info.generation], tier=m.Tier.DISK)
    a.say(m.ReplicaReady(record=disk))
    a.join()
    record = d.catalog.names.versions[info.generation]
    assert record.holders[a.node].tiers == (m.Tier.HOST,)


@pytest.mark.parametrize("whole", [False, True])
def test_what_was_destroyed_before_its_node_came_back_is_not_rebuilt(
    whole: bool,
) -> None:
    d = Desk()
    d.node("a")
    p = d.program()
    info = p.put("x")
    d = d.restart(lost=True)
    p.open(settled=p.count)
    assert p.destroy("x", 0 if whole else info.generation) == ()
    d.nodes[NodeId("a")].join()
    with pytest.raises(NotFound):
        p.resolve("x")
    assert d.nodes[NodeId("a")].held == {}


def test_a_number_that_was_used_and_destroyed_since_the_loss_is_not_taken_back() -> (
    None
):
    d = Desk()
    a = d.node("a")
    p = d.program()
    old = p.put("x")
    d = d.restart(lost=True)
    p.open(settled=p.count)
    b = d.node("b")
    new = p.put("x", node=b.node)
    assert new.version == old.version
    assert p.destroy("x", new.generation) == (new.version,)
    a.join()
    with pytest.raises(Gone):
        p.resolve("x")
    assert a.held == {}


def test_a_copy_of_a_commit_that_the_journal_lost_is_dropped_and_made_again() -> None:
    d = Desk()
    a, b = d.node("a"), d.node("b")
    p = d.program()
    created = p.create("x", node=a.node, replicas=2)
    p.fill("x", created)
    copy = a.held[created.generation]
    b.obedient = False
    b.hold(copy)
    (drop,) = [one for one in b.inbox if isinstance(one, m.DoDrop)]
    assert not drop.final
    b.say(m.ReplicaReady(record=copy))
    b.announce()
    assert len(b.inbox) == 1
    commit = m.CommitCreated(rid=p.rid(), generation=created.generation, deadline_s=9.0)
    p.ask(commit)
    assert p.locate(created.generation) == [a.node]
    b.obedient = True
    b.obey_all()
    d.pass_time(1.0)
    assert p.result(commit.rid, m.ArtifactInfo).degraded == ""
    assert p.locate(created.generation) == [a.node, b.node]
