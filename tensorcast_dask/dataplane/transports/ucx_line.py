"""One line of UCX: a worker of its own and one endpoint.

Rules:

1. A line is cancelled by ending it. UCX cannot call back a receive that has met its
   message, so `close` ends the endpoint by force, then the worker; it returns within
   `_CLOSE_S`, and only then does memory that was posted belong to its owner again.
2. Nobody but this process's own `drive` (and `close`) writes into memory that was posted:
   the receiver fetches, a peer never puts (`ucx_library`).
3. Liveness is our own, since UCX notices a dead peer late or never: the control
   connection's end, silence, and the deadline.
4. Every message is cut into pieces; a piece that is done is a sign of life, and is told to
   its receiver while it is in the cache.
5. Shared memory is fetched through CMA, with TCP for the words about it. UCX's own shared
   memory lanes (posix, sysv) are not used: closing one whose peer stands still with a full
   queue was seen to spin for ever.
6. A line has a context of its own (1.5 ms of the 10 that a line takes): UCX wants to be told
   of contexts that several threads share, and ucxx does not tell it.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tensorcast_dask.dataplane.memory import address
from tensorcast_dask.dataplane.transports.ucx_library import (
    IN_PROGRESS,
    load,
    named,
)
from tensorcast_dask.exceptions import DeadlineExceeded, PeerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensorcast_dask.dataplane.framing import FrameStream
    from tensorcast_dask.dataplane.transports.ucx_library import Endpoint

__all__ = ["PIECE_BYTES", "Line", "Stretch", "offered", "version"]

logger = logging.getLogger(__name__)

#: What goes as one tag message.
PIECE_BYTES: Final = 2 << 20
_SLICE_S: Final = 0.2
#: How long a line may take to end, and how many steps: its process may have been stopped.
_CLOSE_S: Final = 1.0
_CLOSE_STEPS: Final = 1000
#: Lines that did not: a worker that is ended before its lanes have gone ends the process.
#: Nobody drives them any more, so they write nowhere.
_left: Final[list[object]] = []
#: A receive of which a part is here never ends: the worker's end ends it.
_CLOSE_ROUNDS: Final = 20
_IN: Final = select.POLLIN
_HUNG_UP: Final = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL
_BASE_LANES: Final = ("self", "tcp", "cma")
_RDMA_LANES: Final = ("rc", "dc")
_DEVICE_LANES: Final = ("cuda_copy", "cuda_ipc")
_OFFERED: Final = (*_RDMA_LANES, "cma", "tcp")


class Stretch(NamedTuple):
    """Memory as UCX is to see it. A device's never passes through the host."""

    address: int
    nbytes: int
    #: "host" or "cuda".
    memory: str = "host"

    def pieces(self, piece_bytes: int) -> Iterator[Stretch]:
        """Cut it as both ends cut it."""
        for at in range(0, self.nbytes, piece_bytes):
            length = min(piece_bytes, self.nbytes - at)
            yield Stretch(self.address + at, length, self.memory)


def offered() -> tuple[str, ...]:
    """Return the lanes that UCX has on this machine, the best first.

    Raises
    ------
    InvalidArgument
        When UCX is not installed.
    """
    return tuple(name for name in named(load().transports) if name in _OFFERED)


def version() -> str:
    """Return the versions of ucxx and UCX; errors as `offered`."""
    return load().version


def _lanes(*, device: bool) -> tuple[str, ...]:
    """Choose the lanes of a line: RDMA wherever UCX has it; devices when asked for."""
    rdma = [lane for lane in _RDMA_LANES if lane in offered()]
    return (*_BASE_LANES, *rdma, *(_DEVICE_LANES if device else ()))


class _Going(NamedTuple):
    """A piece that is under way."""

    request: int
    nbytes: int
    landed: Callable[[int], None] | None


