"""The client side of the store protocol.

Rules:

1. Same host is proven, not believed: the unix socket is used when the host identities
   are equal *and* the store that answers there is the expected node. Else TCP.
2. A channel carries one request at a time; a pool holds several of them a node.
3. After an error of the transport a channel is closed and raises PeerLost from then on;
   a refusal by the peer (`Refused`) leaves it usable.
4. Channels do not cross a fork: the child is told to use spawn.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from tensorcast_dask.dataplane.auth import (
    STORE,
    Caller,
    check_uid,
    client_tls,
)
from tensorcast_dask.dataplane.congestion import congestion_for, set_congestion
from tensorcast_dask.dataplane.framing import Frame, FrameStream, Into
from tensorcast_dask.exceptions import (
    InvalidArgument,
    PeerLost,
    ReachError,
    TensorCastError,
    UnsupportedPlatform,
    WrongPeer,
)
from tensorcast_dask.tensors.ids import ClusterId, HostId, NodeId
from tensorcast_dask.tensors.messages import (
    Challenge,
    Hello,
    NodeCard,
    Refused,
    Role,
    StoreReply,
    StoreRequest,
    TlsFiles,
    Welcome,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Channel", "ChannelPool", "Credentials", "Prefer"]

R = TypeVar("R")

_NO_CLUSTER: Final = ClusterId("")
_NO_HOST: Final = HostId("")
_CONNECT_S: Final = 10.0
_IDLE_S: Final = 60.0


class Prefer(StrEnum):
    """Which way to a store."""

    AUTO = "auto"
    UNIX = "unix"
    TCP = "tcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Who we are and what we can prove; the same for every store of a cluster."""

    cluster: ClusterId = _NO_CLUSTER
    token: bytes = b""
    tls: TlsFiles | None = None
    role: Role = Role.CLIENT
    host: HostId = _NO_HOST
    congestion: str = ""
    stall_s: float | None = 30.0
    bandwidth_bytes_per_s: float = 0.0


