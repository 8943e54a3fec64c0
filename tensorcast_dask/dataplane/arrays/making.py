"""From the bytes of a segment to arrays that a caller can use.

Rules:

1. Arrays lie over the buffer and keep it alive; nothing is copied, but for parts of a view
   that the library cannot describe (reversed axes in torch, anything strided in "raw"). The buffer is writable
   and private to the caller, so that an edit stays the caller's own.
2. Tied names come back as one array object, and so do the same parts of them in a view.
3. Without `framework`, torch is used where it can be imported, else numpy.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from tensorcast_dask.dataplane.arrays.canonical import backend_named
from tensorcast_dask.dataplane.arrays.contract import Places
from tensorcast_dask.dataplane.arrays.numpy_backend import whole_buffer
from tensorcast_dask.exceptions import InvalidArgument, NotFound
from tensorcast_dask.tensors.specs import TensorSpec
from tensorcast_dask.tensors.views import View

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Buffer

    from tensorcast_dask.tensors.specs import Index, Shape
    from tensorcast_dask.tensors.views import ResolvedView, ViewTensor

__all__ = ["RawTensor", "default_framework", "materialise"]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor without an array library: what it is, and its bytes."""

    spec: TensorSpec
    data: memoryview


@cache
def default_framework() -> str:
    """Return "torch" where it can be imported, else "numpy"; imports neither."""
    if "torch" in sys.modules:  # None there means that its import is barred
        found: object | None = sys.modules["torch"]
    else:
        found = importlib.util.find_spec("torch")
    return "numpy" if found is None else "torch"


def materialise(
    buffer: Buffer,
    index: Index,
    *,
    framework: str | None = None,
    names: Iterable[str] | None = None,
    view: View | ResolvedView | None = None,
) -> dict[str, object]:
    """Make arrays over a segment's bytes.

    Parameters
    ----------
    buffer : buffer
        At least `index.nbytes` bytes: a private writable map, or the caller's own memory.
    index : Index
        What lies in it.
    framework : {None, "numpy", "torch", "raw"}
        Whose arrays; "raw" gives `RawTensor`.
    names : iterable of str, optional
        Which tensors, of the view when there is one; default: all, in put order.
    view : View or ResolvedView, optional
        Which parts; a resolved one must be bound to `index`.

    Raises
    ------
    NotFound
        For a name that is not there.
    UnsupportedDtype
        When the library has no such dtype; nothing has been made.
    InvalidArgument
        When the buffer is too small, or read-only where torch needs it writable.
    """
    size_bytes = memoryview(buffer).nbytes
    if size_bytes < index.nbytes:
        message = f"the buffer has {size_bytes} bytes, the index needs {index.nbytes}"
        raise InvalidArgument(message)
    wanted = _whole(index, names) if view is None else _viewed(index, names, view)
    if framework == "raw":
        return _raw(buffer, wanted)
    backend = backend_named(default_framework() if framework is None else framework)
    made = backend.make(buffer, wanted.places)
    if wanted.array_of is None:
        return dict(zip(wanted.names, made, strict=True))
    return {
        name: made[at] for name, at in zip(wanted.names, wanted.array_of, strict=True)
    }


@dataclass(slots=True)
class _Wanted:
    """Names, and the arrays that they stand for."""

    names: Sequence[str]
    places: Places
    #: Array of each name; None when the n-th name has the n-th array.
    array_of: Sequence[int] | None = None


def _whole(index: Index, names: Iterable[str] | None) -> _Wanted:
    if names is None:
        tied = len(index.names) != len(index.sizes)
        places = Places(index.dtypes, index.shapes, index.offsets)
        return _Wanted(index.names, places, index.entry_of if tied else None)
    chosen = list(dict.fromkeys(names))
    entries: dict[int, int] = {}
    array_of = [entries.setdefault(index.position(n), len(entries)) for n in chosen]
    places = Places(
        [index.dtypes[at] for at in entries],
        [index.shapes[at] for at in entries],
        [index.offsets[at] for at in entries],
    )
    return _Wanted(chosen, places, array_of)


def _viewed(
    index: Index, names: Iterable[str] | None, view: View | ResolvedView
) -> _Wanted:
    resolved = view.resolve(index) if isinstance(view, View) else view
    tensors = {tensor.spec.name: tensor for tensor in resolved.tensors}
    chosen = list(tensors) if names is None else list(dict.fromkeys(names))
    for name in chosen:
        if name not in tensors:
            message = f"the view has no tensor {name!r}; it has {', '.join(tensors)}"
            raise NotFound(message)
    arrays: dict[object, ViewTensor] = {}
    for name in chosen:
        arrays.setdefault(tensors[name].identity, tensors[name])
    number = {identity: at for at, identity in enumerate(arrays)}
    places = Places(
        [tensor.dtype for tensor in arrays.values()],
        [tensor.spec.shape for tensor in arrays.values()],
        [tensor.offset for tensor in arrays.values()],
        [None if tensor.contiguous else tensor.strides for tensor in arrays.values()],
    )
    return _Wanted(chosen, places, [number[tensors[name].identity] for name in chosen])


def _raw(buffer: Buffer, wanted: _Wanted) -> dict[str, object]:
    flat = whole_buffer(buffer).data
    places = wanted.places
    views = [
        _raw_bytes(flat, dtype.itemsize, shape, offset, strides)
        for dtype, shape, offset, strides in zip(
            places.dtypes,
            places.shapes,
            places.offsets,
            places.strides or [None] * len(places.offsets),
            strict=True,
        )
    ]
    made: dict[str, object] = {}
    for name, at in zip(
        wanted.names, wanted.array_of or range(len(views)), strict=True
    ):
        made[name] = RawTensor(
            TensorSpec(name, places.dtypes[at], places.shapes[at]), views[at]
        )
    return made


def _raw_bytes(
    flat: memoryview, itemsize: int, shape: Shape, offset: int, strides: Shape | None
) -> memoryview:
    if strides is None:
        return flat[offset : offset + math.prod(shape) * itemsize]
    elements = np.ndarray(
        shape, f"V{itemsize}", flat, offset, tuple(n * itemsize for n in strides)
    )
    return elements.flatten().view(np.uint8).data
