"""A node's connection to the catalog: one thread, one socket, ordered both ways.

Rules:

1. One thread reads, writes and renews. Callbacks run in it and must return at once
   (hand the work to somebody else), or the node's lease runs out.
2. What is sent while the link is down is dropped (`send` returns False): after each
   `on_up` the node says everything anew. What `on_up` returns goes out before anything
   that other threads send from that instant on, so no change falls between.
3. A lost link is tried again each `retry_s`, for ever; only `LinkRefused(retry=False)`,
   `stop` or nothing to aim at ends that.
4. `stop` and a new aim also end an attempt that hangs: a catalog that takes the
   connection and says nothing holds nobody up.
5. A lease runs from the instant at which its renewal was *sent*, on this node's clock.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tensorcast_dask.dataplane.auth import LINK, Caller, client_tls
from tensorcast_dask.dataplane.framing import Frame, FrameStream
from tensorcast_dask.dataplane.sockets import hang_up, is_tls, not_in_children
from tensorcast_dask.exceptions import (
    CatalogUnavailable,
    TensorCastError,
    WrongPeer,
)
from tensorcast_dask.tensors.messages import (
    Challenge,
    FromNode,
    Hello,
    LinkRefused,
    LinkTarget,
    NodeHello,
    NodeWelcome,
    Renew,
    Renewed,
    Role,
    ToNode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["Link", "LinkCallbacks"]

logger = logging.getLogger(__name__)

_CONNECT_S: Final = 5.0
_SILENCE_S: Final = 10.0
_ENDED_HERE: Final = "the link was ended here"


def _no_message(_: ToNode) -> None:
    """Ignore a message."""


def _no_end(_: TensorCastError) -> None:
    """Ignore the end of a link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCallbacks:
    """What the node has to say and wants to hear. All run in the link's thread."""

    #: Who the node is, asked at each attempt.
    hello: Callable[[], NodeHello]
    #: The link is up; returns what goes out first (the inventory).
    on_up: Callable[[NodeWelcome], Iterable[FromNode]]
    #: One message of the catalog, in its order.
    on_message: Callable[[ToNode], None] = _no_message
    #: The link went down or could not be made (once per attempt).
    on_down: Callable[[TensorCastError], None] = _no_end
    #: Makes the renewal with that sequence number. None: the node renews by itself.
    renew: Callable[[int], Renew] | None = None


