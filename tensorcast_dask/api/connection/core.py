"""What every call of a session needs: the loop, the catalog, the stores.

Rules:

1. Control messages go over the session's event loop; bytes never do: whatever may move
   bytes runs in the caller's thread or in `in_thread`.
2. One bridge for sync and async: `sync` (Dask's) blocks in a thread and gives an awaitable
   on the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast

from distributed.utils import SyncMethodMixin

from tensorcast_dask.api.connection.deadlines import Deadline, deadline
from tensorcast_dask.api.connection.operation import Operation
from tensorcast_dask.api.connection.progress import watch
from tensorcast_dask.api.current import NOT_FORKED
from tensorcast_dask.dataplane import tracing
from tensorcast_dask.exceptions import (
    CapacityError,
    CatalogUnavailable,
    TensorCastError,
    UnsupportedPlatform,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from types import FrameType

    from tornado.ioloop import IOLoop

    from tensorcast_dask.api.connection.catalog import CatalogLink
    from tensorcast_dask.api.connection.stores import Stores
    from tensorcast_dask.dataplane.devices.own import OwnDevices
    from tensorcast_dask.instance.register import Lender
    from tensorcast_dask.tensors.ids import HostId
    from tensorcast_dask.tensors.messages import Message

__all__ = ["Core", "typed"]

T = TypeVar("T")
P = ParamSpec("P")


#: How long what a notebook shows may wait.
_GLIMPSE_S: Final = 1.0
_PACKAGE: Final = __name__.partition(".")[0] + "."
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


def _in_a_span(
    name: str, function: Callable[..., Awaitable[T]]
) -> Callable[..., Coroutine[Any, Any, T]]:
    """Have a call seen in the trace of the program that makes it."""

    async def traced(*args: Any) -> T:
        with tracing.span(f"tensorcast {name}"):
            return await function(*args)

    return traced


def _public_call() -> str:
    """Give the name of the call by which a program has come here."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - nothing else is cheap
    name = ""
    while frame and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        name, frame = frame.f_code.co_name, frame.f_back
    return name


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
        #: Address of Dask's dashboard, as it was when the session was opened; "" for none.
        self.dashboard = ""
        #: What is shown live, by what was asked for.
        self.placements: dict[Any, Any] = {}
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
            When the session is closed, or its event loop has ended.
        UnsupportedPlatform
            In a forked child: the event loop is a thread of its parent.
        """
        if self.forked:
            raise UnsupportedPlatform(NOT_FORKED)
        if self.closed:
            message = "this session is closed; connect again"
            raise CatalogUnavailable(message)
        if self.loop_ended:
            message = "the event loop of this session has ended, with the Dask client that it came from; connect again"
            raise CatalogUnavailable(message)
        if tracing.active():
            function = _in_a_span(_public_call(), function)
        made: Any = self.sync(typed, function, *args)  # type: ignore[no-untyped-call]
        if asyncio.iscoroutine(made):  # what Python warns of when nobody awaits it
            made.__qualname__ = _public_call()  # type: ignore[attr-defined]
        return made

    def glimpse(self, look: Callable[[Deadline], Awaitable[T]]) -> T | None:
        """Ask for what a notebook shows: at most a second, and None where it cannot be had.

        On an event loop nothing is asked, since what is shown there cannot be awaited.
        """
        if self.closed or self.forked or self.asynchronous:
            return None
        try:
            return self.call(lambda: look(deadline(_GLIMPSE_S).sooner(_GLIMPSE_S)))
        except TensorCastError:
            return None

    @property
    def loop_ended(self) -> bool:
        """Whether the event loop is no more: Dask ends it with the last who uses it."""
        return bool(self.loop.asyncio_loop.is_closed())  # type: ignore[attr-defined]

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
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: context.run(function, *args, **kwargs)
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
        progress: bool = False,
        value: bool = False,
    ) -> Any:
        """Begin an operation; return its handle, ended when `wait`.

        The operation's own error is raised here when `wait`. With `value` the handle is
        given only when it is not waited for, else what it came to. `progress` shows how far
        it is, where somebody looks.
        """
        if value and wait and not progress:  # no task for what nobody gets a handle of
            return self.call(lambda: action(Operation(self, kind, ref)))

        async def begin() -> Any:
            operation: Operation[T] = Operation(self, kind, ref)
            task = operation._begin(action(operation))  # noqa: SLF001 - the only place that makes one
            shown = asyncio.create_task(watch(operation)) if progress else None
            if not wait:
                return operation
            try:
                await asyncio.shield(task)
            finally:
                if value and not task.done():  # the caller was interrupted
                    await operation._stop()  # noqa: SLF001
                if shown is not None:
                    await asyncio.wait({shown})
            return task.result() if value else operation

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
