from __future__ import annotations

import pytest

from tensorcast_dask.store.sides import Side, ways_to
from tensorcast_dask.tensors.ids import HostId, Incarnation, NodeId
from tensorcast_dask.tensors.messages import Location, NodeCard, Tier


def at(tier: Tier, *, ucx: bool = True, port: int = 1) -> Location:
    card = NodeCard(
        node=NodeId("n"),
        incarnation=Incarnation(1),
        host=HostId("h"),
        socket="",
        data_port=port,
        ucx=("cma", "tcp") if ucx else (),
    )
    return Location(card=card, tier=tier)


@pytest.mark.parametrize(
    ("location", "ucx", "device", "ways"),
    [
        (at(Tier.DEVICE), True, True, ["device", "ucx", "tcp"]),
        (at(Tier.DEVICE), True, False, ["ucx", "tcp"]),
        (at(Tier.HOST), True, True, ["ucx", "tcp"]),
        (at(Tier.DEVICE), False, True, ["tcp"]),
        (at(Tier.DEVICE, ucx=False), True, True, ["tcp"]),
        (at(Tier.DEVICE, ucx=False, port=0), True, True, ["unix"]),
    ],
)
def test_the_best_way_comes_first_and_plain_sockets_last(
    location: Location, *, ucx: bool, device: bool, ways: list[str]
) -> None:
    assert ways_to(location, ucx=ucx, device=device) == ways


def test_a_way_is_left_once_whoever_says_so_and_not_tried_anew() -> None:
    side = Side(0, at(Tier.DEVICE), ["device", "ucx", "tcp"])
    said = side.leave("device", "it stalled")
    assert said == "UCX in place of UCX between devices from node n: it stalled"
    assert side.leave("device", "it stalled") == ""
    assert side.anew().ways == ["ucx", "tcp"]
    assert side.leave("ucx", "lost") == "tcp in place of UCX from node n: lost"
    assert side.scheme == "tcp"
