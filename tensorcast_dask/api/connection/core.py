"""What every call of a session needs: the loop, the catalog, the stores.

Rules:

1. Control messages go over the session's event loop; bytes never do: whatever may move
   bytes runs in the caller's thread or in `in_thread`.
2. An operation is started once and ends once; its outcome is kept. `result()` gives the
   value or raises the operation's error. Waiting too long raises DeadlineExceeded for the
   waiter and leaves the operation alone; `cancel()` stops it.
3. One bridge for sync and async: `sync` (Dask's) blocks in a thread and gives an awaitable
   on the loop.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar, cast

from distributed.utils import SyncMethodMixin

from tensorcast_dask.api.connection.deadlines import Deadline, deadline
from tensorcast_dask.api.current import NOT_FORKED
from tensorcast_dask.exceptions import (
    CapacityError,
    CatalogUnavailable,
    DeadlineExceeded,
    NotFound,
    TensorCastError,
    UnsupportedPlatform,
)
from tensorcast_dask.tensors.messages import OperationAsked, OperationState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator

    from tornado.ioloop import IOLoop

    from tensorcast_dask.api.connection.catalog import CatalogLink
    from tensorcast_dask.api.connection.stores import Stores
    from tensorcast_dask.dataplane.devices.own import OwnDevices
    from tensorcast_dask.instance.register import Lender
    from tensorcast_dask.tensors.ids import HostId, RequestId
    from tensorcast_dask.tensors.messages import Message

__all__ = ["Core", "Operation", "typed"]

T = TypeVar("T")
P = ParamSpec("P")


#: What a process or machine has run out of, and what to do.
_SHORT: Final = {
    errno.EMFILE: "this process has no descriptor left; raise its limit (ulimit -n), or let go of tensors",
    errno.ENFILE: "this machine has no descriptor left; raise fs.file-max",
    errno.ENOMEM: "this machine has no memory left",
    errno.ENOSPC: "there is no space left on the disk",
    errno.EDQUOT: "the quota of the disk is used up",
}


async def typed(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Await it; what the operating system has run out of is an error of ours, wherever it was."""
    try:
        return await function(*args)
    except OSError as error:
        short = _SHORT.get(error.errno or 0)
        if short is None or isinstance(error, TensorCastError):
            raise
        message = f"{short} ({error})"
        raise CapacityError(message) from error


