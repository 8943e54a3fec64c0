from __future__ import annotations

import pytest

from tensorcast_dask.scheduler_plugin.state import readings
from tensorcast_dask.scheduler_plugin.state.events import CatalogSettings
from tensorcast_dask.scheduler_plugin.state.readings import (
    AWAY_S,
    CONSUMER_FRESH_S,
    LINK_FRESH_S,
    LINK_KEPT_S,
)
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import NodeId
from tests.kit.catalogs import MIB, Desk, Program
from tests.kit.signals import frame, load, snapshot

TTL_S = 3.0


def scene() -> tuple[Desk, Program]:
    d = Desk(settings=CatalogSettings(token=b"t", lease_ttl_s=TTL_S))
    d.node("a")
    d.node("b")
    return d, d.program()


def test_a_nodes_tiers_are_told_with_what_is_free() -> None:
    d, p = scene()
    p.put("x", nbytes=16 * MIB, node=NodeId("a"))
    d.nodes[NodeId("a")].renew()
    found = snapshot(p, "node/a/host")["node/a/host"]
    assert found.epoch == 1
    assert found["used_bytes"] == 16 * MIB
    assert found["free_bytes"] == 48 * MIB
    assert found["free_fraction"] == 0.75
    assert found["name"] == "w-a"


def test_a_signal_of_a_node_that_died_is_stale_and_then_away() -> None:
    d, p = scene()
    dead = d.nodes[NodeId("b")]
    dead.lose_link()
    d.pass_time(TTL_S - 0.5)
    assert snapshot(p, "node/b/")["node/b/host"].fresh
    d.pass_time(1.0)
    found = snapshot(p, "node/b/")
    assert not found["node/b/host"].fresh
    assert found["node/b/orders"]["live"] is False
    assert snapshot(p, "node/a/")["node/a/host"].fresh
    d.pass_time(AWAY_S)
    assert snapshot(p, "node/b/") == {}
    assert snapshot(p, "node/a/")["node/a/host"].fresh


def test_work_is_counted_from_the_orders_that_are_open() -> None:
    d, p = scene()
    info = p.put("x", nbytes=8 * MIB, node=NodeId("a"))
    d.nodes[NodeId("b")].obedient = False
    ensure = m.Ensure(
        rid=p.rid(), generation=info.generation, node=NodeId("b"), deadline_s=60.0
    )
    p.ask(ensure)
    work = snapshot(p, "node/b/orders")["node/b/orders"]
    assert (work["queue"], work["inflight_bytes"]) == (1, 8 * MIB)
    order = d.nodes[NodeId("b")].inbox[0]
    assert isinstance(order, m.DoPull)
    d.nodes[NodeId("b")].say(
        m.TaskProgress(task=order.task, done_bytes=6 * MIB, total_bytes=8 * MIB)
    )
    assert snapshot(p, "node/b/orders")["node/b/orders"]["inflight_bytes"] == 2 * MIB
    p.ask(m.CancelAsked(rid=p.rid(), asked=ensure.rid))
    work = snapshot(p, "node/b/orders")["node/b/orders"]
    assert (work["queue"], work["inflight_bytes"]) == (0, 0)


def test_a_link_is_measured_by_the_pull_that_went_over_it() -> None:
    d, p = scene()
    info = p.put("x", nbytes=8 * MIB, node=NodeId("a"))
    ensure = m.Ensure(
        rid=p.rid(), generation=info.generation, node=NodeId("b"), deadline_s=60.0
    )
    p.call(ensure, m.Moved)
    found = snapshot(p, "link/")["link/a/b"]
    assert found["transfers"] == 1
    assert found["bytes_per_s"] == 83_900_000.0  # 8 MiB in 0.1 s, rounded
    d.pass_time(LINK_FRESH_S + 1.0)
    assert not snapshot(p, "link/")["link/a/b"].fresh
    d.pass_time(LINK_KEPT_S - LINK_FRESH_S)
    assert snapshot(p, "link/") == {}


