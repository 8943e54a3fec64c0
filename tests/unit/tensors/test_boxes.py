from __future__ import annotations

import struct

import pytest

from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.tensors.boxes import (
    MOST_RUNS,
    Box,
    Runs,
    box_runs,
    c_strides,
    intersect,
    relative,
    whole,
)


def test_strides_of_c_order_count_elements() -> None:
    assert c_strides((2, 3, 4)) == (12, 4, 1)
    assert c_strides(()) == ()
    assert c_strides((2, 0, 4)) == (4, 4, 1)


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        (range(10), range(4, 12), range(4, 10)),
        (range(0, 20, 4), range(0, 20, 6), range(0, 13, 12)),
        (range(1, 20, 4), range(3, 20, 6), range(9, 20, 12)),
        (range(0, 20, 2), range(1, 20, 2), None),
        (range(5), range(5, 9), None),
        (range(0), range(5), None),
        (range(7, 8), range(1, 30, 3), range(7, 8)),
    ],
)
def test_ranges_intersect_in_their_common_members(
    a: range, b: range, common: range | None
) -> None:
    expected = None if common is None else (common,)
    assert intersect((a,), (b,)) == expected
    assert intersect((b,), (a,)) == expected


def test_boxes_intersect_axis_by_axis() -> None:
    a: Box = (range(2, 8), range(3))
    b: Box = (range(0, 10, 3), range(2, 9))
    assert intersect(a, b) == (range(3, 7, 3), range(2, 3))
    assert intersect(a, (range(9, 10), range(3))) is None
    assert intersect((), ()) == ()


def test_boxes_of_different_tensors_do_not_intersect() -> None:
    with pytest.raises(InvalidArgument):
        intersect((range(3),), ())


def test_an_inner_box_lies_somewhere_in_the_packed_outer_one() -> None:
    outer: Box = (range(2, 20, 3), range(5))
    assert relative((range(5, 18, 6), range(4, 5)), outer) == (
        range(1, 6, 2),
        range(4, 5),
    )
    assert relative((range(0), range(1)), outer) == (range(0), range(1))


@pytest.mark.parametrize(
    ("shape", "box", "runs"),
    [
        ((), (), Runs(0, 4)),
        ((6,), (range(6),), Runs(0, 24)),
        ((6,), (range(2, 5),), Runs(8, 12)),
        ((6,), (range(1, 6, 2),), Runs(4, 4, (3,), (8,))),
        ((2, 3, 4), whole((2, 3, 4)), Runs(0, 96)),
        ((2, 3, 4), (range(1, 2), range(3), range(4)), Runs(48, 48)),
        ((2, 3, 4), (range(2), range(1, 3), range(4)), Runs(16, 32, (2,), (48,))),
        ((2, 3, 4), (range(2), range(3), range(1)), Runs(0, 4, (6,), (16,))),
        (
            (2, 3, 4),
            (range(2), range(0, 3, 2), range(1, 3)),
            Runs(4, 8, (2, 2), (48, 32)),
        ),
        ((1, 3, 1), (range(1), range(1, 2), range(1)), Runs(4, 4)),
        ((2, 3), (range(0), range(3)), Runs(0, 0)),
        ((0, 3), whole((0, 3)), Runs(0, 0)),
    ],
)
def test_a_box_is_few_runs_at_regular_places(
    shape: tuple[int, ...], box: Box, runs: Runs
) -> None:
    assert box_runs(shape, 4, box) == runs


@pytest.mark.parametrize(
    "box",
    [
        (),
        (range(3), range(3)),
        (range(4),),
        (range(-1, 2),),
        (range(2, -1, -1),),
    ],
)
def test_a_box_outside_its_tensor_is_refused(box: Box) -> None:
    with pytest.raises(InvalidArgument):
        box_runs((3,), 4, box)


def test_runs_are_listed_in_ascending_order_with_their_length() -> None:
    runs = Runs(100, 8, (2, 3), (64, 16))
    assert list(runs) == [(at, 8) for at in (100, 116, 132, 164, 180, 196)]
    assert (len(runs), runs.nbytes, runs.span) == (6, 48, (100, 204))
    assert list(runs.shifted(-100).offsets()) == [0, 16, 32, 64, 80, 96]
    assert list(Runs(0, 0)) == []
    assert len(Runs(0, 0)) == 0


def test_a_million_runs_are_described_without_listing_them() -> None:
    runs = box_runs((1 << 20, 1 << 20), 2, (range(1 << 20), range(1)))
    assert runs == Runs(0, 2, (1 << 20,), (1 << 21,))
    assert len(runs) == 1 << 20


def pairs(data: bytes) -> list[tuple[int, int]]:
    return [(a, b) for a, b in struct.iter_unpack("<2Q", data)]


def test_requests_hold_whole_runs_up_to_their_limit() -> None:
    batches = list(Runs(0, 8, (5,), (16,)).batches(20))
    assert [n for n, _ in batches] == [16, 16, 8]
    assert [p for _, data in batches for p in pairs(data)] == [
        (at, 8) for at in range(0, 80, 16)
    ]


def test_a_run_longer_than_a_request_is_cut() -> None:
    batches = list(Runs(0, 8, (2,), (16,)).batches(5))
    assert [pairs(data) for _, data in batches] == [
        [(0, 5)],
        [(5, 3)],
        [(16, 5)],
        [(21, 3)],
    ]
    assert [n for n, _ in batches] == [5, 3, 5, 3]


def test_no_runs_are_no_requests() -> None:
    assert list(Runs(0, 0).batches(5)) == []


def test_a_request_of_no_bytes_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        list(Runs(0, 8).batches(0))


def test_a_request_asks_for_no_more_runs_than_are_answered_in_a_moment() -> None:
    batches = list(Runs(0, 1, (2 * MOST_RUNS + 1,), (3,)).batches(1 << 30))
    assert [nbytes for nbytes, _ in batches] == [MOST_RUNS, MOST_RUNS, 1]
