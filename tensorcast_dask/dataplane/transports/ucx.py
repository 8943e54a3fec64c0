"""Chunks as UCX tag messages, from memory to memory: scheme `ucx`.

Rules:

1. The control connection is a channel like any other: it proves who the holder is, carries
   requests, sums and refusals, and its end is the end of the transfer. UCX has neither
   TLS nor a proof: whoever can reach its ports can disturb it, so a chunk counts only when
   it has the sum that the channel told.
2. A receive is posted when the holder has said that it sends, into memory that stays UCX's
   until the chunk is there or the line is gone.
3. A line takes longest to make. One that is at rest when its source is closed is kept
   for the next pull (`Context.idle`), with its connection.
4. A line that has no better lane than TCP is refused, unless it was asked for: several
   plain connections are faster.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tensorcast_dask.dataplane.channel import Channel
from tensorcast_dask.dataplane.fileranges import FileRange, write_all
from tensorcast_dask.dataplane.memory import address, flat, new_digest, private
from tensorcast_dask.dataplane.transports.base import (
    Arrived,
    Context,
    Work,
    damaged,
    next_rid,
    register,
)
from tensorcast_dask.dataplane.transports.stream import StreamSource
from tensorcast_dask.dataplane.transports.ucx_line import Line, Stretch
from tensorcast_dask.exceptions import PeerLost, WrongPeer
from tensorcast_dask.tensors.messages import (
    Chunk,
    Location,
    Ranges,
    ReadChunk,
    ReadRanges,
    StoreReply,
    UcxOpen,
    UcxOpened,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from tensorcast_dask.dataplane.framing import Frame, FrameStream
    from tensorcast_dask.tensors.ids import Generation

__all__ = ["UcxSource", "Way", "open_ucx"]

_PLAIN: Final = ("tcp",)


class Way(NamedTuple):
    """A connection and the line that was made over it."""

    channel: Channel
    line: Line

    @property
    def usable(self) -> bool:
        """Whether both are whole and at rest."""
        return self.line.usable and self.channel.usable

    def close(self) -> None:
        """Close both. Idempotent, from any thread."""
        self.channel.close()  # first: it ends a transfer under way
        self.line.close()


class UcxSource(StreamSource):
    """A holder that sends chunks over a line of UCX."""

    def __init__(
        self, way: Way, generation: Generation, context: Context, key: Hashable
    ) -> None:
        super().__init__(way.channel, generation, context, scheme="ucx")
        self.via = way.line.via
        self._way = way
        self._key = key
        #: Where chunks land that go into a file.
        self._landing: memoryview | None = None
        #: Guards the two: once closed nothing begins, and what is under way is not kept.
        self._lock = threading.Lock()
        self._busy = False
        self._closed = False

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                message = "the connection is closed here"
                raise PeerLost(message)
            self._busy = True
        try:
            yield
        finally:
            with self._lock:
                self._busy = False

    def read_chunks(self, work: Callable[[], Work | None]) -> Iterator[Arrived]:
        """See `Source`."""
        with self._at_work():
            yield from super().read_chunks(work)

    def _request(self, chunk: int) -> ReadChunk:
        return ReadChunk(
            rid=next_rid(), generation=self._generation, chunk=chunk, ucx=True
        )

    def _take(self, stream: FrameStream, work: Work) -> Arrived:
        frame: Frame[StoreReply] = stream.receive(
            StoreReply,  # type: ignore[arg-type]  # a union, decoded as one
            until_s=self._context.until_s,
        )
        frame.close()
        reply = self._checked(frame.message, stream, work)
        target = work.into if isinstance(work.into, FileRange) else flat(work.into)
        found = self._receive(stream, reply, target)
        return self._verified(stream, work, reply, found, reply.nbytes)

    def _receive(
        self,
        stream: FrameStream,
        reply: Chunk | Ranges,
        target: memoryview | FileRange,
    ) -> int:
        """Receive what a reply announced; its sum."""
        nbytes = reply.nbytes
        if not 0 <= nbytes <= target.nbytes:
            message = f"{stream.peer} sends {nbytes} bytes where {target.nbytes} belong"
            raise WrongPeer(message)
        into = self._landing_of(nbytes) if isinstance(target, FileRange) else target
        digest, at = new_digest(), 0

        def landed(length: int) -> None:
            nonlocal at
            piece = into[at : at + length]
            digest.update(piece)
            if isinstance(target, FileRange):
                write_all(target.fd, piece, target.offset + at)
            at += length

        if nbytes:
            line = self._way.line
            with address(into, writable=True) as (start, _):
                line.receive(Stretch(start, nbytes), landed)
                line.drive(
                    control=stream,
                    stall_s=stream.stall_s,
                    until_s=self._context.until_s,
                )
        return digest.intdigest()

    def _landing_of(self, nbytes: int) -> memoryview:
        if self._landing is None or self._landing.nbytes < nbytes:
            self._landing = private(nbytes)
        return self._landing

    def read_ranges(self, ranges: list[tuple[int, int]], into: Any) -> int:  # noqa: ANN401
        """See `Source`."""
        target = flat(into)
        packed = struct.pack(f"<{2 * len(ranges)}Q", *(n for r in ranges for n in r))
        wanted = sum(length for _, length in ranges)
        with self._at_work():
            frame = self._channel.call(
                ReadRanges(
                    rid=next_rid(), generation=self._generation, ranges=packed, ucx=True
                ),
                expect=Ranges,
                until_s=self._context.until_s,
            )
            with self._channel.conversation() as stream:
                if frame.message.nbytes != wanted:
                    message = (
                        f"{stream.peer} sends {frame.message.nbytes} bytes of {wanted}"
                    )
                    raise WrongPeer(message)
                if self._receive(stream, frame.message, target) != frame.message.sum:
                    what = "ranges"
                    raise damaged(what, stream.peer)
                self._expected.check_stamp(frame.message.stamp, peer=stream.peer)
        return wanted

    def close(self) -> None:
        """See `Source`; a line at rest is kept for the next pull where the context can."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = None if self._busy else self._context.idle
        if idle is not None and self._way.usable:
            idle.give(self._key, self._way)
        else:
            self._way.close()


