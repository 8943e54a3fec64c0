"""A gateway: a thread with an event loop and one session, behind whichever server asks it.

Rules:

1. Nothing of it runs on the loop of a worker or scheduler but the few lines that hand over.
2. The session is opened at the first request that needs it, and again when it was lost.
3. So many reads, streams and requests at once, and not one more: who comes then is told to come again.
4. A thread that sends bytes ends when its reader takes none for a while, or the gateway closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from tensorcast_dask.dataplane.sockets import hang_up
from tensorcast_dask.exceptions import (
    CatalogUnavailable,
    ResourceError,
    TensorCastError,
    Unknown,
)
from tensorcast_dask.http.desk import Desk
from tensorcast_dask.http.state.access import Need
from tensorcast_dask.http.state.routes import Form
from tensorcast_dask.scheduler_plugin.endings import at_the_end

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from tensorcast_dask.config import Settings
    from tensorcast_dask.http.desk import Answer, Conditions
    from tensorcast_dask.http.state.routes import Asked

__all__ = ["Gateway", "Limits", "Places"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_PIECE_BYTES: Final = 1 << 20
_CLOSE_S: Final = 5.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much at once."""

    connections: int
    watchers: int
    reads: int
    #: Who takes nothing for so long is left.
    stall_s: float = 20.0

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        """Take them from settings."""
        return cls(
            connections=settings.http_connections,
            watchers=settings.http_watchers,
            reads=settings.http_reads,
        )


class Places:
    """So many may be in at once; asked from any thread."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._lock = threading.Lock()
        self.taken = 0

    def take(self) -> None:
        """Go in.

        Raises
        ------
        ResourceError
            When it is full.
        """
        with self._lock:
            if self.taken >= self._most:
                message = f"{self._most} {self._what} are under way here; ask again in a second"
                raise ResourceError(message)
            self.taken += 1

    def give(self) -> None:
        """Go out."""
        with self._lock:
            self.taken -= 1


class Gateway:
    """Answers requests out of one session, in a thread of its own.

    Parameters
    ----------
    open_session : callable
        Opens the session, on the gateway's loop.
    token : str
        What callers must show.
    limits : Limits
        How much at once.
    root : str
        Path below which it is served.
    """

    def __init__(
        self,
        open_session: Callable[[], Awaitable[Any]],
        *,
        token: str,
        limits: Limits,
        root: str = "",
    ) -> None:
        self.token = token
        self.stall_s = limits.stall_s
        self.root = root
        self.requests = Places(limits.connections, "requests")
        self._rooms = {
            Form.EVENTS: Places(limits.watchers, "event streams"),
            Form.BYTES: Places(limits.reads, "reads of bytes"),
        }
        self._open_session = open_session
        self._opening = asyncio.Lock()
        self._session: Any = None
        self._senders = ThreadPoolExecutor(limits.reads, "tensorcast-http-bytes")
        self._sending: set[socket.socket] = set()
        self._closed = False
        self._end = asyncio.Event()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop = self._runner.get_loop()
        self._thread = threading.Thread(
            target=self._run, name="tensorcast-http", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        with self._runner as runner:
            runner.run(self._until_the_end())

    async def _until_the_end(self) -> None:
        await self._end.wait()

    # ------------------------------------------------------------ from another loop
    async def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something on the gateway's loop, from whichever loop this is."""
        if asyncio.get_running_loop() is self.loop:
            return await work
        if self._closed:
            work.close()
            message = "the gateway has closed"
            raise CatalogUnavailable(message)
        task = asyncio.current_task()
        try:
            return await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(work, self.loop)
            )
        except asyncio.CancelledError:
            if task is not None and task.cancelling():
                raise
            message = "the gateway has closed"  # under what it was doing
            raise CatalogUnavailable(message) from None

    # ------------------------------------------------------------ answers
    def enter(self, form: Form) -> Places | None:
        """Take the place that an answer of this form needs; None when it needs none."""
        room = self._rooms.get(form)
        if room is not None:
            room.take()
        return room

    async def answer(self, asked: Asked, given: Conditions) -> Answer:
        """Answer; on the gateway's loop.

        Raises
        ------
        TensorCastError
            What the session raised, or what is wrong with the request.
        """
        try:
            return await (await self._desk(asked)).answer(asked, given)
        except (TensorCastError, TimeoutError):
            raise
        except Exception as error:
            log.exception("the gateway failed at %s", asked.route.name)
            message = "the gateway failed at this request; see its log"
            raise Unknown(message) from error

    async def _desk(self, asked: Asked) -> Desk:
        if asked.route.need is Need.LOOK and asked.route.shape is None:
            return Desk(None, self.root)  # the document
        async with self._opening:
            if self._session is None or self._session.client.status == "closed":
                await self._leave_session()
                self._session = await self._open_session()
        return Desk(self._session, self.root)

    async def _leave_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(TensorCastError, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await session.close()

    # ------------------------------------------------------------ bytes
    async def send(self, sock: socket.socket, memory: memoryview) -> None:
        """Send memory by a thread of ours; closes the socket, on whichever loop this is."""
        loop = asyncio.get_running_loop()
        self._sending.add(sock)
        if self._closed:
            hang_up(sock)
        try:
            await loop.run_in_executor(
                self._senders, _send_all, sock, memory, self.stall_s
            )
        except (OSError, RuntimeError) as error:  # the reader has gone, or we are going
            log.debug("a reader of bytes is left: %s", error)
        finally:
            self._sending.discard(sock)
            sock.close()

    # ------------------------------------------------------------ the end
    async def close(self) -> None:
        """End everything; from another loop."""
        if self._closed:
            return
        ending = asyncio.run_coroutine_threadsafe(self._leave_session(), self.loop)
        self._closed = True
        for sock in list(self._sending):
            hang_up(sock)
        self._senders.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.wrap_future(ending)
        self.loop.call_soon_threadsafe(self._end.set)
        await at_the_end(self._thread.join, _CLOSE_S)


def _send_all(sock: socket.socket, memory: memoryview, stall_s: float) -> None:
    sock.settimeout(stall_s)
    while memory:  # not `sendall`, whose time is that of all: a slow reader is none that takes nothing
        memory = memory[sock.send(memory[:_PIECE_BYTES]) :]
    sock.shutdown(socket.SHUT_WR)
