"""A handle of work that takes time.

Rules:

1. An operation is started once and ends once; its outcome is kept. `result()` gives the
   value or raises the operation's error. Waiting too long raises DeadlineExceeded for the
   waiter and leaves the operation alone.
2. `cancel()` returns when the operation has ended: as cancelled, or as what it had become.
3. How far it is: what the catalog says of the request that carries it, else what the
   action itself has counted; after a success all of it.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from msgspec.structs import replace

from tensorcast_dask.api.connection.deadlines import GRACE_S, deadline
from tensorcast_dask.exceptions import DeadlineExceeded, NotFound, TensorCastError
from tensorcast_dask.notebook.cards import operation_card
from tensorcast_dask.tensors.messages import OperationAsked, OperationState

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator

    from tensorcast_dask.tensors.ids import RequestId

__all__ = ["Operation", "Tally"]

T = TypeVar("T")
_ASK_S: Final = 10.0


class Tally:
    """How many bytes an action has moved, of how many; from whichever thread.

    Attributes
    ----------
    done, total : int
        Bytes.
    why_not : DeadlineExceeded or None
        Raised in the thread that counts on; set when nobody wants the bytes any more.
    """

    def __init__(self) -> None:
        self.done = 0
        self.total = 0
        self.why_not: DeadlineExceeded | None = None
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Note that so many bytes more are there.

        Raises
        ------
        DeadlineExceeded
            When the operation was cancelled meanwhile.
        """
        with self._lock:
            self.done += nbytes
        if self.why_not is not None:
            raise self.why_not


class Operation(Generic[T]):
    """Handle of a put, prefetch, replicate, publish, load, save, ...

    Attributes
    ----------
    kind : str
        The verb.
    ref : str
        What it acts on.
    note : str
        What there is to know of a success: it was there already, or has fewer replicas
        than asked for. "" when nothing.
    """

    def __init__(self, core: Any, kind: str, ref: str) -> None:
        self._core = core  # a `Core`, which imports this module
        self.kind = kind
        self.ref = ref
        self.note = ""
        #: What the action itself has counted; the catalog may know better.
        self.tally = Tally()
        #: The catalog request that carries the action, once it was sent.
        self.rid: RequestId | None = None
        self._task: asyncio.Task[T] | None = None

    def _begin(self, action: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(action, name=f"tensorcast-{self.kind}")
        self._task = task
        # An outcome that nobody asks for is not an error in the event loop's log.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return task

    # ------------------------------------------------------------ how it stands
    @property
    def status(self) -> str:
        """`running`, `done`, `failed` or `cancelled`."""
        task = self._task
        if task is None or not task.done():
            return "running"
        if task.cancelled():
            return "cancelled"
        error = task.exception()
        if error is None:
            return "done"
        return "cancelled" if self._stopped(error) else "failed"

    def _stopped(self, error: BaseException) -> bool:
        facts = error.data if isinstance(error, TensorCastError) else {}
        return self.tally.why_not is not None and bool(facts.get("cancelled"))

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._task is not None and self._task.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the end without raising the operation's own error.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None is the session's default deadline.

        Raises
        ------
        DeadlineExceeded
            When it still runs.
        """
        return self._core.bridge(self._wait, timeout)

    async def _wait(self, timeout: float | None) -> Operation[T]:
        limit = self._core.deadline(timeout)
        assert self._task is not None, "operation: waited for before it was begun"
        await asyncio.wait({self._task}, timeout=limit.left_s())
        if not self._task.done():
            message = (
                f"{self.kind} of {self.ref!r} still runs; wait longer or cancel it"
            )
            raise DeadlineExceeded(message)
        return self

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end; return the value or raise the error."""
        return self._core.bridge(self._result, timeout)

    async def _result(self, timeout: float | None = None) -> T:
        await self._wait(timeout)
        assert self._task is not None
        if self.status == "cancelled":
            raise self._was_cancelled()
        return self._task.result()

    def _was_cancelled(self) -> DeadlineExceeded:
        message = f"{self.kind} of {self.ref!r} was cancelled by its caller"
        return DeadlineExceeded(message, {"cancelled": True})

    def exception(self, timeout: float | None = None) -> Any:
        """Wait for the end; return the operation's own error, or None.

        Raises
        ------
        DeadlineExceeded
            When it still runs.
        """
        return self._core.bridge(self._exception, timeout)

    async def _exception(self, timeout: float | None) -> TensorCastError | None:
        await self._wait(timeout)
        try:
            await self._result(0)
        except TensorCastError as error:
            return error
        return None

    # ------------------------------------------------------------ stop
    def cancel(self) -> Any:
        """Stop it, and wait for its end; what is done already is not undone."""
        return self._core.bridge(self._stop)

    async def _stop(self) -> None:
        task = self._task
        if task is None or task.done():
            return
        self.tally.why_not = self._was_cancelled()
        if self.rid is not None and await self._core.link.cancel(self.rid):
            await asyncio.wait({task}, timeout=GRACE_S)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})

    # ------------------------------------------------------------ how far, and why
    def progress(self) -> Any:
        """How far it is: an `OperationState` with done and total bytes.

        All of the total once it is done. 0 of 0 for what moves no bytes, and while their
        number is not known yet.
        """
        return self._core.bridge(self._state)

    async def _state(self) -> OperationState:
        tally, status = self.tally, self.status
        done = tally.total if status == "done" else tally.done
        own = OperationState(status=status, done_bytes=done, total_bytes=tally.total)
        if self.done() or self.rid is None:
            return own
        request = OperationAsked(rid=self._core.link.next_rid(), asked=self.rid)
        told: OperationState = await self._core.link.call(
            request, OperationState, deadline(_ASK_S)
        )
        if told.total_bytes:
            tally.done, tally.total = told.done_bytes, told.total_bytes
            return told
        return replace(own, message=told.message)

    def explain(self) -> Any:
        """Sentences on what the catalog did for it, oldest first; none when it did nothing."""
        return self._core.bridge(self._explain)

    async def _explain(self) -> list[str]:
        limit = self._core.deadline(None)
        for ref in (self.rid, self.ref):
            try:
                lines = await self._core.told_of(ref, limit) if ref else []
            except NotFound:
                continue
            if lines:
                return lines
        return []

    def __await__(self) -> Generator[Any, None, T]:
        return self._result().__await__()

    def __repr__(self) -> str:
        note = f": {self.note}" if self.note else ""
        return f"<Operation {self.kind} {self.ref!r} {self.status}{note}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            message = f"an Operation has no {name!r}; what it gives is its result()"
            raise AttributeError(message)

    def _repr_html_(self) -> str:
        tally, status, error = self.tally, self.status, None
        if status == "failed":
            assert self._task is not None
            error = self._task.exception()
        return operation_card(
            self.kind,
            self.ref,
            status=status,
            done=tally.total if status == "done" else tally.done,
            total=tally.total,
            note=self.note,
            error=error,
        )
