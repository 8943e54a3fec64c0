from __future__ import annotations

import pytest

from tensorcast_dask.scheduler_plugin.state.bandwidths import (
    LEAST_BYTES,
    MAX_LINKS,
    Bandwidths,
)
from tensorcast_dask.tensors.ids import NodeId
from tensorcast_dask.tensors.messages import Fault, TaskDone

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def pull(
    *shares: int, seconds: float = 2.0, moved: int = 0, **more: object
) -> TaskDone:
    return TaskDone(
        task=1,
        moved_bytes=moved or sum(shares),
        seconds=seconds,
        via="tcp",
        sources=(A, C)[: max(len(shares), 1)],
        shares=shares,
        **more,  # type: ignore[arg-type]
    )


def test_each_source_gets_what_came_from_it_in_the_time_of_the_whole() -> None:
    links = Bandwidths()
    links.transferred(B, pull(8 * LEAST_BYTES, 2 * LEAST_BYTES), now_s=5.0)
    found = {(s, n): one for s, n, one in links.items()}
    assert found[A, B].bytes_per_s == 4 * LEAST_BYTES
    assert found[C, B].bytes_per_s == LEAST_BYTES
    assert found[A, B].reading == {
        "bytes_per_s": pytest.approx(4 * LEAST_BYTES, rel=1e-2),
        "last_bytes_per_s": pytest.approx(4 * LEAST_BYTES, rel=1e-2),
        "transfers": 1,
        "bytes": 8 * LEAST_BYTES,
        "via": "tcp",
    }
    assert links.best_into(B) == 4 * LEAST_BYTES
    assert links.best_into(A) is None


def test_a_store_that_says_no_shares_says_it_for_its_only_source() -> None:
    links = Bandwidths()
    links.transferred(B, pull(moved=4 * LEAST_BYTES), now_s=1.0)
    found = links.get(A, B)
    assert found is not None
    assert found.bytes_per_s == 2 * LEAST_BYTES
    assert links.get(B, A) is None


def test_small_transfers_count_and_say_nothing_of_speed() -> None:
    links = Bandwidths()
    links.transferred(B, pull(LEAST_BYTES - 1), now_s=1.0)
    found = links.get(A, B)
    assert found is not None
    assert (found.transfers, found.bytes_per_s) == (1, None)
    assert found.reading["bytes_per_s"] is None


def test_what_failed_what_took_no_time_and_what_was_here_is_no_transfer() -> None:
    links = Bandwidths()
    links.transferred(
        B, pull(LEAST_BYTES, fault=Fault(kind="Gone", message="")), now_s=1
    )
    links.transferred(B, pull(LEAST_BYTES, seconds=0.0), now_s=1)
    links.transferred(A, pull(LEAST_BYTES), now_s=1)
    links.transferred(B, pull(0, 0), now_s=1)
    assert len(links) == 0


def test_the_link_longest_silent_is_forgotten_and_so_are_those_of_a_node() -> None:
    links = Bandwidths()
    for number in range(MAX_LINKS + 1):
        links.transferred(NodeId(f"n{number}"), pull(LEAST_BYTES), now_s=number)
    assert len(links) == MAX_LINKS
    assert links.get(A, NodeId("n0")) is None
    links.forget(NodeId("n1"))
    assert links.get(A, NodeId("n1")) is None
    links.forget(A)
    assert len(links) == 0
