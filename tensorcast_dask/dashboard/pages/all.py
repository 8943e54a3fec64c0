"""All pages by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tensorcast_dask.dashboard.pages import (
    events,
    memory,
    placement,
    plans,
    story,
    transfers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bokeh.document import Document

    from tensorcast_dask.dashboard.board import Board

__all__ = ["DRAW"]

DRAW: Final[Mapping[str, Callable[[Board, Document, dict[str, str]], None]]] = {
    "placement": placement.draw,
    "memory": memory.draw,
    "transfers": transfers.draw,
    "plans": plans.draw,
    "events": events.draw,
    "story": story.draw,
}
