"""Segments in plain memory, for tests of what goes into one and comes out."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

from tensorcast_dask.dataplane.arrays import Source, canonical, copy_into, write_into
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


def sealed_file(nbytes: int) -> int:
    """Descriptor of a memory file that can neither shrink nor grow, full of stale bytes."""
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(fd, bytes([STALE]) * nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def written(sources: Sequence[Source], index: Index) -> bytes:
    """What a recycled file holds once `sources` are written into it."""
    fd = sealed_file(index.nbytes)
    try:
        write_into(sources, index, fd)
        return os.pread(fd, index.nbytes, 0)
    finally:
        os.close(fd)