def open_ucx(location: Location, generation: Generation, context: Context) -> UcxSource:
    """Open a source over UCX: a line that is at rest, or a new one.

    Raises
    ------
    InvalidArgument
        When UCX is not installed here.
    PeerLost
        When the holder has none, or there is no lane that is better than TCP and the
        context does not insist.
    """
    card = location.card
    key = (
        card.node,
        card.data_host,
        card.data_port,
        context.credentials,
        context.prefer,
        context.any_lane,
    )
    way = None if context.idle is None else context.idle.take(key)
    return UcxSource(way or _made(location, context), generation, context, key)


def _made(location: Location, context: Context) -> Way:
    line = Line()
    channel: Channel | None = None
    try:
        channel = Channel.connect(
            location.card,
            credentials=context.credentials,
            prefer=context.prefer,
            until_s=context.until_s,
        )
        _introduce(line, channel, context)
    except BaseException:
        if channel is not None:
            channel.close()
        line.close()
        raise
    return Way(channel, line)


def _introduce(line: Line, channel: Channel, context: Context) -> None:
    """Let both ends of a line know each other."""
    opened = channel.call(
        UcxOpen(rid=next_rid(), address=line.address),
        expect=UcxOpened,
        until_s=context.until_s,
    ).message
    line.piece_bytes = opened.piece_bytes
    line.connect(opened.address)
    if line.lanes[:1] in {_PLAIN, ()} and not context.any_lane:
        message = "UCX would go over TCP, where plain connections are faster"
        raise PeerLost(message)
    with channel.conversation() as stream:
        line.greet(
            first=True,
            control=stream,
            stall_s=stream.stall_s,
            until_s=context.until_s,
        )


register("ucx", open_ucx)
