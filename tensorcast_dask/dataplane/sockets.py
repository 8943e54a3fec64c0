"""The few calls in which plain and TLS sockets differ, and descriptors beside bytes.

Rules:

1. A plain socket blocks in the kernel (`SO_RCVTIMEO`, `SO_SNDTIMEO`), so that one call
   moves megabytes without the GIL. A TLS socket has Python's time-outs and moves 16 KiB
   a call.
2. A call that waited too long raises BlockingIOError or TimeoutError; the layer above
   says what that means.
3. Descriptors arrive closed on exec, and are closed where they do not fit.
4. `ssl` is loaded by who makes a TLS socket, not by who only asks for one.
5. A forked child closes its copies of our sockets at once (`not_in_children`): else a
   connection would seem to live on, and a port to listen, after its process has died.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import sys
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from tensorcast_dask.exceptions import PeerLost

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from typing_extensions import TypeIs

__all__ = [
    "SCRATCH_BYTES",
    "Io",
    "Pace",
    "PlainIo",
    "TlsIo",
    "close_fds",
    "hang_up",
    "is_tls",
    "not_in_children",
]

_MAX_FDS: Final = 8
_ANCILLARY_BYTES: Final = 16 + _MAX_FDS * 4  # CMSG_SPACE on 64-bit Linux
_TIMEVAL: Final = struct.Struct("ll")
# Plain integers: arithmetic on the enumerations of `socket` is slow.
_UNIX: Final = getattr(socket, "AF_UNIX", None)
_WAIT_ALL: Final = int(getattr(socket, "MSG_WAITALL", 0))
_CLOEXEC: Final = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_CUT: Final = int(getattr(socket, "MSG_CTRUNC", 0))
SCRATCH_BYTES: Final = 256 << 10


def close_fds(fds: Sequence[int]) -> None:
    """Close descriptors; one that is closed already is no error."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def hang_up(sock: socket.socket) -> None:
    """End both directions; a thread that uses the socket notices, and has it still to close."""
    with contextlib.suppress(OSError):
        # Not SSLSocket's own: it takes away what the other thread is using.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def not_in_children(*sockets: socket.socket) -> None:
    """Close these sockets in every child that is forked from here on."""
    _sockets.update(sockets)


def _after_fork() -> None:
    for sock in list(_sockets):
        with contextlib.suppress(OSError):
            sock.close()  # never shut down: the connection is the parent's


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


class Io(Protocol):
    """One socket, plain or TLS. `wait_s` None waits for ever."""

    def recv(self, view: memoryview, wait_s: float | None) -> int:
        """Receive up to as many bytes as `view` holds; 0 is the end."""
        ...

    def recv_with_fds(
        self, view: memoryview, wait_s: float | None
    ) -> tuple[int, tuple[int, ...]]:
        """Receive like `recv`, and the descriptors that came with the first byte."""
        ...

    def send(
        self, views: list[memoryview], fds: Sequence[int], wait_s: float | None
    ) -> int:
        """Send some of `views`, with descriptors beside the first byte."""
        ...


def is_tls(sock: socket.socket) -> TypeIs[ssl.SSLSocket]:
    """Say whether a socket speaks TLS."""
    loaded = sys.modules.get("ssl")
    return loaded is not None and isinstance(sock, loaded.SSLSocket)


class PlainIo:
    """A blocking socket; time-outs are the kernel's."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._sock = sock
        self._unix = sock.family == _UNIX
        self._waits: dict[int, float | None] = {
            socket.SO_RCVTIMEO: None,
            socket.SO_SNDTIMEO: None,
        }

    def _wait(self, option: int, wait_s: float | None) -> None:
        if self._waits[option] != wait_s:
            seconds = 0.0 if wait_s is None else max(wait_s, 1e-3)
            whole = int(seconds)
            value = _TIMEVAL.pack(whole, int((seconds - whole) * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, option, value)
            self._waits[option] = wait_s

    def recv(self, view: memoryview, wait_s: float | None) -> int:
        """Receive up to as many bytes as `view` holds; 0 is the end."""
        self._wait(socket.SO_RCVTIMEO, wait_s)
        return self._sock.recv_into(view, len(view), _WAIT_ALL)

    def recv_with_fds(
        self, view: memoryview, wait_s: float | None
    ) -> tuple[int, tuple[int, ...]]:
        """Receive like `recv`, and the descriptors that came with the first byte."""
        if not self._unix:
            return self.recv(view, wait_s), ()
        self._wait(socket.SO_RCVTIMEO, wait_s)
        got, ancillary, flags, _ = self._sock.recvmsg_into(
            [view], _ANCILLARY_BYTES, _CLOEXEC
        )
        fds = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) // fds.itemsize * fds.itemsize])
        if flags & _CUT:
            close_fds(fds)
            message = "the peer's descriptors did not fit; raise RLIMIT_NOFILE"
            raise PeerLost(message)
        return got, tuple(fds)

    def send(
        self, views: list[memoryview], fds: Sequence[int], wait_s: float | None
    ) -> int:
        """Send some of `views`, with descriptors beside the first byte."""
        self._wait(socket.SO_SNDTIMEO, wait_s)
        ancillary = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            if fds
            else []
        )
        return self._sock.sendmsg(views, ancillary)

    def send_file(self, fd: int, offset: int, nbytes: int, wait_s: float | None) -> int:
        """Send some of a range of a file."""
        self._wait(socket.SO_SNDTIMEO, wait_s)
        return os.sendfile(self._sock.fileno(), fd, offset, nbytes)


class TlsIo:
    """A TLS socket; time-outs are Python's, descriptors do not travel."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._wait_s: float | None = None
        #: What rule 2 calls BlockingIOError is an error of `ssl` here.
        self._waited: type[OSError] = sys.modules["ssl"].SSLWantReadError
        sock.settimeout(None)

    def _wait(self, wait_s: float | None) -> None:
        if wait_s != self._wait_s:
            self._sock.settimeout(wait_s)
            self._wait_s = wait_s

    def recv(self, view: memoryview, wait_s: float | None) -> int:
        """Receive up to as many bytes as `view` holds; 0 is the end."""
        self._wait(wait_s)
        try:
            return self._sock.recv_into(view, len(view))
        except self._waited as error:
            raise BlockingIOError(str(error)) from error

    def recv_with_fds(
        self, view: memoryview, wait_s: float | None
    ) -> tuple[int, tuple[int, ...]]:
        """Receive like `recv`, and the descriptors that came with the first byte."""
        return self.recv(view, wait_s), ()

    def send(
        self, views: list[memoryview], fds: Sequence[int], wait_s: float | None
    ) -> int:
        """Send some of `views`, with descriptors beside the first byte."""
        assert not fds, "framing: descriptors do not travel over TLS"
        self._wait(wait_s)
        try:
            return self._sock.send(views[0])
        except self._waited as error:
            raise BlockingIOError(str(error)) from error


@dataclass(slots=True)
class Pace:
    """Keeps a connection below a rate (tests of slow peers)."""

    bytes_per_s: float
    free_at_s: float = 0.0

    @property
    def piece_bytes(self) -> int:
        """How much to send at once."""
        return max(4096, int(self.bytes_per_s * 0.02))

    def spend(self, nbytes: int) -> None:
        """Wait until `nbytes` more are within the rate."""
        now_s = time.monotonic()
        self.free_at_s = max(self.free_at_s, now_s) + nbytes / self.bytes_per_s
        time.sleep(max(0.0, self.free_at_s - now_s))
