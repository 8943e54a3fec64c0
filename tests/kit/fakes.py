"""Parts that keep their contract without sockets, files or processes.

Rules:

1. A fake passes the same contract class as the real thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tensorcast_dask.dataplane import memory
from tensorcast_dask.dataplane.fileranges import FileRange
from tensorcast_dask.dataplane.transports.base import (
    Arrived,
    Context,
    Expected,
    Work,
    damaged,
)
from tensorcast_dask.exceptions import (
    DeadlineExceeded,
    Gone,
    PeerLost,
    StaleOwner,
    WrongPeer,
)
from tensorcast_dask.tensors.checksums import encode_sums
from tensorcast_dask.tensors.ids import Generation
from tensorcast_dask.tensors.messages import ChunkMap, Location
from tests.kit.holders import TOKEN, Break, Served

__all__ = ["FakeSource", "open_fake"]


class FakeSource:
    """Chunks from a holder's memory, with the holder's faults."""

    scheme = "fake"
    via = "memory"

    def __init__(self, served: Served, generation: Generation) -> None:
        self._served = served
        self._generation = generation
        self._closed = False
        self._expected = Expected()

    def chunk_map(self) -> ChunkMap:
        self._check()
        served = self._served
        sums = memory.sums_of(served.data, served.chunk_bytes)
        found = ChunkMap(
            generation=self._generation,
            nbytes=len(served.data),
            chunk_bytes=served.chunk_bytes,
            index=b"",
            sums=encode_sums(sums),
            stamp=served.stamp,
        )
        self._expected = Expected(found)
        return found

    def read_chunk(self, chunk: int, into: Any) -> Arrived:
        self._check()
        data = bytearray(self._served.chunk(chunk))
        match self._served.broken.get(chunk):
            case Break.DIE:
                raise PeerLost("the holder died")
            case Break.STALL:
                raise DeadlineExceeded("the holder stalled")
            case Break.REFUSE:
                raise Gone("destroyed")
            case Break.OTHER:
                raise WrongPeer("another chunk")
            case Break.CORRUPT:
                raise damaged(f"chunk {chunk}", "the fake")
            case None:
                self._expected.check_stamp(self._served.stamp, peer="the fake")
                if isinstance(into, FileRange):
                    into.write(memoryview(data))
                else:
                    memory.flat(into)[: len(data)] = data
                return Arrived(Work(chunk, into), len(data), memory.sum_of(data))

    def read_chunks(self, work: Callable[[], Work | None]) -> Iterator[Arrived]:
        while (item := work()) is not None:
            yield self.read_chunk(item.chunk, item.into)

    def read_ranges(self, ranges: list[tuple[int, int]], into: Any) -> int:
        self._check()
        if Break.DIE in self._served.broken.values():
            raise WrongPeer("too few bytes")
        if Break.CORRUPT in self._served.broken.values():
            raise damaged("ranges", "the fake")
        data = b"".join(self._served.data[at : at + n] for at, n in ranges)
        memory.flat(into)[: len(data)] = data
        return len(data)

    def take_fd(self) -> int | None:
        return None

    def close(self) -> None:
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise PeerLost("closed")


def open_fake(
    served: Served, location: Location, generation: Generation, context: Context
) -> FakeSource:
    """Open a source on a holder's memory, with the checks of the real ones."""
    if context.credentials.token != TOKEN or location.card.node != served.card.node:
        raise WrongPeer("wrong token or node")
    if location.card.incarnation != served.card.incarnation:
        raise StaleOwner("another incarnation")
    return FakeSource(served, generation)
