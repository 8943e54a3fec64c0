from __future__ import annotations

from tensorcast_dask.policies import NodeView, Pack, Spread, View, Wanted

NODES = (
    NodeView(node="a", host="1", capacity_bytes=100, free_bytes=60),
    NodeView(node="b", host="2", capacity_bytes=1000, free_bytes=300),
    NodeView(node="c", host="3", capacity_bytes=100, free_bytes=60),
    NodeView(node="d", host="4", capacity_bytes=50, free_bytes=50, placeable=False),
)
VIEW = View(now_s=0.0, nodes=NODES)


def test_spread_takes_the_emptiest_and_pack_the_fullest_that_has_room() -> None:
    small = Wanted(id="x", nbytes=50)
    assert Spread().decide(VIEW, small) == "a"
    assert Pack().decide(VIEW, small) == "b"
    large = Wanted(id="x", nbytes=200)
    assert Spread().decide(VIEW, large) == "b"
    assert Pack().decide(VIEW, large) == "b"


def test_where_nobody_has_room_the_default_decides() -> None:
    huge = Wanted(id="x", nbytes=301)
    for policy in (Spread(), Pack()):
        assert policy.decide(VIEW, huge) is None
        assert policy.decide(VIEW) is None
