"""What a program talks to.

Rules:

1. The public calls are the classes of `calls/`: names, arguments and docstrings. Each is
   one line of work in `actions/` or `plans/`.
2. Every call blocks in a synchronous program, and is awaited in an asynchronous one or
   inside a coroutine that runs on the session's event loop.
3. Calls that change something return when the change holds. With `wait=False` they return
   an `Operation` at once; `prefetch` does so by default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from tensorcast_dask.api.actions import tasks
from tensorcast_dask.api.calls.base import whole
from tensorcast_dask.api.calls.finding import Finding
from tensorcast_dask.api.calls.looking import Looking
from tensorcast_dask.api.calls.making import Making
from tensorcast_dask.api.calls.placing import Placing
from tensorcast_dask.api.calls.planning import Planning
from tensorcast_dask.api.calls.reading import Reading
from tensorcast_dask.api.calls.showing import Showing
from tensorcast_dask.notebook.cards import session_card

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tensorcast_dask.api.connection.core import Core

__all__ = ["Session"]


@whole
class Session(Making, Finding, Reading, Placing, Planning, Looking, Showing):
    """A program's connection to the tensor service of one Dask cluster.

    Made by `tensorcast_dask.connect`. A context manager, synchronous or asynchronous.

    Attributes
    ----------
    client : distributed.Client or None
        The Dask client.
    """

    def __init__(
        self,
        core: Core,
        on_close: Callable[[], Coroutine[Any, Any, None]],
        after: Callable[[], Any] | None,
        on_lost: Callable[[], None],
    ) -> None:
        self._core = core
        self._on_close = on_close
        #: Lets go of what is in this process, when the event loop has ended.
        self._on_lost = on_lost
        #: Closes the Dask client; in a program's own thread it ends the client's too.
        self._after = after
        self.closed = False

    @property
    def client(self) -> Any:
        """The Dask client."""
        return self._core.client

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`client.submit`, sent to a worker whose node holds the artifacts among `args`.

        Returns
        -------
        distributed.Future
        """
        return tasks.submit(self._core, function, args, kwargs)

    def close(self) -> Any:
        """Close the session; artifacts stay, drafts are given back, registrations end.

        In a forked child it closes nothing: the session is its parent's.
        """
        if self.closed or self._core.forked:
            return _nothing() if self._core.asynchronous else None
        self.closed = True
        if self._core.loop_ended:
            self._on_lost()
            return None
        if self._core.asynchronous:
            return self._close_on_loop()
        try:
            self._core.call(self._on_close)
        finally:
            if self._after is not None:
                self._after()
        return None

    async def _close_on_loop(self) -> None:
        try:
            await self._on_close()
        finally:
            if self._after is not None:
                await self._after()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Session {'closed' if self.closed else 'open'} {self._core.link.name}>"

    def _repr_html_(self) -> str:
        return session_card(
            self._core.link.name,
            state="closed" if self.closed else "open",
            dashboard=self._core.dashboard,
            nodes=self._nodes_at_hand(),
        )


async def _nothing() -> None:
    return None
