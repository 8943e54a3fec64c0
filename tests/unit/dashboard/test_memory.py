from __future__ import annotations

import pytest

from tensorcast_dask.dashboard.data.memory import TIERS, Page, memory
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import NodeId
from tests.kit.catalogs import MIB, Desk, FakeNode

USES = {
    m.Tier.HOST: m.TierUse(
        capacity_bytes=100 * MIB,
        used_bytes=60 * MIB,
        reserved_bytes=8 * MIB,
        pinned_bytes=10 * MIB,
        evictable_bytes=20 * MIB,
        warm_bytes=50 * MIB,
        lingering_bytes=4 * MIB,
        replicas=7,
    ),
    m.Tier.DEVICE: m.TierUse(capacity_bytes=MIB, used_bytes=3 * MIB, device="GPU-1"),
}


def scene() -> Desk:
    d = Desk()
    d.node("a").say(m.Renew(seq=1, uses=USES))
    return d


def test_a_bars_parts_follow_each_other_and_add_up_to_what_is_taken() -> None:
    told = memory(scene().catalog, Page())
    assert told.columns["rows"]["label"] == ["w-a  device", "w-a  host"]
    parts = told.columns["parts"]
    host = [at for at, y in enumerate(parts["y"]) if y == 1]
    found = [(parts["part"][at], parts["left"][at], parts["right"][at]) for at in host]
    assert found == [
        ("pinned", 0.0, 0.1),
        ("kept", 0.1, 0.4),
        ("evictable", 0.4, 0.6),
        ("reserved", 0.6, 0.68),
        ("leased", 0.68, 0.72),
        ("warm", 0.72, 1.0),  # no more than what is free
    ]
    assert told.columns["rows"]["free"][1] == 28 * MIB
    assert told.columns["rows"]["total"][1] == "72.0 MiB of 100.0 MiB"


def test_what_takes_more_than_it_may_fills_its_bar_and_no_more() -> None:
    parts = memory(scene().catalog, Page()).columns["parts"]
    assert (parts["part"][0], parts["left"][0], parts["right"][0]) == ("kept", 0.0, 1.0)


def test_the_limit_of_pins_is_that_of_the_settings() -> None:
    d = scene()
    limits = memory(d.catalog, Page()).columns["limits"]
    assert (limits["y"], limits["x"]) == ([1], [d.settings.pin_limit_fraction])


def test_a_node_that_is_gone_is_shown_while_it_matters_with_its_age() -> None:
    d = Desk()
    for name in "ab":
        d.node(name)
    d.program().put("x", node=NodeId("a"))
    for name in "ab":
        d.nodes[NodeId(name)].lose_link()
    d.pass_time(60.0)
    rows = memory(d.catalog, Page()).columns["rows"]
    assert (rows["node"], rows["state"]) == (["w-a (a)"], ["gone"])
    assert rows["age"] == ["60.0 s"]


@pytest.mark.parametrize("page", [0, 1, 99])
def test_pages_bound_what_is_drawn(page: int) -> None:
    d = Desk()
    for number in range(TIERS + 3):
        d.node(f"n{number:03}")
    told = memory(d.catalog, Page(page))
    assert len(told.columns["rows"]["y"]) == (3 if page else TIERS)
    assert told.counts["pages"] == 2


def test_without_nodes_it_says_what_would_be_here() -> None:
    told = memory(Desk().catalog, Page())
    assert told.counts["rows"] == 0
    assert told.texts["empty"].startswith("No node has told of its memory yet.")


def test_a_node_without_capacity_has_an_empty_bar() -> None:
    d = Desk()
    node: FakeNode = d.node("a", capacity_bytes=0)
    told = memory(d.catalog, Page())
    assert told.columns["rows"]["node"] == [f"w-{node.node} (a)"]
    assert told.columns["parts"]["y"] == []
