"""Frames on blocking sockets: messages, bulk bytes, descriptors.

Rules:

1. Plain and TLS sockets look the same above this module (`sockets`).
2. Two limits of waiting: `until_s`, an instant of the monotonic clock (then
   DeadlineExceeded), and the stream's `stall_s`, the longest silence (then PeerLost).
3. After any error a stream is of no more use: its position in the peer's bytes is not
   known. The caller closes it.
4. Lengths are checked before anything is allocated; a payload goes straight to where
   it belongs. Descriptors that nobody takes are closed.
5. Bytes that were sent by reference can still change on the way, and no lease shows
   that (measured): they go with a sum, or they are copied.
6. One thread sends and one receives at a time; with TLS they must be the same thread.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Protocol,
    TypeAlias,
    TypeVar,
)

from tensorcast_dask.dataplane.fileranges import FileRange, write_all
from tensorcast_dask.dataplane.memory import HASHED_BYTES, flat
from tensorcast_dask.dataplane.sockets import (
    SCRATCH_BYTES,
    Io,
    Pace,
    PlainIo,
    TlsIo,
    close_fds,
    hang_up,
    is_tls,
    not_in_children,
)
from tensorcast_dask.exceptions import (
    DeadlineExceeded,
    PeerLost,
    TensorCastError,
    WrongPeer,
)
from tensorcast_dask.tensors.frames import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    pack_header,
    parse_header,
)
from tensorcast_dask.tensors.messages import Wire, decode, encode

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

__all__ = [
    "Digest",
    "Frame",
    "FrameStream",
    "Into",
    "Payload",
    "pack",
    "read_message",
]

T = TypeVar("T")

#: Anything with the buffer protocol (there is no such type before Python 3.12).
Buffer: TypeAlias = Any
#: Where a payload goes: a buffer, a range of a file, or what says so once the message is known.
Into: TypeAlias = "Buffer | FileRange | Callable[[Any, int], Buffer | None]"

_SMALL_BYTES: Final = 64 << 10
_SENDFILE_BYTES: Final = 16 << 20
_IOV_MAX: Final = 512
#: The kernel rounds time-outs to its tick.
_TICK_S: Final = 0.01
_DEFAULT_STALL_S: Final = 30.0
#: What a call on a socket raises when it waited too long, and at all.
_WAITED: Final = (BlockingIOError, TimeoutError)
_FAILURES: Final = (OSError, ValueError)


def pack(message: Wire, payload: bytes = b"") -> bytes:
    """Make one whole frame; for event loops."""
    body = encode(message)
    return pack_header(len(body), len(payload)) + body + payload


class _Reader(Protocol):
    async def readexactly(self, n: int) -> bytes: ...


async def read_message(
    reader: _Reader, kind: type[T], *, max_body_bytes: int = MAX_BODY_BYTES
) -> T:
    """Read one frame without payload from an asyncio stream.

    Raises
    ------
    PeerLost
        When the stream ends.
    WrongPeer
        When it is no frame, too long, or no message of `kind`.
    """
    try:
        header = parse_header(
            await reader.readexactly(HEADER_BYTES), max_body_bytes=max_body_bytes
        )
        body = await reader.readexactly(header.body_bytes)
    except (EOFError, OSError) as error:
        message = "the peer closed the connection"
        raise PeerLost(message) from error
    return decode(body, kind)


class Digest(Protocol):
    """What is fed with received bytes: an xxhash state."""

    def update(self, data: Any, /) -> object:  # noqa: ANN401
        """Take the next bytes."""
        ...


class Frame(Generic[T]):
    """One received frame. Descriptors that are not taken are closed by `close`."""

    __slots__ = ("fds", "message", "nbytes", "payload")

    def __init__(
        self, message: T, payload: bytearray | None, nbytes: int, fds: tuple[int, ...]
    ) -> None:
        self.message = message
        #: The bytes, where no destination was given.
        self.payload = payload
        #: Length of the payload, wherever it went.
        self.nbytes = nbytes
        self.fds = fds

    def take_fd(self) -> int:
        """Hand over the one descriptor that this frame must have brought."""
        if len(self.fds) != 1:
            message = f"the peer sent {len(self.fds)} descriptors where one belongs"
            self.close()
            raise WrongPeer(message)
        fd, self.fds = self.fds[0], ()
        return fd

    def close(self) -> None:
        """Close descriptors that nobody took. Idempotent."""
        fds, self.fds = self.fds, ()
        close_fds(fds)

    def __del__(self) -> None:
        self.close()


class FrameStream:
    """One connected socket that speaks frames.

    Parameters
    ----------
    sock : socket
        Connected; it belongs to the stream from here on.
    peer : str
        How errors call the other end.
    stall_s : float or None
        The longest silence inside a frame; None waits for ever.
    bandwidth_bytes_per_s : float
        A cap on what is sent; 0 means none.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        peer: str = "the peer",
        stall_s: float | None = _DEFAULT_STALL_S,
        bandwidth_bytes_per_s: float = 0.0,
    ) -> None:
        self.sock = sock
        self.peer = peer
        self.stall_s = stall_s
        self.sent_bytes = 0
        self.received_bytes = 0
        self._io: Io = TlsIo(sock) if is_tls(sock) else PlainIo(sock)
        self._pace = Pace(bandwidth_bytes_per_s) if bandwidth_bytes_per_s else None
        self._header = bytearray(HEADER_BYTES)
        self._scratch = bytearray()
        not_in_children(sock)

    def fileno(self) -> int:
        """Descriptor of the socket, for polling; -1 once closed."""
        return self.sock.fileno()

    @property
    def pending(self) -> bool:
        """Whether TLS has bytes that a poll of the descriptor would not show."""
        return is_tls(self.sock) and self.sock.pending() > 0

    def close(self) -> None:
        """Close; a thread that is in a call on this stream gets PeerLost. Idempotent."""
        hang_up(self.sock)
        with contextlib.suppress(OSError):
            self.sock.close()

    def shutdown(self) -> None:
        """End both directions without giving the descriptor back (another thread uses it)."""
        hang_up(self.sock)

    # -------------------------------------------------------------- sending
    def send(
        self,
        message: Wire,
        *,
        payload: Buffer | Sequence[Buffer] | None = None,
        payload_file: tuple[int, int, int] | None = None,
        by_reference: bool = False,
        fds: Sequence[int] = (),
        until_s: float | None = None,
    ) -> None:
        """Send one frame.

        Parameters
        ----------
        message : Wire
            The body.
        payload : buffer or sequence of buffers, optional
            Bulk bytes from memory.
        payload_file : (fd, offset, nbytes), optional
            Bulk bytes from a file.
        by_reference : bool
            Send the file's pages themselves (`sendfile`), the fastest way. The peer may then
            get what the file holds when it *reads*, also long after this call: only for
            bytes whose sum stands in the message. Else they are copied.
        fds : sequence of int
            Descriptors to send beside the first byte; they stay the caller's.
        until_s : float, optional
            Monotonic instant at which to give up.

        Raises
        ------
        PeerLost
            When the peer closed or took nothing for `stall_s`.
        DeadlineExceeded
            When `until_s` passed.
        """
        views = _views(payload)
        nbytes = payload_file[2] if payload_file else sum(v.nbytes for v in views)
        body = encode(message)
        head = memoryview(pack_header(len(body), nbytes) + body)
        if self._pace is None:
            self._send_views([head, *views], fds, until_s)
        else:
            self._send_views([head], fds, until_s)
            self._send_paced(views, until_s)
        if payload_file and by_reference and isinstance(self._io, PlainIo):
            self._send_file(payload_file, until_s)
        elif payload_file:
            self._send_copied(payload_file, until_s)

    def _send_views(
        self, views: list[memoryview], fds: Sequence[int], until_s: float | None
    ) -> None:
        while views:
            wait_s = self._wait_s(until_s)
            try:
                sent = self._io.send(views[:_IOV_MAX], fds, wait_s)
            except _FAILURES as error:
                raise self._failed(error, "send to", until_s) from error
            fds = ()
            self.sent_bytes += sent
            views = _after(views, sent)

    def _send_paced(self, views: list[memoryview], until_s: float | None) -> None:
        assert self._pace is not None
        step = self._pace.piece_bytes
        for view in views:
            for at in range(0, view.nbytes, step):
                piece = view[at : at + step]
                self._send_views([piece], (), until_s)
                self._pace.spend(piece.nbytes)

    def _send_file(self, file: tuple[int, int, int], until_s: float | None) -> None:
        fd, offset, left = file
        most = self._pace.piece_bytes if self._pace else _SENDFILE_BYTES
        while left:
            wait_s = self._wait_s(until_s)
            assert isinstance(self._io, PlainIo), "framing: TLS has no pages to send"
            try:
                sent = self._io.send_file(fd, offset, min(left, most), wait_s)
            except _FAILURES as error:
                raise self._failed(error, "send to", until_s) from error
            if not sent:
                self._file_ended()
            offset, left = offset + sent, left - sent
            self.sent_bytes += sent
            if self._pace:
                self._pace.spend(sent)

    def _send_copied(self, file: tuple[int, int, int], until_s: float | None) -> None:
        fd, offset, left = file
        most = self._pace.piece_bytes if self._pace else 4 * SCRATCH_BYTES
        scratch = memoryview(bytearray(min(left, most)))
        while left:
            got = os.preadv(fd, [scratch[: min(left, len(scratch))]], offset)
            if not got:
                self._file_ended()
            self._send_views([scratch[:got]], (), until_s)
            offset, left = offset + got, left - got
            if self._pace:
                self._pace.spend(got)

    def _file_ended(self) -> None:
        message = f"the file behind {self.peer}'s request ended early"
        raise PeerLost(message)

    # -------------------------------------------------------------- receiving
    def receive_head(
        self,
        kind: type[T],
        *,
        max_payload_bytes: int = 0,
        max_body_bytes: int = MAX_BODY_BYTES,
        until_s: float | None = None,
        idle: bool = False,
    ) -> tuple[T, Payload, tuple[int, ...]]:
        """Receive a message and leave its payload on the wire.

        The payload must be read (or skipped) before the next frame. Parameters and
        errors are those of `receive`.
        """
        view = memoryview(self._header)
        stall_s = None if idle else self.stall_s
        wait_s = self._wait_s(until_s, stall_s)
        try:
            got, fds = self._io.recv_with_fds(view, wait_s)
        except _FAILURES as error:
            raise self._failed(error, "hear from", until_s) from error
        try:
            if not got:
                self._ended()
            self.received_bytes += got
            self.fill(view[got:], until_s=until_s)
            header = parse_header(
                self._header,
                max_body_bytes=max_body_bytes,
                max_payload_bytes=max_payload_bytes,
            )
            body = bytearray(header.body_bytes)
            self.fill(memoryview(body), until_s=until_s)
            message = decode(body, kind)
        except BaseException:
            close_fds(fds)
            raise
        return message, Payload(self, header.payload_bytes, until_s), fds

    def receive(
        self,
        kind: type[T],
        *,
        into: Into | None = None,
        digest: Digest | None = None,
        max_payload_bytes: int = 0,
        until_s: float | None = None,
        idle: bool = False,
    ) -> Frame[T]:
        """Receive one frame.

        Parameters
        ----------
        kind : type
            The union (or struct) that the message must belong to.
        into : writable buffer, FileRange, or callable (message, nbytes) -> buffer or None
            Where the payload goes. None (given or returned): into a new bytearray, or
            nowhere, respectively.
        digest : Digest, optional
            Is fed with the payload that goes `into` something.
        max_payload_bytes : int
            The longest payload that is accepted.
        until_s : float, optional
            Monotonic instant at which to give up.
        idle : bool
            The first byte may be long in coming (a server between two requests).

        Raises
        ------
        PeerLost
            When the peer closed or was silent for `stall_s`.
        DeadlineExceeded
            When `until_s` passed.
        WrongPeer
            When what came is no such frame.
        """
        message, payload, fds = self.receive_head(
            kind, max_payload_bytes=max_payload_bytes, until_s=until_s, idle=idle
        )
        nbytes = payload.nbytes
        data: bytearray | None = None
        try:
            if into is None:
                data = payload.read() if nbytes else None
            elif nbytes:
                target = into(message, nbytes) if callable(into) else into
                if target is None:
                    payload.skip()
                elif isinstance(target, FileRange):
                    payload.read_to_range(target, digest=digest)
                else:
                    payload.read_into(target, digest=digest)
        except BaseException:
            close_fds(fds)
            raise
        return Frame(message, data, nbytes, fds)

    def fill(
        self,
        view: memoryview,
        *,
        until_s: float | None = None,
        digest: Digest | None = None,
    ) -> None:
        """Receive exactly as many bytes as `view` holds.

        With a `digest` they are hashed piece by piece, while they are in the cache.
        """
        most = len(view) if digest is None else HASHED_BYTES
        while view:
            wait_s = self._wait_s(until_s)
            try:
                got = self._io.recv(view[:most], wait_s)
            except _FAILURES as error:
                raise self._failed(error, "hear from", until_s) from error
            if not got:
                self._ended()
            self.received_bytes += got
            if digest is not None:
                digest.update(view[:got])
            view = view[got:]

    def scratch(self, nbytes: int) -> memoryview:
        """Lend the stream's own buffer; it is made once, for fresh pages cost as much as a copy."""
        if len(self._scratch) < nbytes:
            self._scratch = bytearray(nbytes)
        return memoryview(self._scratch)[:nbytes]

    # -------------------------------------------------------------- waiting
    def _wait_s(
        self, until_s: float | None, stall_s: float | None = -1.0
    ) -> float | None:
        if stall_s == -1.0:
            stall_s = self.stall_s
        if until_s is None:
            return stall_s
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            message = f"the deadline passed while waiting for {self.peer}"
            raise DeadlineExceeded(message)
        return left_s if stall_s is None or left_s < stall_s else stall_s

    def _failed(
        self, error: Exception, what: str, until_s: float | None
    ) -> TensorCastError:
        """Say what the failure of a call on the socket means to the caller."""
        if isinstance(error, _WAITED):
            if until_s is not None and time.monotonic() >= until_s - _TICK_S:
                return DeadlineExceeded(
                    f"the deadline passed before this process could {what} {self.peer}"
                )
            return PeerLost(
                f"could not {what} {self.peer} for {self.stall_s} s: it stalled",
                {"stalled": True},
            )
        return PeerLost(f"could not {what} {self.peer}: {error}")

    def _ended(self) -> None:
        message = f"{self.peer} closed the connection"
        raise PeerLost(message)


