"""Fast copies and checksums of plain memory, without an array library.

Rules:

1. Every long copy or hash runs without the GIL: `memmove` is called through ctypes, and
   xxhash lets the GIL go for buffers above 100 kB (measured on 4.1).
2. Work is cut into pieces of at least 16 MiB; below that one thread is faster.
3. The pool is made on first use and never crosses a fork: a child makes its own.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pickle import PickleBuffer  # a view of raw bytes; nothing is pickled
from typing import TYPE_CHECKING, Any, Final

import xxhash

from tensorcast_dask.dataplane.machine import Machine
from tensorcast_dask.tensors.checksums import chunk_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "DEFAULT_THREADS",
    "HASHED_BYTES",
    "address",
    "copy",
    "copy_summed",
    "flat",
    "new_digest",
    "private",
    "run_parallel",
    "sum_of",
    "sums_of",
]


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


#: Copies gain nothing above this; memory bandwidth is the limit long before.
DEFAULT_THREADS: Final = max(1, min(8, _cores()))
_PIECE_BYTES: Final = 16 << 20
#: Private memory from here on is asked for only where the machine has it; a look takes 0.2 ms.
_LOOKED_AT: Final = 64 << 20
#: Pieces that stay in the cache between the copy and the hash.
HASHED_BYTES: Final = 1 << 20


class _PyBuffer(ctypes.Structure):
    """Head of CPython's `Py_buffer`; its layout is part of the stable ABI since 3.11."""

    _fields_ = [  # type: ignore[mutable-override]  # as ctypes wants it
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_GET_BUFFER: Final = ctypes.pythonapi.PyObject_GetBuffer
_GET_BUFFER.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_RELEASE_BUFFER: Final = ctypes.pythonapi.PyBuffer_Release
_RELEASE_BUFFER.argtypes = (ctypes.POINTER(_PyBuffer),)
_RELEASE_BUFFER.restype = None
_SIMPLE: Final = 0
_WRITABLE: Final = 1


class _Pin:
    """Holds a buffer in place and knows where that is."""

    __slots__ = ("_held", "address", "nbytes")

    def __init__(self, buffer: Any, *, writable: bool) -> None:  # noqa: ANN401
        self._held = _PyBuffer()
        _GET_BUFFER(buffer, self._held, _WRITABLE if writable else _SIMPLE)
        self.address: int = self._held.buf or 0
        self.nbytes: int = self._held.len

    def release(self) -> None:
        """Let the buffer go."""
        _RELEASE_BUFFER(self._held)


@contextmanager
def address(buffer: Any, *, writable: bool = False) -> Iterator[tuple[int, int]]:  # noqa: ANN401
    """Lend the address and the length of a contiguous buffer for the length of a block.

    Raises
    ------
    BufferError
        When it is not contiguous, or is read-only and `writable` was asked for.
    """
    pin = _Pin(buffer, writable=writable)
    try:
        yield pin.address, pin.nbytes
    finally:
        pin.release()


def flat(buffer: Any) -> memoryview:  # noqa: ANN401
    """View a contiguous buffer as single bytes."""
    view = memoryview(buffer)
    if view.format == "B" and view.ndim == 1:
        return view
    # Not `cast("B")`, which refuses the "<B" of ctypes arrays and zeros in shapes.
    return PickleBuffer(view).raw()


_pools: dict[int, ThreadPoolExecutor] = {}


#: `inside` is set in the pool's threads.
_worker = threading.local()


def _enter() -> None:
    _worker.inside = True


def _forget_pools() -> None:
    _pools.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_pools)


def run_parallel(
    jobs: Sequence[Callable[[], object]], *, threads: int = DEFAULT_THREADS
) -> None:
    """Run `jobs` on the pool and wait for all; the first error is raised after that.

    A job that calls this itself runs its own jobs one after the other: a full pool must
    not wait for itself.
    """
    if len(jobs) <= 1 or threads <= 1 or getattr(_worker, "inside", False):
        for job in jobs:
            job()
        return
    pool = _pools.get(threads)
    if pool is None:
        pool = _pools[threads] = ThreadPoolExecutor(
            threads, thread_name_prefix="tensorcast-copy", initializer=_enter
        )
    batch = _Batch()
    try:
        futures = [pool.submit(batch.run, job) for job in jobs]
        errors = [error for f in futures if (error := f.exception()) is not None]
    except BaseException:  # Ctrl-C: nobody may write into memory that is given up
        batch.end()
        raise
    if errors:
        raise errors[0]