class Line:
    """One end. Made, told the other end's `address`, greeted, used, closed.

    Parameters
    ----------
    device : bool
        Whether device memory will go over it.
    piece_bytes : int
        What goes as one message; both ends must agree.
    """

    def __init__(self, *, device: bool = False, piece_bytes: int = PIECE_BYTES) -> None:
        self._ucx = load()
        self.piece_bytes = piece_bytes
        #: The lanes that UCX has chosen, the best first; () before `connect`.
        self.lanes: tuple[str, ...] = ()
        #: Guards all of UCX here; held for the length of a transfer.
        self._lock = threading.RLock()
        self._next_tag = 0
        #: What was begun and not seen to end, in order.
        self._going: deque[_Going] = deque()
        #: How many pieces have ended well, of all that were begun (`begun`).
        self.ended = 0
        self._endpoint: Endpoint | None = None
        api = self._ucx.api
        self._context: Any = self._ucx.context(_lanes(device=device))
        self._worker: Any = api.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self.address: bytes = self._worker.address.tobytes()

    @property
    def via(self) -> str:
        """How the bytes go, for `explain`: "ucx:cma"."""
        return f"ucx:{self.lanes[0]}" if self.lanes else "ucx"

    @property
    def begun(self) -> int:
        """How many pieces were begun; they end in this order."""
        return self.ended + len(self._going)

    @property
    def usable(self) -> bool:
        """Whether another transfer may begin: nothing is under way, nothing has failed."""
        endpoint = self._endpoint
        return endpoint is not None and not (endpoint.failed or self._going)

    def connect(self, other: bytes) -> None:
        """Reach the other end.

        Raises
        ------
        PeerLost
            When UCX has no way there.
        """
        self._endpoint = self._ucx.endpoint(self._worker, other)
        self.lanes = self._ucx.lanes_of(self._endpoint)

    def greet(
        self,
        *,
        first: bool,
        control: FrameStream,
        stall_s: float | None,
        until_s: float | None = None,
    ) -> None:
        """Send a byte each way: UCX wires a line up when it is used. Arguments as `drive`.

        A line that does not work is found out before anything depends on it, and one that
        is half wired need never be closed.

        Raises
        ------
        PeerLost, DeadlineExceeded
            As `drive`.
        """
        with address(bytearray(2), writable=True) as (word, _):
            if first:
                self.send(Stretch(word, 1))
            self.receive(Stretch(word + 1, 1))
            if not first:
                self.send(Stretch(word, 1))
            self.drive(control=control, stall_s=stall_s, until_s=until_s)

    def send(self, stretch: Stretch) -> None:
        """Begin to send; `drive` brings it to its end."""
        self._post(stretch, None, out=True)

    def receive(
        self, stretch: Stretch, landed: Callable[[int], None] | None = None
    ) -> None:
        """Begin to receive; `drive` brings it to its end.

        `landed` is told the length of each piece when it is there, from first to last.
        """
        self._post(stretch, landed, out=False)

    def _post(
        self, stretch: Stretch, landed: Callable[[int], None] | None, *, out: bool
    ) -> None:
        with self._lock:
            if self._endpoint is None:
                message = "the UCX line is closed"
                raise PeerLost(message)
            ucx = self._ucx
            for piece in stretch.pieces(self.piece_bytes):
                tag, self._next_tag = self._next_tag, self._next_tag + 1
                request = (
                    ucx.send(self._endpoint, *piece, tag)
                    if out
                    else ucx.receive(self._worker, *piece, tag)
                )
                self._going.append(_Going(request, piece.nbytes, landed))

    def drive(
        self,
        *,
        control: FrameStream,
        stall_s: float | None,
        until_s: float | None = None,
        or_asked: bool = False,
    ) -> None:
        """Bring everything that was begun to its end. After an error the line is closed.

        Parameters
        ----------
        control : FrameStream
            The connection to the same peer: its end is the end of the transfer.
        stall_s : float or None
            The longest time without a piece that is done.
        until_s : float, optional
            Monotonic instant at which to give up.
        or_asked : bool
            Return already when the peer asks for more: the next call goes on.

        Raises
        ------
        PeerLost
            When the peer died, stalled or hung up, or a lane failed.
        DeadlineExceeded
            When `until_s` passed.
        """
        with self._lock:
            try:
                self._drive(control, stall_s, until_s, or_asked=or_asked)
            except BaseException:
                self.close()
                raise

    def _drive(
        self,
        control: FrameStream,
        stall_s: float | None,
        until_s: float | None,
        *,
        or_asked: bool,
    ) -> None:
        poll, asked = select.poll(), select.poll()
        if self._worker is not None:
            poll.register(self._worker.epoll_file_descriptor, select.POLLIN)
        if control.fileno() >= 0:
            poll.register(control.fileno(), select.POLLRDHUP | _IN * or_asked)
            asked.register(control.fileno(), _IN * or_asked)
        heard_s, hung_up = time.monotonic(), False
        while self._going:
            if self._worker is None or control.fileno() < 0:
                message = f"the connection to {control.peer} is closed"
                raise PeerLost(message)
            moved = self._ucx.progress(self._worker)
            now_s = time.monotonic()
            swept = self._sweep(control.peer)
            if [event for _, event in asked.poll(0)] == [_IN]:
                return
            if swept:
                heard_s = now_s
                continue
            if hung_up and not moved:  # and what it had sent before is here
                message = f"{control.peer} closed the connection"
                raise PeerLost(message)
            wait_s = _left_s(control.peer, now_s, heard_s, stall_s, until_s)
            if not moved:
                ready = self._worker.arm()
                hung_up = _hung_up(poll, control, wait_s if ready else 0.0)

    def _sweep(self, peer: str) -> bool:
        """Forget what is done, in order; whether there was any."""
        ucx, done = self._ucx, False
        while self._going:
            request, nbytes, landed = self._going[0]
            status = ucx.status(request)
            if status == IN_PROGRESS:
                break
            self._going.popleft()
            ucx.free(request)
            done = True
            if status < 0:
                message = f"UCX lost {peer}: status {status}"
                raise PeerLost(message)
            self.ended += 1
            if landed is not None:
                landed(nbytes)
        if self._going and (self._endpoint is None or self._endpoint.failed):
            message = f"UCX lost {peer}: the endpoint failed"
            raise PeerLost(message)
        return done

    def close(self) -> None:
        """End the line; on return UCX touches no memory of its transfers any more.

        Idempotent, from any thread; a transfer under way is waited for, so end its control
        connection first.
        """
        with self._lock:
            worker, self._worker = self._worker, None
            endpoint, self._endpoint = self._endpoint, None
            context, self._context = self._context, None
            if worker is None:
                return
            for going in self._going:
                self._ucx.cancel(worker, going.request)
            requests = [going.request for going in self._going]
            rest = self._comes_to_rest(worker, endpoint, requests)
            for request in requests:
                self._ucx.free(request)
            self._going.clear()
            if not rest:
                logger.warning("UCX does not end a line; it is left alone, for ever")
                _left.append((worker, endpoint, context))
            # In this order, and here: nobody else holds any of them.
            del worker
            del endpoint
            del context

    def _comes_to_rest(
        self,
        worker: Any,  # noqa: ANN401
        endpoint: Endpoint | None,
        requests: list[int],
    ) -> bool:
        """Close the endpoint by force and let its lanes go; False when that has no end."""
        ucx, patience = self._ucx, _Patience()
        if endpoint is not None:
            # What has come is looked at while there is an endpoint. Afterwards its lanes are
            # stubs, and UCX ends the process when something comes for one: no step too many.
            self._drain(worker, patience)
            closing = ucx.end(endpoint)
            while not patience.over and ucx.status(closing) == IN_PROGRESS:
                ucx.progress(worker)
                patience.step()
            ucx.free(closing)
        for _ in range(_CLOSE_ROUNDS):  # what was ended tells its requests
            if patience.over or IN_PROGRESS not in map(ucx.status, requests):
                break
            self._drain(worker, patience)
        return not patience.over

    def _drain(self, worker: Any, patience: _Patience) -> None:  # noqa: ANN401
        while not patience.over and self._ucx.progress(worker):
            patience.step()


