"""Sources into a descriptor, and their memory as a table for somebody else to read.

Rules:

1. Writing makes the pages of a fresh memory file at twice the rate of touching a map of it
   (`docs/facts.md`), so a segment that is not warm is written, not mapped.
2. Small tensors are gathered in one scratch buffer; it and nothing else is allocated. Big
   ones are written from where they lie. A big one that is not flat is the exception: its
   library needs memory to write into, so that part of the file is mapped for it.
3. Every byte of the segment is written once, in ascending order, gaps included.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from typing import TYPE_CHECKING, Final

import numpy as np

from tensorcast_dask.dataplane.arrays.copying import BIG_BYTES, fill
from tensorcast_dask.exceptions import CapacityError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorcast_dask.dataplane.arrays.contract import Bytes, Source
    from tensorcast_dask.dataplane.arrays.copying import Placed
    from tensorcast_dask.tensors.specs import Index

__all__ = ["spans", "write_into"]

_SCRATCH_BYTES: Final = 4 << 20
#: Bytes of one system call: bigger ones are slower into fresh pages.
_WRITE_BYTES: Final = 1 << 20


def write_into(sources: Sequence[Source], index: Index, fd: int) -> None:
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
        _Writer(fd).segment(placed, index.nbytes)
    except OSError as error:
        message = f"the segment cannot take {index.nbytes} bytes: {error}"
        raise CapacityError(message) from error


class _Writer:
    """Writes a segment from its first byte to its last."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        #: Everything before this byte of the segment is written, or in `_pending`.
        self._end = 0
        #: Tensors that go through the scratch buffer, all of them within
        #: `_start` to `_start + len(_scratch)`.
        self._pending: list[Placed] = []
        self._start = 0
        self._scratch: Bytes = np.empty(0, np.uint8)

    def segment(self, placed: Sequence[Placed], nbytes: int) -> None:
        self._scratch = np.zeros(min(nbytes, _SCRATCH_BYTES), np.uint8)
        for source, offset, size in placed:
            if not size:
                continue
            if size >= BIG_BYTES:
                self._flush(offset)
                if source.flat:
                    self._write(source.backend.extent(source)[0], offset, size)
                else:
                    self._map(source, offset, size)
                self._start = self._end = offset + size
            else:
                if offset + size - self._start > len(self._scratch):
                    self._flush(offset)
                self._pending.append((source, offset, size))
                self._end = offset + size
        self._flush(nbytes)

    def _flush(self, until: int) -> None:
        """Write what is pending, and zeros from there on."""
        held = self._end - self._start
        if held:
            if sum(size for _, _, size in self._pending) < held:
                self._scratch[:held] = 0  # there are gaps
            fill(self._pending, self._scratch, origin=self._start)
            self._write_scratch(self._start, held)
            self._pending.clear()
        if until > self._end:
            self._scratch[: until - self._end] = 0
            for at in range(self._end, until, len(self._scratch)):
                self._write_scratch(at, min(len(self._scratch), until - at))
        self._start = self._end = until

    def _write_scratch(self, offset: int, nbytes: int) -> None:
        self._write(self._scratch.__array_interface__["data"][0], offset, nbytes)

    def _write(self, address: int, offset: int, nbytes: int) -> None:
        data = memoryview((ctypes.c_char * nbytes).from_address(address))
        done = 0
        while done < nbytes:
            piece = data[done : done + _WRITE_BYTES]
            done += os.pwrite(self._fd, piece, offset + done)

    def _map(self, source: Source, offset: int, nbytes: int) -> None:
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        try:
            part = mmap.mmap(self._fd, offset + nbytes - start, offset=start)
        except ValueError as error:  # its way to say that the file is too short
            raise OSError(errno.EFBIG, str(error)) from error
        # The map ends with the array, which nobody keeps.
        out = np.frombuffer(part, np.uint8)[offset - start :]
        source.backend.write([source], out)


def spans(sources: Sequence[Source], index: Index) -> tuple[bytes, list[int]]:
    """List the memory that a reader of this process can copy by itself.

    Returns
    -------
    (bytes, list of int)
        Little-endian u64 triples (offset in the segment, address, length), ascending and
        as few as can be; and the entries that are not flat, which only `copy_into` or
        `write_into` can write. The addresses hold while the sources are alive.
    """
    rows: list[tuple[int, int, int]] = []
    others: list[int] = []
    columns = zip(sources, index.offsets, index.sizes, strict=True)
    for entry, (source, offset, nbytes) in enumerate(columns):
        if not nbytes:
            continue
        if not source.flat:
            others.append(entry)
            continue
        address = source.backend.extent(source)[0]
        if rows:
            start, first, length = rows[-1]
            if (start + length, first + length) == (offset, address):
                rows[-1] = (start, first, length + nbytes)
                continue
        rows.append((offset, address, nbytes))
    rows.sort()
    flat = [number for row in rows for number in row]
    return struct.pack(f"<{len(flat)}Q", *flat), others
