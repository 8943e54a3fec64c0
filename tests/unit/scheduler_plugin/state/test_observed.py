from __future__ import annotations

from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import Generation, NodeId
from tests.kit.catalogs import Desk
from tests.kit.plans import Runner, chain
from tests.kit.signals import load, snapshot


def test_reads_that_a_store_tells_are_heat_and_those_of_what_is_gone_are_nothing() -> (
    None
):
    d = Desk()
    node = d.node("a")
    p = d.program()
    info = p.put("x")
    node.say(m.Renew(seq=1, reads={info.generation: 60, Generation(9): 5}))
    heat = snapshot(p, "artifact/x")["artifact/x"]["reads_per_s"]
    assert heat == 0.693  # 60 reads in a half-life of a minute
    assert set(snapshot(p, "consumer/")) == {"consumer/a/x"}
    p.destroy("x")
    p.put("x")
    assert snapshot(p, "artifact/x")["artifact/x"]["reads_per_s"] == 0.0
    assert snapshot(p, "consumer/") == {}


def test_what_the_catalog_itself_has_to_do_is_told() -> None:
    d = Desk()
    node = d.node("a", obedient=False)
    d.node("b")
    p = d.program()
    info = p.put("x", node=NodeId("b"))
    p.ask(
        m.Ensure(
            rid=p.rid(), generation=info.generation, node=node.node, deadline_s=9.0
        )
    )
    assert snapshot(p, "catalog/")["catalog/counts"].value == {
        "sessions": 1,
        "operations": 1,
        "tasks": 1,
        "pins": 0,
        "plans": 0,
        "held": 0,
        "artifacts": 1,
        "nodes": 2,
    }


def test_a_push_of_an_earlier_attachment_changes_nothing() -> None:
    d = Desk()
    node = d.node("a")
    p = d.program()
    p.put("x")
    node.say(load(1, epoch=2, queue=1.0))
    node.say(load(7, epoch=1, queue=9.0, versions={"x": 1}))
    node.say(m.InstanceGone(instance="i", epoch=1))
    assert snapshot(p, "instance/")["instance/i"]["queue"] == 1.0
    assert snapshot(p, "consumer/") == {}


def test_a_run_that_is_over_tells_what_changed_while_it_ran() -> None:
    d = Desk()
    d.node("a")
    p = d.program()
    p.put("before")
    runner = Runner(p)
    spec = chain("s")
    state = runner.open(spec)
    assert state.signals == ()
    info = p.put("x", nbytes=1000, node=NodeId("a"))
    d.nodes[NodeId("a")].renew()
    p.publish(info.generation)
    runner.ended("s")
    end = runner.end()
    assert end.status == "done"
    names = [one.name for one in end.signals]
    assert "event/published" in names
    assert "node/a/host" in names
    assert [one["id"] for one in end.signals if one.name == "event/created"] == ["x"]
    d.pass_time(10.0)
    later = runner.look()
    assert [one.name for one in later.signals] == names
    assert min(one.staleness for one in later.signals) >= 10.0
