"""Listening for the store protocol: unix socket and TCP port, one thread a connection.

Rules:

1. Nobody is served before the handshake: the uid over the unix socket, the challenge
   over TCP (inside TLS where the cluster has it). It has a deadline, small limits and
   its own share of connections, so that strangers cannot crowd out peers.
2. One slow peer holds up one thread. A peer that is silent inside a frame is dropped
   after `stall_s`; between frames it may be silent for ever.
3. A handler's TensorCastError becomes `Refused`; any other exception is logged, answered
   and ends the connection. The server itself goes on.
4. `stop` ends listeners, connections and threads within its bound.
5. A payload that the handler did not read is skipped, so the next frame is found.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from tensorcast_dask.dataplane import faults, tracing
from tensorcast_dask.dataplane.auth import STORE, Answerer, check_hello, check_uid
from tensorcast_dask.dataplane.congestion import set_congestion
from tensorcast_dask.dataplane.framing import FrameStream, Payload
from tensorcast_dask.dataplane.sockets import (
    close_fds,
    hang_up,
    is_tls,
    not_in_children,
)
from tensorcast_dask.exceptions import (
    InvalidArgument,
    PeerLost,
    TensorCastError,
    WrongPeer,
)
from tensorcast_dask.tensors.messages import (
    Chunk,
    Fault,
    Hello,
    Proof,
    Ranges,
    Refused,
    Role,
    StoreReply,
    StoreRequest,
    Welcome,
)
from tensorcast_dask.tensors.traces import cause_of

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from tensorcast_dask.tensors.ids import HostId, NodeId
    from tensorcast_dask.tensors.messages import NodeCard

__all__ = ["Handler", "Limits", "Peer", "Reply", "Server"]

logger = logging.getLogger(__name__)

_HELLO_BODY_BYTES: Final = 16 << 10
_BACKLOG: Final = 128
_KEEPALIVE_S: Final = 30
_LATE_AGAIN_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server grants to its peers."""

    connections: int = 1024
    strangers: int = 64  # connections that have not finished the handshake
    handshake_s: float = 5.0
    stall_s: float | None = 30.0
    payload_bytes: int = 1 << 40
    bandwidth_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a handler answers.

    `fds` are closed once sent; `done` is called when the bytes have left (or could not).
    A `payload_file` of a `Chunk` or `Ranges` leaves by reference: should its memory change
    before the peer has read it, the sum in the message tells. Everything else is copied.
    """

    #: None: the request is of a kind that is not answered.
    message: StoreReply | None
    payload: Any = None
    payload_file: tuple[int, int, int] | None = None
    fds: Sequence[int] = ()
    done: Callable[[], None] | None = None


@dataclass(eq=False, slots=True, kw_only=True)
class Peer:
    """One connection, after its handshake."""

    number: int
    stream: FrameStream
    unix: bool
    role: Role
    host: HostId
    #: Over the unix socket the kernel's word; over TCP what the peer says.
    pid: int
    hello: Hello
    #: Held for the length of a frame: an instance is spoken to by other threads too.
    sending: threading.Lock = field(default_factory=threading.Lock)
    #: For the handler's own use, from the connection's thread.
    notes: dict[str, Any] = field(default_factory=dict)

    def close(self) -> None:
        """End the connection, from any thread."""
        self.stream.shutdown()


class Handler(Protocol):
    """What a server does with requests. Called from the connections' threads."""

    def handle(self, request: StoreRequest, payload: Payload, peer: Peer) -> Reply:
        """Carry one request out; `payload` reads its bulk bytes."""
        ...

    def closed(self, peer: Peer) -> None:
        """Learn that the connection has ended. Must not raise."""
        ...


