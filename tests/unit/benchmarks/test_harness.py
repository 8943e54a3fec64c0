"""A bar is decided by quartiles of ratios, and by nothing else."""

from __future__ import annotations

import itertools
import json

import pytest

from benchmarks.harness import Better, absolute, judge, paired, unavailable


@pytest.mark.parametrize(
    ("samples", "bar", "better", "verdict"),
    [
        ([1.0, 1.1, 1.2, 1.3], 2.0, "lower", "pass"),
        ([2.1, 2.2, 2.3, 2.4], 2.0, "lower", "miss"),
        ([1.0, 1.5, 2.5, 3.0], 2.0, "lower", "undecided"),
        ([0.95, 0.96, 0.97], 0.9, "higher", "pass"),
        ([0.80, 0.85, 0.89], 0.9, "higher", "miss"),
        ([0.5, 0.9, 1.5], 0.9, "higher", "undecided"),
        ([2.0], 2.0, "lower", "pass"),
    ],
)
def test_quartiles_on_both_sides_of_the_bar_are_undecided(
    samples: list[float], bar: float, better: Better, verdict: str
) -> None:
    assert judge(samples, bar=bar, better=better) == verdict


def test_an_undecided_run_is_repeated_and_three_of_them_are_a_miss() -> None:
    wild = itertools.cycle([1.0, 3.0])
    calls = []

    def product() -> float:
        calls.append(1)
        return next(wild)

    line = paired("wild", product, lambda: 1.0, bar=2, better="lower", pairs=8, warm=0)

    assert (line.verdict, line.met, line.runs) == ("miss", False, 3)
    assert len(calls) == 24


def test_an_undecided_run_that_is_followed_by_a_clear_one_counts_as_the_clear_one() -> (
    None
):
    figures = iter([1.0, 3.0, 1.0, 3.0] + [1.0] * 4)

    line = paired(
        "calms down",
        lambda: next(figures),
        lambda: 1.0,
        bar=2,
        better="lower",
        pairs=4,
        warm=0,
    )

    assert (line.verdict, line.met, line.runs) == ("pass", True, 2)


def test_product_and_reference_alternate_and_neither_always_goes_first() -> None:
    order: list[str] = []

    def note(who: str) -> float:
        order.append(who)
        return 1.0

    paired(
        "order",
        lambda: note("p"),
        lambda: note("r"),
        bar=1,
        better="lower",
        pairs=4,
        warm=0,
    )

    assert "".join(order) == "prrpprrp"


def test_the_line_says_what_was_measured_and_with_what() -> None:
    line = json.loads(
        paired("x", lambda: 4.0, lambda: 2.0, bar=3, better="lower", unit="ms").line()
    )

    assert line["bench"] == "x"
    assert line["value"] == 4.0
    assert line["reference"] == 2.0
    assert line["ratio"] == 2.0
    assert line["quartiles"] == [2.0, 2.0]
    assert line["met"] is True
    assert line["versions"]["python"]
    assert line["commit"]


def test_a_bar_about_the_value_itself_has_neither_reference_nor_ratio() -> None:
    line = absolute("x", lambda: 5.0, bar=10, better="lower", unit="ms")

    assert (line.reference, line.ratio, line.met) == (None, None, True)


def test_a_peer_that_cannot_be_had_neither_meets_nor_misses_a_bar() -> None:
    line = unavailable("x", "no network")

    assert line.met is None
    assert "no network" in line.line()
