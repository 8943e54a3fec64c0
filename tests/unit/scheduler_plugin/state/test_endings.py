from __future__ import annotations

import msgspec
import pytest

from tensorcast_dask.exceptions import (
    DeadlineExceeded,
    Gone,
    Mismatch,
    NotFound,
)
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ArtifactId, Generation, NodeId, RequestId
from tests.kit.catalogs import Desk, FakeNode, Program


def desk() -> tuple[Desk, FakeNode, FakeNode, Program]:
    d = Desk()
    return d, d.node("a"), d.node("b"), d.program()


def destroy(p: Program, name: str, deadline_s: float = 60.0) -> m.Destroy:
    return m.Destroy(rid=p.rid(), id=ArtifactId(name), deadline_s=deadline_s)


def release(p: Program, generation: int, node: str = "") -> m.Release:
    return m.Release(rid=p.rid(), generation=Generation(generation), node=NodeId(node))


def test_destroy_is_answered_after_the_journal_and_after_every_holder_dropped_it() -> (
    None
):
    d, a, b, p = desk()
    info = p.put("x", replicas=2)
    d.auto = False
    a.obedient = b.obedient = False
    rid = p.ask(destroy(p, "x"))
    assert not any(isinstance(one, m.DoDrop) for one in a.inbox + b.inbox)
    d.flush()
    a.obey_all()
    d.flush()
    assert not p.answered(rid)
    b.obey_all()
    d.flush()
    assert p.result(rid, m.Destroyed).versions == (1,)
    assert info.generation not in a.held
    assert info.generation not in b.held


def test_p27_what_is_destroyed_is_gone_at_once_and_its_name_is_free() -> None:
    d, a, _, p = desk()
    for _ in range(50):
        info = p.put("x", node=a.node)
        a.obedient = False
        p.ask(destroy(p, "x"))
        d.flush()
        with pytest.raises(Gone):
            p.locate(info.generation)
        a.obedient = True
        fresh = p.put("x", node=a.node)
        assert fresh.generation > info.generation
        assert p.resolve("x").generation == fresh.generation
        assert p.locate(fresh.generation) == [a.node]
        a.obey_all()
        assert p.locate(fresh.generation) == [a.node]
        p.destroy("x")


def test_a_holder_without_a_lease_is_not_waited_for_and_drops_when_it_comes_back() -> (
    None
):
    d, _a, b, p = desk()
    info = p.put("x", replicas=2)
    b.lose_link()
    rid = p.ask(destroy(p, "x"))
    d.flush()
    assert not p.answered(rid)
    d.pass_time(7.0)
    assert p.result(rid, m.Destroyed).versions == (1,)
    b.join()
    assert info.generation not in b.held


def test_destroy_is_idempotent_and_a_second_one_waits_for_the_same_drops() -> None:
    d, a, _, p = desk()
    p.put("x", node=a.node)
    a.obedient = False
    first, second = p.ask(destroy(p, "x")), p.ask(destroy(p, "x"))
    d.flush()
    assert not p.answered(first)
    assert not p.answered(second)
    a.obey_all()
    d.flush()
    assert p.result(first, m.Destroyed).versions == (1,)
    assert p.result(second, m.Destroyed).versions == ()
    assert p.destroy("x") == ()
    assert p.destroy("never") == ()


def test_destroy_that_meets_its_deadline_has_happened_all_the_same() -> None:
    d, a, _, p = desk()
    p.put("x", node=a.node)
    a.obedient = False
    rid = p.ask(destroy(p, "x", deadline_s=1.0))
    d.pass_time(1.5)
    with pytest.raises(DeadlineExceeded):
        p.result(rid, m.Destroyed)
    with pytest.raises(Gone):
        p.resolve("x")
    a.obey_all()
    assert d.catalog.debug_state()["endings"] == 0


def test_one_version_is_destroyed_and_the_others_stay() -> None:
    _, _, _, p = desk()
    first, second = p.put("x"), p.put("x", version=-1)
    assert p.destroy("x", second.generation) == (2,)
    assert p.resolve("x").generation == first.generation
    with pytest.raises(Mismatch):
        p.destroy("y", first.generation)


