from __future__ import annotations

import pytest

from tensorcast_dask.scheduler_plugin.state.events import NodeJoined, NodeSaid
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ClusterId, Epoch, Generation
from tests.kit.catalogs import Desk, index_of


def test_a_store_of_another_cluster_is_refused_loudly_and_for_good() -> None:
    d = Desk()
    stranger = d.node("a")
    stranger.join(cluster="other")
    refused = stranger.refused
    assert refused is not None
    assert (refused.fault.kind, refused.retry) == ("WrongPeer", False)
    assert stranger.link == 0
    assert any(log.level == "error" and "other" in log.text for log in d.logs)


def test_a_store_that_never_had_a_cluster_is_let_in() -> None:
    d = Desk()
    assert d.node("a").join(cluster="").welcome is not None


def test_a_node_that_has_seen_a_later_epoch_raises_it_before_anything_is_minted() -> (
    None
):
    d = Desk()
    node = d.node("a")
    node.epoch_seen = 41
    node.join()
    assert d.catalog.epoch == 42
    assert node.welcome is not None
    assert node.welcome.epoch == 42
    assert d.program().put("x").generation >> 40 == 42
    assert d.restart().catalog.epoch == 43


def test_a_generation_that_a_node_holds_is_not_minted_again() -> None:
    d = Desk()
    a = d.node("a")
    held = Generation(1 << 40 | 900)
    a.held[held] = d.record(held, "old", 1, index_of(1))
    a.join()
    assert d.program().put("x").generation == held + 1


def test_a_greeting_in_the_middle_of_a_talk_changes_nothing() -> None:
    d = Desk()
    a = d.node("a")
    before = d.catalog.debug_state()
    hello = m.NodeHello(card=a.card, cluster=ClusterId("c1"), epoch=Epoch(99))
    a.say(hello)
    a.say(m.Hello())
    a.say(m.Proof(proof=b""))
    assert d.catalog.debug_state() == before


def test_what_an_unknown_link_says_is_ignored() -> None:
    d = Desk()
    before = d.catalog.debug_state()
    d.tell(NodeSaid(link=4711, message=m.Renew(seq=1)))
    assert d.catalog.debug_state() == before


@pytest.mark.parametrize("protocol", [0, 2, 99])
def test_a_node_of_another_protocol_is_refused_by_number(protocol: int) -> None:
    d = Desk()
    a = d.node("a")
    card = m.NodeCard(
        node=a.node,
        incarnation=a.card.incarnation,
        host=a.host,
        socket="",
        protocol=protocol,
    )
    hello = m.NodeHello(card=card, cluster=ClusterId("c1"), epoch=Epoch(0))
    link = d.next_link()
    d.links[link] = a
    d.tell(NodeJoined(link=link, hello=hello))
    assert a.refused is not None
    assert a.refused.fault.kind == "Unimplemented"
