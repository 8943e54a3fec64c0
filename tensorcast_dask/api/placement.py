"""Which artifact lies where, live.

Rules:

1. It follows signals and asks anew only when something has changed, no more often than it was
   told to. It belongs to its session and ends with it.
2. The catalog is asked for one page of artifacts and their places: what it costs does not grow with
   the cluster.
3. Where ipywidgets is, a notebook has a table that changes in its place; it is made when it is
   first shown. Everywhere else what is shown is how things stand at that moment.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorcast_dask.api.actions import names
from tensorcast_dask.api.connection.deadlines import deadline
from tensorcast_dask.api.signals import FOREVER_S, Watch
from tensorcast_dask.exceptions import AbsentError, InvalidArgument, TensorCastError
from tensorcast_dask.notebook.placement import Grid, grid_html, grid_text

if TYPE_CHECKING:
    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.api.connection.deadlines import Deadline
    from tensorcast_dask.tensors.messages import ArtifactInfo, Location

__all__ = ["Placement", "View", "check_view"]

_ASK_S = 60.0
_MOST_ROWS = 1000


class View(NamedTuple):
    """What is to be shown."""

    prefix: str
    labels: tuple[tuple[str, str], ...]
    rows: int
    every_s: float


def check_view(prefix: object, labels: object, limit: object, every: object) -> View:
    """Make it of what a caller gave.

    Raises
    ------
    InvalidArgument
        When one of them is not what it must be.
    """
    if not isinstance(prefix, str):
        message = f"prefix must be text, not {type(prefix).__name__}"
        raise InvalidArgument(message)
    if type(limit) is not int or not 0 < limit <= _MOST_ROWS:
        message = f"limit must be a whole number, 1 to {_MOST_ROWS}, not {limit!r}"
        raise InvalidArgument(message)
    number = isinstance(every, int | float) and not isinstance(every, bool)
    if not number or not 0 < every <= FOREVER_S:  # type: ignore[operator]
        message = f"every must be seconds above 0, not {every!r}"
        raise InvalidArgument(message)
    wanted = tuple(sorted(names.check_labels(labels).items()))
    return View(prefix, wanted, limit, float(every))  # type: ignore[arg-type]


class Placement:
    """A table of what is where. Made by `Session.placement`.

    Attributes
    ----------
    grid : Grid
        What was seen last.
    looks : int
        How often it was looked.
    error : TensorCastError or None
        What ended it.
    """

    def __init__(self, core: Core, view: View) -> None:
        self._core = core
        self._view = view
        self._prefix = view.prefix
        topics = (f"artifact/{view.prefix}", "event/", "node/")
        self._watch = Watch(core, topics, view.every_s, FOREVER_S)
        self._task: asyncio.Task[None] | None = None
        self._html: Any = None
        self.grid = Grid()
        self.looks = 0
        self.error: TensorCastError | None = None

    @property
    def active(self) -> bool:
        """Whether it still follows what happens."""
        return self._task is not None and not self._task.done()

    async def start(self, limit: Deadline) -> None:
        """Look for the first time, and begin to follow; what `Session.placement` does."""
        await self._look(limit)
        self._task = asyncio.create_task(self._run(), name="tensorcast-placement")

    def close(self) -> Any:
        """Follow no more; what was shown last stays."""
        if self._core.closed:
            return self._close() if self._core.asynchronous else None
        return self._core.call(self._close)

    async def _close(self) -> None:
        if self.active:
            await self._watch.close()
        await self.ended()

    async def ended(self) -> None:
        """Wait until nothing of it runs, on the session's loop."""
        if self._task is not None:
            await asyncio.wait({self._task})

    # ------------------------------------------------------------ following
    async def _run(self) -> None:
        try:
            while (changes := await self._watch.look()) is not None and not self._left:
                if changes:
                    await self._look(deadline(_ASK_S))
        except TensorCastError as error:
            self.error = error
        finally:
            self._watch.closed = True
            if self._core.placements.get(self._view) is self:
                del self._core.placements[self._view]
            self._show(state="ended")

    @property
    def _left(self) -> bool:
        """Whether its widget was closed."""
        return self._html is not None and self._html.comm is None

    async def _look(self, limit: Deadline) -> None:
        view = self._view
        found = await names.list_artifacts(
            self._core,
            prefix=self._prefix,
            labels=dict(view.labels),
            all_versions=True,
            most=view.rows + 1,
            limit=limit,
        )
        shown = tuple(found[: view.rows])
        places = await asyncio.gather(*(self._places(one, limit) for one in shown))
        nodes = (await names.nodes(self._core, limit)).nodes
        stores = [one for one in nodes if one.card.kind == "store"]
        self.grid = Grid(
            nodes=tuple(sorted(stores, key=lambda one: one.card.name)),
            artifacts=shown,
            places={
                one.generation: where for one, where in zip(shown, places, strict=True)
            },
            more=len(found) > len(shown),
        )
        self.looks += 1
        self._show(state="live")

    async def _places(
        self, info: ArtifactInfo, limit: Deadline
    ) -> tuple[Location, ...]:
        try:
            return await names.locate(self._core, info.generation, limit)
        except AbsentError:  # it ended meanwhile, or was lost
            return ()

    # ------------------------------------------------------------ showing
    def _show(self, *, state: str) -> None:
        """Put what was seen last into the widget; a front end that is gone is no error."""
        if self._html is not None and not self._left:
            with contextlib.suppress(OSError, RuntimeError):
                self._html.value = self._drawn(state)

    def _drawn(self, state: str) -> str:
        title = f"{self._prefix}*" if self._prefix else "all artifacts"
        return grid_html(self.grid, title=title, state=state)

    def _widget(self) -> Any:
        """Make a box to search in, above the table; None without ipywidgets."""
        try:
            import ipywidgets
        except ImportError:
            return None
        if self._html is None:
            self._html = ipywidgets.HTML(self._drawn("live"))
        words = ipywidgets.Text(
            self._prefix, description="ids begin", continuous_update=False
        )
        words.observe(self._search, names="value")
        return ipywidgets.VBox([words, self._html])

    def _search(self, change: Any) -> None:
        """Show what begins with other letters."""
        self._prefix = str(change["new"])
        if self.active and not self._core.closed:
            self._core.loop.add_callback(self._search_on_loop)

    async def _search_on_loop(self) -> None:
        with contextlib.suppress(TensorCastError):
            await self._look(deadline(_ASK_S))

    def __repr__(self) -> str:
        state = "live" if self.active else "ended"
        lines = grid_text(self.grid) or "no artifacts"
        return f"<Placement of {self._prefix or 'everything'!r} {state}>\n{lines}"

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        state = "live" if self.active else "ended"
        shown: dict[str, Any] = {
            "text/plain": repr(self),
            "text/html": self._drawn(state),
        }
        widget = self._widget() if self.active else None
        if widget is not None:
            made = widget._repr_mimebundle_()
            bundle = made[0] if isinstance(made, tuple) else made
            kind = "application/vnd.jupyter.widget-view+json"
            shown |= {kind: bundle[kind]} if kind in bundle else {}
        return shown
