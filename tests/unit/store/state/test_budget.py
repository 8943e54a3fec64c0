from __future__ import annotations

import pytest

from tensorcast_dask.store.state.budget import (
    Headroom,
    Limits,
    Shortfall,
    shortfall,
    steps,
)

LIMITS = Limits(1000, 0.05, 10)


def test_the_budget_is_used_to_its_last_byte() -> None:
    assert shortfall(400, held_bytes=600, limits=LIMITS, headroom=Headroom()) is None
    short = shortfall(401, held_bytes=600, limits=LIMITS, headroom=Headroom())
    assert short == Shortfall("budget", 401, 400)
    assert short.missing_bytes == 1


@pytest.mark.parametrize(
    ("headroom", "what", "free"),
    [
        (Headroom(available_bytes=150, total_bytes=1000), "machine", 100),
        (Headroom(cgroup_limit_bytes=2000, cgroup_free_bytes=190), "cgroup", 90),
        (Headroom(cgroup_limit_bytes=100, cgroup_free_bytes=5), "cgroup", 0),
    ],
)
def test_machine_and_cgroup_keep_their_reserve(
    headroom: Headroom, what: str, free: int
) -> None:
    limits = LIMITS._replace(budget_bytes=1 << 40)
    if free:
        assert shortfall(free, held_bytes=0, limits=limits, headroom=headroom) is None
    found = shortfall(free + 1, held_bytes=0, limits=limits, headroom=headroom)
    assert found == Shortfall(what, free + 1, free)


def test_the_reserve_is_a_share_but_never_less_than_its_floor() -> None:
    assert LIMITS.reserve_bytes(1000) == 50
    assert LIMITS.reserve_bytes(100) == 10


def test_an_allocation_is_cut_into_steps_that_cover_it_once() -> None:
    assert list(steps(10, 4)) == [(0, 4), (4, 4), (8, 2)]
    assert list(steps(0, 4)) == []
