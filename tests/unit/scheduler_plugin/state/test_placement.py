from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import CapacityError, Mismatch, NotFound, PeerLost
from tensorcast_dask.scheduler_plugin.state.nodes import Nodes
from tensorcast_dask.scheduler_plugin.state.outbox import Outbox
from tensorcast_dask.scheduler_plugin.state.placement import (
    choose,
    free_bytes,
    place,
    promise,
)
from tensorcast_dask.scheduler_plugin.state.records import NodeRecord
from tensorcast_dask.scheduler_plugin.state.timers import Timers
from tensorcast_dask.tensors.ids import HostId, Incarnation, NodeId
from tensorcast_dask.tensors.messages import NodeCard, Owner, Tier, TierUse

H1, H2, ANY = HostId("h1"), HostId("h2"), HostId("")


def node(
    name: str,
    host: HostId,
    *,
    capacity: int = 100,
    used: int = 0,
    kind: str = "store",
    live: bool = True,
    attended: bool = True,
) -> NodeRecord:
    card = NodeCard(
        node=NodeId(name), incarnation=Incarnation(1), host=host, socket="", kind=kind
    )
    use = TierUse(capacity_bytes=capacity, used_bytes=used)
    return NodeRecord(
        node=card.node,
        card=card,
        link=1 if live else 0,
        live=live,
        attended=attended,
        uses={Tier.HOST: use},
    )


def best(*nodes: NodeRecord, nbytes: int = 10, host: HostId = ANY) -> str:
    return choose(nodes, nbytes=nbytes, host=host)[0].node


def test_the_callers_host_is_preferred_then_the_most_free_memory() -> None:
    a, b, c = node("a", H1, used=50), node("b", H2), node("c", H2, used=20)
    assert best(a, b, c, host=H1) == "a"
    assert best(a, b, c) == "b"
    assert best(a, b, c, host=H2) == "b"


def test_a_node_with_room_comes_before_a_full_one_of_the_callers_host() -> None:
    assert best(node("a", H1, used=95), node("b", H2), host=H1) == "b"
    assert best(node("a", H1, used=95), node("b", H2, used=99), host=H1) == "a"


def test_a_node_that_is_gone_unattended_or_no_store_is_never_chosen() -> None:
    good = node("z", H1, used=90)
    others = [
        node("a", H1, live=False),
        node("b", H1, attended=False),
        node("c", H1, kind="instance"),
    ]
    draining = node("d", H1)
    draining.draining = True
    assert best(good, *others, draining) == "z"
    with pytest.raises(CapacityError, match="no node can take"):
        best(*others, draining)


def test_a_node_whose_link_is_down_gets_nothing_new() -> None:
    down = node("a", H1)
    down.link = 0
    assert best(down, node("b", H2), host=H1) == "b"


def test_what_fits_into_no_node_is_refused_with_the_largest() -> None:
    with pytest.raises(CapacityError) as refused:
        best(node("a", H1), node("b", H2, capacity=200), nbytes=201)
    assert refused.value.data["largest"] == 200


def test_bytes_promised_since_the_last_renewal_count() -> None:
    a, b = node("a", H1), node("b", H1)
    a.promised_bytes = {Tier.HOST: 40}
    assert free_bytes(a) == 60
    assert best(a, b) == "b"


def test_evictable_bytes_are_free() -> None:
    one = node("a", H1)
    one.uses = {
        Tier.HOST: TierUse(capacity_bytes=100, used_bytes=80, evictable_bytes=50)
    }
    assert free_bytes(one) == 70
    one.uses = {}
    assert free_bytes(one) == 0


def test_of_nodes_with_about_as_much_room_one_with_warm_pages_is_chosen() -> None:
    cold, warm = (
        node("a", H1, capacity=1000, used=10),
        node("b", H1, capacity=1000, used=30),
    )
    warm.uses = {Tier.HOST: TierUse(capacity_bytes=1000, used_bytes=30, warm_bytes=50)}
    assert best(cold, warm, nbytes=50) == "b"
    assert best(cold, warm, nbytes=51) == "a"
    full = node("c", H1, capacity=1000)
    full.uses = {Tier.HOST: TierUse(capacity_bytes=1000, used_bytes=500, warm_bytes=50)}
    assert best(cold, full, nbytes=50) == "a"


def test_a_choice_says_why() -> None:
    assert (
        "caller's host" in choose([node("a", H1), node("b", H2)], nbytes=1, host=H1)[1]
    )
    assert "only node" in choose([node("a", H1)], nbytes=1, host=H1)[1]


def test_a_wanted_node_is_taken_or_refused_by_name() -> None:
    nodes = Nodes(Outbox(seq=0), Timers(), lease_ttl_s=1.0)
    for one in (
        node("a", H1),
        node("dead", H1, live=False),
        node("i", H1, kind="instance"),
    ):
        nodes.records[one.node] = one

    def wanted(name: str, owner: Owner = Owner.SYSTEM) -> NodeId:
        return place(nodes, NodeId(name), nbytes=1, host=H2, owner=owner)[0].node

    assert wanted("a") == "a"
    assert wanted("") == "a"
    assert wanted("i", Owner.CALLER) == "i"
    with pytest.raises(NotFound):
        wanted("nobody")
    with pytest.raises(PeerLost):
        wanted("dead")
    for name, owner in (("i", Owner.SYSTEM), ("a", Owner.CALLER), ("", Owner.CALLER)):
        with pytest.raises(Mismatch):
            wanted(name, owner)


def test_a_tier_is_looked_for_among_the_nodes_that_have_it() -> None:
    a, b, c = node("a", H1), node("b", H1), node("c", H2)
    b.uses[Tier.DEVICE] = TierUse(capacity_bytes=50, device="GPU-b")
    c.uses[Tier.DEVICE] = TierUse(capacity_bytes=80, device="GPU-c")

    def at(device: str = "") -> str:
        nodes = [a, b, c]
        found = choose(nodes, nbytes=40, host=ANY, tier=Tier.DEVICE, device=device)
        return found[0].node

    assert at() == "c"
    assert at(device="GPU-b") == "b"
    promise(c, Tier.DEVICE, 60)
    assert at() == "b"
    assert free_bytes(c) == 100
    for device, tier in (("GPU-x", Tier.DEVICE), ("", Tier.DISK)):
        with pytest.raises(CapacityError, match="no node that may be chosen"):
            choose([a, b, c], nbytes=1, host=ANY, tier=tier, device=device)