def test_a_node_that_is_just_getting_a_copy_is_told_to_drop_it_too() -> None:
    d, a, b, p = desk()
    info = p.put("x", node=a.node)
    b.obedient = False
    ensure = m.Ensure(
        rid=p.rid(), generation=info.generation, node=b.node, deadline_s=9.0
    )
    rid = p.ask(ensure)
    pull = next(one for one in b.inbox if isinstance(one, m.DoPull))
    ended = p.ask(destroy(p, "x"))
    d.flush()
    with pytest.raises(Gone):
        p.result(rid, m.Moved)
    assert not p.answered(ended)
    b.obey(pull)  # it was too late to cancel
    b.obey_all()
    d.flush()
    assert p.result(ended, m.Destroyed).versions == (1,)
    assert b.held == {}


def test_views_go_with_their_base_and_an_alias_is_not_destroyed_by_its_name() -> None:
    _d, _, _, p = desk()
    info = p.put("x")
    view = m.RegisterView(
        rid=p.rid(),
        id=ArtifactId("v"),
        generation=info.generation,
        view=b"w",
        index_digest="",
        nbytes=1,
        tensors=1,
    )
    p.call(view, m.ArtifactInfo)
    p.call(
        m.SetAlias(rid=p.rid(), name=ArtifactId("al"), generation=info.generation),
        m.AliasState,
    )
    with pytest.raises(Mismatch, match="alias"):
        p.destroy("al")
    p.destroy("x")
    with pytest.raises(NotFound):
        p.resolve("v")
    other = p.put("y")
    again = msgspec.structs.replace(view, rid=p.rid(), generation=other.generation)
    p.call(again, m.ArtifactInfo)
    assert p.destroy("v") == ()
    with pytest.raises(NotFound):
        p.resolve("v")
    assert p.resolve("y").generation == other.generation


def test_release_takes_one_replica_and_never_the_last() -> None:
    _d, a, b, p = desk()
    info = p.put("x", replicas=2)
    p.call(release(p, info.generation, "a"), type(None))
    assert p.locate(info.generation) == [b.node]
    assert info.generation not in a.held
    with pytest.raises(Mismatch, match="last copy"):
        p.call(release(p, info.generation, "b"), type(None))
    with pytest.raises(NotFound):
        p.call(release(p, info.generation, "a"), type(None))
    with pytest.raises(Mismatch):
        p.call(release(p, info.generation), type(None))
    assert p.locate(info.generation) == [b.node]


def test_a_pinned_replica_is_not_released() -> None:
    _, a, _, p = desk()
    info = p.put("x", replicas=2)
    p.call(
        m.Pin(rid=p.rid(), generation=info.generation, ttl_s=60.0, node=a.node),
        m.Pinned,
    )
    with pytest.raises(Mismatch, match="pinned"):
        p.call(release(p, info.generation, "a"), type(None))


def test_a_released_registration_is_gone() -> None:
    d = Desk()
    owner = d.node("i", kind="instance")
    p = d.program()
    info = p.put("x", owner=m.Owner.CALLER, node=owner.node)
    p.call(release(p, info.generation), type(None))
    with pytest.raises(Gone):
        p.locate(info.generation)
    assert owner.held == {}


def test_a_destroy_while_copies_are_made_starts_no_further_copy() -> None:
    d = Desk()
    nodes = [d.node(name, obedient=False) for name in ("a", "b", "c", "d")]
    p = d.program()
    created = p.create("x", replicas=3)
    p.fill("x", created)
    commit = m.CommitCreated(
        rid=p.rid(), generation=created.generation, deadline_s=60.0
    )
    rid = p.ask(commit)
    ended = p.ask(destroy(p, "x"))
    with pytest.raises(Gone):
        p.result(rid, m.ArtifactInfo)
    for _ in range(3):
        for node in nodes:
            node.obey_all()
    d.flush()
    assert p.result(ended, m.Destroyed).versions == (1,)
    assert all(node.held == {} for node in nodes)
    assert d.catalog.debug_state()["moves"] == 0


