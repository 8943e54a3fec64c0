from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import DataLost
from tensorcast_dask.tensors import messages as m
from tests.kit.catalogs import Desk


def test_copies_go_to_distinct_hosts_not_to_more_nodes_of_one() -> None:
    d = Desk()
    for name, host in (("a1", "ha"), ("a2", "ha"), ("b1", "hb"), ("b2", "hb")):
        d.node(name, host)
    p = d.program()
    info = p.put("x", replicas=2)
    holders = p.locate(info.generation)
    assert len(holders) == 2
    assert {d.nodes[node].host for node in holders} == {"ha", "hb"}


def test_a_host_that_fails_is_passed_over_for_another() -> None:
    d = Desk()
    d.node("a")
    d.node("b")
    d.node("c")
    big = d.node("d", capacity_bytes=1 << 40)
    big.fail_next = m.Fault(kind="CapacityError", message="full")
    p = d.program(host="h-a")
    info = p.put("x", replicas=2)
    assert info.degraded == ""
    assert len({d.nodes[node].host for node in p.locate(info.generation)}) == 2


def test_what_is_lost_before_its_copies_are_made_was_not_put() -> None:
    d = Desk()
    a, b = d.node("a"), d.node("b")
    p = d.program(host="h-a")
    b.obedient = False
    created = p.create("x", node=a.node, replicas=2)
    p.fill("x", created)
    ask = m.CommitCreated(rid=p.rid(), generation=created.generation, deadline_s=60.0)
    p.ask(ask)
    a.lose_link()
    d.pass_time(7.0)
    b.obey_all()
    d.pass_time(1.0)
    with pytest.raises(DataLost):
        p.result(ask.rid, m.ArtifactInfo)


def test_the_shortfall_says_how_many_and_why() -> None:
    d = Desk()
    d.node("a")
    p = d.program()
    info = p.put("x", replicas=4)
    assert "no other host" in info.degraded
    assert info.degraded.startswith("1 of 4 hosts hold it: no node can take")
