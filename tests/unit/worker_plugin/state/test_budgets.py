"""How much memory a node takes, and what that leaves."""

from __future__ import annotations

import pytest

from tensorcast_dask.worker_plugin.state.budgets import (
    excess_of,
    is_auto_limit,
    lowered_limit_bytes,
    node_budget_bytes,
    oversold,
)

MACHINE = 25_162_203_136
GIB = 1 << 30


def budget(
    host_memory: float | None = None, *, share: float = 1.0, limit: int | None = None
) -> int:
    return node_budget_bytes(
        host_memory, machine_bytes=MACHINE, share=share, limit_bytes=limit
    )


def test_a_node_takes_half_of_its_share_of_the_machine() -> None:
    assert budget() == MACHINE // 2
    assert budget(share=0.5) == MACHINE // 4
    assert budget(share=3.0) == MACHINE // 2


def test_a_node_takes_at_most_half_of_a_memory_limit() -> None:
    assert budget(limit=4 * GIB) == 2 * GIB
    assert budget(share=0.5, limit=20 * GIB) == MACHINE // 4


def test_what_was_set_is_taken_as_it_is() -> None:
    assert budget(3 * GIB, limit=4 * GIB) == 3 * GIB
    assert budget(0.25) == MACHINE // 4
    assert budget(0) == 0


def test_more_than_the_machine_has_is_all_of_it_and_is_said() -> None:
    assert budget(MACHINE) == MACHINE
    assert budget(MACHINE + 1) == MACHINE
    for fits in (None, 0, 0.5, 3 * GIB, MACHINE):
        assert excess_of(fits, machine_bytes=MACHINE) == ""
    assert "host-memory" in excess_of(MACHINE + 1, machine_bytes=MACHINE)


def test_nodes_of_a_host_that_may_take_more_than_it_has_are_told_of() -> None:
    assert oversold([], machine_bytes=MACHINE) == ""
    assert oversold([MACHINE // 2, MACHINE // 2], machine_bytes=MACHINE) == ""
    told = oversold([MACHINE // 2, MACHINE], machine_bytes=MACHINE)
    assert "2 nodes" in told
    assert str(MACHINE + MACHINE // 2) in told


@pytest.mark.parametrize(
    ("limit", "auto"),
    [
        (MACHINE, True),
        (MACHINE // 2, True),
        (int(MACHINE / 3), True),
        (4 * GIB, False),
        (4_000_000_000, False),
        (None, False),
        (0, False),
    ],
)
def test_a_limit_that_dask_chose_is_told_from_a_given_one(
    limit: int | None, auto: bool
) -> None:
    assert is_auto_limit(limit, machine_bytes=MACHINE, threads=1, cores=2) is auto


def test_an_automatic_limit_is_lowered_by_the_budget_and_keeps_a_quarter() -> None:
    assert lowered_limit_bytes(10 * GIB, 4 * GIB) == 6 * GIB
    assert lowered_limit_bytes(8 * GIB, 8 * GIB) == 2 * GIB
