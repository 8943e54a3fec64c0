from __future__ import annotations

import math

import pytest

from tensorcast_dask.exceptions import InvalidArgument, InvalidName
from tensorcast_dask.scheduler_plugin.state.checks import (
    check_count,
    check_labels,
    check_seconds,
    check_size,
)


@pytest.mark.parametrize("bad", [-1.0, -0.001, math.nan, -math.inf])
def test_a_time_that_cannot_be_is_refused(bad: float) -> None:
    with pytest.raises(InvalidArgument, match="deadline"):
        check_seconds(bad, what="deadline")


def test_zero_is_a_time_and_infinity_a_long_one() -> None:
    assert check_seconds(0.0, what="ttl") == 0.0
    assert math.isfinite(check_seconds(math.inf, what="ttl"))


def test_sizes_and_counts_have_bounds_at_both_ends() -> None:
    assert check_size(0, what="size") == 0
    for bad in (-1, 1 << 63):
        with pytest.raises(InvalidArgument):
            check_size(bad, what="size")
    assert check_count(1, least=1, most=2, what="replicas") == 1
    for bad in (0, 3):
        with pytest.raises(InvalidArgument):
            check_count(bad, least=1, most=2, what="replicas")


def test_labels_are_few_legal_and_short() -> None:
    assert check_labels({"team": "a b"}) == {"team": "a b"}
    for bad in ({"": "x"}, {"a": "x" * 600}, {"a": "\ud800"}, {"a\n": "x"}):
        with pytest.raises(InvalidName):
            check_labels(bad)
    with pytest.raises(InvalidArgument):
        check_labels({str(n): "" for n in range(100)})
