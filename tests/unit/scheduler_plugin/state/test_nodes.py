from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import NotFound, PeerLost
from tensorcast_dask.scheduler_plugin.state.events import (
    DOUBT_S,
    CatalogSettings,
    TimePassed,
    WorkerGone,
)
from tensorcast_dask.tensors.ids import NodeId
from tests.kit.catalogs import Desk

TTL_S = 3.0


def desk() -> Desk:
    return Desk(settings=CatalogSettings(lease_ttl_s=TTL_S))


def at(desk: Desk, now_s: float) -> None:
    desk.now_s = now_s
    desk.tell(TimePassed())


def test_a_lease_outlives_the_end_of_its_link_and_the_news_of_its_workers_death() -> (
    None
):
    d = desk()
    node = d.node("a")
    start_s = d.now_s
    node.lose_link()
    d.tell(WorkerGone(address="tcp://a"))
    at(d, start_s + TTL_S - 0.01)
    assert d.catalog.nodes.live(node.node).attended is False
    at(d, start_s + TTL_S)
    at(d, start_s + TTL_S + DOUBT_S)
    with pytest.raises(PeerLost):
        d.catalog.nodes.live(node.node)


def test_a_lease_that_looks_lapsed_is_judged_again_after_renewals_were_read() -> None:
    d = desk()
    node = d.node("a")
    late_s = d.now_s + 10 * TTL_S  # the loop was busy; a renewal lies in the socket
    at(d, late_s)
    node.renew()
    at(d, late_s + DOUBT_S)
    assert d.catalog.nodes.live(node.node).live


def test_a_renewal_extends_the_lease_from_when_it_was_read() -> None:
    d = desk()
    node = d.node("a")
    d.now_s += 2.0
    node.renew()
    until_s = d.now_s + TTL_S
    (state,) = d.catalog.nodes.states()
    assert state.lease_left_s == TTL_S
    at(d, until_s)
    at(d, until_s + DOUBT_S)
    assert d.catalog.nodes.states() == ()


def test_p30_what_an_older_link_or_life_says_is_ignored() -> None:
    d = desk()
    node = d.node("a")
    old = node.link
    node.join()
    assert d.catalog.nodes.at_link(old) is None
    node.incarnation = 2
    node.join()
    node.incarnation = 1
    node.join()
    assert node.refused is not None
    assert node.refused.fault.kind == "StaleOwner"
    assert d.catalog.nodes.live(node.node).incarnation == 2


def test_an_unknown_node_is_not_found_and_nodes_are_told_in_order_of_their_names() -> (
    None
):
    d = desk()
    for name in ("b", "a", "c"):
        d.node(name)
    assert [state.card.node for state in d.catalog.nodes.states()] == ["a", "b", "c"]
    with pytest.raises(NotFound):
        d.catalog.nodes.live(NodeId("z"))
    assert d.catalog.nodes.label(NodeId("0123456789")) == "01234567"


def test_a_node_that_comes_back_after_its_lease_is_live_again() -> None:
    d = desk()
    node = d.node("a")
    node.lose_link()
    d.pass_time(TTL_S * 2)
    assert d.catalog.debug_state()["nodes"] == 0
    node.join()
    d.pass_time(TTL_S * 3)
    assert d.catalog.debug_state()["nodes"] == 1
