from __future__ import annotations

import math

import msgspec
import pytest

from tensorcast_dask.exceptions import (
    AlreadyExists,
    CapacityError,
    DeadlineExceeded,
    Gone,
    Incomplete,
    InvalidArgument,
    InvalidName,
    Mismatch,
    NotFound,
    PeerLost,
)
from tensorcast_dask.scheduler_plugin.state.creations import KEEP_AFTER_S
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ArtifactId, Generation, NodeId, RequestId
from tests.kit.catalogs import Desk, Program, index_of


def desk() -> Desk:
    d = Desk()
    d.node("a")
    d.node("b")
    return d


def commit(generation: int, rid: str, deadline_s: float = 5.0) -> m.CommitCreated:
    return m.CommitCreated(
        rid=RequestId(rid), generation=Generation(generation), deadline_s=deadline_s
    )


def test_a_put_is_seen_only_after_commit_and_announcement_in_either_order() -> None:
    for announced_first in (True, False):
        d = desk()
        p = d.program()
        created = p.create("x")
        if announced_first:
            p.fill("x", created)
        with pytest.raises(Incomplete):
            p.resolve("x")
        rid = p.ask(commit(created.generation, "s-900"))
        if not announced_first:
            d.flush()
            assert not p.answered(rid)
            with pytest.raises(Incomplete):
                p.resolve("x")
            p.fill("x", created)
        d.flush()
        assert p.result(rid, m.ArtifactInfo).stage is m.Stage.COMMITTED
        assert p.resolve("x").generation == created.generation
        assert p.locate(created.generation) == [created.node.node]


def bringing(p: Program, name: str, rid: str, deadline_s: float = 5.0) -> m.Create:
    index = index_of(100)
    return m.Create(
        rid=p.rid(),
        id=ArtifactId(name),
        nbytes=index.nbytes,
        index=index.encode(),
        index_digest=index.digest(),
        tensors=1,
        commit=RequestId(rid),
        commit_deadline_s=deadline_s,
    )


def test_a_creation_that_brings_its_commit_is_a_version_once_it_is_announced() -> None:
    d = desk()
    p = d.program()
    ask = bringing(p, "x", "s-900")
    created = p.call(ask, m.Created)
    assert not p.answered(RequestId("s-900"))
    with pytest.raises(Incomplete):
        p.resolve("x")
    p.fill("x", created)
    d.flush()
    info = p.result(RequestId("s-900"), m.ArtifactInfo)
    assert (info.stage, info.generation) == (m.Stage.COMMITTED, created.generation)
    # Who does not know that it happened asks again, word for word.
    assert p.call(ask, m.Created) == created
    assert p.call(commit(created.generation, "s-900"), m.ArtifactInfo) == info
    with pytest.raises(Mismatch):
        p.call(commit(created.generation, "s-900", deadline_s=6.0), m.ArtifactInfo)
    assert len(d.catalog.operations) == 0


def test_a_commit_that_was_brought_ends_with_its_creation() -> None:
    d = desk()
    p = d.program()
    created = p.call(bringing(p, "x", "s-900"), m.Created)
    abort = m.AbortCreated(rid=p.rid(), generation=created.generation)
    p.call(abort, type(None))
    with pytest.raises(Gone):
        p.result(RequestId("s-900"), m.ArtifactInfo)
    created = p.call(bringing(p, "x", "s-901", deadline_s=2.0), m.Created)
    d.pass_time(2.5)
    with pytest.raises(DeadlineExceeded):
        p.result(RequestId("s-901"), m.ArtifactInfo)
    assert d.catalog.debug_state()["creations"] == 1


def test_a_refused_creation_asks_for_no_commit() -> None:
    d = desk()
    p = d.program()
    p.put("x")
    with pytest.raises(AlreadyExists):
        p.call(bringing(p, "x", "s-900"), m.Created)
    assert not p.answered(RequestId("s-900"))
    assert p.put("y", at_once=True).version == 1


def test_a_put_that_brought_its_commit_is_journaled_as_a_creation_only_when_it_is_slow() -> (
    None
):
    d = desk()
    p = d.program()
    before = len(d.rows)
    p.put("quick", at_once=True)
    kinds = sorted(row.kind for row in d.rows[before:])
    assert kinds == ["index", "outcome", "version"]
    slow = p.call(bringing(p, "slow", "s-900", deadline_s=9.0), m.Created)
    before = len(d.rows)
    d.pass_time(KEEP_AFTER_S / 2)
    later = p.call(bringing(p, "later", "s-901", deadline_s=9.0), m.Created)
    assert d.rows[before:] == []
    d.pass_time(KEEP_AFTER_S / 2)
    rows = [(row.kind, row.key) for row in d.rows[before:]]
    assert rows == [("creating", str(slow.generation)), ("index", str(slow.generation))]
    d.pass_time(KEEP_AFTER_S)
    assert {row.key for row in d.rows[before + 2 :]} == {str(later.generation)}
    d = d.restart()
    for node in d.nodes.values():
        node.join()
    p.open()
    p.fill("slow", slow)
    found = p.call(commit(slow.generation, "s-900", deadline_s=9.0), m.ArtifactInfo)
    assert found.generation == slow.generation


