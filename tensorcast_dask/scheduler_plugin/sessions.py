"""The catalog's side of sessions: Dask comms that were taken over.

Rules:

1. One comm carries raw messages of `tensors.messages`, one answer for one request, in any
   order. Nothing is batched and nothing waits for a timer.
2. A request that cannot be read, but says which it is, is answered so, and the session goes on:
   it would be sent again after a reconnect, and end that comm too, for ever.
3. A comm that sends what is no message is closed, alone; the session may come back.
4. No exception leaves a handler: Dask would answer it as its own.
5. The newest comm of a session is the session's; answers never go to an older one.
6. Requests that have come already are read without the loop's leave; after `TURN` of them it has
   its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, get_args

from distributed.core import Status
from msgspec import Raw

from tensorcast_dask.exceptions import InvalidArgument, Unimplemented, WrongPeer
from tensorcast_dask.scheduler_plugin.state.events import (
    Asked,
    SessionLost,
    SessionOpened,
)
from tensorcast_dask.tensors.ids import RequestId  # noqa: TC001 - msgspec reads it
from tensorcast_dask.tensors.messages import (
    Answer,
    Fault,
    OpenSession,
    SessionRequest,
    Wire,
    decode,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.exceptions import TensorCastError
    from tensorcast_dask.scheduler_plugin.state.events import Event
    from tensorcast_dask.tensors.ids import SessionId

__all__ = ["SESSION_OP", "TURN", "Comm", "Sessions", "answer_of"]

log = logging.getLogger(__name__)

#: The name of the handler that takes a comm over.
SESSION_OP: Final = "tensorcast-session"
#: Requests of one comm, a few milliseconds' work, between two turns of the loop.
TURN: Final = 32
_NOTHING: Final = Raw(b"\xc0")  # msgpack for nothing


def answer_of(rid: RequestId, value: Wire | Fault | None) -> Answer:
    """Wrap what the catalog says in the envelope that carries it."""
    if isinstance(value, Fault):
        return Answer(rid=rid, fault=value)
    return Answer(rid=rid, value=_NOTHING if value is None else Raw(encode(value)))


class _Asked(Wire, frozen=True, kw_only=True):
    """What every request says of itself."""

    op: str
    rid: RequestId


#: Every request that this release knows, by its name on the wire.
_KNOWN: Final = frozenset(kind.__name__ for kind in get_args(SessionRequest))


def _refusal(raw: bytes, error: WrongPeer) -> Answer:
    """Answer a request that cannot be read; WrongPeer when it is none at all."""
    asked = decode(raw, _Asked)
    problem: TensorCastError
    if asked.op in _KNOWN:
        message = f"{asked.op} cannot take what it was given: {error.__cause__}"
        problem = InvalidArgument(message)
    else:
        message = f"the scheduler knows no {asked.op}; use one release on all machines"
        problem = Unimplemented(message)
    return answer_of(asked.rid, Fault.of(problem))


class Comm(Protocol):
    """What is used of a Dask comm."""

    @property
    def peer_address(self) -> str:
        """Who is at the other end."""

    async def read(self) -> object:
        """Receive one message."""

    async def write(self, message: object) -> object:
        """Send one message."""

    async def close(self) -> None:
        """Close, flushing first."""

    def abort(self) -> None:
        """Close at once."""


class _Comm:
    """One comm of one session."""

    __slots__ = ("comm", "connection", "ended", "out", "session", "writing")

    def __init__(self, comm: Comm, connection: int, session: SessionId) -> None:
        self.comm = comm
        self.connection = connection
        self.session = session
        self.out: deque[bytes] = deque()
        #: A flush is under way and will send what is added.
        self.writing = False
        #: The catalog ended it: no news of its loss.
        self.ended = False

    async def flush(self) -> None:
        """Send what is queued, in order; one at a time."""
        if self.writing:
            return
        self.writing = True
        try:
            while self.out:
                await self.comm.write(self.out.popleft())
            if self.ended:
                await self.comm.close()
        except OSError as error:  # the reader sees it too and says so to the catalog
            log.debug("session %s: %s", self.session, error)
            self.out.clear()
        finally:
            self.writing = False


class Sessions:
    """All sessions of one scheduler.

    Parameters
    ----------
    tell : callable
        Hands an event to the catalog and carries out what it says.
    """

    def __init__(self, tell: Callable[[Event], None]) -> None:
        self._tell = tell
        self._connections = itertools.count(1)
        self._by_session: dict[SessionId, _Comm] = {}
        self._by_connection: dict[int, _Comm] = {}
        #: Flushes under way, so that none is collected before its end.
        self._flushes: set[asyncio.Task[None]] = set()
        #: The comm whose request is being handled: its reader flushes it.
        self._reading: _Comm | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._by_session)

    def next_connection(self) -> int:
        """Mint the number of a connection."""
        return next(self._connections)

    async def handle(self, comm: Comm, **_: object) -> Status:
        """Take a comm over until it ends: the handler `tensorcast-session`."""
        taken: _Comm | None = None
        try:
            opening = decode(_bytes(await comm.read()), OpenSession)
            taken = self._open(comm, opening)
            await self._serve(taken)
        except WrongPeer as error:
            log.warning("closing the session of %s: %s", comm.peer_address, error)
        except OSError as error:
            log.debug("session of %s ended: %s", comm.peer_address, error)
        except Exception:
            log.exception("closing the session of %s", comm.peer_address)
        finally:
            if taken is not None:
                self._forget(taken)
            comm.abort()
        return Status.dont_reply

    def _open(self, comm: Comm, opening: OpenSession) -> _Comm:
        if self._closed:
            message = "the catalog has closed"
            raise OSError(message)
        taken = _Comm(comm, self.next_connection(), opening.session)
        self._by_session[opening.session] = taken
        self._by_connection[taken.connection] = taken
        self._tell(SessionOpened(connection=taken.connection, opening=opening))
        return taken

    async def _serve(self, taken: _Comm) -> None:
        read = taken.comm.read
        for number in itertools.count(1):
            if taken.ended:
                break
            if number % TURN == 0:
                await asyncio.sleep(0)
            if taken.out:
                await taken.flush()
            raw = _bytes(await read())
            try:
                request: SessionRequest = decode(raw, SessionRequest)  # type: ignore[arg-type]  # a union, decoded as one
            except WrongPeer as error:
                taken.out.append(encode(_refusal(raw, error)))
                continue
            self._reading = taken
            try:
                self._tell(
                    Asked(
                        session=taken.session,
                        connection=taken.connection,
                        request=request,
                    )
                )
            finally:
                self._reading = None
        await taken.flush()

    def _forget(self, taken: _Comm) -> None:
        self._by_connection.pop(taken.connection, None)
        if self._by_session.get(taken.session) is taken:
            del self._by_session[taken.session]
        if not taken.ended:
            taken.ended = True
            self._tell(SessionLost(session=taken.session, connection=taken.connection))

    def answer(
        self, session: SessionId, rid: RequestId, value: Wire | Fault | None
    ) -> None:
        """Queue an answer for the comm that the session has now, if any."""
        taken = self._by_session.get(session)
        if taken is None:
            return
        taken.out.append(encode(answer_of(rid, value)))
        self._flush_soon(taken)

    def end(self, connection: int) -> None:
        """Close a comm once its answers are out."""
        taken = self._by_connection.get(connection)
        if taken is not None:
            taken.ended = True
            self._flush_soon(taken)

    def _flush_soon(self, taken: _Comm) -> None:
        if taken is self._reading or taken.writing:
            return
        task = asyncio.ensure_future(taken.flush())
        self._flushes.add(task)
        task.add_done_callback(self._flushes.discard)

    async def close(self) -> None:
        """Close every comm, and those that are just coming."""
        self._closed = True
        for taken in list(self._by_connection.values()):
            taken.ended = True
            with contextlib.suppress(OSError):
                await taken.comm.close()


def _bytes(message: object) -> bytes:
    if not isinstance(message, bytes):
        problem = f"a session sends packed messages, not {type(message).__name__}"
        raise WrongPeer(problem)
    return message
