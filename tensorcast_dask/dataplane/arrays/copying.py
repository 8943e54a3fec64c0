"""Bytes from sources into a segment, and from a segment into a caller's arrays.

Rules:

1. Everything is checked before the first byte moves.
2. Big copies run without the GIL, cut evenly over `threads`. Small tensors of one kind that
   lie side by side go to their library in one call; other small ones are copied by the
   calling thread, which keeps the GIL rather than hand it back and forth.
3. When a call returns, or raises, no thread of it touches memory any more.
4. Bytes of the segment that belong to no entry are zeroed: a recycled segment shows nothing
   of its former content, and equal tensors make equal segments.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from tensorcast_dask.dataplane import memory
from tensorcast_dask.dataplane.arrays.canonical import backend_named, describe
from tensorcast_dask.dataplane.arrays.contract import Source
from tensorcast_dask.exceptions import InvalidArgument, Mismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Buffer

    from tensorcast_dask.dataplane.arrays.contract import Bytes
    from tensorcast_dask.tensors.specs import Index

__all__ = [
    "BIG_BYTES",
    "Placed",
    "check_targets",
    "copy_into",
    "copy_out",
    "staged",
    "stretches",
    "zero_gaps",
]

BIG_BYTES: Final = 1 << 20  # from here on a tensor is copied by itself, without the GIL
_PIECE_BYTES: Final = 16 << 20
_FEW, _MANY = 8, 512  # tensors in one call of a library
_MEMMOVE: Final = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
_SIGNATURE: Final = (None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
#: memmove without the GIL, and with it.
_move_big: Final = ctypes.CFUNCTYPE(*_SIGNATURE)(_MEMMOVE)
_move_small: Final = ctypes.PYFUNCTYPE(*_SIGNATURE)(_MEMMOVE)

#: What to call, with what, and what must stay alive meanwhile.
Job = tuple["Callable[..., object]", tuple[object, ...], object]
Placed = tuple["Source", int, int]  # with offset and length


def _bytes(buffer: Buffer | int, nbytes: int, *, writable: bool) -> Bytes:
    """`nbytes` of the buffer, or of the memory at an address, as an array."""
    if isinstance(buffer, int):
        buffer = (ctypes.c_char * nbytes).from_address(buffer)
    view = memoryview(buffer)
    if view.nbytes < nbytes:
        message = f"the buffer has {view.nbytes} bytes, the index needs {nbytes}"
        raise InvalidArgument(message)
    if writable and view.readonly:
        message = "the buffer is read-only; give a writable map"
        raise InvalidArgument(message)
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer(view, np.uint8, nbytes)


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])


def _pieces(
    target: int, source: int, nbytes: int, *, threads: int, keep: object
) -> list[Job]:
    """Cut one big copy so that every thread gets a part."""
    piece = min(_PIECE_BYTES, -(-nbytes // threads))
    piece = -(-piece // 4096) * 4096
    return [
        (_move_big, (target + at, source + at, min(piece, nbytes - at)), keep)
        for at in range(0, nbytes, piece)
    ]


def _run(jobs: list[Job], *, threads: int) -> None:
    """Run every job; the first error is raised once all threads have ended."""
    jobs.reverse()
    errors: list[BaseException] = []

    def drain() -> None:
        while not errors:
            try:
                job, arguments, _keep = jobs.pop()
            except IndexError:
                return
            try:
                job(*arguments)
            except BaseException as error:  # noqa: BLE001 - handed to the caller below
                errors.append(error)

    extra: list[threading.Thread] = []
    try:
        for _ in range(min(threads, len(jobs)) - 1):
            thread = threading.Thread(target=drain, name="tensorcast-copy", daemon=True)
            thread.start()
            extra.append(thread)
        drain()
    finally:
        jobs.clear()
        for thread in extra:
            thread.join()
    if errors:
        raise errors[0]


def zero_gaps(buffer: Buffer | int, index: Index) -> None:
    """Zero the bytes of a segment that belong to no entry."""
    _zero(_bytes(buffer, index.nbytes, writable=True), index)


def _zero(out: Bytes, index: Index) -> None:
    for offset, nbytes in index.gaps():
        out[offset : offset + nbytes] = 0


def staged(sources: Sequence[Source], index: Index) -> list[Source]:
    """Copy a segment into host memory of our own, and describe it there as it was."""
    content = memory.private(index.nbytes)
    copy_into(sources, index, content)
    whole, backend = np.frombuffer(content, np.uint8), backend_named("numpy")
    columns = zip(index.offsets, index.sizes, index.dtypes, index.shapes, strict=True)
    return [
        Source(backend, whole[at : at + nbytes], dtype, shape, flat=True)
        for at, nbytes, dtype, shape in columns
    ]


def copy_into(
    sources: Sequence[Source], index: Index, buffer: Buffer | int, *, threads: int = 2
) -> None:
    """Write the content of a segment.

    Parameters
    ----------
    sources : sequence of Source
        Of each entry of `index`, as `canonical` gives them.
    index : Index
        Where each goes.
    buffer : buffer or int
        A writable buffer of at least `index.nbytes` bytes, or the address of one.
    threads : int
        How many may copy at once.

    Raises
    ------
    InvalidArgument
        When the buffer is too small or read-only; nothing has been written.
    """
    assert len(sources) == len(index.sizes), "arrays: one source for each entry"
    out = _bytes(buffer, index.nbytes, writable=True)
    _zero(out, index)
    _fill(zip(sources, index.offsets, index.sizes, strict=True), out, threads=threads)


def _fill(placed: Iterable[Placed], out: Bytes, *, threads: int) -> None:
    base = _address(out)
    jobs: list[Job] = []
    small: list[Placed] = []
    for offset, nbytes, items in stretches(placed):
        source = items[0][0]
        if not source.flat:
            room = out[offset : offset + nbytes]
            jobs.append((source.backend.write, ([source], room), None))
        elif nbytes >= BIG_BYTES:
            address = source.backend.extent(source)[0]
            keep = (out, items)
            jobs += _pieces(base + offset, address, nbytes, threads=threads, keep=keep)
        else:
            small += items
    for group in _side_by_side(small):
        if len(group) < _FEW:
            for source, offset, nbytes in group:
                _move_small(base + offset, source.backend.extent(source)[0], nbytes)
        else:
            start, end = group[0][1], group[-1][1] + group[-1][2]
            together = [source for source, _, _ in group]
            room = out[start:end]
            jobs.append((group[0][0].backend.write, (together, room), None))
    _run(jobs, threads=threads)


def stretches(placed: Iterable[Placed]) -> Iterator[tuple[int, int, list[Placed]]]:
    """Offset, length and members of what can be copied as one.

    A member alone, or flat tensors that lie in the caller's memory as they will in the
    segment, as those of a state dict do that was read from one. Zero-size ones are left out.
    """
    items: list[Placed] = []
    start = end = reach = 0
    for item in placed:
        source, offset, nbytes = item
        if not nbytes:
            continue
        address = source.address if source.flat else 0
        if address and items and (offset, address) == (end, reach):
            items.append(item)
        else:
            if items:
                yield start, end - start, items
            items, start = [item], offset
        end, reach = offset + nbytes, address + nbytes if address else 0
    if items:
        yield start, end - start, items


def _side_by_side(small: Sequence[Placed]) -> Iterator[list[Placed]]:
    """Group tensors of one kind that have no gap between them."""
    group: list[Placed] = []
    key: tuple[object, ...] = ()
    end = -1
    for placed in small:
        source, offset, nbytes = placed
        here = (source.backend, source.dtype.name, source.shape)
        if offset == end and here == key and len(group) < _MANY and source.shape:
            group.append(placed)
        else:
            if group:
                yield group
            group, key = [placed], here
        end = offset + nbytes
    if group:
        yield group


def check_targets(index: Index, targets: Mapping[str, object]) -> list[Source]:
    """Describe a caller's own arrays, once all of them can be filled.

    Raises
    ------
    NotFound
        For a name that the index does not have.
    Mismatch
        When a dtype or shape differs or a target cannot be written, naming every such one.
    """
    wanted = [index.spec(name) for name in targets]
    sources = describe(targets)
    wrong: list[str] = []
    owners: dict[object, int] = {}
    for spec, target in zip(wanted, sources, strict=True):
        if (spec.dtype.name, spec.shape) != (target.dtype.name, target.shape):
            wrong.append(
                f"{spec.name!r} is {spec.dtype.name}{list(spec.shape)}, "
                f"its target {target.dtype.name}{list(target.shape)}"
            )
        elif why := target.backend.refusal(target):
            wrong.append(f"the target of {spec.name!r} {why}")
        entry = index.position(spec.name)
        if owners.setdefault(target.backend.tie(target), entry) != entry:
            wrong.append(f"the target of {spec.name!r} is the memory of another target")
    if wrong:
        message = f"{len(wrong)} targets do not fit: {'; '.join(wrong)}"
        raise Mismatch(message)
    return sources


def copy_out(
    buffer: Buffer, index: Index, targets: Mapping[str, object], *, threads: int = 2
) -> None:
    """Fill the caller's own arrays from a segment.

    Parameters
    ----------
    buffer : buffer
        The segment.
    index : Index
        What lies in it.
    targets : mapping of str to array
        Which tensors, and where to; of any library, also strided, also on a device.
    threads : int
        How many may copy at once.

    Raises
    ------
    NotFound
        For a name that the index does not have.
    Mismatch
        When a dtype or shape differs or a target cannot be written, naming every such
        target; no byte has been written.
    """
    data = _bytes(buffer, index.nbytes, writable=False)
    sources = check_targets(index, targets)
    base = _address(data)
    jobs: list[Job] = []
    for name, target in zip(targets, sources, strict=True):
        at = index.position(name)
        offset, nbytes = index.offsets[at], index.sizes[at]
        if not nbytes:
            continue
        if not target.flat:
            job = target.backend.read_into
            jobs.append((job, (target, data[offset : offset + nbytes]), None))
            continue
        address = target.backend.extent(target)[0]
        if nbytes >= BIG_BYTES:
            keep = (data, target)
            jobs += _pieces(address, base + offset, nbytes, threads=threads, keep=keep)
        else:
            _move_small(address, base + offset, nbytes)
    _run(jobs, threads=threads)
