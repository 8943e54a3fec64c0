"""UCX on the side of who holds the bytes: a line for each connection that asks for one.

Rules:

1. A line belongs to a connection and its thread: no thread runs for UCX, and what one
   reader does to its line touches no other.
2. What is being sent stays leased until UCX has done with it, or the line is gone.
3. The reply goes first, the bytes after it, so the reader posts for what is coming.
4. The next request is answered while the bytes of the last one are under way, so that a line is
   never idle while its reader has asked for more.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from tensorcast_dask.dataplane import faults
from tensorcast_dask.dataplane.memory import address
from tensorcast_dask.dataplane.server import Peer, Reply
from tensorcast_dask.dataplane.transports.ucx_line import PIECE_BYTES, Line, Stretch
from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.tensors.messages import (
    Chunk,
    Ranges,
    ReadChunk,
    ReadRanges,
    UcxOpen,
    UcxOpened,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.dataplane.framing import FrameStream
    from tensorcast_dask.tensors.messages import StoreRequest

__all__ = ["UcxServing"]

logger = logging.getLogger(__name__)

_SENDER: Final = "ucx"
_ALL: Final = 1 << 62


class UcxServing:
    """Lines of a server's connections.

    Parameters
    ----------
    allowed : callable
        Whether the settings of this instant allow UCX.
    piece_bytes : int
        What goes as one message.
    """

    def __init__(
        self,
        *,
        allowed: Callable[[], bool],
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._allowed = allowed
        self._piece_bytes = piece_bytes

    def open(self, request: UcxOpen, peer: Peer) -> Reply:
        """Make a line to a reader.

        Raises
        ------
        InvalidArgument
            When UCX is switched off, or not installed.
        PeerLost
            When there is no way to the reader.
        """
        if not self._allowed():
            message = "UCX is off at this node; set tensorcast.transfer.ucx"
            raise InvalidArgument(message)
        self.closed(peer)
        line = Line(piece_bytes=self._piece_bytes)
        try:
            line.connect(request.address)
        except BaseException:
            line.close()
            raise
        peer.notes[_SENDER] = _Sender(line)
        logger.info("a reader opened a line: %s", line.via)
        stream = peer.stream
        return Reply(
            message=UcxOpened(address=line.address, piece_bytes=self._piece_bytes),
            done=lambda: line.greet(
                first=False, control=stream, stall_s=stream.stall_s
            ),
        )

    @staticmethod
    def line(peer: Peer) -> Line:
        """Return the line of a connection.

        Raises
        ------
        InvalidArgument
            When it has none.
        """
        sender: _Sender | None = peer.notes.get(_SENDER)
        if sender is None:
            message = "no UCX line was opened on this connection"
            raise InvalidArgument(message)
        return sender.line

    def answer(
        self, request: StoreRequest, peer: Peer, make: Callable[[], Reply]
    ) -> Reply:
        """Answer a request: its bytes go over the line of its connection when it asks so.

        Errors are those of `make` and of `line`.
        """
        if not (isinstance(request, ReadChunk | ReadRanges) and request.ucx):
            self._rest(peer)
            return make()
        try:
            self.line(peer)  # refused before anything is leased
            return self._over(make(), peer)
        except BaseException:
            self._rest(peer)
            raise

    def _over(self, reply: Reply, peer: Peer) -> Reply:
        try:
            whole = _joined(reply.payload)
            message = reply.message
            assert isinstance(message, Chunk | Ranges), (
                "only these carry bytes over UCX"
            )
        except BaseException:
            if reply.done is not None:
                reply.done()
            raise
        sender: _Sender = peer.notes[_SENDER]

        def send() -> None:
            sender.begin(whole, reply.done or _nothing)
            sender.drive(peer.stream, or_asked=True)

        announced = msgspec.structs.replace(message, nbytes=whole.nbytes)
        return Reply(message=announced, done=send)

    @staticmethod
    def _rest(peer: Peer) -> None:
        """Send what is under way: nobody does it while the next request is waited for."""
        sender: _Sender | None = peer.notes.get(_SENDER)
        if sender is not None:
            sender.drive(peer.stream)

    @staticmethod
    def closed(peer: Peer) -> None:
        """End the line of a connection that has ended. Idempotent."""
        sender: _Sender | None = peer.notes.pop(_SENDER, None)
        if sender is not None:
            sender.close()


class _Sending(NamedTuple):
    """An answer whose bytes are under way."""

    #: The number of its last piece on the line.
    last: int
    #: Kept, since UCX reads it.
    bytes_: memoryview
    done: Callable[[], None]


class _Sender:
    """A line, and what is leased for it."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self._sending: deque[_Sending] = deque()

    def begin(self, whole: memoryview, done: Callable[[], None]) -> None:
        """Begin to send; `done` is called when UCX needs the bytes no more."""
        line = self.line
        try:
            faults.point("ucx.sending")
            if whole.nbytes:
                with address(whole) as (start, _):
                    line.send(Stretch(start, whole.nbytes))
        finally:
            self._sending.append(_Sending(line.begun, whole, done))

    def drive(self, control: FrameStream, *, or_asked: bool = False) -> None:
        """Bring it to its end, or until the reader asks for more."""
        try:
            self.line.drive(control=control, stall_s=control.stall_s, or_asked=or_asked)
        except BaseException:  # the line has ended
            self._release(_ALL)
            raise
        self._release(self.line.ended)

    def close(self) -> None:
        """End the line, and let everything go."""
        self.line.close()
        self._release(_ALL)

    def _release(self, ended: int) -> None:
        while self._sending and self._sending[0].last <= ended:
            self._sending.popleft().done()


def _nothing() -> None:
    """Be done with what was leased by nobody."""


def _joined(payload: object) -> memoryview:
    """Give the bytes of a payload as one: ranges that lie apart are gathered."""
    if payload is None:
        return memoryview(b"")
    if isinstance(payload, list | tuple):
        parts = [memoryview(part) for part in payload]
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
    return memoryview(payload)  # type: ignore[arg-type]  # a buffer
