"""From the bytes of a segment to arrays that a caller can use.

Rules:

1. Arrays lie over the buffer and keep it alive; nothing is copied. The buffer is writable
   and private to the caller, so that an edit stays the caller's own.
2. Tied names come back as one array object, and so do the same parts of them in a view.
3. Without `framework`, torch is used where it can be imported, else numpy.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from tensorcast_dask.dataplane.arrays.canonical import backend_named
from tensorcast_dask.dataplane.arrays.contract import Places
from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.tensors.specs import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Buffer

    from tensorcast_dask.tensors.specs import Index

__all__ = ["RawTensor", "default_framework", "materialise"]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor without an array library: what it is, and its bytes."""

    spec: TensorSpec
    data: memoryview


@cache
def default_framework() -> str:
    """Return "torch" where it can be imported, else "numpy"; imports neither."""
    if "torch" in sys.modules or importlib.util.find_spec("torch") is not None:
        return "torch"
    return "numpy"


def materialise(
    buffer: Buffer,
    index: Index,
    *,
    framework: str | None = None,
    names: Iterable[str] | None = None,
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
        Which tensors; default: all, in put order.

    Raises
    ------
    NotFound
        For a name that the index does not have.
    UnsupportedDtype
        When the library has no such dtype; nothing has been made.
    InvalidArgument
        When the buffer is too small, or read-only where torch needs it writable.
    """
    size_bytes = memoryview(buffer).nbytes
    if size_bytes < index.nbytes:
        message = f"the buffer has {size_bytes} bytes, the index needs {index.nbytes}"
        raise InvalidArgument(message)
    if names is None:
        chosen, entry_of = list(index.names), list(index.entry_of)
    else:
        chosen = list(dict.fromkeys(names))
        entry_of = [index.position(name) for name in chosen]
    if framework == "raw":
        return _raw(buffer, index, chosen)
    backend = backend_named(framework or default_framework())
    wanted = (
        entry_of
        if len(index.sizes) == len(index.names)
        else list(dict.fromkeys(entry_of))
    )
    places = Places(
        [index.dtypes[at] for at in wanted],
        [index.shapes[at] for at in wanted],
        [index.offsets[at] for at in wanted],
    )
    made = backend.make(buffer, places)
    if wanted is entry_of:
        return dict(zip(chosen, made, strict=True))
    array_of = dict(zip(wanted, made, strict=True))
    return {name: array_of[at] for name, at in zip(chosen, entry_of, strict=True)}


def _raw(buffer: Buffer, index: Index, names: Iterable[str]) -> dict[str, object]:
    whole = (
        memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(b"")
    )
    made: dict[str, object] = {}
    for name in names:
        entry = index.entry(name)
        data = whole[entry.offset : entry.offset + entry.nbytes]
        made[name] = RawTensor(TensorSpec(name, entry.dtype, entry.shape), data)
    return made
