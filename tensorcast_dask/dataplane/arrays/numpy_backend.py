"""numpy arrays.

Rules:

1. bfloat16 and the float8 kinds are numpy dtypes only where `ml_dtypes` is installed; it is
   imported when the first of them is asked for.
2. A byte-swapped, strided, broadcast or Fortran-ordered array is not flat; numpy writes its
   logical values.
3. A subclass whose values are not in its buffer alone (masked arrays) is refused.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import TYPE_CHECKING, Final

import numpy as np

from tensorcast_dask.dataplane.arrays.contract import Source
from tensorcast_dask.exceptions import UnsupportedDtype
from tensorcast_dask.tensors.dtypes import DTYPES, DType

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from typing_extensions import Buffer

    from tensorcast_dask.dataplane.arrays.contract import Bytes, Places
    from tensorcast_dask.tensors.specs import Shape

__all__ = [
    "AnyArray",
    "NumpyBackend",
    "byte_strides",
    "numpy_dtype",
    "our_dtype",
    "whole_buffer",
]

AnyArray = np.ndarray[tuple[int, ...], np.dtype[np.generic]]

_DTYPE_OF: dict[np.dtype[np.generic], DType] = {}
_first_byte: Final = ctypes.c_char.from_buffer
_address_of: Final = ctypes.addressof
_NUMPY_OF: dict[str, np.dtype[np.generic]] = {}


def numpy_dtype(dtype: DType) -> np.dtype[np.generic]:
    """Return numpy's dtype; UnsupportedDtype when numpy has none here."""
    found = _NUMPY_OF.get(dtype.name)
    if found is not None:
        return found
    if dtype.numpy is None:
        message = f"numpy has no {dtype.name}; ask for framework='torch' or 'raw'"
        raise UnsupportedDtype(message)
    if not dtype.needs_ml_dtypes:
        found = np.dtype(dtype.numpy)
    else:
        try:
            scalar = getattr(importlib.import_module("ml_dtypes"), dtype.numpy, None)
        except ImportError:
            scalar = None
        if scalar is None:
            message = (
                f"numpy arrays of {dtype.name} need the package ml_dtypes: install "
                "tensorcast-dask[dtypes], or ask for framework='torch' or 'raw'"
            )
            raise UnsupportedDtype(message)
        found = np.dtype(scalar)
    _NUMPY_OF[dtype.name] = found
    return found


def _instead_of(found: np.dtype[np.generic]) -> str:
    """Say what to give in place of an array whose dtype is not in the table."""
    if (
        found.kind in "mM"
    ):  # as exact, without a copy; a unit is nothing that a tensor has
        return "give its .view('int64') and keep the unit, in a label for instance"
    if found.char in "gG":  # 80 bits and padding here, other bits on other machines
        shorter = "float64" if found.char == "g" else "complex128"
        return f"its bits differ from machine to machine: give its .astype({shorter!r})"
    if found.kind in "SUV" and not found.hasobject:
        return "give its bytes, np.ascontiguousarray(x).view('uint8'), and keep its dtype in a label"
    return f"convert it to one of: {', '.join(DTYPES)}"


def our_dtype(name: str, found: np.dtype[np.generic]) -> DType:
    """Return the dtype that an array of numpy's (or with numpy's dtypes) has here."""
    known = _DTYPE_OF.get(found)
    if known is not None:
        return known
    known = DTYPES.get(found.name)
    # A structured or void dtype may carry any name; ml_dtypes marks its own by module.
    if (
        known is None
        or known.itemsize != found.itemsize
        or (known.needs_ml_dtypes and found.type.__module__ != "ml_dtypes")
        or (not known.needs_ml_dtypes and found.kind not in "biufc")
    ):
        message = (
            f"tensor {name!r} has numpy dtype {found}, which no artifact can hold; "
            f"{_instead_of(found)}"
        )
        raise UnsupportedDtype(message)
    _DTYPE_OF[found] = known
    return known


def _plain(name: str, value: object) -> AnyArray:
    """Return a plain array for a scalar or an instance of a subclass."""
    if isinstance(value, np.generic):
        return np.asarray(value)
    if isinstance(value, np.ma.MaskedArray) or not isinstance(value, np.ndarray):
        message = f"tensor {name!r} is a {type(value).__name__}; give a plain array"
        raise UnsupportedDtype(message)
    return value.view(np.ndarray)


def _address(array: AnyArray) -> int:
    """Where a C-contiguous array begins."""
    try:
        # A quarter of the price of the next way, and not for every array: it wants a
        # writable one, of a dtype that the buffer protocol knows.
        return _address_of(_first_byte(array))  # type: ignore[arg-type]  # a buffer
    except (TypeError, ValueError, BufferError):
        return int(array.__array_interface__["data"][0])


def _array(source: Source) -> AnyArray:
    value = source.value
    assert isinstance(value, np.ndarray), "arrays: a numpy source holds a numpy array"
    return value


