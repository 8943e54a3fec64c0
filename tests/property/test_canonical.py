from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensorcast_dask.dataplane.arrays import copy_out, materialise, resident_bytes
from tensorcast_dask.dataplane.arrays.canonical import canonical
from tensorcast_dask.tensors.dtypes import DTYPES
from tests.kit.segments import stored
from tests.kit.strategies import names, slices

Array = np.ndarray[Any, np.dtype[Any]]
kinds = st.sampled_from(
    [n for n, d in DTYPES.items() if d.numpy is not None and not d.needs_ml_dtypes]
)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Any bytes, of any dtype, seen through any chain of numpy views."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    kind = np.dtype(draw(kinds))
    nbytes = int(np.prod(shape, dtype=int)) * kind.itemsize
    data = draw(st.binary(min_size=nbytes, max_size=nbytes))
    array: Array = np.frombuffer(bytearray(data), kind).reshape(shape)
    for _ in range(draw(st.integers(0, 3))):
        how = draw(
            st.sampled_from(["swap", "cut", "transpose", "fortran", "broadcast"])
        )
        if how == "swap":
            array = array.view(array.dtype.newbyteorder())
        elif how == "cut":
            array = array[tuple(draw(slices(n)) for n in array.shape)]
        elif how == "transpose":
            array = array.transpose(draw(st.permutations(range(array.ndim))))
        elif how == "fortran":
            array = np.asfortranarray(array)
        elif array.ndim < 5:
            array = np.broadcast_to(array, (draw(st.integers(0, 3)), *array.shape))
    return array


def canonical_bytes(array: Array) -> bytes:
    """Element by element, each turned to little-endian as bytes: no copy kernel at work."""
    swapped = array.dtype.newbyteorder("<") != array.dtype
    # numpy swaps each half of a complex number.
    part = array.dtype.itemsize // (2 if array.dtype.kind == "c" else 1)
    found = b""
    for at in np.ndindex(array.shape):
        element = array[(*at, ...)].tobytes()
        halves = [element[i : i + part] for i in range(0, len(element), part)]
        found += b"".join(half[::-1] if swapped else half for half in halves)
    return found


@given(st.dictionaries(names, arrays(), max_size=4))
def test_what_comes_back_are_the_logical_values_bit_for_bit(
    tensors: dict[str, Array],
) -> None:
    memory, index = stored(tensors)
    made = materialise(memory, index, framework="numpy")
    raw = materialise(memory, index, framework="raw")
    targets = {
        name: np.empty(a.shape, a.dtype, order="F") for name, a in tensors.items()
    }
    copy_out(memory, index, targets)
    for name, array in tensors.items():
        expected = canonical_bytes(array)
        found = made[name]
        assert isinstance(found, np.ndarray)
        assert (found.shape, found.dtype) == (
            array.shape,
            array.dtype.newbyteorder("="),
        )
        assert found.tobytes() == expected
        assert bytes(raw[name].data) == expected  # type: ignore[attr-defined]
        assert canonical_bytes(targets[name]) == expected


@given(
    st.integers(1, 400), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 60)))
)
def test_resident_bytes_count_each_touched_byte_once(
    size: int, parts: list[tuple[int, int]]
) -> None:
    whole = np.zeros(size, np.uint8)
    views = {str(at): whole[start : start + n] for at, (start, n) in enumerate(parts)}
    touched = {at for start, n in parts for at in range(size)[start : start + n]}
    _, sources = canonical(views)
    assert resident_bytes(sources) == len(touched)
