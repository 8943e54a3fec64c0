from __future__ import annotations

import pytest

from tensorcast_dask.store.pulls import lanes_for


@pytest.mark.parametrize(("cores", "lanes"), [(1, 2), (2, 2), (3, 3), (4, 4), (96, 4)])
def test_lanes_follow_the_cores(cores: int, lanes: int) -> None:
    assert lanes_for(cores) == lanes
