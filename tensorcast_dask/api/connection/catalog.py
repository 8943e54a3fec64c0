"""A session's conversation with the catalog: one ordered comm, answers by request id.

Rules:

1. Requests go out in the order of the calls; answers come back in any order.
2. A broken comm is opened again for as long as a caller waits, and every unanswered request
   is sent again under its old id: the catalog answers repeats from its record.
3. When no comm can be had before a caller's deadline it gets CatalogUnavailable. A change
   that was sent and never answered may have happened: its error is Unknown.
4. Everything here runs on one event loop; nothing is shared with other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tensorcast_dask.dataplane import tracing
from tensorcast_dask.exceptions import (
    CatalogUnavailable,
    DeadlineExceeded,
    InvalidArgument,
    TensorCastError,
    Unknown,
    WrongPeer,
)
from tensorcast_dask.tensors.ids import RequestId
from tensorcast_dask.tensors.messages import (
    READS,
    Answer,
    CancelAsked,
    Message,
    OpenPlan,
    OpenSession,
    ResumePlan,
    SessionOpen,
    decode,
    encode,
)
from tensorcast_dask.tensors.traces import rid_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from tensorcast_dask.api.connection.deadlines import Deadline
    from tensorcast_dask.tensors.ids import HostId, SessionId

__all__ = ["CatalogLink"]

_LOG = logging.getLogger(__name__)
_RETRY_S: Final = 0.2
#: How long callers are kept waiting for a scheduler that is away.
_AWAY_S: Final = 30.0
T = TypeVar("T")


@dataclass(slots=True)
class _Asked:
    """A request without an answer."""

    future: asyncio.Future[Answer]
    #: Its class and its bytes; empty while it is only foreseen.
    name: str = ""
    raw: bytes = b""
    #: Over which comm the catalog got it last.
    comm: Any = None


class CatalogLink:
    """Ask the catalog, over one comm that heals itself.

    Parameters
    ----------
    dial : callable
        Makes a fresh Dask comm to the scheduler.
    session : str
        Identity of the session; survives reconnects.
    pid, host
        Told to the catalog for placement.
    address : str
        The scheduler's, for messages and representations.
    """

    def __init__(
        self,
        dial: Callable[[], Awaitable[Any]],
        session: SessionId,
        *,
        pid: int,
        host: HostId,
        address: str = "",
    ) -> None:
        self.name = address
        self._dial = dial
        self._session = session
        self._pid = pid
        self._host = host
        self._comm: Any = None
        self._numbers = itertools.count(1)
        #: Requests without an answer, in the order of their sending.
        self._pending: dict[RequestId, _Asked] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._closed = False
        #: Why the catalog refused the session itself; final.
        self._refusal: TensorCastError | None = None
        self.greeting: SessionOpen | None = None
        #: Told of every later greeting: a new scheduler may have a new token and epoch.
        self.on_greeting: Callable[[SessionOpen], None] | None = None

    async def open(self, deadline: Deadline) -> SessionOpen:
        """Connect for the first time and return the catalog's greeting."""
        self._keeper = asyncio.create_task(self._keep(), name="tensorcast-session")
        await self._wait_up(deadline)
        assert self.greeting is not None
        return self.greeting

    def next_rid(self) -> RequestId:
        """Mint the id of a new request."""
        return RequestId(rid_of(self._session, next(self._numbers), tracing.here()))

    async def call(self, request: Message, kind: type[T], deadline: Deadline) -> T:
        """Send one request and wait for its answer.

        Parameters
        ----------
        request : Message
            One of `SessionRequest`, with a `rid` from `next_rid`.
        kind : type
            What the answer's value is decoded as.
        deadline : Deadline
            When it passes the request is cancelled at the catalog.

        Raises
        ------
        TensorCastError
            What the catalog answered; CatalogUnavailable, Unknown or DeadlineExceeded when
            it did not.
        """
        if self._closed:
            message = "this session is closed; connect again"
            raise CatalogUnavailable(message)
        rid: RequestId = request.rid  # type: ignore[attr-defined]
        raw = _packed(request)
        asked = self._pending.get(rid) or self._ask(rid)
        asked.name, asked.raw = type(request).__name__, raw
        try:
            # One that was foreseen is there already, unless the comm is another by now.
            if self._comm is not None and self._comm is not asked.comm:
                asked.comm = self._comm
                await self._write(asked.raw)
            # Not `wait_for`: that of Python 3.11 drops a cancellation when the answer comes
            # at the same moment, and a caller's `asyncio.timeout` with it.
            async with asyncio.timeout(deadline.answer_within_s()):
                answer = await asked.future
        except TimeoutError as error:
            raise self._too_late(request) from error
        except asyncio.CancelledError:
            if isinstance(request, OpenPlan | ResumePlan):  # it may wait for its turn
                self._withdraw(rid)
            raise
        finally:
            self._pending.pop(rid, None)
        if answer.fault is not None:
            raise answer.fault.error()
        return decode(answer.value, kind)

    def _ask(self, rid: RequestId) -> _Asked:
        asked = self._pending[rid] = _Asked(asyncio.get_running_loop().create_future())
        return asked

    @contextlib.contextmanager
    def foreseen(self, kind: type[Message]) -> Iterator[RequestId]:
        """Mint the id of a request of this kind that the next one brings with it.

        Its answer may come from then on. `call` it in the block, once its content is known:
        it is sent only where it is not sure that the catalog has it.
        """
        rid = self.next_rid()
        asked = self._ask(rid)
        asked.name, asked.comm = kind.__name__, self._comm
        try:
            yield rid
        finally:
            self._pending.pop(rid, None)
            if not asked.future.cancel() and not asked.future.cancelled():
                asked.future.exception()  # looked at, or the event loop complains

    def _too_late(self, request: Message) -> TensorCastError:
        name = type(request).__name__
        if self._comm is not None:
            self._withdraw(request.rid)  # type: ignore[attr-defined]
            return DeadlineExceeded(
                f"{name} was not answered in time; give it more with deadline="
            )
        return _away(name)

    def _withdraw(self, rid: RequestId) -> None:
        """Tell the catalog that nobody waits for an answer any more."""
        cancel = CancelAsked(rid=self.next_rid(), asked=rid)
        asyncio.ensure_future(self._write(encode(cancel)))  # noqa: RUF006 - nobody waits for it

    async def cancel(self, rid: RequestId) -> bool:
        """Ask the catalog to stop a request; its caller gets the catalog's answer.

        Says whether there is an answer to wait for.
        """
        if self._comm is None or rid not in self._pending:
            return False
        await self._write(encode(CancelAsked(rid=self.next_rid(), asked=rid)))
        return True

    async def close(self) -> None:
        """Close the comm; whoever still waits gets CatalogUnavailable."""
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        if self._comm is not None:
            with contextlib.suppress(OSError):
                await self._comm.close()
            self._comm = None
        self._fail_all(CatalogUnavailable("this session was closed; connect again"))

    def _fail_all(self, error: TensorCastError) -> None:
        for asked in self._pending.values():
            if not asked.future.done():
                asked.future.set_exception(error)

    async def _wait_up(self, deadline: Deadline) -> None:
        try:
            async with asyncio.timeout(max(deadline.left_s(), 1.0)):
                await self._up.wait()
        except TimeoutError as error:
            message = (
                "no scheduler with the tensorcast plugin answered; check the address"
            )
            raise CatalogUnavailable(message) from error
        if self._refusal is not None:
            raise self._refusal

    async def _write(self, raw: bytes) -> None:
        # A comm that breaks here is seen by the reader, which opens another and sends again.
        comm = self._comm
        if comm is not None:
            with contextlib.suppress(OSError):
                await comm.write(raw)

    async def _keep(self) -> None:
        """Hold a comm open, for as long as the session lives."""
        away_since_s = time.monotonic()
        while True:
            try:
                comm = await self._dial()
            except OSError as error:
                _LOG.debug("catalog not reached: %s", error)
                if time.monotonic() - away_since_s > _AWAY_S:
                    self._give_up()
                await asyncio.sleep(_RETRY_S)
                continue
            try:
                await self._greet(comm)
                await self._read(comm)
            except (OSError, WrongPeer) as error:
                _LOG.info("session comm ended: %s", error)
            except TensorCastError as error:
                self._refusal = error
                self._fail_all(error)
                self._up.set()
                return
            finally:
                self._comm = None
                self._up.clear()
                comm.abort()
            away_since_s = time.monotonic()
            await asyncio.sleep(_RETRY_S)

    def _give_up(self) -> None:
        """End what waits, each with its own truth: the scheduler stays away."""
        for asked in self._pending.values():
            if not asked.future.done():
                asked.future.set_exception(_away(asked.name))

    async def _greet(self, comm: Any) -> None:
        rid = self.next_rid()
        settled = min(int(known.rpartition(":")[2]) for known in (rid, *self._pending))
        hello = OpenSession(
            rid=rid,
            session=self._session,
            pid=self._pid,
            host=self._host,
            settled=settled,
        )
        await comm.write(encode(hello))
        answer = decode(await comm.read(), Answer)
        if answer.fault is not None:
            raise answer.fault.error()
        self.greeting = decode(answer.value, SessionOpen)
        if self.on_greeting is not None:
            self.on_greeting(self.greeting)
        for asked in list(self._pending.values()):
            if asked.raw:
                asked.comm = comm
                await comm.write(asked.raw)
        self._comm = comm
        self._up.set()

    async def _read(self, comm: Any) -> None:
        while True:
            answer = decode(await comm.read(), Answer)
            waiting = self._pending.get(answer.rid)
            if waiting is not None and not waiting.future.done():
                waiting.future.set_result(answer)


def _packed(request: Message) -> bytes:
    """Pack a request, or say which of the caller's values no message can carry."""
    try:
        return encode(request)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        message = f"{type(request).__name__} cannot carry what it was given ({error})"
        raise InvalidArgument(message) from error


def _away(name: str) -> TensorCastError:
    """Give what a caller is told when the scheduler went away before it answered."""
    if name in READS:
        return CatalogUnavailable(
            f"the scheduler does not answer ({name}); is it running?"
        )
    message = (
        f"the scheduler went away during {name}; look whether it happened, then repeat"
    )
    return Unknown(message)