class _Patience:
    """What the end of a line may take."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + _CLOSE_S
        self._steps = 0
        self.over = False

    def step(self) -> None:
        """Count one."""
        self._steps += 1
        self.over = self._steps > _CLOSE_STEPS and time.monotonic() > self._until_s


def _left_s(
    peer: str,
    now_s: float,
    heard_s: float,
    stall_s: float | None,
    until_s: float | None,
) -> float:
    """Return how long to wait for a sign of life."""
    if until_s is not None and now_s >= until_s:
        message = f"the deadline passed while waiting for {peer} over UCX"
        raise DeadlineExceeded(message)
    if stall_s is not None and now_s - heard_s >= stall_s:
        message = f"nothing went to or from {peer} over UCX for {stall_s} s: it stalled"
        raise PeerLost(message, {"stalled": True})
    ends = [_SLICE_S]
    if until_s is not None:
        ends.append(until_s - now_s)
    if stall_s is not None:
        ends.append(heard_s + stall_s - now_s)
    return min(ends)


def _hung_up(poll: select.poll, control: FrameStream, wait_s: float) -> bool:
    """Wait for an event of UCX; True when the control connection has ended."""
    fd = control.fileno()
    return any(
        found == fd and event & _HUNG_UP for found, event in poll.poll(wait_s * 1e3)
    )
