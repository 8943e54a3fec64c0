"""Puts the pages into Dask's dashboard, and takes them out again.

Rules:

1. Where Dask has no dashboard (no Bokeh, or none was asked for) there is nothing to do.
2. This file imports Bokeh only then: a scheduler without it works as ever.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorcast_dask.dashboard import dask_private
from tensorcast_dask.dashboard.board import PAGES, Board

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Scheduler

    from tensorcast_dask.scheduler_plugin.state.catalog import Catalog

__all__ = ["show"]

log = logging.getLogger(__name__)


def show(
    scheduler: Scheduler, catalog: Callable[[], Catalog | None]
) -> Callable[[], None]:
    """Show the pages of a catalog.

    Parameters
    ----------
    scheduler : Scheduler
        Dask's.
    catalog : callable
        Gives the catalog of now, or None.

    Returns
    -------
    callable
        Takes them away.
    """
    if not dask_private.has_dashboard(scheduler):
        return _nothing
    board = Board(catalog)
    applications: dict[str, Any] = {}
    for page in (*PAGES, "story"):
        applications[f"/tensorcast-{page}"] = partial(_draw, page, board, alone=False)
        if page != "story":
            name = f"/individual-tensorcast-{page}"
            applications[name] = partial(_draw, page, board, alone=True)
    applications["/tensorcast"] = applications["/tensorcast-placement"]
    hide = dask_private.serve(scheduler, applications, page="tensorcast")

    def close() -> None:
        hide()
        board.close()

    return close


def _draw(
    page: str,
    board: Board,
    scheduler: Scheduler,  # noqa: ARG001 - handed over by Dask
    extra: dict[str, Any],
    doc: Any,  # noqa: ANN401
    *,
    alone: bool,
) -> None:
    """Draw a page for one browser."""
    from tensorcast_dask.dashboard.pages import look  # noqa: PLC0415 (rule 2)
    from tensorcast_dask.dashboard.pages.all import DRAW  # noqa: PLC0415

    given = doc.session_context.request.arguments if doc.session_context else {}
    arguments = {
        name: values[-1].decode("utf-8", "replace") for name, values in given.items()
    }
    doc.title = f"TensorCast: {page}"
    doc.template = look.template(alone=alone)
    doc.template_variables.update(extra, **look.variables())
    try:
        DRAW[page](board, doc, arguments)
    except Exception:
        log.exception("the page %s cannot be drawn", page)
        raise


def _nothing() -> None:
    """Nothing was shown."""
