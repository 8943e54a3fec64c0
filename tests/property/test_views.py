from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensorcast_dask.dataplane.arrays import RawTensor, materialise
from tensorcast_dask.tensors.ids import ArtifactId, Generation
from tensorcast_dask.tensors.views import ResolvedView, View, view_id
from tests.kit.segments import segment, stored
from tests.kit.strategies import slices

Array = np.ndarray[Any, np.dtype[Any]]
shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def keys(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """Basic slicing that fits a shape."""
    given_axes = draw(st.integers(0, len(shape)))
    key: list[Any] = [
        draw(st.integers(-n, n - 1) | slices(n) if n else slices(n))
        for n in shape[:given_axes]
    ]
    if given_axes < len(shape) and draw(st.booleans()):
        key.append(Ellipsis)
    elif given_axes == len(shape):
        key.insert(draw(st.integers(0, len(key))), Ellipsis)
    return key[0] if len(key) == 1 and draw(st.booleans()) else tuple(key)


@st.composite
def chains(draw: st.DrawFn, start: Array) -> tuple[View, Array]:
    """A chain of steps on the tensor "t", and what numpy makes of it."""
    view, array = View(), start
    for _ in range(draw(st.integers(1, 4))):
        if array.ndim and draw(st.booleans()):
            order = tuple(draw(st.permutations(range(array.ndim))))
            signed = tuple(a - array.ndim if draw(st.booleans()) else a for a in order)
            view = view.then(View.transpose({"t": signed}))
            array = array.transpose(order)
        else:
            key = draw(keys(array.shape))
            view = view.then(View.of({"t": key}))
            array = np.asarray(array[key])
    return view, array


def gathered(memory: Any, resolved: ResolvedView) -> tuple[Any, ResolvedView, Any]:
    """A segment that holds just the boxes, filled run by run as a pull would."""
    index, packed = resolved.packed()
    target = segment(index.nbytes)
    for runs, offset in zip(resolved.runs(), index.offsets, strict=True):
        at = offset
        for start, nbytes in runs:
            target[at : at + nbytes] = memory[start : start + nbytes]
            at += nbytes
    return index, packed, target


@given(shapes, st.sampled_from(["uint8", "int16", "float64"]), st.data())
def test_a_chain_of_views_is_what_numpy_makes_of_it(
    shape: tuple[int, ...], kind: str, data: st.DataObject
) -> None:
    start = (np.arange(int(np.prod(shape, dtype=int))) + 1).astype(kind).reshape(shape)
    view, expected = data.draw(chains(start))
    memory, index = stored({"before": np.ones(3), "t": start})
    resolved = view.resolve(index)
    assert View.decode(view.encode()).resolve(index) == resolved
    assert resolved.described().resolve(index) == resolved
    (tensor,) = resolved.tensors
    assert tensor.spec.shape == expected.shape
    whole = materialise(memory, index, framework="numpy", view=view)
    packed_index, packed, target = gathered(memory, resolved)
    part = materialise(target, packed_index, framework="numpy", view=packed)
    for made in (whole["t"], part["t"]):
        assert isinstance(made, np.ndarray)
        assert made.dtype == start.dtype
        assert made.shape == expected.shape
        assert np.array_equal(made, expected)
    raw = materialise(memory, index, framework="raw", view=view)["t"]
    assert isinstance(raw, RawTensor)
    assert bytes(raw.data) == expected.tobytes()


@given(shapes, st.data())
def test_views_that_read_the_same_elements_alike_are_one_view(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    start = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    (a, ours), (b, theirs) = data.draw(chains(start)), data.draw(chains(start))
    _, index = stored({"t": start})
    first, second = a.resolve(index), b.resolve(index)
    ids = {view_id(ArtifactId("x"), Generation(1), form) for form in (first, second)}
    assert (len(ids) == 1) == (first == second)
    if first == second:
        assert np.array_equal(ours, theirs)
    # An element takes part once, so equal results of two and more elements an axis mean
    # that every axis is read alike.
    if ours.shape == theirs.shape and ours.size and min(ours.shape, default=2) > 1:
        alike = np.array_equal(ours, theirs)
        assert first.runs() == second.runs() if alike else first != second


@given(st.data())
def test_cuts_compose(data: st.DataObject) -> None:
    start = np.arange(120).reshape(4, 5, 6)
    first, middle = data.draw(chains(start))
    second, _ = data.draw(chains(middle))
    _, index = stored({"t": start})
    chained = first.then(second).resolve(index)
    both = View(first.steps + second.steps).resolve(index)
    assert chained == both
