"""Byte ranges of a segment that exists only as its sources.

Rules:

1. A range costs what it overlaps: a flat source, and one on a device, is copied by bytes,
   without the GIL when it is big; another is written whole, for its library knows no ranges.
2. Bytes between entries are zero, as in the segment itself.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

import numpy as np

from tensorcast_dask.dataplane import memory
from tensorcast_dask.dataplane.arrays.on_device import DeviceTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tensorcast_dask.dataplane.arrays.contract import Bytes, Source
    from tensorcast_dask.tensors.specs import Index

__all__ = ["RangeReader"]


class RangeReader:
    """Reads ranges of the segment that `sources` would make.

    Parameters
    ----------
    sources : sequence of Source
        Of each entry of `index`, as `canonical` gives them.
    index : Index
        Where each goes.
    """

    def __init__(self, sources: Sequence[Source], index: Index) -> None:
        self._sources = sources
        self._index = index
        spans = zip(index.offsets, index.sizes, strict=True)
        #: (offset, size, entry) of every entry with bytes, ascending.
        self._places = sorted(
            (offset, size, entry) for entry, (offset, size) in enumerate(spans) if size
        )
        self._starts = [offset for offset, _, _ in self._places]

    def read(self, start: int, nbytes: int) -> Bytes:
        """Copy `nbytes` bytes of the segment from byte `start` on."""
        out = np.empty(nbytes, np.uint8)
        self._fill(start, out)
        return out

    def read_into(self, start: int, room: memoryview) -> None:
        """Copy bytes of the segment from byte `start` on, as many as `room` has."""
        self._fill(start, np.frombuffer(room, np.uint8))

    def _fill(self, start: int, out: Bytes) -> None:
        at, end = start, start + out.nbytes
        for offset, size, entry in self._overlapping(start, end):
            low, high = max(start, offset), min(end, offset + size)
            out[at - start : low - start] = 0
            self._copy(entry, low - offset, out[low - start : high - start])
            at = high
        out[at - start :] = 0

    def _copy(self, entry: int, first: int, out: Bytes) -> None:
        source = self._sources[entry]
        if source.flat:
            memory.copy(
                out, source.backend.extent(source)[0] + first, out.nbytes, threads=1
            )
            return
        if isinstance(source.value, DeviceTensor):
            source.value.read_into(first, out)
            return
        whole = np.empty(self._index.sizes[entry], np.uint8)
        source.backend.write([source], whole)
        out[:] = whole[first : first + out.nbytes]

    def _overlapping(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        for place in self._places[first:]:
            offset, size, _ = place
            if offset >= end:
                return
            if offset + size > start:
                yield place