class Core(SyncMethodMixin):
    """Shared by a session and all handles made by it.

    Attributes
    ----------
    link : CatalogLink
        The conversation with the catalog.
    stores : Stores
        Channels to the stores of nodes.
    client : distributed.Client or None
        The Dask client, None inside a worker's task.
    host : HostId
        Identity of this process's host.
    devices : OwnDevices
        The devices of this process.
    deadline_default_s : float
        What `deadline=None` means, in seconds.
    """

    def __init__(
        self,
        *,
        loop: IOLoop,
        link: CatalogLink,
        stores: Stores,
        client: Any,
        host: HostId,
        devices: OwnDevices,
        deadline_default_s: float,
        asynchronous: bool = False,
    ) -> None:
        self.loop = loop
        self._asynchronous = asynchronous
        self.link = link
        self.stores = stores
        self.client = client
        self.host = host
        self.devices = devices
        self.deadline_default_s = deadline_default_s
        self.closed = False
        self._pid = os.getpid()
        self._lending = threading.Lock()
        self._lender: Lender | None = None
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="tensorcast-bytes")

    def bridge(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Give the value in a thread, an awaitable of it on the loop.

        Raises
        ------
        CatalogUnavailable
            When the session is closed: its event loop may be gone too.
        UnsupportedPlatform
            In a forked child: the event loop is a thread of its parent.
        """
        if self.forked:
            raise UnsupportedPlatform(NOT_FORKED)
        if self.closed:
            message = "this session is closed; connect again"
            raise CatalogUnavailable(message)
        return self.sync(typed, function, *args)  # type: ignore[no-untyped-call]

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child of the one that made the session."""
        return self._pid != os.getpid()

    def deadline(self, seconds: float | None) -> Deadline:
        """Check a caller's `deadline=`; see `tensorcast_dask.api.connection.deadlines`."""
        return deadline(seconds, default_s=self.deadline_default_s)

    async def in_thread(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run what may block or move bytes off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: function(*args, **kwargs)
        )

    async def ask(
        self,
        request: Message,
        kind: type[T],
        limit: Deadline,
        *,
        operation: Operation[Any] | None = None,
    ) -> T:
        """Ask the catalog; `operation` remembers which request carries it."""
        if operation is not None:
            operation.rid = request.rid  # type: ignore[attr-defined]
        return await self.link.call(request, kind, limit)

    def operate(
        self,
        kind: str,
        ref: str,
        action: Callable[[Operation[T]], Coroutine[Any, Any, T]],
        *,
        wait: bool,
    ) -> Any:
        """Begin an operation; return its handle, ended when `wait`.

        The operation's own error is raised here when `wait`.
        """

        async def begin() -> Operation[T]:
            operation: Operation[T] = Operation(self, kind, ref)
            task = asyncio.create_task(action(operation), name=f"tensorcast-{kind}")
            operation._begin(task)  # noqa: SLF001 - the only place that makes one
            if wait:
                await asyncio.shield(task)
            return operation

        return self.bridge(begin)

    def call(self, action: Callable[[], Awaitable[T]]) -> T:
        """Bridge; typed as in a synchronous program."""
        return cast("T", self.bridge(action))

    async def told_of(self, ref: str, limit: Deadline) -> list[str]:
        """Why is it as it is: sentences, oldest first."""
        from tensorcast_dask.tensors.messages import ExplainAsked, Explained

        request = ExplainAsked(rid=self.link.next_rid(), ref=ref)
        explained = await self.ask(request, Explained, limit)
        return [f"{ago_s:8.2f} s ago  {line}" for ago_s, line in explained.lines]

    def lender(self) -> Lender:
        """Give the server that lends this process's registered tensors, made at first use."""
        with self._lending:
            if self._lender is None:
                from tensorcast_dask.instance.register import Lender

                greeting = self.link.greeting
                assert greeting is not None, "core: used before the session was open"
                self._lender = Lender(greeting, host=self.host)
            return self._lender

    def end_lending(self) -> None:
        """Stop serving registered tensors."""
        with self._lending:
            lender, self._lender = self._lender, None
        if lender is not None:
            lender.close()

    def close(self) -> None:
        """Take no more calls and stop the threads that move bytes."""
        self.closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)


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

    def __init__(self, core: Core, kind: str, ref: str) -> None:
        self._core = core
        self.kind = kind
        self.ref = ref
        self.note = ""
        #: The catalog request that carries the action, once it was sent.
        self.rid: RequestId | None = None
        self._task: asyncio.Task[T] | None = None

    def _begin(self, task: asyncio.Task[T]) -> None:
        self._task = task
        # An outcome that nobody asks for is not an error in the event loop's log.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    @property
    def status(self) -> str:
        """`running`, `done`, `failed` or `cancelled`."""
        task = self._task
        if task is None or not task.done():
            return "running"
        if task.cancelled():
            return "cancelled"
        return "failed" if task.exception() is not None else "done"

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.status != "running"

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
        if self._task.cancelled():
            message = f"{self.kind} of {self.ref!r} was cancelled"
            raise DeadlineExceeded(message)
        return self._task.result()

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

    def cancel(self) -> Any:
        """Ask that it stop; what is done already is not undone."""
        return self._core.bridge(self._cancel)

    async def _cancel(self) -> None:
        if self.rid is not None and not self.done():
            await self._core.link.cancel(self.rid)
        elif self._task is not None:
            self._task.cancel()

    def progress(self) -> Any:
        """How far it is: an `OperationState` with done and total bytes."""
        return self._core.bridge(self._progress)

    async def _progress(self) -> OperationState:
        if self.done() or self.rid is None:
            return OperationState(status=self.status)
        request = OperationAsked(rid=self._core.link.next_rid(), asked=self.rid)
        return await self._core.link.call(request, OperationState, deadline(10.0))

    def explain(self) -> Any:
        """Sentences on what the catalog did for it, oldest first; none when it did nothing."""
        return self._core.bridge(self._explain)

    async def _explain(self) -> list[str]:
        try:
            return await self._core.told_of(
                self.rid or self.ref, self._core.deadline(None)
            )
        except NotFound:
            return []

    def __await__(self) -> Generator[Any, None, T]:
        return self._result().__await__()

    def __repr__(self) -> str:
        return f"<Operation {self.kind} {self.ref!r} {self.status}>"