class _Batch:
    """Jobs of one call, so that it can be left only when none of them runs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._ended = False

    def run(self, job: Callable[[], object]) -> None:
        with self._changed:
            if self._ended:
                return
            self._running += 1
        try:
            job()
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """Let no further job begin, and wait for those that run."""
        with self._changed:
            self._ended = True
            self._changed.wait_for(lambda: not self._running)


def _pieces(nbytes: int, threads: int) -> list[tuple[int, int]]:
    count = max(1, min(threads, nbytes // _PIECE_BYTES))
    step = -(-nbytes // count)
    step = -(-step // 4096) * 4096 or 1
    return [(at, min(step, nbytes - at)) for at in range(0, nbytes, step)]


def copy(
    target: Any,  # noqa: ANN401
    source: Any,  # noqa: ANN401
    nbytes: int | None = None,
    *,
    threads: int = DEFAULT_THREADS,
) -> int:
    """Copy bytes; return how many.

    Parameters
    ----------
    target : int or writable buffer
        An address, or a contiguous buffer.
    source : int or buffer
        An address, or a contiguous buffer.
    nbytes : int, optional
        Needed where both are addresses; otherwise the length of the buffers.
    threads : int
        The most to use; small copies use one.

    Raises
    ------
    ValueError
        When a buffer is shorter than `nbytes`, or the lengths differ and it is not given.
    """
    to = None if isinstance(target, int) else _Pin(target, writable=True)
    try:
        origin = None if isinstance(source, int) else _Pin(source, writable=False)
        try:
            nbytes = _agreed(nbytes, to, origin)
            _copy(
                to.address if to else target,
                origin.address if origin else source,
                nbytes,
                threads,
            )
        finally:
            if origin:
                origin.release()
    finally:
        if to:
            to.release()
    return nbytes


def _agreed(nbytes: int | None, to: _Pin | None, origin: _Pin | None) -> int:
    lengths = [pin.nbytes for pin in (to, origin) if pin]
    if nbytes is None:
        if not lengths or min(lengths) != max(lengths):
            message = f"copy: buffers of {lengths} bytes do not say how much"
            raise ValueError(message)
        return lengths[0]
    if any(room < nbytes for room in lengths):
        message = f"copy: {nbytes} bytes do not fit buffers of {lengths} bytes"
        raise ValueError(message)
    return nbytes


def _copy(to: int, origin: int, nbytes: int, threads: int) -> None:
    if threads <= 1 or nbytes < 2 * _PIECE_BYTES:
        ctypes.memmove(to, origin, nbytes)
        return

    def job(at: int, n: int) -> Callable[[], object]:
        return lambda: ctypes.memmove(to + at, origin + at, n)

    run_parallel([job(at, n) for at, n in _pieces(nbytes, threads)], threads=threads)


def sum_of(buffer: Any) -> int:  # noqa: ANN401
    """xxh3_64 of a contiguous buffer."""
    return xxhash.xxh3_64_intdigest(buffer)


def new_digest() -> xxhash.xxh3_64:
    """Make an empty xxh3_64 state, to be fed piece by piece."""
    return xxhash.xxh3_64()


def copy_summed(target: Any, source: Any) -> int:  # noqa: ANN401
    """Copy one buffer into another of the same length and return its xxh3_64.

    Each piece is hashed while it is in the cache: cheaper than a second pass.
    """
    to, origin, digest = flat(target), flat(source), new_digest()
    for at in range(0, origin.nbytes, HASHED_BYTES):
        piece = to[at : at + HASHED_BYTES]
        copy(piece, origin[at : at + HASHED_BYTES], threads=1)
        digest.update(piece)
    return digest.intdigest()


@functools.cache
def _machine() -> Machine:
    return Machine()


def private(nbytes: int) -> memoryview:
    """Give fresh memory of this process's own, as writable bytes.

    Nothing is touched: the kernel clears pages as they are filled, without the GIL held
    (a `bytearray` clears all of them at once, with it).

    Raises
    ------
    CapacityError
        When so much could not be filled.
    """
    if not nbytes:
        return memoryview(bytearray())
    if nbytes >= _LOOKED_AT:
        _machine().check_room(nbytes)
    area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            area.madvise(
                mmap.MADV_HUGEPAGE
            )  # pages that are filled in order: fewer faults
    return memoryview(area)


def sums_of(
    buffer: Any,  # noqa: ANN401
    chunk_bytes: int,
    *,
    threads: int = DEFAULT_THREADS,
) -> list[int]:
    """xxh3_64 of each chunk of a contiguous buffer, several at a time."""
    view = flat(buffer)
    count = chunk_count(view.nbytes, chunk_bytes)
    sums = [0] * count

    def job(first: int, step: int) -> Callable[[], object]:
        def run() -> None:
            for chunk in range(first, count, step):
                at = chunk * chunk_bytes
                sums[chunk] = sum_of(view[at : at + chunk_bytes])

        return run

    lanes = max(1, min(threads, view.nbytes // _PIECE_BYTES))
    run_parallel([job(lane, lanes) for lane in range(lanes)], threads=threads)
    return sums