class Payload:
    """The bulk bytes of a frame whose message has been read, still on the wire."""

    __slots__ = ("_stream", "_until_s", "left", "nbytes")

    def __init__(self, stream: FrameStream, nbytes: int, until_s: float | None) -> None:
        self._stream = stream
        self._until_s = until_s
        #: Length of the whole.
        self.nbytes = nbytes
        #: What has not been read yet.
        self.left = nbytes

    def read_into(self, target: Buffer, *, digest: Digest | None = None) -> int:
        """Receive all that is left into the front of a writable buffer.

        Raises
        ------
        WrongPeer
            When it is longer than the buffer; nothing has been read.
        """
        view = flat(target)
        self._check_fits(view.nbytes)
        nbytes, self.left = self.left, 0
        self._stream.fill(view[:nbytes], until_s=self._until_s, digest=digest)
        return nbytes

    def read(self) -> bytearray:
        """Receive all that is left into new memory; for payloads known to be small."""
        data = bytearray(self.left)
        self.read_into(data)
        return data

    def read_to_range(self, place: FileRange, *, digest: Digest | None = None) -> int:
        """Receive all that is left into the front of a range of a file.

        Raises
        ------
        WrongPeer
            When it is longer than the range; nothing has been read.
        """
        self._check_fits(place.nbytes)
        return self.read_to_file(place.fd, place.offset, digest=digest)

    def read_to_file(
        self, fd: int, offset: int, *, digest: Digest | None = None
    ) -> int:
        """Receive all that is left and write it to a file: no map is needed."""
        scratch = self._stream.scratch(min(self.left, HASHED_BYTES))
        nbytes = self.left
        while self.left:
            piece = scratch[: min(self.left, len(scratch))]
            self.left -= len(piece)
            self._stream.fill(piece, until_s=self._until_s, digest=digest)
            write_all(fd, piece, offset)
            offset += len(piece)
        return nbytes

    def _check_fits(self, nbytes: int) -> None:
        if self.left > nbytes:
            message = (
                f"{self._stream.peer} sent {self.left} bytes where {nbytes} belong"
            )
            raise WrongPeer(message)

    def skip(self) -> None:
        """Receive all that is left and forget it."""
        scratch = memoryview(bytearray(min(self.left, SCRATCH_BYTES)))
        while self.left:
            piece = scratch[: min(self.left, len(scratch))]
            self.left -= len(piece)
            self._stream.fill(piece, until_s=self._until_s)


def _views(payload: Buffer | Sequence[Buffer] | None) -> list[memoryview]:
    if payload is None:
        return []
    parts = payload if isinstance(payload, list | tuple) else (payload,)
    return [view for part in parts if (view := flat(part)).nbytes]


def _after(views: list[memoryview], sent: int) -> list[memoryview]:
    """Return what is left of `views` once `sent` bytes of them are gone."""
    for number, view in enumerate(views):
        if sent < view.nbytes:
            return [view[sent:], *views[number + 1 :]]
        sent -= view.nbytes
    return []
