"""The page *story*: how one artifact stands, and what happened to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bokeh.layouts import column

from tensorcast_dask.dashboard.data.story import Subject
from tensorcast_dask.dashboard.pages import look
from tensorcast_dask.dashboard.pages.view import View

if TYPE_CHECKING:
    from bokeh.document import Document

    from tensorcast_dask.dashboard.board import Board

__all__ = ["draw"]


def draw(board: Board, doc: Document, arguments: dict[str, str]) -> None:
    """Draw the page in a document."""
    view = View(board, doc, Subject(arguments.get("ref", "")))
    versions = look.table(
        view.source("versions"),
        {
            "version": look.amount("version", 60, "0"),
            "stage": look.plain("stage", 85),
            "bytes": look.plain("bytes", 85, text_align="right"),
            "tensors": look.amount("tensors", 70, "0,0"),
            "owner": look.plain("owner", 70),
            "copies": look.plain("copies on", 420),
            "pinned": look.plain("pinned for", 85),
            "labels": look.plain("labels", 320),
        },
        name="table-versions",
        height=170,
    )
    lines = look.table(
        view.source("lines"),
        {"at": look.when("time", 115), "what": look.plain("what happened", 1100)},
        name="table-lines",
        height=380,
    )
    view.begin(
        column(
            view.place("title", "title"),
            view.place("empty", "empty"),
            versions,
            look.div("How it stands now", "title"),
            view.place("now"),
            look.div("What happened, newest first", "title"),
            lines,
            sizing_mode="stretch_width",
        ),
        figures=[],
    )