class Server:
    """Listens, shakes hands and hands requests to a handler.

    Parameters
    ----------
    handler : Handler
        Carries requests out.
    welcome : callable
        Gives the `Welcome` of this instant: card, cluster, epoch.
    token : callable
        Gives the cluster token; b"" while there is none, and TCP callers are refused.
    limits : Limits
        See there.
    allow_uids : collection of int
        Other users that may use the unix socket.
    guests : callable, optional
        Gives the cards of other nodes for which this server speaks too.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        welcome: Callable[[], Welcome],
        token: Callable[[], bytes],
        limits: Limits | None = None,
        allow_uids: Sequence[int] = (),
        guests: Callable[[NodeId], NodeCard | None] | None = None,
    ) -> None:
        self._guests = guests
        self._handler = handler
        self._welcome = welcome
        self._token = token
        self._limits = limits or Limits()
        self._allow_uids = tuple(allow_uids)
        self._lock = threading.Lock()
        #: Threads of connections -> their sockets. Guarded by the lock.
        self._open: dict[threading.Thread, socket.socket] = {}
        #: Those of them that have not finished the handshake -> until when they must;
        #: the oldest first. Guarded by the lock.
        self._strangers: dict[threading.Thread, float] = {}
        self._numbers = itertools.count(1)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._stopping = False
        self._unix_path = ""
        self._tcp: socket.socket | None = None
        self._thread = threading.Thread(
            target=self._accept_loop, name="tensorcast-accept", daemon=True
        )

    # -------------------------------------------------------------- listening
    def start(self) -> None:
        """Begin to accept; listeners may be added before or after."""
        self._thread.start()

    def listen_unix(self, path: str) -> None:
        """Listen on a unix socket; a dead socket at `path` is replaced."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()
        listener.bind(path)
        Path(path).chmod(0o600 if not self._allow_uids else 0o666)
        self._listen(listener, None)
        self._unix_path = path

    def listen_tcp(
        self,
        host: str,
        *,
        ports: tuple[int, int] = (0, 0),
        tls: ssl.SSLContext | None = None,
        congestion: str = "",
    ) -> int:
        """Listen on an interface, in place of the former TCP listener; return the port.

        Raises
        ------
        InvalidArgument
            When no port of the range can be bound.
        """
        listener = _bind(host, ports)
        if congestion:
            set_congestion(listener, congestion)
        self.close_tcp()
        self._tcp = listener
        self._listen(listener, tls)
        return int(listener.getsockname()[1])

    def close_tcp(self) -> None:
        """Stop listening on TCP; connections that exist go on."""
        listener, self._tcp = self._tcp, None
        if listener is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(listener)
            listener.close()

    def _listen(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        not_in_children(listener, self._wake, self._woken)
        listener.listen(_BACKLOG)
        listener.settimeout(0)
        self._selector.register(listener, selectors.EVENT_READ, _Accept(tls))
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    # -------------------------------------------------------------- life
    def configure(
        self, *, limits: Limits | None = None, allow_uids: Sequence[int] | None = None
    ) -> None:
        """Change limits; connections that exist keep the ones they began with."""
        if limits is not None:
            self._limits = limits
        if allow_uids is not None:
            self._allow_uids = tuple(allow_uids)

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._open)

    def stop(self, *, within_s: float = 5.0) -> bool:
        """End everything; True when no thread is left. Idempotent."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        until_s = time.monotonic() + within_s
        if self._thread.ident is not None:
            self._thread.join(within_s)
        with self._lock:
            left = dict(self._open)
        for sock in left.values():
            hang_up(sock)
        left.pop(threading.current_thread(), None)  # a handler may ask for the end
        for thread in left:
            thread.join(max(0.0, until_s - time.monotonic()))
        self._close_listeners()
        return not self._thread.is_alive() and not any(t.is_alive() for t in left)

    def _close_listeners(self) -> None:
        for key in list(
            self._selector.get_map().values() if self._selector.get_map() else ()
        ):
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]  # always a socket here
        self._selector.close()
        self._wake.close()
        if self._unix_path:
            with contextlib.suppress(OSError):
                Path(self._unix_path).unlink()

    def _accept_loop(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(self._end_late_strangers()):
                if key.data is None:
                    self._woken.recv(64)
                else:
                    self._accept(key.fileobj, key.data)  # type: ignore[arg-type]

    def _end_late_strangers(self) -> float | None:
        """Hang up on whom the handshake's deadline has passed; return how long to wait."""
        now_s = time.monotonic()
        with self._lock:
            for thread, until_s in self._strangers.items():
                if until_s > now_s:
                    return until_s - now_s
                hang_up(self._open[thread])
            return _LATE_AGAIN_S if self._strangers else None

    def _accept(self, listener: socket.socket, accept: _Accept) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor left: do not spin
            if not self._stopping and listener.fileno() >= 0:
                logger.warning("cannot accept a connection: %s", error)
                time.sleep(_LATE_AGAIN_S)
            return
        try:
            sock = _prepared(sock, accept.tls)
            thread = threading.Thread(
                target=self._serve, args=(sock,), name="tensorcast-serve", daemon=True
            )
            if self._admit(thread, sock):
                thread.start()
                return
        except (OSError, RuntimeError) as error:  # it went away; no thread to be had
            logger.warning("cannot serve a connection: %s", error)
            self._forget(sock)
        sock.close()

    def _admit(self, thread: threading.Thread, sock: socket.socket) -> bool:
        """Count a new connection in; where strangers are too many the oldest must go."""
        with self._lock:
            if len(self._open) >= self._limits.connections or self._stopping:
                return False
            if len(self._strangers) >= self._limits.strangers:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                hang_up(self._open[oldest])
            self._open[thread] = sock
            self._strangers[thread] = time.monotonic() + self._limits.handshake_s
            return True

    # -------------------------------------------------------------- one connection
    def _serve(self, sock: socket.socket) -> None:
        peer: Peer | None = None
        try:
            if is_tls(sock):
                sock.settimeout(self._limits.handshake_s)
                sock.do_handshake()
            stream = FrameStream(
                sock,
                peer="the caller",
                stall_s=self._limits.stall_s,
                bandwidth_bytes_per_s=self._limits.bandwidth_bytes_per_s,
            )
            peer = self._handshake(stream)
            if peer is not None:
                self._converse(peer)
        except (TensorCastError, OSError) as error:
            logger.debug("a connection ended: %s", error)
        finally:
            if peer is not None:
                self._tell_closed(peer)
            self._forget(sock)
            hang_up(sock)
            sock.close()

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            for thread in [t for t, s in self._open.items() if s is sock]:
                del self._open[thread]
                self._strangers.pop(thread, None)

    def _handshake(self, stream: FrameStream) -> Peer | None:
        until_s = time.monotonic() + self._limits.handshake_s
        unix = stream.sock.family == socket.AF_UNIX
        try:
            pid = check_uid(stream.sock, allow_uids=self._allow_uids) if unix else 0
            hello = self._hear(stream, Hello, until_s)
            welcome = self._welcome_to(hello)
            check_hello(
                hello,
                cluster=welcome.cluster,
                node=welcome.card.node,
                incarnation=welcome.card.incarnation,
            )
            if not unix:
                answerer = Answerer(token=self._token(), purpose=STORE)
                stream.send(answerer.challenge(hello), until_s=until_s)
                answerer.check(self._hear(stream, Proof, until_s))
            with self._lock:
                # Before the peer may know: from its welcome on it is never taken for a stranger.
                self._strangers.pop(threading.current_thread(), None)
            stream.send(welcome, until_s=until_s)
        except PeerLost:
            return None
        except TensorCastError as error:
            with contextlib.suppress(TensorCastError):
                stream.send(Refused(fault=Fault.of(error)), until_s=until_s)
            return None
        return Peer(
            number=next(self._numbers),
            stream=stream,
            unix=unix,
            role=hello.role,
            host=hello.host,
            pid=pid or hello.pid,
            hello=hello,
        )

    def _welcome_to(self, hello: Hello) -> Welcome:
        welcome = self._welcome()
        if self._guests is None or hello.node in {"", welcome.card.node}:
            return welcome
        guest = self._guests(hello.node) or welcome.card
        return msgspec.structs.replace(welcome, card=guest)

    @staticmethod
    def _hear(stream: FrameStream, kind: type[Any], until_s: float) -> Any:  # noqa: ANN401
        message, _, fds = stream.receive_head(
            kind, max_body_bytes=_HELLO_BODY_BYTES, until_s=until_s
        )
        close_fds(fds)
        return message

    def _converse(self, peer: Peer) -> None:
        stream = peer.stream
        while not self._stopping:
            head: tuple[StoreRequest, Payload, tuple[int, ...]]
            head = stream.receive_head(
                StoreRequest,  # type: ignore[arg-type]  # a union, decoded as one
                max_payload_bytes=self._limits.payload_bytes,
                idle=True,
            )
            request, payload, fds = head
            close_fds(fds)  # nothing in the protocol sends descriptors to a store
            reply, go_on = self._answer(request, payload, peer)
            try:
                if payload.left:
                    payload.skip()
                if reply.message is not None:
                    with peer.sending:
                        stream.send(
                            reply.message,
                            payload=reply.payload,
                            payload_file=reply.payload_file,
                            by_reference=isinstance(reply.message, Chunk | Ranges),
                            fds=reply.fds,
                        )
                if reply.fds:
                    faults.point("descriptor.sent", type(request).__name__)
            finally:
                close_fds(reply.fds)
                if reply.done is not None:
                    reply.done()
            if not go_on:
                return

    def _answer(
        self, request: StoreRequest, payload: Payload, peer: Peer
    ) -> tuple[Reply, bool]:
        if isinstance(request, Hello | Proof):
            error = WrongPeer("the handshake is over; send requests")
            return Reply(message=Refused(fault=Fault.of(error))), False
        try:
            if not tracing.active():
                return self._handler.handle(request, payload, peer), True
            name = f"store {type(request).__name__}"
            with tracing.span(name, cause_of(getattr(request, "rid", ""))):
                return self._handler.handle(request, payload, peer), True
        except TensorCastError as error:
            return Reply(message=Refused(fault=Fault.of(error))), True
        except Exception as error:  # rule 3: a defect must not end the server
            logger.exception("a request failed: %s", type(request).__name__)
            message = f"the node failed on {type(request).__name__} ({type(error).__name__}: {error}); see its log"
            fault = Fault.of(TensorCastError(message))
            return Reply(message=Refused(fault=fault)), False

    def _tell_closed(self, peer: Peer) -> None:
        try:
            self._handler.closed(peer)
        except Exception:  # rule 3
            logger.exception("the end of a connection was not handled")


def _prepared(sock: socket.socket, tls: ssl.SSLContext | None) -> socket.socket:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    if tls is None:
        return sock
    return tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)


@dataclass(frozen=True, slots=True)
class _Accept:
    """What accepted connections of one listener need."""

    tls: ssl.SSLContext | None


def _bind(host: str, ports: tuple[int, int]) -> socket.socket:
    first, last = ports
    family, _, _, _, address = socket.getaddrinfo(
        host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    failure: OSError | None = None
    for port in range(first, last + 1):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address[0], port))
        except OSError as error:
            failure = error
            listener.close()
        else:
            return listener
    message = f"no port of {first}-{last} can be bound on {host!r} ({failure}); see tensorcast.node.data_ports"
    raise InvalidArgument(message)
