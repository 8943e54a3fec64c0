from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import (
    AlreadyExists,
    CapacityError,
    CorruptFile,
    DeadlineExceeded,
    Gone,
    Mismatch,
    NotFound,
)
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ArtifactId, NodeId
from tests.kit.catalogs import Desk, FakeNode, Program, index_of


def scene() -> tuple[Desk, FakeNode, Program]:
    d = Desk()
    return d, d.node("a"), d.program()


def load(p: Program, name: str = "x", deadline_s: float = 9.0) -> m.LoadFile:
    return m.LoadFile(
        rid=p.rid(), id=ArtifactId(name), path="/models/m", deadline_s=deadline_s
    )


def test_a_loaded_file_is_a_version_like_any_other() -> None:
    _d, a, p = scene()
    info = p.call(load(p), m.ArtifactInfo)
    assert (info.version, info.nbytes, info.tensors) == (1, len("/models/m"), 1)
    assert info.index_digest != ""
    assert p.locate(info.generation) == [a.node]
    with pytest.raises(AlreadyExists):
        p.call(load(p), m.ArtifactInfo)


def test_a_failed_load_leaves_no_artifact_and_says_why() -> None:
    _d, a, p = scene()
    a.fail_next = m.Fault(kind="CorruptFile", message="shard 3 is missing")
    with pytest.raises(CorruptFile, match="shard 3"):
        p.call(load(p), m.ArtifactInfo)
    with pytest.raises(NotFound):
        p.resolve("x")
    assert p.call(load(p), m.ArtifactInfo).version == 1


def test_a_late_or_cancelled_load_is_rolled_back() -> None:
    d, a, p = scene()
    a.obedient = False
    rid = p.ask(load(p, deadline_s=1.0))
    d.pass_time(1.2)
    with pytest.raises(DeadlineExceeded):
        p.result(rid, m.ArtifactInfo)
    with pytest.raises(NotFound):
        p.resolve("x")
    rid = p.ask(load(p, "y"))
    p.call(m.CancelAsked(rid=p.rid(), asked=rid), type(None))
    with pytest.raises(NotFound):
        p.resolve("y")
    a.obey_all()
    assert a.held == {}


def test_a_load_that_is_destroyed_meanwhile_ends_gone() -> None:
    _d, a, p = scene()
    a.obedient = False
    rid = p.ask(load(p))
    p.destroy("x")
    a.obey_all()
    with pytest.raises(Gone):
        p.result(rid, m.ArtifactInfo)
    a.obedient = True
    assert p.call(load(p), m.ArtifactInfo).version == 1


def test_publishing_a_registration_copies_it_and_leaves_the_registration() -> None:
    d, a, p = scene()
    owner = d.node("i", "h-client", kind="instance")
    lent = p.put("x", owner=m.Owner.CALLER, node=owner.node)
    info = p.publish(lent.generation)
    assert (info.version, info.owner, info.stage) == (
        2,
        m.Owner.SYSTEM,
        m.Stage.PUBLISHED,
    )
    assert p.locate(info.generation) == [a.node]
    assert p.locate(lent.generation) == [owner.node]
    assert p.resolve("x", published=True).generation == info.generation
    owner.lose_link()
    d.pass_time(7.0)
    assert p.locate(info.generation) == [a.node]


def test_what_its_owner_may_change_is_not_replicated_but_published() -> None:
    d, a, p = scene()
    owner = d.node("i", "h-client", kind="instance")
    lent = p.put("x", owner=m.Owner.CALLER, node=owner.node)
    of, at = lent.generation, a.node
    ensure = m.Ensure(rid=p.rid(), generation=of, node=at, deadline_s=9.0)
    with pytest.raises(Mismatch, match="publish it"):
        p.call(ensure, m.Moved)
    migrate = m.Migrate(
        rid=p.rid(), generation=of, source=owner.node, node=at, deadline_s=9.0
    )
    with pytest.raises(Mismatch, match="publish it"):
        p.call(migrate, m.Moved)
    assert a.held == {}


def test_p18_a_copy_that_fails_publishes_nothing() -> None:
    d, a, p = scene()
    owner = d.node("i", "h-client", kind="instance")
    lent = p.put("x", owner=m.Owner.CALLER, node=owner.node)
    a.fail_next = m.Fault(kind="CorruptFile", message="torn")
    with pytest.raises(CorruptFile):
        p.publish(lent.generation)
    with pytest.raises(NotFound):
        p.resolve("x", published=True)
    assert p.resolve("x").generation == lent.generation


def save(p: Program, info: m.ArtifactInfo, node: str = "") -> m.SaveFile:
    return m.SaveFile(
        rid=p.rid(),
        generation=info.generation,
        path="/out",
        deadline_s=9.0,
        node=NodeId(node),
    )


def test_save_is_done_by_a_holder_of_the_callers_host_when_there_is_one() -> None:
    d, _a, _ = scene()
    d.node("c", "h-client")
    p = d.program(host="h-client")
    info = p.put("x", replicas=2)
    assert p.call(save(p, info), m.Moved).location.card.node == "c"
    assert p.call(save(p, info, "a"), m.Moved).location.card.node == "a"


def test_save_at_a_node_that_does_not_hold_it_or_of_a_registration_is_refused() -> None:
    d, a, p = scene()
    b = d.node("b")
    info = p.put("x", node=a.node)
    with pytest.raises(Mismatch):
        p.call(save(p, info, b.node), m.Moved)
    with pytest.raises(NotFound):
        p.call(save(p, info, "zz"), m.Moved)
    owner = d.node("i", kind="instance")
    lent = p.put("lent", owner=m.Owner.CALLER, node=owner.node)
    with pytest.raises(Mismatch):
        p.call(save(p, lent), m.Moved)
    a.fail_next = m.Fault(kind="CorruptFile", message="disk")
    with pytest.raises(CorruptFile):
        p.call(save(p, info), m.Moved)


def test_a_load_that_brings_no_index_or_announces_nothing_is_no_artifact() -> None:
    d, a, p = scene()
    a.obedient = False
    for spoil in ("index", "announcement"):
        rid = p.ask(load(p))
        (order,) = [one for one in a.inbox if isinstance(one, m.DoLoad)]
        a.inbox.clear()
        if spoil == "index":
            a.hold(d.record(order.generation, "x", order.version, index_of(9)))
        result = b"\xff" if spoil == "index" else index_of(9).encode()
        a.say(m.TaskDone(task=order.task, result=result))
        d.flush()
        with pytest.raises((CorruptFile, Mismatch)):
            p.result(rid, m.ArtifactInfo)
        with pytest.raises(NotFound):
            p.resolve("x")


def test_a_copy_that_is_destroyed_meanwhile_ends_gone() -> None:
    d, a, p = scene()
    owner = d.node("i", "h-client", kind="instance")
    lent = p.put("x", owner=m.Owner.CALLER, node=owner.node)
    a.obedient = False
    rid = p.ask(m.Publish(rid=p.rid(), generation=lent.generation))
    p.destroy("x")
    a.obey_all()
    d.flush()
    with pytest.raises(Gone):
        p.result(rid, m.ArtifactInfo)
    assert a.held == {}


def test_a_copy_for_which_there_is_no_room_is_refused() -> None:
    d = Desk()
    p = d.program()
    owner = d.node("i", "h-client", kind="instance")
    lent = p.put("x", owner=m.Owner.CALLER, node=owner.node)
    with pytest.raises(CapacityError):
        p.publish(lent.generation)
    assert d.catalog.debug_state()["creations"] == 0
