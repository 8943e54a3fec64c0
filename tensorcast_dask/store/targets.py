"""Where pulled chunks land.

Rules:

1. Into pages that are there bytes are received in place; fresh ones are written by `pwrite`,
   piece by piece from the cache, which is twice as fast as touching them.
2. A chunk has landed when it is verified, and is served on from that instant.
3. The memory is leased while anybody may write to it; `close` takes back what was not
   committed.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tensorcast_dask.dataplane.fileranges import FileRange
from tensorcast_dask.tensors.checksums import chunk_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.dataplane.transports.base import Context, Source
    from tensorcast_dask.store.core import Core, Reading
    from tensorcast_dask.store.state.replicas import Filling, Wanted
    from tensorcast_dask.tensors.ids import Generation
    from tensorcast_dask.tensors.messages import Location

__all__ = ["Target"]


class Target:
    """The segment in host memory that one pull fills.

    Parameters
    ----------
    core : Core
        The state.
    wanted : Wanted
        What is pulled.
    """

    depth: int | None = None

    def __init__(self, core: Core, wanted: Wanted) -> None:
        self._core = core
        self._wanted = wanted
        self._held: Reading | None = None
        self._filling: Filling | None = None
        self._chunk_bytes = 0
        self._lock = threading.Lock()

    def reserve(self, *, index: bytes, chunk_bytes: int, until_s: float) -> None:
        """Make room, once.

        Raises
        ------
        CapacityError, AlreadyExists, Gone
            When there is none, or the bytes are here, or may not come.
        """
        if self._held is not None:
            return
        core, wanted = self._core, self._wanted
        filling = self._filling = core.reserve(wanted, until_s=until_s)
        count = chunk_count(wanted.nbytes, chunk_bytes)
        with core.lock:
            self._held = core.hold(wanted.generation, filling.copy)
            self._held.replica.index = index
            filling.chunk_bytes = chunk_bytes
            filling.have = bytearray(-(-count // 8))
        self._chunk_bytes = chunk_bytes

    def place(self, chunk: int, length: int) -> memoryview | FileRange:
        """Return where a chunk is to be received."""
        filling, held = self._filling, self._held
        assert filling is not None, "store: chunks come after the reservation"
        assert held is not None, "store: chunks come after the reservation"
        start = chunk * self._chunk_bytes
        stock = self._core.table.tiers[self._wanted.tier]
        if not filling.make_bytes or stock.in_slab(self._wanted.nbytes):
            return held.view()[start : start + length]
        fd = self._core.shelf.own(filling.copy.segment).fd
        return FileRange(fd, start, length)

    def settle(self, chunk: int) -> None:
        """Take note that a chunk is there and verified."""
        assert self._filling is not None, "store: chunks come after the reservation"
        with self._lock:
            assert self._filling.have is not None, "store: a pull without a chunk map"
            self._filling.have[chunk >> 3] |= 1 << (chunk & 7)

    def direct(self) -> Callable[[Location, Generation, Context], Source] | None:
        """Give none: every chunk has a place."""
        return None

    def give_up(self, chunk: int) -> None:
        """Do nothing: its place stays its own."""

    def end(self) -> None:
        """Do nothing: nobody waits for a place."""

    def close(self) -> None:
        """Let the memory go, and what was not committed with it. Idempotent."""
        held, self._held = self._held, None
        if held is not None:
            self._core.release(held)
        if self._filling is not None:
            self._core.abort(self._wanted.generation, self._wanted.tier)