def test_p17_sixteen_creators_of_one_name_have_one_winner_and_the_catalog_lives() -> (
    None
):
    d = desk()
    programs = [d.program(f"s{n}") for n in range(16)]
    won, lost = [], 0
    for program in programs:
        try:
            won.append((program, program.create("same")))
        except AlreadyExists:
            lost += 1
    assert (len(won), lost) == (1, 15)
    program, created = won[0]
    program.fill("same", created)
    program.call(commit(created.generation, "s0-99"), m.ArtifactInfo)
    for program in programs:
        with pytest.raises(AlreadyExists) as taken:
            program.create("same")
        assert taken.value.data["generation"] == created.generation
        assert program.resolve("same").generation == created.generation


def test_p17_a_second_put_of_the_same_name_is_told_what_is_there() -> None:
    d = desk()
    p = d.program()
    info = p.put("x")
    with pytest.raises(AlreadyExists) as taken:
        p.create("x")
    assert taken.value.data["index_digest"] == info.index_digest
    assert taken.value.data["nbytes"] == info.nbytes


def test_the_commit_is_answered_after_the_copies_are_made_on_other_hosts() -> None:
    d = desk()
    d.node("a2", "h-a")
    p = d.program()
    info = p.put("x", replicas=2)
    hosts = {d.nodes[node].host for node in p.locate(info.generation)}
    assert hosts == {"h-a", "h-b"}
    assert info.degraded == ""


def test_a_shortfall_of_copies_is_said_and_kept() -> None:
    d = desk()
    p = d.program()
    info = p.put("x", replicas=3)
    assert info.stage is m.Stage.COMMITTED
    assert "2 of 3 hosts" in info.degraded
    assert "2 of 3 hosts" in p.resolve("x").degraded


def test_copies_that_are_late_leave_the_version_degraded_at_the_deadline() -> None:
    d = desk()
    for node in d.nodes.values():
        node.obedient = False
    p = d.program()
    created = p.create("x", replicas=2)
    p.fill("x", created)
    rid = p.ask(commit(created.generation, "s-90", deadline_s=1.0))
    d.pass_time(1.5)
    assert "1 of 2 hosts" in p.result(rid, m.ArtifactInfo).degraded


def test_p25_a_creation_dies_with_its_session_after_a_grace() -> None:
    d = desk()
    p, other = d.program("s"), d.program("o")
    created = p.create("x")
    p.fill("x", created)
    p.lose_comm()
    d.pass_time(1.0)
    with pytest.raises(AlreadyExists):
        other.create("x")
    d.pass_time(1.5)
    assert other.put("x").version == 1
    assert created.generation not in d.nodes[created.node.node].held
    p.open()
    with pytest.raises(Gone):
        p.call(commit(created.generation, "s-99"), m.ArtifactInfo)


def test_a_session_that_comes_back_within_its_grace_keeps_its_creations() -> None:
    d = desk()
    p = d.program()
    created = p.create("x")
    p.lose_comm()
    d.pass_time(1.0)
    p.open()
    d.pass_time(5.0)
    p.fill("x", created)
    assert p.call(commit(created.generation, "s-99"), m.ArtifactInfo).version == 1


def test_p25_a_creation_without_a_sign_of_life_is_rolled_back_at_its_time() -> None:
    d = desk()
    p = d.program()
    created = p.create("x", ttl_s=5.0)
    d.pass_time(4.0)
    keep = m.KeepCreating(rid=p.rid(), generation=created.generation, ttl_s=5.0)
    p.call(keep, type(None))
    d.pass_time(4.0)
    with pytest.raises(Incomplete):
        p.resolve("x")
    d.pass_time(2.0)
    with pytest.raises(NotFound):
        p.resolve("x")
    assert d.catalog.debug_state()["creations"] == 0


def test_p25_destroy_ends_a_creation_and_its_commit_says_so() -> None:
    d = desk()
    p = d.program()
    created = p.create("x")
    rid = p.ask(commit(created.generation, "s-90"))
    assert p.destroy("x") == ()
    with pytest.raises(Gone):
        p.result(rid, m.ArtifactInfo)
    assert p.put("x").version == 1


def test_an_aborted_creation_gives_its_name_back_and_its_node_drops_it() -> None:
    d = desk()
    p = d.program()
    created = p.create("x")
    p.fill("x", created)
    abort = m.AbortCreated(rid=p.rid(), generation=created.generation)
    p.call(abort, type(None))
    assert d.nodes[created.node.node].held == {}
    assert p.put("x").version == 1
    p.call(m.AbortCreated(rid=p.rid(), generation=Generation(5)), type(None))


def test_a_creation_ends_with_its_node() -> None:
    d = desk()
    p = d.program()
    created = p.create("x")
    rid = p.ask(commit(created.generation, "s-90", deadline_s=100.0))
    d.nodes[created.node.node].lose_link()
    d.pass_time(7.0)
    with pytest.raises(PeerLost):
        p.result(rid, m.ArtifactInfo)
    assert p.put("x").version == 1


