from __future__ import annotations

import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensorcast_dask.tensors.boxes import box_runs, intersect, relative
from tests.kit.strategies import boxes, shapes


def numbers(shape: tuple[int, ...], box: tuple[range, ...]) -> list[int]:
    """Positions of a box's elements in C order, by numpy."""
    every = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    picked = every[np.ix_(*map(list, box))] if box else every
    return [int(at) for at in picked.reshape(-1)]


@given(shapes, st.sampled_from([1, 2, 8]), st.data())
def test_runs_cover_each_byte_of_a_box_once_and_no_other(
    shape: tuple[int, ...], itemsize: int, data: st.DataObject
) -> None:
    box = data.draw(boxes(shape))
    runs = box_runs(shape, itemsize, box)
    expected = [
        at
        for element in numbers(shape, box)
        for at in range(element * itemsize, (element + 1) * itemsize)
    ]
    assert [at for start, n in runs for at in range(start, start + n)] == expected
    assert runs.nbytes == len(expected)
    assert len(runs) == len(list(runs))
    if expected:
        assert runs.span == (expected[0], expected[-1] + 1)


@given(shapes, st.integers(1, 40), st.data())
def test_requests_ask_for_the_same_bytes_in_the_same_order(
    shape: tuple[int, ...], max_bytes: int, data: st.DataObject
) -> None:
    runs = box_runs(shape, 4, data.draw(boxes(shape)))
    asked: list[int] = []
    for nbytes, packed in runs.batches(max_bytes):
        pairs = list(struct.iter_unpack("<2Q", packed))
        assert sum(n for _, n in pairs) == nbytes <= max_bytes
        asked += [at for start, n in pairs for at in range(start, start + n)]
    assert asked == [at for start, n in runs for at in range(start, start + n)]


@given(shapes, st.data())
def test_an_intersection_has_exactly_the_common_elements(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = intersect(a, b)
    expected = sorted(set(numbers(shape, a)) & set(numbers(shape, b)))
    assert expected == ([] if common is None else numbers(shape, common))
    if common is not None:
        inside = relative(common, a)
        packed = np.array(numbers(shape, a), int).reshape(tuple(map(len, a)))
        picked = packed[np.ix_(*map(list, inside))] if inside else packed
        assert [int(at) for at in picked.reshape(-1)] == expected


@given(
    st.integers(0, 50),
    st.integers(0, 50),
    st.integers(1, 12),
    st.integers(1, 12),
    st.data(),
)
def test_long_ranges_intersect_as_sets(
    a: int, b: int, a_step: int, b_step: int, data: st.DataObject
) -> None:
    first = range(a, a + data.draw(st.integers(0, 200)), a_step)
    second = range(b, b + data.draw(st.integers(0, 200)), b_step)
    common = intersect((first,), (second,))
    assert sorted(set(first) & set(second)) == (
        [] if common is None else list(common[0])
    )
