"""Sources into a descriptor, and their memory as a table for somebody else to read.

Rules:

1. Writing makes the pages of a fresh memory file at twice the rate of touching a map of it
   (`docs/facts.md`), so a segment that is not warm is written, not mapped.
2. Big tensors, and small ones side by side in memory, are written from where they lie; other
   small ones are gathered by the kernel (`pwritev`), not by us. A small one that is not flat
   is made flat first; for a big one its part of the file is mapped, as its library needs
   memory to write into. So a put allocates next to nothing.
3. Every byte of the segment is written once, in ascending order, gaps included.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import TYPE_CHECKING, Final

import numpy as np

from tensorcast_dask.dataplane.arrays.canonical import locate
from tensorcast_dask.dataplane.arrays.copying import BIG_BYTES, stretches
from tensorcast_dask.exceptions import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensorcast_dask.dataplane.arrays.contract import Source
    from tensorcast_dask.dataplane.arrays.copying import Placed
    from tensorcast_dask.tensors.specs import Index

__all__ = ["spans", "write_into"]

_Readable = memoryview | ctypes.Array[ctypes.c_char]

#: Bytes of one system call: bigger ones are slower into fresh pages.
_CALL_BYTES: Final = 1 << 20
#: After how many it is told.
_SAY_BYTES: Final = 16 << 20
_CALL_BUFFERS: Final = 1000  # below the kernel's IOV_MAX
_ZEROS: Final = memoryview(bytes(1 << 16))


def write_into(
    sources: Sequence[Source],
    index: Index,
    fd: int,
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write the content of a segment into a file.

    Parameters
    ----------
    sources : sequence of Source
        Of each entry of `index`, as `canonical` gives them.
    index : Index
        Where each goes.
    fd : int
        A descriptor open for reading and writing, of a file of at least `index.nbytes`
        bytes whose first byte is the segment's. Its position is not used.
    on_bytes : callable, optional
        Told how many bytes more are written; what it raises ends the writing.

    Raises
    ------
    CapacityError
        When the file cannot take the bytes; some may have been written.
    """
    assert len(sources) == len(index.sizes), "arrays: one source for each entry"
    placed: list[Placed] = list(zip(sources, index.offsets, index.sizes, strict=True))
    if not index.packed:
        placed.sort(key=lambda item: item[1])
    try:
        _Writer(fd, on_bytes).segment(placed, index.nbytes)
    except OSError as error:
        message = f"the segment cannot take {index.nbytes} bytes: {error}"
        raise CapacityError(message) from error


class _Writer:
    """Writes a segment from its first byte to its last."""

    def __init__(self, fd: int, on_bytes: Callable[[int], None] | None) -> None:
        self._fd = fd
        self._on_bytes = on_bytes
        #: Written, and not told to `_on_bytes` yet.
        self._unsaid = 0
        #: What is written next, at `_start`; it ends at `_end`.
        self._pending: list[_Readable] = []
        self._start = 0
        self._end = 0

    def segment(self, placed: Sequence[Placed], nbytes: int) -> None:
        for offset, size, items in stretches(placed):
            self._zeros(offset)
            source = items[0][0]
            if source.flat:
                self._add(_memory(source.backend.extent(source)[0], size), size)
            elif size < BIG_BYTES:
                made = np.empty(size, np.uint8)
                source.backend.write([source], made)
                self._add(made.data, size)
            else:
                self._flush()
                self._map(source, offset, size)
                self._wrote(size)
                self._start = self._end = offset + size
        self._zeros(nbytes)
        self._flush()
        self._say()

    def _zeros(self, until: int) -> None:
        while self._end < until:
            size = min(until - self._end, len(_ZEROS))
            self._add(_ZEROS[:size], size)

    def _add(self, data: _Readable, size: int) -> None:
        pending = self._end - self._start
        if pending and (
            pending + size > _CALL_BYTES or len(self._pending) == _CALL_BUFFERS
        ):
            self._flush()
        self._pending.append(data)
        self._end += size

    def _flush(self) -> None:
        if self._end == self._start:
            return
        if len(self._pending) == 1:
            done, last = 0, memoryview(self._pending[0])
        else:
            done = os.pwritev(self._fd, self._pending, self._start)
            self._wrote(done)
            # The kernel may take less; what is left is joined, which is rare and small.
            complete = done == self._end - self._start
            last = memoryview(b"" if complete else b"".join(self._pending))
        while self._start + done < self._end:
            piece = last[done : done + _CALL_BYTES]
            wrote = os.pwrite(self._fd, piece, self._start + done)
            self._wrote(wrote)
            done += wrote
        self._pending.clear()
        self._start = self._end

    def _wrote(self, nbytes: int) -> None:
        self._unsaid += nbytes
        if self._unsaid >= _SAY_BYTES:
            self._say()

    def _say(self) -> None:
        unsaid, self._unsaid = self._unsaid, 0
        if self._on_bytes is not None:
            self._on_bytes(unsaid)

    def _map(self, source: Source, offset: int, nbytes: int) -> None:
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        try:
            part = mmap.mmap(self._fd, offset + nbytes - start, offset=start)
        except ValueError as error:  # its way to say that the file is too short
            raise OSError(errno.EFBIG, str(error)) from error
        # The map ends with the array, which nobody keeps.
        out = np.frombuffer(part, np.uint8)[offset - start :]
        source.backend.write([source], out)


def _memory(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """Memory of this process as a buffer; it keeps nothing alive."""
    return (ctypes.c_char * nbytes).from_address(address)


def spans(sources: Sequence[Source], index: Index) -> tuple[bytes, list[int]]:
    """List the memory that a reader of this process can copy by itself.

    Returns
    -------
    (bytes, list of int)
        Little-endian u64 triples (offset in the segment, address, length), ascending and
        as few as can be; and the entries that are not flat, which only `copy_into` or
        `write_into` can write. The addresses hold while the sources are alive.
    """
    locate(sources)
    sizes = np.array(index.sizes, np.uint64)
    flat = np.array([source.flat for source in sources], np.bool_)
    others: list[int] = np.flatnonzero(~flat & (sizes > 0)).tolist()
    kept = np.flatnonzero(flat & (sizes > 0))
    offsets = np.array(index.offsets, np.uint64)[kept]
    order = np.argsort(offsets, kind="stable")
    offsets, sizes = offsets[order], sizes[kept][order]
    starts = np.array([source.address for source in sources], np.uint64)[kept][order]
    # What lies in the caller's memory as it will in the segment is one span.
    joined = (offsets[1:] == (offsets + sizes)[:-1]) & (
        starts[1:] == (starts + sizes)[:-1]
    )
    heads = np.flatnonzero(np.concatenate([kept[:1] >= 0, ~joined]))
    lengths = np.add.reduceat(sizes, heads) if len(heads) else sizes
    rows = np.stack([offsets[heads], starts[heads], lengths], axis=1)
    return rows.astype("<u8").tobytes(), others
