from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.tensors.messages import SignalFrame, decode, encode
from tensorcast_dask.tensors.signals import (
    EVERYTHING,
    Crossing,
    Freshness,
    Rate,
    Signal,
    check_families,
    ewma,
    matches,
    rounded,
)


def test_a_signal_crosses_the_wire_with_its_age_and_is_dated_on_the_readers_clock() -> (
    None
):
    sent = Signal(name="node/a/host", value={"free_bytes": 3}, staleness=2.5, epoch=7)
    frame = SignalFrame(epoch=1, number=1, changed=(sent,))
    found = decode(encode(frame), SignalFrame).changed[0].read_at(100.0)
    assert found == Signal(
        name="node/a/host",
        value={"free_bytes": 3},
        staleness=2.5,
        epoch=7,
        as_of=97.5,
    )
    assert found["free_bytes"] == 3
    assert found.fresh
    assert not Signal(name="x", freshness=Freshness.STALE).fresh


def test_names_are_matched_by_their_beginnings() -> None:
    assert matches("node/a/host", ("link/", "node/a"))
    assert not matches("node/b/host", ("link/", "node/a"))
    assert matches("anything", EVERYTHING)
    assert not matches("anything", ())


def test_a_prefix_with_which_no_name_begins_is_refused_by_those_that_there_are() -> (
    None
):
    check_families(("", "n", "node/", "node/a/host", "event/moved"))
    for wrong in ("nodes/", "node2", "instances/e"):
        with pytest.raises(InvalidArgument, match=f"{wrong!r}.*node/"):
            check_families(("node/", wrong))


def test_a_smoothed_value_begins_with_the_first_one() -> None:
    assert ewma(None, 4.0, 0.25) == 4.0
    assert ewma(4.0, 8.0, 0.25) == 5.0


@pytest.mark.parametrize("value", [0.0, 1234.5, -0.00012345, 1e300])
def test_a_rounded_value_keeps_its_size(value: float) -> None:
    assert rounded(value) == pytest.approx(value, rel=1e-2)
    assert rounded(rounded(value)) == rounded(value)


def test_a_rate_halves_in_its_half_life_and_is_nothing_in_the_end() -> None:
    rate = Rate(10.0, 0.0)
    assert rate.at(0.0) == 0.0
    rate.add(8, 0.0)
    first = rate.at(0.0)
    assert rate.at(10.0) == pytest.approx(first / 2)
    rate.add(4, 10.0)
    assert rate.at(10.0) == pytest.approx(first)
    assert rate.at(20_000.0) == 0.0


def test_a_steady_stream_is_told_at_its_rate() -> None:
    rate = Rate(10.0, 0.0)
    for tick in range(2000):
        rate.add(1, tick * 0.1)
    assert rate.at(200.0) == pytest.approx(10.0, rel=0.02)


def test_a_clock_that_stands_still_takes_nothing_away() -> None:
    rate = Rate(10.0, 5.0)
    rate.add(1, 3.0)
    assert rate.at(2.0) == rate.at(5.0) > 0


def seen(crossing: Crossing, *values: float, step_s: float = 1.0) -> list[int]:
    return [n for n, one in enumerate(values) if crossing.see("x", one, n * step_s)]


def test_a_crossing_counts_once_until_the_value_has_come_back() -> None:
    assert seen(Crossing(above=5.0), 5.0, 6.0, 7.0, 5.0, 6.0) == [1, 4]
    assert seen(Crossing(below=0.1), 0.2, 0.05, 0.01, 0.1, 0.05) == [1, 4]


def test_between_the_threshold_and_where_it_clears_nothing_changes() -> None:
    crossing = Crossing(above=5.0, clear=2.0)
    assert seen(crossing, 6.0, 4.0, 6.0, 2.0, 6.0, 1.9, 4.0, 6.0) == [0, 7]


def test_what_crosses_in_the_cooldown_counts_when_it_is_over() -> None:
    crossing = Crossing(above=5.0, cooldown_s=3.0)
    assert seen(crossing, 6.0, 1.0, 6.0, 6.0, 1.0) == [0, 3]


def test_signals_cross_each_for_itself_and_begin_anew_when_they_were_away() -> None:
    crossing = Crossing(above=5.0, cooldown_s=10.0)
    assert crossing.see("x", 6.0, 0.0)
    assert crossing.see("y", 6.0, 0.0)
    crossing.gone("x")
    assert crossing.see("x", 6.0, 1.0)
    assert not crossing.see("y", 6.0, 1.0)


def test_a_crossing_has_one_threshold_and_clears_on_its_near_side() -> None:
    for bad in (
        {},
        {"above": 1.0, "below": 2.0},
        {"above": 1.0, "clear": 2.0},
        {"below": 1.0, "clear": 0.0},
    ):
        with pytest.raises(InvalidArgument):
            Crossing(**bad)
