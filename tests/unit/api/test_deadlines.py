"""One instant for a whole call, however many hops it takes."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from tensorcast_dask.api.connection.deadlines import GRACE_S, MAX_S, Deadline, deadline
from tensorcast_dask.exceptions import DeadlineExceeded, InvalidArgument


@pytest.mark.parametrize("bad", [-1, -1e-9, math.nan, -math.inf, "3", True, [1], b"1"])
def test_p34_what_is_no_time_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="deadline"):
        deadline(bad)


def test_p34_none_is_the_default_and_zero_a_look() -> None:
    assert 6 < deadline(None, default_s=7).left_s() <= 7
    look = deadline(0)
    assert look.poll
    assert look.left_s() == 0
    look.check("looking")
    with pytest.raises(DeadlineExceeded, match="waiting"):
        Deadline(time.monotonic() - 1).check("waiting")


def test_p34_for_ever_is_a_number_that_clocks_take() -> None:
    forever = deadline(math.inf)
    assert MAX_S - 1 < forever.left_s() <= MAX_S
    assert forever.answer_within_s() <= MAX_S + GRACE_S


def test_p34_the_hops_of_a_call_share_one_moment_after_its_deadline() -> None:
    now_s = time.monotonic()
    assert Deadline(now_s).answer_within_s() <= GRACE_S
    assert Deadline(now_s - GRACE_S / 2).answer_within_s() <= GRACE_S / 2
    assert Deadline(now_s - GRACE_S).answer_within_s() == 0


def test_p34_a_part_of_a_call_never_waits_longer_than_the_whole() -> None:
    whole = deadline(10)
    assert whole.sooner(3).answer_within_s() <= 3
    assert whole.sooner(100).left_s() <= 10
    assert whole.sooner(100).answer_within_s() <= 10 + GRACE_S
    assert whole.look(1).left_s() == 0
    assert 0 < whole.look(1).answer_within_s() <= 1
    assert deadline(0).look(100).answer_within_s() <= GRACE_S


def test_p34_a_number_too_large_for_a_clock_is_for_ever_or_refused() -> None:
    assert MAX_S - 1 < deadline(10**400).left_s() <= MAX_S
    with pytest.raises(InvalidArgument, match="deadline"):
        deadline(-(10**400))
