"""What `tensorcast top` shows."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from tensorcast_dask.cli.screen import draw, frame_of
from tensorcast_dask.tensors.signals import Freshness, Signal

MIB = 1 << 20


def signals(values: dict[str, Any]) -> dict[str, Signal]:
    return {name: Signal(name=name, value=value) for name, value in values.items()}


def cluster() -> dict[str, Signal]:
    return signals(
        {
            "node/aaaaaaaaaaaa/host": {
                "name": "w0",
                "used_bytes": 8 * MIB,
                "capacity_bytes": 64 * MIB,
                "replicas": 2,
            },
            "node/aaaaaaaaaaaa/orders": {"name": "w0", "queue": 3, "attended": True},
            "node/bbbbbbbbbbbb/host": {
                "name": "w1",
                "used_bytes": 32 * MIB,
                "capacity_bytes": 64 * MIB,
            },
            "node/bbbbbbbbbbbb/orders": {"name": "w1", "attended": False},
            "link/aaaaaaaaaaaa/bbbbbbbbbbbb": {
                "bytes_per_s": 1e9,
                "transfers": 2,
                "bytes": MIB,
                "via": "tcp",
            },
            "artifact/cold": {"latest": 1, "bytes": 5 * MIB, "reads_per_s": 0.0},
            "artifact/a/hot": {
                "latest": 7,
                "bytes": MIB,
                "reads_per_s": 2.5,
                "hosts": 1,
            },
            "artifact/lost": {"newest": 2, "bytes": 2 * MIB, "lost": True},
            "catalog/counts": {"nodes": 2, "artifacts": 3},
        }
    )


def test_the_fullest_node_stands_first_with_its_state() -> None:
    nodes = frame_of(cluster(), [], rows=9).nodes
    assert [(row[0], row[2], row[4], row[-2], row[-1]) for row in nodes.rows] == [
        ("w1", "32.0 MiB", "######......  50%", "0", "no worker"),
        ("w0", "8.0 MiB", "##..........  12%", "3", ""),
    ]


def test_a_node_that_is_late_is_called_stale() -> None:
    late = cluster()
    name = "node/aaaaaaaaaaaa/host"
    late[name] = Signal(name=name, value=late[name].value, freshness=Freshness.STALE)
    assert frame_of(late, [], rows=9).nodes.rows[1][-1] == "stale"


def test_the_hottest_artifact_stands_first_then_the_largest_and_the_rest_is_counted() -> (
    None
):
    artifacts = frame_of(cluster(), [], rows=2).artifacts
    assert [row[0] for row in artifacts.rows] == ["a/hot", "cold"]
    assert artifacts.more == 1
    assert frame_of(cluster(), [], rows=9).artifacts.rows[2][-1] == "lost"


def test_transfers_that_run_stand_before_links_and_those_that_are_done() -> None:
    rows = [
        ("old", "replicate", "bbbbbbbbbbbb", "done", MIB, MIB, 0.5, "tcp"),
        ("now", "migrate", "bbbbbbbbbbbb", "running", MIB, 4 * MIB, 0.0, ""),
    ]
    found = frame_of(cluster(), rows, rows=9).transfers.rows
    assert found == [
        ("now", "migrate", "w1", "1.0 MiB of 4.0 MiB", "", "running"),
        ("w0 -> w1", "link", "w1", "1.0 MiB", "953.7 MiB/s", "2 by tcp"),
        ("old", "replicate", "w1", "1.0 MiB of 1.0 MiB", "2.0 MiB/s", "done tcp"),
    ]


def test_names_are_text_whatever_is_in_them() -> None:
    odd = signals({"artifact/[bold]\x1b[31m": {"bytes": 1}})
    out = StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system=None)
    console.print(draw(frame_of(odd, [], rows=9)))
    assert "[bold]?[31m" in out.getvalue()


def test_an_empty_cluster_has_a_picture_too() -> None:
    frame = frame_of({}, [], rows=9)
    assert frame.nodes.rows == frame.artifacts.rows == frame.transfers.rows == []
    Console(file=StringIO()).print(draw(frame))