def test_a_released_replica_is_no_copy_again_before_its_node_has_dropped_it() -> None:
    d, a, b, p = desk()
    info = p.put("x", replicas=2)
    a.obedient = False
    rid = p.ask(release(p, info.generation, a.node))
    d.flush()
    a.lose_link()
    a.join()  # its inventory still has it, and the order is on its way again
    a.say(m.ReplicaReady(record=a.held[info.generation]))
    assert p.locate(info.generation) == [b.node]
    b.say(m.MayDrop(rid=RequestId("r"), generations=(info.generation,)))
    assert b.granted == [], "the last copy was given up"
    a.obey_all()
    d.flush()
    assert p.answered(rid)
    assert p.locate(info.generation) == [b.node]


@pytest.mark.parametrize("back", [False, True])
def test_destroy_after_a_restart_waits_for_leases_of_the_former_life(
    back: bool,
) -> None:
    d, a, b, p = desk()
    info = p.put("x", node=a.node)
    d = d.restart()
    p.open(settled=p.count)
    rid = p.ask(destroy(p, "x"))
    d.pass_time(4.0, renewing=False)
    assert not p.answered(rid), "the node may still serve it"
    if back:
        a.join()
        b.join()
        d.pass_time(0.2)
        assert info.generation not in a.held
    else:
        d.pass_time(1.5, renewing=False)
    assert p.result(rid, m.Destroyed).versions == (1,)


@pytest.mark.parametrize("joined", [False, True])
def test_destroy_after_a_restart_waits_for_copies_of_which_nobody_had_heard(
    joined: bool,
) -> None:
    d, a, b, p = desk()
    info = p.put("x", node=a.node)
    b.held[info.generation] = a.held[info.generation]  # pulled, and not yet announced
    d = d.restart()
    p.open(settled=p.count)
    a.join()
    b.obedient = False
    if joined:
        b.join(announce=False)  # its inventory is still on its way
    rid = p.ask(destroy(p, "x"))
    d.pass_time(1.0)
    assert not p.answered(rid), "node b still gives it"
    if not joined:
        b.join()
        d.pass_time(0.2)
    b.obey_all()
    d.flush()
    assert p.result(rid, m.Destroyed).versions == (1,)
    assert info.generation not in b.held


def test_destroy_waits_for_copies_that_were_on_their_way_out() -> None:
    d, a, _, p = desk()
    info = p.put("x", replicas=2)
    a.obedient = False
    p.ask(release(p, info.generation, a.node))
    d.flush()
    rid = p.ask(destroy(p, "x"))
    d.flush()
    assert not p.answered(rid), "node a still has it"
    a.obey_all()
    d.flush()
    assert p.result(rid, m.Destroyed).versions == (1,)


def test_a_destroy_repeated_after_a_restart_waits_for_the_nodes_again() -> None:
    d, a, _, p = desk()
    info = p.put("x", node=a.node)
    a.obedient = False
    rid = p.rid()
    ask = m.Destroy(rid=rid, id=ArtifactId("x"), generation=info.generation)
    p.ask(ask)
    d.flush()
    d = d.restart()
    p.open(settled=p.count)
    p.ask(ask)
    d.nodes[NodeId("b")].join()
    a.join()
    d.pass_time(0.5)
    assert not p.answered(rid), "node a still has it"
    a.obey_all()
    d.pass_time(0.5)
    assert isinstance(p.answers[rid], m.Destroyed)


def test_destroy_waits_for_a_node_whose_cancelled_pull_may_have_been_done() -> None:
    d, a, b, p = desk()
    info = p.put("x", node=a.node)
    b.obedient = False
    ensure = m.Ensure(
        rid=p.rid(), generation=info.generation, node=b.node, deadline_s=0.5
    )
    p.ask(ensure)
    d.pass_time(1.0)
    assert p.answered(ensure.rid), "the deadline has cancelled the pull"
    rid = p.ask(destroy(p, "x"))
    d.flush()
    assert not p.answered(rid)
    b.obey_all()
    d.flush()
    assert p.result(rid, m.Destroyed).versions == (1,)
