"""Segments in plain memory, for tests of what goes into one and comes out."""

from __future__ import annotations

import mmap

from tensorcast_dask.dataplane.arrays import canonical, copy_into
from tensorcast_dask.tensors.specs import Index

STALE = 0xAA  # what a recycled segment is full of


def segment(nbytes: int) -> mmap.mmap:
    """Page-aligned private memory full of a former tenant's bytes."""
    memory = mmap.mmap(-1, max(nbytes, 1))
    memory[:] = bytes([STALE]) * len(memory)
    return memory


def stored(tensors: object, *, threads: int = 2) -> tuple[mmap.mmap, Index]:
    """The segment and the index that hold `tensors`."""
    index, sources = canonical(tensors)
    memory = segment(index.nbytes)
    copy_into(sources, index, memory, threads=threads)
    return memory, index