def test_an_artifact_is_told_with_its_copies_its_heat_and_what_is_missing() -> None:
    d, p = scene()
    info = p.put("x", node=NodeId("a"), replicas=2)
    p.locate(info.generation)
    found = snapshot(p, "artifact/")["artifact/x"]
    assert (found["replicas"], found["hosts"], found["missing"]) == (2, 2, 0)
    assert (found["newest"], found["latest"], found["lost"]) == (1, 0, False)
    assert isinstance(found["reads_per_s"], float)
    assert found["reads_per_s"] > 0
    d.nodes[NodeId("b")].lose_link()
    d.pass_time(2 * TTL_S)
    found = snapshot(p, "artifact/")["artifact/x"]
    assert (found["hosts"], found["wanted"], found["missing"]) == (1, 2, 1)
    p.destroy("x")
    assert snapshot(p, "artifact/") == {}


def test_a_consumer_is_as_far_behind_as_there_are_newer_published_versions() -> None:
    d, p = scene()
    node = d.nodes[NodeId("a")]
    first = p.put("x", node=NodeId("a"))
    p.publish(first.generation)
    node.say(m.Renew(seq=1, reads={first.generation: 3}))
    node.say(load(1, queue=0.0, versions={"x": 1, "unknown": 4}))
    for _ in range(2):
        p.publish(p.put("x", version=-1).generation)
    found = snapshot(p, "consumer/")
    assert set(found) == {"consumer/a/x", "consumer/i/x"}
    assert found["consumer/a/x"].value == {
        "artifact": "x",
        "version": 1,
        "latest": 3,
        "behind": 2,
    }
    d.pass_time(CONSUMER_FRESH_S + 1.0)
    assert not snapshot(p, "consumer/a")["consumer/a/x"].fresh
    node.say(m.InstanceGone(instance="i", epoch=1))
    assert set(snapshot(p, "consumer/")) == {"consumer/a/x"}


def test_an_instance_is_stale_with_its_push_or_with_its_node_and_ends_with_itself() -> (
    None
):
    d, p = scene()
    node = d.nodes[NodeId("b")]
    node.say(load(1, queue=4.0, ttl_s=2.0))
    found = snapshot(p, "instance/")["instance/i"]
    assert (found["queue"], found["node"], found.fresh) == (4.0, "b", True)
    d.pass_time(2.5)
    assert not snapshot(p, "instance/")["instance/i"].fresh
    d.pass_time(2.0)
    assert snapshot(p, "instance/") == {}
    node.say(load(2, queue=4.0, ttl_s=1000.0))
    node.lose_link()
    d.pass_time(2 * TTL_S)
    assert not snapshot(p, "instance/")["instance/i"].fresh
    node.join()
    node.say(m.InstanceGone(instance="i", epoch=1))
    assert snapshot(p, "instance/") == {}


def test_of_very_many_artifacts_the_first_are_told_and_a_longer_prefix_finds_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readings, "MAX_ARTIFACTS", 2)
    _, p = scene()
    for name in ("a", "b", "x-last"):
        p.put(name)
    first = frame(p, "artifact/")
    assert [one.name for one in first.changed] == ["artifact/a", "artifact/b"]
    assert set(snapshot(p, "artifact/x-")) == {"artifact/x-last"}
    # What a wider question does not reach is not taken for gone.
    again = frame(p, "artifact/", epoch=1, since=first.number)
    assert "artifact/x-last" not in again.gone


def test_after_a_restart_signals_are_read_from_what_comes_back() -> None:
    d, p = scene()
    p.put("x", node=NodeId("a"))
    d.nodes[NodeId("a")].renew()
    before = snapshot(p, "node/", "artifact/")
    d.nodes[NodeId("a")].say(load(3, queue=9.0))
    e = d.restart()
    p.open()
    assert snapshot(p, "node/", "instance/") == {}
    e.nodes[NodeId("a")].join()
    e.nodes[NodeId("b")].join()
    after = snapshot(p, "node/", "artifact/")
    assert {n: one.value for n, one in after.items()} == {
        n: one.value for n, one in before.items()
    }
    assert snapshot(p, "instance/") == {}, "what was pushed to another life is not told"
    assert {one.epoch for one in snapshot(p, "artifact/").values()} == {2}
