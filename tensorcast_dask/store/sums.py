"""Chunk sums of what this node holds: at once for what is small, later for the rest.

Rules:

1. A put is not held up by its sums: a thread of low priority computes them after the
   commit, and tells the catalog when the content has a name.
2. Who needs a sum that is not known computes it, of that chunk alone; it is not kept.
3. A sum is computed under a use lease; a replica that goes meanwhile is skipped.
4. Bytes that this process has not mapped are read piece by piece: to fault every page of a
   map in costs several times the copy (measured: 0.6 s a GiB against 0.15 s).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from typing import TYPE_CHECKING, Final

from tensorcast_dask.dataplane.memory import HASHED_BYTES, new_digest
from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.store.records import ready_of
from tensorcast_dask.store.state.replicas import Life
from tensorcast_dask.tensors.checksums import chunk_range, chunk_sum, encode_sums

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensorcast_dask.store.core import Core, Reading
    from tensorcast_dask.tensors.ids import Generation

__all__ = ["Sums"]

logger = logging.getLogger(__name__)

_NICE: Final = 10


class Sums:
    """The sums of one store, and the thread that computes them.

    Parameters
    ----------
    core : Core
        The state; this object hears of each commit without sums.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._queue: queue.SimpleQueue[Generation | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name="tensorcast-sums", daemon=True
        )
        core.unsummed = self._queue.put

    def start(self) -> None:
        """Begin to compute."""
        self._thread.start()

    def stop(self, *, within_s: float) -> None:
        """End the thread after the chunk it is at."""
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(within_s)

    @property
    def waiting(self) -> int:
        """How many replicas wait for their sums."""
        return self._queue.qsize()

    def cut(self, data: bytes | bytearray | memoryview) -> list[int]:
        """Return the sums of bytes at hand, cut as this store cuts."""
        view = memoryview(data)
        step = self._core.settings.chunk_bytes
        return [chunk_sum(view[at : at + step]) for at in range(0, len(view), step)]

    def one(self, held: Reading, chunk: int, chunk_bytes: int) -> int:
        """Return the sum of one chunk, known or computed."""
        start, length = chunk_range(chunk, held.replica.nbytes, chunk_bytes)
        known = held.replica.sums[chunk * 8 : chunk * 8 + 8]
        if known and chunk_bytes == self._core.settings.chunk_bytes:
            return int.from_bytes(known, "little")
        return _sum(held, start, length)

    def of(self, generation: Generation) -> None:
        """Compute all sums of a replica now, unless they are known.

        Raises
        ------
        NotFound, Gone, Incomplete
            When there is no replica to read.
        """
        with self._core.reading(generation) as held:
            core = self._core
            if held.replica.sums:
                return
            if held.file is not None:
                sums = encode_sums(list(self._each(held)))
            else:
                sums = core.room.media[held.copy.tier].sums(generation)
            if not sums:
                return
            with core.lock:
                if held.copy.life is Life.DROPPING:
                    return  # the catalog has struck it: it must not hear of it again
                held.replica.sums = sums
                core.tell(
                    ready_of(
                        held.replica,
                        held.copy.tier,
                        chunk_bytes=core.settings.chunk_bytes,
                    )
                )

    def _each(self, held: Reading) -> Iterator[int]:
        step = self._core.settings.chunk_bytes
        nbytes = held.replica.nbytes
        for start in range(0, nbytes, step):
            if held.copy.life is Life.DROPPING:
                return  # nobody will ask, and the segment waits for this lease
            yield _sum(held, start, min(step, nbytes - start))

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (generation := self._queue.get()) is not None:
            try:
                self.of(generation)
            except TensorCastError as error:
                logger.debug("no sums for generation %d: %s", generation, error)
            except Exception:
                logger.exception("the sums of generation %d failed", generation)


def _sum(held: Reading, start: int, length: int) -> int:
    """Hash a range of a copy in memory."""
    file = held.file
    assert file is not None, "store: this tier has no memory"
    if file.mapped:
        return chunk_sum(held.view()[start : start + length])
    digest = new_digest()
    scratch = memoryview(bytearray(min(length, HASHED_BYTES)))
    at, end = held.copy.offset + start, held.copy.offset + start + length
    while at < end:
        got = os.preadv(file.fd, [scratch[: min(len(scratch), end - at)]], at)
        assert got, "store: a segment is as long as its replica"
        digest.update(scratch[:got])
        at += got
    return digest.intdigest()