class Link:
    """Keeps a node connected to the scheduler plugin.

    Parameters
    ----------
    callbacks : LinkCallbacks
        The node's side.
    target : LinkTarget, optional
        Where to connect; without it the link waits for `aim`.
    role : Role
        `PEER` for a store, `INSTANCE` for a registering process.
    retry_s : float
        Pause between attempts.
    """

    def __init__(
        self,
        callbacks: LinkCallbacks,
        *,
        target: LinkTarget | None = None,
        role: Role = Role.PEER,
        retry_s: float = 1.0,
    ) -> None:
        self._callbacks = callbacks
        self._role = role
        self._retry_s = retry_s
        self._condition = threading.Condition()
        #: All below is guarded by the condition.
        self._target = target
        self._aims = 0  # how often `aim` was called
        self._queue: deque[FromNode] = deque()
        self._up = False
        self._sock: socket.socket | None = None  # of the present attempt or link
        self._stopping = False
        self._lease_until_s = 0.0
        # Of the link's thread alone.
        self._sent_s: dict[int, float] = {}
        self._seq = 0
        self._ttl_s = 0.0
        self._renew_at_s = float("inf")
        self._wake, self._woken = socket.socketpair()
        self._woken.settimeout(0)
        self._wake.settimeout(0)
        not_in_children(self._wake, self._woken)
        self._thread = threading.Thread(
            target=self._run, name="tensorcast-link", daemon=True
        )

    # -------------------------------------------------------------- any thread
    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    @property
    def up(self) -> bool:
        """Whether the catalog listens now."""
        return self._up

    @property
    def lease_left_s(self) -> float:
        """How long the node's lease still runs; negative when it ran out."""
        return self._lease_until_s - time.monotonic()

    def send(self, *messages: FromNode) -> bool:
        """Queue messages in order; False, and nothing is queued, while the link is down."""
        with self._condition:
            if not self._up:
                return False
            self._queue.extend(messages)
        self._poke()
        return True

    def hasten(self) -> None:
        """Renew now: what a renewal says has changed."""
        self._renew_at_s = 0.0
        self._poke()

    def aim(self, target: LinkTarget | None) -> None:
        """Connect to another catalog (or to none) from now on; the present link ends."""
        with self._condition:
            self._target = target
            self._aims += 1
            self._condition.notify_all()
            self._cut_greeting()
        self._poke()

    def stop(self, *, within_s: float = 5.0, flush: bool = True) -> bool:
        """End the link; with `flush` what is queued goes out first. True when it ended."""
        until_s = time.monotonic() + within_s
        while flush and self._up and self._queue and time.monotonic() < until_s:
            time.sleep(0.005)
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
            self._cut_greeting()
        self._poke()
        if self._thread.ident is not None:
            self._thread.join(max(0.0, until_s - time.monotonic()))
        ended = not self._thread.is_alive()
        if ended:
            self._wake.close()
            self._woken.close()
        return ended

    def _cut_greeting(self) -> None:
        """End an attempt that is not up yet. Under the condition."""
        if self._sock is not None and not self._up:
            hang_up(self._sock)

    def _poke(self) -> None:
        if threading.get_ident() == self._thread.ident:
            return  # it looks before it waits
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    # -------------------------------------------------------------- the thread
    def _run(self) -> None:
        while (aimed := self._next_target()) is not None:
            target, aims = aimed
            retry = True
            try:
                retry = self._live(target, aims)
            except TensorCastError as error:
                self._down(error)
            except Exception as error:  # rule 3: a defect must not end the link
                logger.exception("the link failed")
                self._down(CatalogUnavailable(f"the link failed: {error}"))
            self._pause(aims, retry=retry)

    def _next_target(self) -> tuple[LinkTarget, int] | None:
        with self._condition:
            while self._target is None and not self._stopping:
                self._condition.wait()
            if self._stopping or self._target is None:
                return None
            return self._target, self._aims

    def _pause(self, aims: int, *, retry: bool) -> None:
        """Wait before the next attempt; a new aim or the end cuts it short."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._stopping or self._aims != aims,
                self._retry_s if retry else None,
            )

    def _down(self, error: TensorCastError) -> None:
        with self._condition:
            self._up = False
            self._queue.clear()
        self._callbacks.on_down(error)

    def _live(self, target: LinkTarget, aims: int) -> bool:
        """Connect and converse until the link ends; False when it is not to be retried."""
        with self._connected(target, aims) as stream:
            sent_s = time.monotonic()
            stream.send(self._callbacks.hello())
            answer = _receive(stream)
            if isinstance(answer, LinkRefused):
                self._down(answer.fault.error())
                return answer.retry
            if not isinstance(answer, NodeWelcome):
                message = f"the catalog answered {type(answer).__name__} to NodeHello"
                raise WrongPeer(message)
            self._begin(answer, sent_s)
            self._converse(stream, aims)
        self._down(CatalogUnavailable(_ENDED_HERE))
        return True

    @contextlib.contextmanager
    def _connected(self, target: LinkTarget, aims: int) -> Iterator[FrameStream]:
        """Connect and prove both ends; the connection is closed at the end."""
        tls = client_tls(target.tls) if target.tls else None
        try:
            sock = socket.create_connection(
                (target.host, target.port), timeout=_CONNECT_S
            )
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A catalog that vanished without a word is noticed, not waited for.
            sock.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_SILENCE_S * 1000)
            )
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(_SILENCE_S))
            if tls is not None:
                sock = tls.wrap_socket(sock, do_handshake_on_connect=False)
        except OSError as error:
            raise _no_answer(target, error) from error
        try:
            with self._condition:
                if self._stopping or self._aims != aims:
                    raise CatalogUnavailable(_ENDED_HERE)
                self._sock = sock  # rule 4: from here on
            if is_tls(sock):
                try:
                    sock.do_handshake()
                except OSError as error:
                    raise _no_answer(target, error) from error
            stream = FrameStream(sock, peer="the catalog", stall_s=_SILENCE_S)
            self._prove(stream, target)
            yield stream
        finally:
            with self._condition:
                self._sock = None
            hang_up(sock)
            sock.close()

    def _prove(self, stream: FrameStream, target: LinkTarget) -> None:
        caller = Caller(
            Hello(cluster=target.cluster, role=self._role),
            token=target.token,
            purpose=LINK,
        )
        stream.send(caller.hello)
        challenge = _receive(stream)
        if isinstance(challenge, LinkRefused):
            raise challenge.fault.error()
        if not isinstance(challenge, Challenge):
            message = f"the catalog answered {type(challenge).__name__} to Hello"
            raise WrongPeer(message)
        stream.send(caller.answer(challenge))

    def _begin(self, welcome: NodeWelcome, sent_s: float) -> None:
        self._sent_s.clear()
        self._granted(sent_s, welcome.lease_ttl_s)
        self._renew_at_s = float("inf")
        if self._callbacks.renew is not None:
            self._renew_at_s = sent_s + self._ttl_s / 3
        with self._condition:
            self._queue.clear()
            self._up = True
        first = tuple(self._callbacks.on_up(welcome))
        with self._condition:
            self._queue.extendleft(reversed(first))

    def _granted(self, sent_s: float, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._lease_until_s = max(self._lease_until_s, sent_s + ttl_s)

    def _converse(self, stream: FrameStream, aims: int) -> None:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLIN)
        poll.register(self._woken.fileno(), select.POLLIN)
        while True:
            self._flush(stream)
            with self._condition:
                if self._stopping or self._aims != aims:
                    return
            ready = {fd for fd, _ in poll.poll(self._wait_ms(stream))}
            if self._woken.fileno() in ready:
                self._drain_pokes()
            if stream.fileno() in ready or stream.pending:
                self._take(_receive(stream))

    def _wait_ms(self, stream: FrameStream) -> float | None:
        if stream.pending:
            return 0
        if self._renew_at_s == float("inf"):
            return None
        return max(0.0, self._renew_at_s - time.monotonic()) * 1000

    def _drain_pokes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _flush(self, stream: FrameStream) -> None:
        self._renew(stream)
        while True:
            with self._condition:
                if not self._queue:
                    return
                message = self._queue.popleft()
            stream.send(message)
            self._renew(stream)

    def _renew(self, stream: FrameStream) -> None:
        now_s = time.monotonic()
        if self._callbacks.renew is None or now_s < self._renew_at_s:
            return
        self._seq += 1
        self._sent_s[self._seq] = now_s
        self._renew_at_s = now_s + self._ttl_s / 3
        stream.send(self._callbacks.renew(self._seq))

    def _take(self, message: ToNode) -> None:
        if isinstance(message, Renewed) and self._callbacks.renew is not None:
            sent_s = self._sent_s.pop(message.seq, None)
            if sent_s is not None:
                self._sent_s = {
                    s: t for s, t in self._sent_s.items() if s > message.seq
                }
                self._granted(sent_s, message.lease_ttl_s)
            return
        try:
            self._callbacks.on_message(message)
        except TensorCastError as error:
            logger.warning("a message of the catalog was refused: %s", error)


def _no_answer(target: LinkTarget, error: OSError) -> CatalogUnavailable:
    at = f"{target.host}:{target.port}"
    return CatalogUnavailable(f"the scheduler plugin at {at} does not answer ({error})")


def _receive(stream: FrameStream) -> ToNode:
    frame: Frame[ToNode] = stream.receive(ToNode)  # type: ignore[arg-type]  # a union
    frame.close()
    return frame.message
