"""One line of UCX: a worker of its own and one endpoint.

Rules:

1. A line is cancelled by ending it. UCX cannot call back a receive that has met its
   message, so `close` ends the endpoint by force, then the worker; it returns when both
   are gone, and only then does memory that was posted belong to its owner again.
2. Nobody but this process's own `drive` (and `close`) writes into memory that was posted:
   the receiver fetches, a peer never puts (`ucx_library`).
3. Liveness is our own, since UCX notices a dead peer late or never: the control
   connection's end, silence, and the deadline.
4. Every message is cut into pieces; a piece that is done is a sign of life.
5. Shared memory is fetched through CMA, with TCP for the words about it. UCX's own shared
   memory lanes (posix, sysv) are not used: closing one whose peer stands still with a full
   queue was seen to spin for ever.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tensorcast_dask.dataplane.transports.ucx_library import (
    IN_PROGRESS,
    load,
    named,
)
from tensorcast_dask.exceptions import DeadlineExceeded, PeerLost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensorcast_dask.dataplane.framing import FrameStream

__all__ = ["PIECE_BYTES", "Line", "Stretch", "offered", "version"]

#: What goes as one tag message.
PIECE_BYTES: Final = 2 << 20
_SLICE_S: Final = 0.2
_CLOSE_NS: Final = 200_000_000
#: A receive of which a part is here never ends: the worker's end ends it.
_CLOSE_ROUNDS: Final = 20
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


class Line:
    """One end. Made, told the other end's `address`, used, closed.

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
        #: Requests that were begun and not seen to end, in order.
        self._requests: deque[int] = deque()
        self._endpoint: Any = None
        api = self._ucx.api
        self._context: Any = self._ucx.context(_lanes(device=device))
        self._worker: Any = api.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self.address: bytes = self._worker.address.tobytes()

    @property
    def via(self) -> str:
        """How the bytes go, for `explain`: "ucx:cma"."""
        return f"ucx:{self.lanes[0]}" if self.lanes else "ucx"

    def connect(self, address: bytes) -> None:
        """Reach the other end.

        Raises
        ------
        PeerLost
            When UCX has no way there.
        """
        api = self._ucx.api
        try:
            # Error handling: a lane's failure ends the endpoint, and it can be closed by force.
            self._endpoint = self._worker.create_endpoint_from_worker_address(
                api.UCXAddress.create_from_buffer(address), endpoint_error_handling=True
            )
        except api.UCXError as error:
            message = f"UCX finds no way to the other end: {error}"
            raise PeerLost(message) from None
        self.lanes = self._ucx.lanes_of(self._endpoint)

    def send(self, stretch: Stretch) -> None:
        """Begin to send; `drive` brings it to its end."""
        self._post(stretch, out=True)

    def receive(self, stretch: Stretch) -> None:
        """Begin to receive; `drive` brings it to its end."""
        self._post(stretch, out=False)

    def _post(self, stretch: Stretch, *, out: bool) -> None:
        with self._lock:
            if self._endpoint is None:
                message = "the UCX line is closed"
                raise PeerLost(message)
            ucx = self._ucx
            for piece in stretch.pieces(self.piece_bytes):
                tag, self._next_tag = self._next_tag, self._next_tag + 1
                self._requests.append(
                    ucx.send(self._endpoint, *piece, tag)
                    if out
                    else ucx.receive(self._worker, *piece, tag)
                )

    def drive(
        self,
        *,
        control: FrameStream,
        stall_s: float | None,
        until_s: float | None = None,
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

        Raises
        ------
        PeerLost
            When the peer died, stalled or hung up, or a lane failed.
        DeadlineExceeded
            When `until_s` passed.
        """
        with self._lock:
            try:
                self._drive(control, stall_s, until_s)
            except BaseException:
                self.close()
                raise

    def _drive(
        self, control: FrameStream, stall_s: float | None, until_s: float | None
    ) -> None:
        poll = select.poll()
        if self._worker is not None:
            poll.register(self._worker.epoll_file_descriptor, select.POLLIN)
        if control.fileno() >= 0:
            poll.register(control.fileno(), select.POLLRDHUP)
        heard_s, hung_up = time.monotonic(), False
        while self._requests:
            if self._worker is None or control.fileno() < 0:
                message = f"the connection to {control.peer} is closed"
                raise PeerLost(message)
            self._worker.progress()
            now_s = time.monotonic()
            if self._sweep(control.peer):
                heard_s = now_s
                continue
            if hung_up:  # and what it had sent before is here
                message = f"{control.peer} closed the connection"
                raise PeerLost(message)
            wait_s = _left_s(control.peer, now_s, heard_s, stall_s, until_s)
            hung_up = _hung_up(poll, control, wait_s if self._worker.arm() else 0.0)

    def _sweep(self, peer: str) -> bool:
        """Forget what is done, in order; whether there was any."""
        requests, ucx, done = self._requests, self._ucx, False
        while requests and (status := ucx.status(requests[0])) != IN_PROGRESS:
            ucx.free(requests.popleft())
            done = True
            if status < 0:
                message = f"UCX lost {peer}: status {status}"
                raise PeerLost(message)
        if requests and not self._endpoint.alive:
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
            for request in self._requests:
                self._ucx.cancel(worker, request)
            if endpoint is not None:
                with contextlib.suppress(self._ucx.api.UCXError):
                    endpoint.close_blocking(_CLOSE_NS, 1)
            for _ in range(_CLOSE_ROUNDS):
                if not any(self._ucx.status(r) == IN_PROGRESS for r in self._requests):
                    break
                worker.progress()  # what was ended tells its requests
            while self._requests:
                self._ucx.free(self._requests.popleft())
            # In this order, and here: nobody else holds any of them.
            del endpoint
            del worker
            del context


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
