from __future__ import annotations

from tensorcast_dask.policies import (
    ArtifactView,
    Copy,
    NodeView,
    Popular,
    ReplicaFloor,
    View,
)


def node(name: str, free: int = 100, **more: object) -> NodeView:
    return NodeView(node=name, host=f"h-{name}", free_bytes=free, **more)  # type: ignore[arg-type]


def version(generation: int, *holders: str, **more: object) -> ArtifactView:
    given = {
        "id": f"x{generation}",
        "version": 1,
        "nbytes": 40,
        "hosts": len(holders),
        **more,
    }
    return ArtifactView(generation=generation, holders=holders, **given)  # type: ignore[arg-type]


def test_what_lacks_most_is_repaired_first_on_other_hosts_with_room() -> None:
    view = View(
        now_s=0.0,
        nodes=(node("a", 90), node("b", 100), node("c", 50), node("d", 10)),
        artifacts=(
            version(1, "a", "b", wanted=3),
            version(2, "a", wanted=2),
            version(3, wanted=2),  # lost: nothing to copy from
            version(4, "a", wanted=1),
        ),
    )
    assert ReplicaFloor().decide(view) == [
        Copy(generation=2, node="b", why="repair"),
        Copy(generation=1, node="c", why="repair"),
    ]
    assert len(ReplicaFloor(most=1).decide(view)) == 1


def test_a_floor_that_no_host_can_raise_is_left() -> None:
    full = node("b", 39)
    other = NodeView(node="c", host="h-a", free_bytes=100)
    leaving = node("d", 100, placeable=False)
    view = View(
        now_s=0.0,
        nodes=(node("a"), full, other, leaving),
        artifacts=(version(1, "a", wanted=2),),
    )
    assert ReplicaFloor().decide(view) == []


def test_what_is_read_gets_a_copy_for_each_so_many_reads() -> None:
    view = View(
        now_s=0.0,
        nodes=tuple(node(name, 1000 - n) for n, name in enumerate("abcdef")),
        artifacts=(
            version(1, "a", reads_per_s=25.0),
            version(2, "b", reads_per_s=100.0),
            version(3, "c", reads_per_s=100.0, current=False),
            version(4, "d", reads_per_s=9.0),
        ),
    )
    assert [(one.generation, one.node) for one in Popular().decide(view)] == [
        (2, "a"),
        (2, "c"),
        (2, "d"),
        (1, "b"),
    ]
    once = Popular(reads_per_s=10.0, most=2, at_once=9).decide(view)
    assert [one.generation for one in once] == [2, 1]
