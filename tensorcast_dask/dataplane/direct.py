"""A caller and an instance of one host, with nobody between them: small messages over one socket.

Rules:

1. The node's store makes the pair of sockets and hands one end to each. So both are of this host and
   of those that the store serves; there is no handshake.
2. One request at a time; one system call sends it, and one receives it where it is small.
3. After an error the socket is of no more use.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Final, TypeVar

from tensorcast_dask.dataplane.framing import pack
from tensorcast_dask.dataplane.sockets import not_in_children
from tensorcast_dask.exceptions import DeadlineExceeded, PeerLost
from tensorcast_dask.tensors.frames import HEADER_BYTES, parse_header
from tensorcast_dask.tensors.messages import Wire, decode

__all__ = ["Direct"]

T = TypeVar("T")

_ROOM_BYTES: Final = 64 << 10
_MOST_BYTES: Final = 4 << 20
_TIMEVAL: Final = struct.Struct("ll")
#: Who takes nothing for so long is given up.
_STALL_S: Final = 10
#: The kernel waits so long at once.
_SLICE_S: Final = 1.0


class Direct:
    """One end.

    Parameters
    ----------
    sock : socket
        Connected; it belongs to this from here on.
    """

    __slots__ = ("_room", "_sock", "_wait_s")

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(_STALL_S, 0)
        )
        not_in_children(sock)
        self._sock = sock
        self._room = memoryview(bytearray(_ROOM_BYTES))
        self._wait_s = 0.0

    def fileno(self) -> int:
        """Descriptor, for polling."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close. Idempotent."""
        self._sock.close()

    def send(self, message: Wire) -> None:
        """Send one message.

        Raises
        ------
        PeerLost
            When nobody is at the other end: it has not got the message.
        """
        try:
            self._sock.sendall(pack(message))
        except OSError as error:
            raise _lost() from error

    def receive(self, kind: type[T], *, until_s: float | None = None) -> T:
        """Receive one message.

        Raises
        ------
        PeerLost
            When the other end is closed.
        DeadlineExceeded
            When nothing came in time.
        """
        room = self._room
        got = self._fill(room, until_s)
        while got < HEADER_BYTES:
            got += self._fill(room[got:], until_s)
        nbytes = HEADER_BYTES
        nbytes += parse_header(
            room[:HEADER_BYTES], max_body_bytes=_MOST_BYTES
        ).body_bytes
        if nbytes > len(room):
            long = memoryview(bytearray(nbytes))
            long[:got] = room[:got]
            room = long
        while got < nbytes:
            got += self._fill(room[got:nbytes], until_s)
        return decode(room[HEADER_BYTES:nbytes], kind)

    def _fill(self, room: memoryview, until_s: float | None) -> int:
        while True:
            left_s = _SLICE_S if until_s is None else until_s - time.monotonic()
            if left_s <= 0:
                message = (
                    "the instance did not answer in time; what it has begun goes on"
                )
                raise DeadlineExceeded(message)
            self._wait(min(left_s, _SLICE_S))
            try:
                got = self._sock.recv_into(room)
            except BlockingIOError:
                continue
            except OSError as error:
                raise _lost() from error
            if not got:
                raise _lost()
            return got

    def _wait(self, wait_s: float) -> None:
        """Have the kernel give up a wait after so long; most calls find it set already."""
        if wait_s != self._wait_s:
            micros = max(1000, int(wait_s * 1e6))
            value = _TIMEVAL.pack(*divmod(micros, 1_000_000))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._wait_s = wait_s


def _lost() -> PeerLost:
    message = "the other end of a call is gone"
    return PeerLost(message)