class Channel:
    """One open connection to one store. Make it with `connect`."""

    def __init__(
        self, stream: FrameStream, welcome: Welcome, *, via: str, why: str
    ) -> None:
        self.welcome = welcome
        #: "unix" or "tcp".
        self.via = via
        #: Why this way was taken, for `explain`.
        self.why = why
        self.stream = stream
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._broken = False
        self._poll = select.poll()
        self._poll.register(stream.fileno(), select.POLLIN)
        self.used_s = time.monotonic()

    @classmethod
    def connect(
        cls,
        card: NodeCard,
        *,
        credentials: Credentials,
        prefer: Prefer = Prefer.AUTO,
        until_s: float | None = None,
    ) -> Channel:
        """Open a connection to the node on `card`.

        Parameters
        ----------
        card : NodeCard
            Whom to reach. Its incarnation is demanded, unless it is 0.
        credentials : Credentials
            Ours.
        prefer : Prefer
            `AUTO`: the unix socket where rule 1 allows it, else TCP.
        until_s : float, optional
            Monotonic instant at which to give up; 10 s from now by default, which is also
            the most that the network may take to connect.

        Raises
        ------
        PeerLost
            When nobody answers.
        WrongPeer, StaleOwner
            When somebody else answers, or the same node in another life.
        DeadlineExceeded
            When `until_s` passed.
        """
        until_s = until_s or time.monotonic() + _CONNECT_S
        why = _why_not_unix(card, credentials, prefer)
        if not why:
            try:
                return cls._connect_unix(card, credentials, until_s)
            except (PeerLost, WrongPeer) as error:
                if prefer is Prefer.UNIX or not card.data_port:
                    raise
                why = f"the unix socket did not prove the same host: {error.message}"
        elif prefer is Prefer.UNIX:
            raise PeerLost(why)
        return cls._connect_tcp(card, credentials, until_s, why)

    @classmethod
    def _connect_unix(
        cls, card: NodeCard, credentials: Credentials, until_s: float
    ) -> Channel:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream = FrameStream(sock, peer=_name(card), stall_s=credentials.stall_s)
        try:
            with _unreachable(card):
                sock.settimeout(_connect_s(until_s))
                sock.connect(card.socket)
                sock.settimeout(None)
            check_uid(sock)
            stream.send(_hello(card, credentials), until_s=until_s)
            welcome = _expect(stream, Welcome, until_s)
            _check_welcome(welcome, card)
        except BaseException:
            stream.close()
            raise
        return cls(stream, welcome, via="unix", why="same host, proven by its socket")

    @classmethod
    def _connect_tcp(
        cls, card: NodeCard, credentials: Credentials, until_s: float, why: str
    ) -> Channel:
        if not card.data_port:
            message = f"{_name(card)} has no data port, and {why}"
            raise PeerLost(message)
        sock = _dial(card, credentials, until_s)
        stream = FrameStream(
            sock,
            peer=_name(card),
            stall_s=credentials.stall_s,
            bandwidth_bytes_per_s=credentials.bandwidth_bytes_per_s,
        )
        try:
            caller = Caller(
                _hello(card, credentials), token=credentials.token, purpose=STORE
            )
            stream.send(caller.hello, until_s=until_s)
            challenge = _expect(stream, Challenge, until_s)
            stream.send(caller.answer(challenge), until_s=until_s)
            welcome = _expect(stream, Welcome, until_s)
            _check_welcome(welcome, card)
        except BaseException:
            stream.close()
            raise
        return cls(stream, welcome, via="tcp", why=why)

    # -------------------------------------------------------------- use
    @property
    def intact(self) -> bool:
        """Whether nothing broke here, as far as is known without asking the kernel."""
        return not self._broken and self._pid == os.getpid()

    @property
    def usable(self) -> bool:
        """Whether the next call can go out: intact, and the peer has not hung up."""
        # Between requests a peer says nothing: what can be read is its end.
        return self.intact and not self._poll.poll(0)

    def call(
        self,
        request: StoreRequest,
        *,
        expect: type[R],
        payload: Any = None,  # noqa: ANN401
        payload_file: tuple[int, int, int] | None = None,
        into: Into | None = None,
        max_payload_bytes: int = 0,
        until_s: float | None = None,
        stall_s: float | None = None,
    ) -> Frame[R]:
        """Send one request and wait for its answer.

        Parameters
        ----------
        request : StoreRequest
            What is asked.
        expect : type
            The answer's type.
        payload : buffer or sequence of buffers, optional
            Bulk bytes of the request.
        payload_file : (fd, offset, nbytes), optional
            The same from a file.
        into : writable buffer, or callable (message, nbytes) -> buffer or None
            Where the answer's bulk bytes go.
        max_payload_bytes : int
            The longest answer payload accepted.
        until_s : float, optional
            Monotonic instant at which to give up; the channel is closed then.
        stall_s : float, optional
            The longest silence of the peer from now on.

        Raises
        ------
        TensorCastError
            What the peer refused with; the channel stays usable.
        PeerLost, WrongPeer, DeadlineExceeded
            When the conversation broke; the channel is closed.
        """
        with self._lock, self.conversation():
            self.stream.stall_s = stall_s or self.stream.stall_s
            self.stream.send(
                request, payload=payload, payload_file=payload_file, until_s=until_s
            )
            frame: Frame[Any] = self.stream.receive(
                StoreReply,  # type: ignore[arg-type]  # a union, decoded as one
                into=into,
                max_payload_bytes=max_payload_bytes,
                until_s=until_s,
            )
            frame = self._checked(frame, expect)
        if isinstance(frame.message, Refused):
            frame.close()
            raise frame.message.fault.error()
        return frame

    @staticmethod
    def _checked(frame: Frame[Any], expect: type[Any]) -> Frame[Any]:
        if not isinstance(frame.message, expect | Refused):
            frame.close()
            message = f"the peer answered {type(frame.message).__name__} where {expect.__name__} belongs"
            raise WrongPeer(message)
        return frame

    @contextlib.contextmanager
    def conversation(self) -> Iterator[FrameStream]:
        """Use the stream directly (pipelining); any error closes the channel."""
        self._check_process()
        if self._broken:
            message = (
                f"the connection to {self.stream.peer} broke earlier; open another"
            )
            raise PeerLost(message)
        try:
            yield self.stream
        except BaseException:
            self._broken = True
            self.stream.close()
            raise
        self.used_s = time.monotonic()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            message = "this connection was made before a fork and cannot be used in the child; start processes with spawn or forkserver"
            raise UnsupportedPlatform(message)

    def close(self) -> None:
        """Close. Idempotent; in a forked child only the copy of the descriptor."""
        self._broken = True
        if self._pid == os.getpid():
            self.stream.close()
        else:
            with contextlib.suppress(OSError):
                self.stream.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ChannelPool:
    """Channels to many nodes, lent one at a time.

    Parameters
    ----------
    credentials : Credentials
        Ours; may be replaced by `renew` (a new token or certificates).
    idle_s : float
        A channel that was not used for so long is closed at the next look.
    """

    def __init__(self, credentials: Credentials, *, idle_s: float = _IDLE_S) -> None:
        self._credentials = credentials
        self._idle_s = idle_s
        self._pid = os.getpid()
        self._lock = threading.Lock()
        #: Channels that nobody uses now, the latest used last.
        self._idle: dict[tuple[NodeId, int, Prefer], list[Channel]] = defaultdict(list)
        self._closed = False
        self._looked_s = time.monotonic()

    @property
    def credentials(self) -> Credentials:
        """What new channels are opened with."""
        return self._credentials

    def renew(self, credentials: Credentials) -> None:
        """Use other credentials from now on; idle channels are closed."""
        self._credentials = credentials
        self._drop_idle()

    @contextlib.contextmanager
    def channel(
        self,
        card: NodeCard,
        *,
        prefer: Prefer = Prefer.AUTO,
        until_s: float | None = None,
        stall_s: float | None = None,
    ) -> Iterator[Channel]:
        """Lend a channel to the node on `card`, an idle one or a new one.

        `stall_s` is the longest silence while a new one is opened.

        Errors are those of `Channel.connect`.
        """
        self._check()
        key = (card.node, int(card.incarnation), prefer)
        ours = self._credentials
        channel = self._take(key) or Channel.connect(
            card,
            credentials=replace(ours, stall_s=stall_s or ours.stall_s),
            prefer=prefer,
            until_s=until_s,
        )
        try:
            yield channel
        finally:
            self._give(key, channel)

    def call(
        self,
        card: NodeCard,
        request: StoreRequest,
        *,
        expect: type[R],
        prefer: Prefer = Prefer.AUTO,
        until_s: float | None = None,
        stall_s: float | None = None,
        **how: Any,  # noqa: ANN401
    ) -> Frame[R]:
        """Call over a lent channel; `stall_s` and `how` as in `Channel.call`.

        A channel that lay idle may turn out to be closed by the peer: then the request
        goes out once more over a new one, which its `rid` makes safe.
        """
        self._check()
        key = (card.node, int(card.incarnation), prefer)
        stall_s = stall_s or self._credentials.stall_s
        how |= {"expect": expect, "until_s": until_s, "stall_s": stall_s}
        idle = self._take(key)
        if idle is not None:
            heard = idle.stream.received_bytes
            try:
                return idle.call(request, **how)
            except PeerLost as error:
                if "stalled" in error.data or idle.stream.received_bytes != heard:
                    raise
            finally:
                self._give(key, idle)
        with self.channel(
            card, prefer=prefer, until_s=until_s, stall_s=stall_s
        ) as channel:
            return channel.call(request, **how)

    def _check(self) -> None:
        if self._pid != os.getpid():
            message = "these connections were made before a fork and cannot be used in the child; start processes with spawn or forkserver"
            raise UnsupportedPlatform(message)
        if self._closed:
            message = "the connections are closed; open a new session"
            raise ReachError(message)

    def _take(self, key: tuple[NodeId, int, Prefer]) -> Channel | None:
        self._drop_old()
        while True:
            with self._lock:
                idle = self._idle.get(key)
                if not idle:
                    return None
                channel = idle.pop()
            if channel.usable:
                return channel
            channel.close()

    def _give(self, key: tuple[NodeId, int, Prefer], channel: Channel) -> None:
        with self._lock:  # after `close` nobody would close what lies here
            if not self._closed and channel.intact:
                self._idle[key].append(channel)
                return
        channel.close()

    def _drop_old(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < self._idle_s / 4:
            return
        self._looked_s = now_s
        self._drop_idle(unused_since_s=now_s - self._idle_s)

    def _drop_idle(self, *, unused_since_s: float = math.inf) -> None:
        """Close what lies idle; nobody can take a channel that is about to be closed."""
        dropped: list[Channel] = []
        with self._lock:
            for key, idle in list(self._idle.items()):
                kept = [c for c in idle if c.used_s >= unused_since_s]
                dropped += (c for c in idle if c.used_s < unused_since_s)
                if kept:
                    self._idle[key] = kept
                else:
                    del self._idle[key]
        for channel in dropped:
            channel.close()

    def close(self) -> None:
        """Close all idle channels; lent ones are closed when they come back. Idempotent."""
        with self._lock:
            self._closed = True
        self._drop_idle()


# ------------------------------------------------------------------ steps
def _name(card: NodeCard) -> str:
    label = f" ({card.name})" if card.name else ""
    return f"node {card.node[:8]}{label}"


def _why_not_unix(card: NodeCard, credentials: Credentials, prefer: Prefer) -> str:
    if prefer is Prefer.TCP:
        return "TCP was asked for"
    if not card.socket:
        return "the node has no unix socket"
    if prefer is Prefer.UNIX:
        return ""
    if not credentials.host or card.host != credentials.host:
        return "the node is on another host"
    return ""


def _hello(card: NodeCard, credentials: Credentials) -> Hello:
    return Hello(
        cluster=credentials.cluster,
        node=card.node,
        incarnation=card.incarnation,
        role=credentials.role,
        pid=os.getpid(),
        host=credentials.host,
    )


def _expect(stream: FrameStream, kind: type[R], until_s: float) -> R:
    frame: Frame[StoreReply] = stream.receive(
        StoreReply,  # type: ignore[arg-type]  # a union, decoded as one
        until_s=until_s,
    )
    frame.close()
    reply: object = frame.message
    if isinstance(reply, Refused):
        raise reply.fault.error()
    if not isinstance(reply, kind):
        message = f"{stream.peer} answered {type(reply).__name__} where {kind.__name__} belongs"
        raise WrongPeer(message)
    return reply


def _check_welcome(welcome: Welcome, card: NodeCard) -> None:
    if card.node and welcome.card.node != card.node:
        message = f"node {welcome.card.node} answered where {card.node} was expected; ask the catalog again"
        raise WrongPeer(message)


@contextlib.contextmanager
def _unreachable(card: NodeCard) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"{_name(card)} cannot be reached: {error}"
        raise PeerLost(message) from error


def _connect_s(until_s: float) -> float:
    """Give what a socket takes as its time-out: neither 0 nor infinity."""
    return min(_CONNECT_S, max(1e-3, until_s - time.monotonic()))


def _dial(card: NodeCard, credentials: Credentials, until_s: float) -> socket.socket:
    if card.tls and credentials.tls is None:
        message = f"{_name(card)} wants TLS and there are no certificates here"
        raise InvalidArgument(message)
    tls = client_tls(credentials.tls) if credentials.tls else None
    with _unreachable(card):
        sock = socket.create_connection(
            (card.data_host, card.data_port),
            timeout=_connect_s(until_s),
        )
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if name := credentials.congestion or congestion_for(card.data_host):
            set_congestion(sock, name)
        with _unreachable(card):
            return tls.wrap_socket(sock) if tls else sock
    except TensorCastError:
        sock.close()
        raise