class NumpyBackend:
    """numpy behind the contract of `ArrayBackend`."""

    name = "numpy"

    def describe(self, name: str, value: object) -> Source:
        """Describe an array or a numpy scalar."""
        array = value if type(value) is np.ndarray else _plain(name, value)
        found, flags = array.dtype, array.flags
        return Source(
            self,
            array,
            _DTYPE_OF.get(found) or our_dtype(name, found),
            array.shape,
            flags.c_contiguous and found.isnative,
            alone=flags.owndata,
        )

    def describe_all(self, tensors: Mapping[str, object]) -> list[Source]:
        """Describe many; plain native arrays without a call for each."""
        arrays: list[AnyArray] = [
            value for value in tensors.values() if type(value) is np.ndarray
        ]
        if len(arrays) != len(tensors):
            return [self.describe(name, value) for name, value in tensors.items()]
        dtypes = [array.dtype for array in arrays]
        kinds = dict(zip(dtypes, tensors, strict=True))  # with the name to blame
        ours = {
            kind: _DTYPE_OF.get(kind) or our_dtype(name, kind)
            for kind, name in kinds.items()
        }
        columns = zip(arrays, map(ours.__getitem__, dtypes), strict=True)
        sources = [
            Source(
                self,
                array,
                dtype,
                array.shape,
                (flags := array.flags).c_contiguous,
                0,
                flags.owndata,
            )
            for array, dtype in columns
        ]
        if not all(kind.isnative for kind in kinds):
            for source, kind in zip(sources, dtypes, strict=True):
                source.flat = source.flat and kind.isnative
        return sources

    def locate(self, sources: Sequence[Source]) -> None:
        """Ask for all addresses at once."""
        wanted = [source for source in sources if source.flat]
        arrays = [source.value for source in wanted]
        try:
            found = list(map(_address_of, map(_first_byte, arrays)))  # type: ignore[arg-type]  # buffers
        except (TypeError, ValueError, BufferError):
            found = [self.extent(source)[0] for source in wanted]
        for source, address in zip(wanted, found, strict=True):
            source.address = address

    def tie(self, source: Source) -> Hashable:
        """Compare by memory and by the way it is read."""
        array = _array(source)
        if not array.size:
            return id(array)
        if source.flat:
            return self.extent(source)[0], source.dtype.name, source.shape
        start = array.__array_interface__["data"][0]
        lazy = "" if array.dtype.isnative else "swapped"
        return start, source.dtype.name, source.shape, array.strides, lazy

    def extent(self, source: Source) -> tuple[int, int]:
        """Bounds of the touched memory."""
        array = _array(source)
        if not array.size:
            return 0, 0
        if not source.flat:
            start = array.__array_interface__["data"][0]
            reach = [
                (n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)
            ]
            low = start + sum(step for step in reach if step < 0)
            high = start + sum(step for step in reach if step > 0) + array.itemsize
            return low, high
        if not source.address:
            source.address = _address(array)
        return source.address, source.address + array.nbytes

    def write(self, sources: Sequence[Source], out: Bytes) -> None:
        """Write the logical values in C order and native byte order."""
        first = sources[0]
        target = out.view(numpy_dtype(first.dtype))
        if len(sources) == 1:
            array = _array(first).view(np.ndarray)
            np.copyto(target.reshape(first.shape), array, casting="equiv")
        else:
            joined = target.reshape(-1, *first.shape[1:])
            np.concatenate([_array(source) for source in sources], out=joined)

    def make(self, buffer: Buffer, places: Places) -> list[object]:
        """Arrays over the buffer; writable when it is."""
        base = whole_buffer(buffer)
        kinds = {dtype.name: dtype for dtype in places.dtypes}
        dtypes = {name: numpy_dtype(dtype) for name, dtype in kinds.items()}
        make = np.ndarray
        columns = zip(places.dtypes, places.shapes, places.offsets, strict=True)
        if places.strides is None:
            return [
                make(shape, dtypes[dtype.name], base, at)
                for dtype, shape, at in columns
            ]
        return [
            make(shape, dtypes[dtype.name], base, at, byte_strides(dtype, strides))
            for (dtype, shape, at), strides in zip(columns, places.strides, strict=True)
        ]

    def refusal(self, target: Source) -> str:
        """Refuse read-only arrays, and those that hold an element twice."""
        array = _array(target)
        if not array.flags.writeable:
            return "is read-only"
        pairs = zip(array.shape, array.strides, strict=True)
        twice = array.size and any(n > 1 and not step for n, step in pairs)
        return "is broadcast: several elements share memory" if twice else ""

    def read_into(self, target: Source, data: Bytes) -> None:
        """Assign the values, in whatever order and byte order the target has."""
        values = data.view(numpy_dtype(target.dtype)).reshape(target.shape)
        np.copyto(_array(target).view(np.ndarray), values, casting="equiv")


def whole_buffer(buffer: Buffer) -> Bytes:
    """Return all bytes of a buffer as one array over it."""
    view = memoryview(buffer)
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def byte_strides(dtype: DType, strides: Shape | None) -> Shape | None:
    """Return strides in bytes."""
    return None if strides is None else tuple(n * dtype.itemsize for n in strides)
