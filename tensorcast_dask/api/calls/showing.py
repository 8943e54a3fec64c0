"""Calls that show the cluster to people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.api.actions import names
from tensorcast_dask.api.calls.base import Calls
from tensorcast_dask.api.pages import Page
from tensorcast_dask.api.placement import Placement, check_view
from tensorcast_dask.exceptions import UnsupportedPlatform

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Showing"]

_ROWS: Final = 50


class Showing(Calls):
    """What shows the cluster to people."""

    def dashboard(
        self, page: str = "placement", *, height: int = 600, **asked: str
    ) -> Page:
        """Give a page of Dask's dashboard: a notebook shows it, `open()` opens it in a browser.

        Nothing is asked: where the scheduler has no such pages (`dashboard.pages` is false, or it
        has no Bokeh), its address leads nowhere.

        Parameters
        ----------
        page : str
            `placement`, `memory`, `transfers`, `plans` or `events`.
        height : int
            In a notebook, in pixels.
        **asked : str
            What the page is asked for, such as `name="^models/"`.

        Raises
        ------
        InvalidArgument
            When there is no such page.
        UnsupportedPlatform
            When Dask knows no dashboard of this cluster.
        """
        link = self._core.dashboard
        if not link:
            message = (
                "Dask knows of no dashboard here: a task's session has no client, and a "
                "scheduler without Bokeh no pages; look with `placement()` instead"
            )
            raise UnsupportedPlatform(message)
        return Page(link, page, asked, height)

    def placement(
        self,
        prefix: str = "",
        *,
        labels: Mapping[str, str] | None = None,
        limit: int = _ROWS,
        every: float = 1.0,
        deadline: float | None = None,
    ) -> Any:
        """Show which artifact lies where: a table that follows what happens.

        With ipywidgets (the extra `[notebook]`) a notebook's table changes in its place, and can be
        searched; without, it shows how things stood, as does the text. Called again with the same
        arguments it gives the same one. It ends with `close()` and with the session.

        Parameters
        ----------
        prefix : str
            Of the ids that are shown.
        labels : mapping of str to str, optional
            Only artifacts that carry all of them.
        limit : int
            Most artifacts.
        every : float
            Least seconds between two changes.
        deadline : float, optional
            Seconds for the first look.

        Returns
        -------
        Placement
        """
        view = check_view(prefix, labels, limit, every)
        within = self._core.deadline(deadline)

        async def work() -> Placement:
            known: Placement | None = self._core.placements.get(view)
            if known is None or not known.active:
                known = self._core.placements[view] = Placement(self._core, view)
                await known.start(within)
            return known

        return self._core.call(work)

    def _nodes_at_hand(self) -> Any:
        found = self._core.glimpse(lambda limit: names.nodes(self._core, limit))
        return None if found is None else found.nodes
