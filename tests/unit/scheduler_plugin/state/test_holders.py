from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import DataLost, OwnerGone
from tensorcast_dask.tensors import messages as m
from tests.kit.catalogs import Desk


def test_readers_are_sent_to_their_own_host_first_then_to_the_nearest_tier() -> None:
    d = Desk()
    for name in ("a", "b", "c"):
        d.node(name)
    p = d.program(host="h-c")
    info = p.put("x", replicas=3)
    assert p.locate(info.generation)[0] == "c"


def test_p28_with_the_last_copy_gone_data_lost_names_artifact_version_and_node() -> (
    None
):
    d = Desk()
    a = d.node("a")
    p = d.program()
    info = p.put("x")
    a.lose_link()
    d.pass_time(6.0)
    for ask in (lambda: p.locate(info.generation), lambda: p.resolve("x")):
        with pytest.raises(DataLost) as lost:
            ask()
        assert lost.value.data["id"] == "x"
        assert lost.value.data["version"] == 1
        assert "w-a" in str(lost.value.data["nodes"])
    assert any(one.topic == "lost" for one in d.emitted)
    d.node("b")
    assert p.destroy("x") == (1,)
    assert p.put("x").version == 2


def test_p28_a_death_with_another_copy_left_is_not_seen_by_readers() -> None:
    d = Desk()
    a, b = d.node("a"), d.node("b")
    p = d.program()
    info = p.put("x", replicas=2)
    a.lose_link()
    d.pass_time(6.0)
    assert p.locate(info.generation) == [b.node]
    assert p.resolve("x").stage is m.Stage.COMMITTED


def test_a_version_is_found_again_when_its_node_comes_back() -> None:
    d = Desk()
    a = d.node("a")
    p = d.program()
    info = p.put("x")
    a.lose_link()
    d.pass_time(6.0)
    a.join()
    assert p.locate(info.generation) == [a.node]
    assert p.resolve("x").stage is m.Stage.COMMITTED
    assert any(one.topic == "found" for one in d.emitted)


def test_a_lost_registration_is_owner_gone() -> None:
    d = Desk()
    owner = d.node("i", kind="instance")
    p = d.program()
    info = p.put("x", owner=m.Owner.CALLER, node=owner.node)
    owner.lose_link()
    d.pass_time(6.0)
    with pytest.raises(OwnerGone):
        p.locate(info.generation)


def test_p31_after_a_restart_a_reader_waits_for_the_node_and_gets_its_replica() -> None:
    d = Desk()
    a = d.node("a")
    p = d.program()
    info = p.put("x")
    d = d.restart()
    p.open()
    assert p.resolve("x").generation == info.generation
    rid = p.ask(m.Locate(rid=p.rid(), generation=info.generation))
    d.flush()
    assert not p.answered(rid)
    a.join()
    assert p.result(rid, m.Located).locations[0].card.node == "a"


def test_p31_what_nobody_claims_in_time_is_lost_and_said_so() -> None:
    d = Desk()
    d.node("a")
    p = d.program()
    info = p.put("x")
    d = d.restart()
    p.open()
    rid = p.ask(m.Locate(rid=p.rid(), generation=info.generation))
    d.pass_time(d.settings.recovery_timeout_s + 0.1, renewing=False)
    with pytest.raises(DataLost):
        p.result(rid, m.Located)
    assert any("lost" in log.text for log in d.logs)
