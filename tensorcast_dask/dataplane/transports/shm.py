"""Same host: map the holder's memory file. Scheme `shm`.

Rules:

1. The unix socket of the expected node must have answered: that proves the host.
2. A private map of a read-only description is all that a reader gets; `take_fd` hands
   the description itself to who shares the segment (another store of this host).
3. Where the holder does not map (a small artifact, memory of a caller) it sends the
   bytes, and they are served from here.
4. A segment that is being filled is not mapped: `Open` refuses it with Incomplete.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tensorcast_dask.dataplane.channel import Channel, Prefer
from tensorcast_dask.dataplane.fileranges import FileRange
from tensorcast_dask.dataplane.maps import PrivateMap
from tensorcast_dask.dataplane.memory import copy, copy_summed, flat, sum_of
from tensorcast_dask.dataplane.transports.base import (
    Arrived,
    Context,
    Expected,
    Work,
    next_rid,
    register,
)
from tensorcast_dask.exceptions import PeerLost, WrongPeer
from tensorcast_dask.tensors.checksums import chunk_range
from tensorcast_dask.tensors.messages import (
    ChunkMap,
    ChunkMapAsked,
    Location,
    Open,
    Opened,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensorcast_dask.dataplane.framing import Frame
    from tensorcast_dask.tensors.ids import Generation

__all__ = ["ShmSource", "open_segment", "open_shm"]

_OPEN_S = 60.0


def open_segment(
    channel: Channel,
    generation: Generation,
    *,
    until_s: float | None = None,
    deadline_s: float = _OPEN_S,
    max_payload_bytes: int = 1 << 30,
) -> Frame[Opened]:
    """Ask a store for a replica: `take_fd` of the answer where it is mapped, else `payload`.

    Raises
    ------
    Gone, NotFound, Incomplete
        As the store says.
    """
    frame = channel.call(
        Open(rid=next_rid(), generation=generation, deadline_s=deadline_s),
        expect=Opened,
        max_payload_bytes=max_payload_bytes,
        until_s=until_s,
    )
    opened = frame.message
    if opened.mapped != bool(frame.fds) or (
        not opened.mapped and frame.nbytes != opened.nbytes
    ):
        frame.close()
        message = (
            f"{channel.stream.peer} answered Open with neither a segment nor its bytes"
        )
        raise WrongPeer(message)
    return frame


class ShmSource:
    """A holder on this host, mapped."""

    scheme = "shm"

    def __init__(
        self, channel: Channel, generation: Generation, context: Context
    ) -> None:
        self.via = "map"
        self._channel = channel
        self._generation = generation
        self._context = context
        self._expected = Expected()
        self._chunk_bytes = channel.welcome.chunk_bytes
        self._fd = -1
        self._bytes: memoryview | None = None
        self._nbytes = 0

    def _open(self) -> None:
        if self._fd >= 0 or self._bytes is not None:
            return
        frame = open_segment(
            self._channel,
            self._generation,
            until_s=self._context.until_s,
            max_payload_bytes=self._context.max_payload_bytes,
        )
        self._nbytes = frame.message.nbytes
        if frame.message.mapped:
            self._fd = frame.take_fd()
        else:
            self.via = self._channel.via
            self._bytes = memoryview(frame.payload or b"")

    def _view(self) -> memoryview:
        self._open()
        if self._bytes is None:
            fd, self._fd = self._fd, -1
            self._bytes = PrivateMap(fd, self._nbytes).view
        return self._bytes

    def chunk_map(self) -> ChunkMap:
        """See `Source`."""
        frame = self._channel.call(
            ChunkMapAsked(rid=next_rid(), generation=self._generation),
            expect=ChunkMap,
            until_s=self._context.until_s,
        )
        self._expected = Expected(frame.message)
        self._chunk_bytes = frame.message.chunk_bytes
        return frame.message

    def read_chunk(self, chunk: int, into: Any) -> Arrived:  # noqa: ANN401
        """See `Source`."""
        view = self._view()
        offset, nbytes = chunk_range(chunk, self._nbytes, self._chunk_bytes)
        data = view[offset : offset + nbytes]
        if isinstance(into, FileRange):
            found = sum_of(data)
            into.write(data)
        else:
            found = copy_summed(flat(into)[:nbytes], data)
        self._expected.check_sum(chunk, found, peer=self._channel.stream.peer)
        return Arrived(Work(chunk, into), nbytes, found)

    def read_chunks(self, work: Callable[[], Work | None]) -> Iterator[Arrived]:
        """See `Source`."""
        while (item := work()) is not None:
            yield self.read_chunk(item.chunk, item.into)

    def read_ranges(self, ranges: list[tuple[int, int]], into: Any) -> int:  # noqa: ANN401
        """See `Source`."""
        view, target, at = self._view(), flat(into), 0
        for offset, length in ranges:
            if offset + length > self._nbytes:
                message = f"range {offset}+{length} is outside the segment of {self._nbytes} bytes"
                raise WrongPeer(message)
            copy(target[at : at + length], view[offset : offset + length])
            at += length
        return at

    def take_fd(self) -> int | None:
        """See `Source`."""
        self._open()
        fd, self._fd = self._fd, -1
        return fd if fd >= 0 else None

    def close(self) -> None:
        """See `Source`."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self._bytes = None
        self._channel.close()


def open_shm(location: Location, generation: Generation, context: Context) -> ShmSource:
    """Open a source by mapping.

    Raises
    ------
    PeerLost
        When the holder is not on this host, or its socket does not answer.
    """
    card = location.card
    if context.credentials.host and card.host != context.credentials.host:
        message = "the holder is on another host and cannot be mapped; use tcp"
        raise PeerLost(message)
    channel = Channel.connect(
        card,
        credentials=context.credentials,
        prefer=Prefer.UNIX,
        until_s=context.until_s,
    )
    return ShmSource(channel, generation, context)


register("shm", open_shm)
