"""UCX on the side of who holds the bytes: a line for each connection that asks for one.

Rules:

1. A line belongs to a connection and its thread: no thread runs for UCX, and what one
   reader does to its line touches no other.
2. What is being sent stays leased until UCX has done with it, or the line is gone.
3. The reply goes first, the bytes after it, so the reader posts for what is coming.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.dataplane import faults
from tensorcast_dask.dataplane.memory import address
from tensorcast_dask.dataplane.server import Peer, Reply
from tensorcast_dask.dataplane.transports.ucx_line import PIECE_BYTES, Line, Stretch
from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.tensors.messages import Chunk, Ranges, UcxOpen, UcxOpened

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["UcxServing"]

logger = logging.getLogger(__name__)

_LINE: Final = "ucx"


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
        peer.notes[_LINE] = line
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
        line: Line | None = peer.notes.get(_LINE)
        if line is None:
            message = "no UCX line was opened on this connection"
            raise InvalidArgument(message)
        return line

    def over(self, reply: Reply, peer: Peer) -> Reply:
        """Send a reply's payload over the line of its connection.

        Errors are those of `line`; the reply is done with then.
        """
        try:
            line = self.line(peer)
            whole = _joined(reply.payload)
            message = reply.message
            assert isinstance(message, Chunk | Ranges), (
                "only these carry bytes over UCX"
            )
        except BaseException:
            if reply.done is not None:
                reply.done()
            raise

        def send() -> None:
            try:
                faults.point("ucx.sending")
                if whole.nbytes:
                    with address(whole) as (start, _):
                        line.send(Stretch(start, whole.nbytes))
                        line.drive(control=peer.stream, stall_s=peer.stream.stall_s)
            finally:
                if reply.done is not None:
                    reply.done()

        announced = msgspec.structs.replace(message, nbytes=whole.nbytes)
        return Reply(message=announced, done=send)

    @staticmethod
    def closed(peer: Peer) -> None:
        """End the line of a connection that has ended. Idempotent."""
        line: Line | None = peer.notes.pop(_LINE, None)
        if line is not None:
            line.close()


def _joined(payload: object) -> memoryview:
    """Give the bytes of a payload as one: ranges that lie apart are gathered."""
    if payload is None:
        return memoryview(b"")
    if isinstance(payload, list | tuple):
        parts = [memoryview(part) for part in payload]
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
    return memoryview(payload)  # type: ignore[arg-type]  # a buffer
