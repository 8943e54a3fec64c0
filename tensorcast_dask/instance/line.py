"""The one socket between an instance and its store, and the one thread that reads it.

Rules:

1. The thread reads, and carries calls out. Other threads of the process send, and wait for what
   the thread brings them. Where the thread itself has to wait (a function that registers or
   reads) it goes on reading meanwhile; further calls wait for their turn.
2. Answers to our requests come in the order of the requests; everything else is said at any time.
3. The death of the store is seen by its pidfd, and by the end of the connection.
4. After a fork the child's copy is closed, and every use of it there is refused.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from tensorcast_dask.dataplane.channel import Channel, Credentials, Prefer
from tensorcast_dask.dataplane.direct import Direct
from tensorcast_dask.dataplane.hosts import PidWatch
from tensorcast_dask.dataplane.sockets import not_in_children
from tensorcast_dask.exceptions import (
    DeadlineExceeded,
    PeerLost,
    TensorCastError,
    UnsupportedPlatform,
    WrongPeer,
)
from tensorcast_dask.tensors.ids import Incarnation
from tensorcast_dask.tensors.messages import (
    CallAnswered,
    CallerHere,
    CallInstance,
    Refused,
    Role,
    StoreReply,
    ToInstance,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.dataplane.framing import Frame, FrameStream
    from tensorcast_dask.tensors.messages import NodeCard, StoreRequest

__all__ = ["NOT_FORKED", "Line", "Waiter"]

T = TypeVar("T")

NOT_FORKED: Final = (
    "an attachment does not survive fork; start processes with spawn and attach there"
)
_CONNECT_S: Final = 5.0
_SEND_S: Final = 30.0
_MOST_PAYLOAD_BYTES: Final = 1 << 30
_Heard = StoreReply | ToInstance


class Waiter:
    """One thing that is waited for."""

    __slots__ = ("error", "event", "value")

    def __init__(self) -> None:
        self.event = threading.Event()
        self.value: Any = None
        self.error: TensorCastError | None = None

    def give(self, value: object = None, error: TensorCastError | None = None) -> None:
        """End the wait."""
        self.value, self.error = value, error
        self.event.set()

    def result(self) -> Any:
        """Give what came, or raise it."""
        if self.error is not None:
            raise self.error
        return self.value


class Line:
    """A connection to a store that may be opened anew.

    Parameters
    ----------
    heard : callable
        Told in the line's thread of what the store says.
    called : callable
        Carries out, in that thread, what a caller of this host asks for directly.
    """

    def __init__(
        self,
        heard: Callable[[ToInstance], None],
        called: Callable[[CallInstance], CallAnswered | Refused],
    ) -> None:
        self._heard = heard
        self._called = called
        #: Who calls without the store between, by descriptor. Of the line's thread.
        self._callers: dict[int, Direct] = {}
        #: Polled always; and with callers, where no call is under way.
        self._own = select.poll()
        self._all = select.poll()
        self._pid = os.getpid()
        self._sending = threading.Lock()
        #: Who waits for answers, the oldest first. Guarded by `_sending`.
        self._waiters: deque[Waiter] = deque()
        self._stream: FrameStream | None = None
        self._watch: PidWatch | None = None
        self.thread: threading.Thread | None = None
        #: At most so much goes to the store in one message, and lies in a slab there.
        self.small_bytes = 0
        self._wake, self._woken = socket.socketpair()
        self._woken.settimeout(0)
        self._wake.settimeout(0)
        not_in_children(self._wake, self._woken)

    # ------------------------------------------------------------ life
    def open(self, card: NodeCard) -> None:
        """Connect to a store and shake hands; before anybody else uses the line.

        Raises
        ------
        PeerLost, WrongPeer, DeadlineExceeded
            When there is none, or another one.
        """
        # A store that was adopted anew is the same store.
        card = msgspec.structs.replace(card, incarnation=Incarnation(0))
        channel = Channel.connect(
            card,
            credentials=Credentials(role=Role.INSTANCE, host=card.host),
            prefer=Prefer.UNIX,
            until_s=time.monotonic() + _CONNECT_S,
        )
        # From here on it is no channel: either end speaks at any time (rule 2).
        stream = channel.stream
        try:
            watch = PidWatch.of_peer(stream.sock)
        except BaseException:
            stream.close()
            raise
        self._stream, self._watch = stream, watch
        self.small_bytes = channel.welcome.small_bytes
        for fd in (stream.fileno(), watch.fileno(), self._woken.fileno()):
            if fd >= 0:
                self._own.register(fd, select.POLLIN)
                self._all.register(fd, select.POLLIN)

    def close(self) -> None:
        """End the connection; who waits is told. Idempotent."""
        stream, self._stream = self._stream, None
        watch, self._watch = self._watch, None
        self._own, self._all = select.poll(), select.poll()
        for fd in self._callers:  # they go on without the store
            self._all.register(fd, select.POLLIN)
        if stream is not None:
            stream.close()
        if watch is not None:
            watch.close()
        with self._sending:
            left = list(self._waiters)
            self._waiters.clear()
        for waiter in left:
            waiter.give(error=_lost())

    def end(self) -> None:
        """Close for good. In the line's thread."""
        self.close()
        for caller in self._callers.values():
            caller.close()
        self._callers.clear()
        self._wake.close()
        self._woken.close()

    def wake(self) -> None:
        """Have the thread look up."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the process that made it."""
        return self._pid != os.getpid()

    def check(self) -> None:
        """Refuse a forked child."""
        if self.forked:
            raise UnsupportedPlatform(NOT_FORKED)

    # ------------------------------------------------------------ speaking
    def tell(self, message: StoreRequest, payload: Any = None) -> None:
        """Say what is not answered.

        Raises
        ------
        PeerLost
            When nobody listens.
        """
        self.check()
        with self._sending:
            self._send(message, payload)

    def _send(self, message: StoreRequest, payload: Any) -> None:
        stream = self._stream
        if stream is None:
            raise _lost()
        try:
            stream.send(message, payload=payload, until_s=time.monotonic() + _SEND_S)
        except DeadlineExceeded as error:  # half a frame may be out
            stream.shutdown()
            raise _lost() from error

    def ask(
        self,
        request: StoreRequest,
        expect: type[T],
        *,
        payload: Any = None,
        within_s: float,
    ) -> Frame[T]:
        """Send one request and wait for its answer.

        Raises
        ------
        TensorCastError
            What the store refused with; PeerLost, DeadlineExceeded when it did not answer.
        """
        self.check()
        waiter = Waiter()
        with self._sending:
            self._waiters.append(waiter)
            try:
                self._send(request, payload)
            except BaseException:
                self._waiters.remove(waiter)
                raise
        self.wait(waiter, within_s, what=type(request).__name__)
        frame: Frame[Any] = waiter.result()
        if isinstance(frame.message, Refused):
            frame.close()
            raise frame.message.fault.error()
        if not isinstance(frame.message, expect):
            frame.close()
            message = f"the node answered {type(frame.message).__name__} to {type(request).__name__}"
            raise WrongPeer(message)
        return frame

    def wait(self, waiter: Waiter, within_s: float, *, what: str) -> None:
        """Wait, in whichever thread (rule 1).

        Raises
        ------
        DeadlineExceeded
            When it takes too long.
        """
        until_s = time.monotonic() + within_s
        if threading.current_thread() is self.thread:
            while not waiter.event.is_set() and self.read(until_s):
                pass
        else:
            waiter.event.wait(within_s)
        if not waiter.event.is_set():
            if self._stream is None:
                raise _lost()
            message = f"the node did not answer {what} in time"
            raise DeadlineExceeded(message)

    # ------------------------------------------------------------ hearing
    def hear_out(self) -> None:
        """Hear what the store said before the connection ended: it may have let this process go.

        In the line's thread.
        """
        with contextlib.suppress(TensorCastError):
            while self.read(0.0):
                pass

    def read(self, until_s: float | None = None, *, callers: bool = False) -> bool:
        """Read one thing; False when nothing came by then. In the line's thread.

        With `callers` it may be a call that came directly, which is carried out.

        Raises
        ------
        PeerLost
            When the store, or the connection, is no more.
        """
        stream, watch = self._stream, self._watch
        if stream is None or watch is None:
            raise _lost()
        wait_ms = None
        if until_s is not None:
            wait_ms = max(0.0, until_s - time.monotonic()) * 1000
        ready = dict((self._all if callers else self._own).poll(wait_ms))
        if stream.fileno() in ready:
            self._take(stream)
            return True
        if self._woken.fileno() in ready:
            with contextlib.suppress(OSError):
                self._woken.recv(4096)
            return True
        if watch.fileno() in ready:
            raise _lost()
        for fd, event in ready.items():
            self._serve(fd, event)
        return bool(ready)

    def _serve(self, fd: int, event: int) -> None:
        """Answer one caller; one that has hung up (it gave up, or died) is not served."""
        caller = self._callers[fd]
        try:
            if event & select.POLLHUP:
                raise _lost()
            until_s = time.monotonic() + _CONNECT_S
            caller.send(self._called(caller.receive(CallInstance, until_s=until_s)))
        except (PeerLost, WrongPeer, DeadlineExceeded):
            self._all.unregister(fd)
            del self._callers[fd]
            caller.close()

    def _take(self, stream: FrameStream) -> None:
        frame: Frame[Any] = stream.receive(
            _Heard,  # type: ignore[arg-type]  # a union, decoded as one
            max_payload_bytes=_MOST_PAYLOAD_BYTES,
        )
        if isinstance(frame.message, CallerHere):
            caller = Direct(socket.socket(fileno=frame.take_fd()))
            self._callers[caller.fileno()] = caller
            self._all.register(caller.fileno(), select.POLLIN)
            return
        if isinstance(frame.message, ToInstance):
            frame.close()
            self._heard(frame.message)
            return
        with self._sending:
            waiter = self._waiters.popleft() if self._waiters else None
        if waiter is None:
            message = "the node answered what nobody had asked"
            raise PeerLost(message)
        waiter.give(frame)


def _lost() -> PeerLost:
    message = "this process is not attached to a node now; it attaches again by itself when one is there"
    return PeerLost(message)