def test_a_commit_that_nobody_announces_ends_at_its_deadline_and_may_be_repeated() -> (
    None
):
    d = desk()
    p = d.program()
    created = p.create("x")
    rid = p.ask(commit(created.generation, "s-90", deadline_s=1.0))
    d.pass_time(1.1)
    with pytest.raises(DeadlineExceeded):
        p.result(rid, m.ArtifactInfo)
    p.fill("x", created)
    assert p.call(commit(created.generation, "s-91"), m.ArtifactInfo).version == 1
    assert p.call(commit(created.generation, "s-92"), m.ArtifactInfo).version == 1


def test_a_replica_of_another_size_than_its_writer_said_is_refused() -> None:
    d = desk()
    p = d.program()
    created = p.create("x", nbytes=100)
    rid = p.ask(commit(created.generation, "s-90"))
    node = d.nodes[created.node.node]
    record = d.record(created.generation, "x", 1, index_of(100))
    node.hold(msgspec.structs.replace(record, nbytes=99))
    with pytest.raises(Mismatch):
        p.result(rid, m.ArtifactInfo)
    assert p.put("x").version == 1


def test_an_announcement_by_another_node_than_the_chosen_one_does_not_count() -> None:
    d = desk()
    p = d.program()
    created = p.create("x")
    rid = p.ask(commit(created.generation, "s-90"))
    other = "b" if created.node.node == "a" else "a"
    d.nodes[NodeId(other)].hold(d.record(created.generation, "x", 1, index_of(100)))
    d.flush()
    assert not p.answered(rid)


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"nbytes": -1}, InvalidArgument),
        ({"replicas": 0}, InvalidArgument),
        ({"version": -2}, InvalidArgument),
        ({"tensors": -1}, InvalidArgument),
        ({"ttl_s": math.nan}, InvalidArgument),
        ({"labels": {"": ""}}, InvalidName),
        ({"id": ArtifactId(" x")}, InvalidName),
        ({"id": ArtifactId("")}, InvalidName),
        ({"nbytes": 1 << 40}, CapacityError),
        ({"node": NodeId("z")}, NotFound),
        ({"owner": m.Owner.CALLER}, Mismatch),
        ({"owner": m.Owner.CALLER, "replicas": 2}, Mismatch),
    ],
)
def test_a_wrong_create_gets_its_error_and_changes_nothing(
    more: dict[str, object], error: type[Exception]
) -> None:
    d = desk()
    p = d.program()
    before = d.catalog.debug_state()
    fields: dict[str, object] = {
        "rid": p.rid(),
        "id": ArtifactId("x"),
        "nbytes": 1,
        "index": b"",
        "index_digest": "",
        "tensors": 1,
    }
    with pytest.raises(error):
        p.call(m.Create(**(fields | more)), m.Created)  # type: ignore[arg-type]
    after = d.catalog.debug_state()
    assert {k: v for k, v in after.items() if k != "outcomes"} == {
        k: v for k, v in before.items() if k != "outcomes"
    } | {"outcome_sessions": 1}
    assert p.put("x").version == 1


def test_a_registration_of_a_dead_process_frees_its_name() -> None:
    d = desk()
    p = d.program()
    owner = d.node("i", "h-client", kind="instance")
    info = p.put("x", owner=m.Owner.CALLER, node=owner.node)
    with pytest.raises(AlreadyExists):
        p.create("x")
    owner.lose_link()
    d.pass_time(7.0)
    assert p.put("x").version == info.version + 1


def test_a_creation_that_was_spilled_before_its_commit_lies_where_it_lies() -> None:
    d = Desk()
    a = d.node("a")
    p = d.program()
    created = p.create("x")
    p.fill("x", created)
    host = a.held[created.generation]
    disk = msgspec.structs.replace(host, tier=m.Tier.DISK)
    a.say(m.ReplicaReady(record=disk))
    gone = m.ReplicaDropped(
        generation=created.generation, tier=m.Tier.HOST, why="spilled"
    )
    a.say(gone)
    ask = m.CommitCreated(rid=p.rid(), generation=created.generation, deadline_s=9.0)
    p.call(ask, m.ArtifactInfo)
    record = d.catalog.names.versions[created.generation]
    assert record.holders[a.node].tiers == (m.Tier.DISK,)


def test_a_creation_is_where_its_nodes_last_inventory_has_it() -> None:
    d = Desk()
    a = d.node("a")
    p = d.program()
    created = p.create("x")
    p.fill("x", created)
    host = a.held[created.generation]
    a.lose_link()
    a.held[created.generation] = msgspec.structs.replace(host, tier=m.Tier.DISK)
    a.join()
    ask = m.CommitCreated(rid=p.rid(), generation=created.generation, deadline_s=9.0)
    p.call(ask, m.ArtifactInfo)
    record = d.catalog.names.versions[created.generation]
    assert record.holders[a.node].tiers == (m.Tier.DISK,)
