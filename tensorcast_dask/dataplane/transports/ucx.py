"""Chunks as UCX tag messages, from memory to memory: scheme `ucx`.

Rules:

1. The control connection is a channel like any other: it proves who the holder is, carries
   requests, sums and refusals, and its end is the end of the transfer. UCX has neither
   TLS nor a proof: whoever can reach its ports can disturb it, so a chunk counts only when
   it has the sum that the channel told.
2. A receive is posted when the holder has said that it sends, into memory that stays UCX's
   until the chunk is there or the line is gone.
3. A line that has no better lane than TCP is refused, unless it was asked for: several
   plain connections are faster.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.dataplane.channel import Channel
from tensorcast_dask.dataplane.fileranges import FileRange
from tensorcast_dask.dataplane.memory import address, flat, private, sum_of
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
    from tensorcast_dask.dataplane.framing import Frame, FrameStream
    from tensorcast_dask.tensors.ids import Generation

__all__ = ["UcxSource", "open_ucx"]

_PLAIN: Final = ("tcp",)


class UcxSource(StreamSource):
    """A holder that sends chunks over a line of UCX."""

    def __init__(
        self, channel: Channel, generation: Generation, context: Context, line: Line
    ) -> None:
        super().__init__(channel, generation, context, scheme="ucx")
        self.via = line.via
        self._line = line
        #: Where chunks land that go into a file.
        self._landing: memoryview | None = None

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
        landed = self._receive(stream, reply, target)
        found = sum_of(landed)
        arrived = self._verified(stream, work, reply, found, landed.nbytes)
        if isinstance(target, FileRange):
            target.write(landed)
        return arrived

    def _receive(
        self,
        stream: FrameStream,
        reply: Chunk | Ranges,
        target: memoryview | FileRange,
    ) -> memoryview:
        """Receive what a reply announced; the bytes, wherever they lie."""
        nbytes = reply.nbytes
        if not 0 <= nbytes <= target.nbytes:
            message = f"{stream.peer} sends {nbytes} bytes where {target.nbytes} belong"
            raise WrongPeer(message)
        if isinstance(target, FileRange):
            if self._landing is None or self._landing.nbytes < nbytes:
                self._landing = private(nbytes)
            target = self._landing
        if nbytes:
            with address(target, writable=True) as (start, _):
                self._line.receive(Stretch(start, nbytes))
                self._line.drive(
                    control=stream,
                    stall_s=stream.stall_s,
                    until_s=self._context.until_s,
                )
        return memoryview(target)[:nbytes]

    def read_ranges(self, ranges: list[tuple[int, int]], into: Any) -> int:  # noqa: ANN401
        """See `Source`."""
        target = flat(into)
        packed = struct.pack(f"<{2 * len(ranges)}Q", *(n for r in ranges for n in r))
        wanted = sum(length for _, length in ranges)
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
            landed = self._receive(stream, frame.message, target)
            if sum_of(landed) != frame.message.sum:
                what = "ranges"
                raise damaged(what, stream.peer)
            self._expected.check_stamp(frame.message.stamp, peer=stream.peer)
        return wanted

    def close(self) -> None:
        """See `Source`."""
        self._channel.close()  # first: it ends a transfer under way
        self._line.close()


def open_ucx(location: Location, generation: Generation, context: Context) -> UcxSource:
    """Open a source over UCX.

    Raises
    ------
    InvalidArgument
        When UCX is not installed here.
    PeerLost
        When the holder has none, or there is no lane that is better than TCP and the
        context does not insist.
    """
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
    return UcxSource(channel, generation, context, line)


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


register("ucx", open_ucx)
