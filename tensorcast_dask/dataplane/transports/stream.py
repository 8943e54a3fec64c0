"""Chunks over a socket: scheme `tcp`, and over the unix socket of a host that does not map.

Rules:

1. The next request is sent before the present answer is read, so the connection is
   never idle while there is work.
2. Bytes go from the socket straight to their destination, in one call without the GIL.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tensorcast_dask.dataplane.channel import Channel, Prefer
from tensorcast_dask.dataplane.fileranges import FileRange
from tensorcast_dask.dataplane.memory import flat, new_digest, sum_of
from tensorcast_dask.dataplane.transports.base import (
    Arrived,
    Context,
    Expected,
    Work,
    damaged,
    next_rid,
    register,
)
from tensorcast_dask.exceptions import WrongPeer
from tensorcast_dask.tensors.messages import (
    Chunk,
    ChunkMap,
    ChunkMapAsked,
    Location,
    Ranges,
    ReadChunk,
    ReadRanges,
    Refused,
    StoreReply,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensorcast_dask.dataplane.framing import Frame, FrameStream
    from tensorcast_dask.tensors.ids import Generation

__all__ = ["StreamSource", "open_tcp", "open_unix"]


class StreamSource:
    """A holder that sends chunks over one channel."""

    def __init__(
        self, channel: Channel, generation: Generation, context: Context, *, scheme: str
    ) -> None:
        self.scheme = scheme
        self.via = channel.via
        self._channel = channel
        self._generation = generation
        self._context = context
        self._expected = Expected()

    def chunk_map(self) -> ChunkMap:
        """See `Source`."""
        frame = self._channel.call(
            ChunkMapAsked(rid=next_rid(), generation=self._generation),
            expect=ChunkMap,
            until_s=self._context.until_s,
        )
        self._expected = Expected(frame.message)
        return frame.message

    def read_chunk(self, chunk: int, into: Any) -> Arrived:  # noqa: ANN401
        """See `Source`."""
        todo = deque([Work(chunk, into)])
        (arrived,) = self.read_chunks(lambda: todo.popleft() if todo else None)
        return arrived

    def read_chunks(self, work: Callable[[], Work | None]) -> Iterator[Arrived]:
        """See `Source`."""
        asked: deque[Work] = deque()
        try:
            while True:
                with self._channel.conversation() as stream:
                    self._ask(stream, work, asked)
                    if not asked:
                        return
                    arrived = self._take(stream, asked[0])
                asked.popleft()
                yield arrived
        finally:
            if asked:  # answers are still on the wire: nobody can use this channel
                self._channel.close()

    def _ask(
        self, stream: FrameStream, work: Callable[[], Work | None], asked: deque[Work]
    ) -> None:
        while len(asked) < self._context.depth:
            item = work()
            if item is None:
                return
            asked.append(item)
            stream.send(self._request(item.chunk), until_s=self._context.until_s)

    def _request(self, chunk: int) -> ReadChunk:
        return ReadChunk(rid=next_rid(), generation=self._generation, chunk=chunk)

    def _take(self, stream: FrameStream, work: Work) -> Arrived:
        target, digest = work.into, new_digest()
        if not isinstance(target, FileRange):
            target = flat(target)
        frame: Frame[StoreReply] = stream.receive(
            StoreReply,  # type: ignore[arg-type]  # a union, decoded as one
            into=target,
            digest=digest,
            max_payload_bytes=target.nbytes,
            until_s=self._context.until_s,
        )
        frame.close()
        reply = self._checked(frame.message, stream, work)
        return self._verified(stream, work, reply, digest.intdigest(), frame.nbytes)

    def _checked(self, reply: object, stream: FrameStream, work: Work) -> Chunk:
        """Return the answer, when it is for the chunk that was asked for."""
        if isinstance(reply, Refused):
            raise reply.fault.error()
        if not isinstance(reply, Chunk) or reply.chunk != work.chunk:
            message = f"{stream.peer} did not answer with chunk {work.chunk}"
            raise WrongPeer(message)
        if reply.generation != self._generation:
            message = f"{stream.peer} answered for another generation"
            raise WrongPeer(message)
        return reply

    def _verified(
        self, stream: FrameStream, work: Work, reply: Chunk, found: int, nbytes: int
    ) -> Arrived:
        """Hand a chunk over, when its bytes are what they have to be."""
        if found != reply.sum:
            what = f"chunk {work.chunk}"
            raise damaged(what, stream.peer)
        self._expected.check_stamp(reply.stamp, peer=stream.peer)
        self._expected.check_sum(work.chunk, found, peer=stream.peer)
        return Arrived(work, nbytes, found, reply.stamp)

    def read_ranges(self, ranges: list[tuple[int, int]], into: Any) -> int:  # noqa: ANN401
        """See `Source`."""
        target = flat(into)
        packed = struct.pack(f"<{2 * len(ranges)}Q", *(n for r in ranges for n in r))
        frame = self._channel.call(
            ReadRanges(rid=next_rid(), generation=self._generation, ranges=packed),
            expect=Ranges,
            into=target,
            max_payload_bytes=target.nbytes,
            until_s=self._context.until_s,
        )
        wanted = sum(length for _, length in ranges)
        if frame.nbytes != wanted:
            self.close()
            message = (
                f"{self._channel.stream.peer} sent {frame.nbytes} bytes of {wanted}"
            )
            raise WrongPeer(message)
        if sum_of(target[:wanted]) != frame.message.sum:
            self.close()
            what = "ranges"
            raise damaged(what, self._channel.stream.peer)
        peer = self._channel.stream.peer
        self._expected.check_stamp(frame.message.stamp, peer=peer)
        return wanted

    def take_fd(self) -> int | None:
        """See `Source`; there is none over a socket."""
        return None

    def close(self) -> None:
        """See `Source`."""
        self._channel.close()


def open_tcp(
    location: Location, generation: Generation, context: Context
) -> StreamSource:
    """Open a source over TCP."""
    return _open(location, generation, replace(context, prefer=Prefer.TCP), "tcp")


def open_unix(
    location: Location, generation: Generation, context: Context
) -> StreamSource:
    """Open a source over the unix socket, without mapping."""
    return _open(location, generation, replace(context, prefer=Prefer.UNIX), "unix")


def _open(
    location: Location, generation: Generation, context: Context, scheme: str
) -> StreamSource:
    channel = Channel.connect(
        location.card,
        credentials=context.credentials,
        prefer=context.prefer,
        until_s=context.until_s,
    )
    return StreamSource(channel, generation, context, scheme=scheme)


register("tcp", open_tcp)
register("unix", open_unix)
