"""The page *events*: what happened, and a search in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bokeh.layouts import column, row
from bokeh.models import TextInput

from tensorcast_dask.dashboard.data.events import Words
from tensorcast_dask.dashboard.pages import look
from tensorcast_dask.dashboard.pages.view import View

if TYPE_CHECKING:
    from bokeh.document import Document

    from tensorcast_dask.dashboard.board import Board

__all__ = ["draw"]


def draw(board: Board, doc: Document, arguments: dict[str, str]) -> None:
    """Draw the page in a document."""
    view = View(board, doc, Words(arguments.get("words", "")))
    search = TextInput(
        title="has all of these words", value=arguments.get("words", ""), name="words", width=420,
        placeholder="an event, an artifact, a node, a reason", stylesheets=[look.sheet("widget")],
    )  # fmt: skip

    def changed(attr: str, old: object, new: str) -> None:  # noqa: ARG001
        view.ask(Words(new.strip()))

    search.on_change("value", changed)
    table = look.table(
        view.source("events", "at", "event", "subject", "node", "facts", "link"),
        {
            "at": look.when("time", 115),
            "event": look.plain("event", 120, font_style="bold"),
            "subject": look.link("of what", 360),
            "node": look.plain("node", 210),
            "facts": look.plain("facts", 560),
        },
        name="table",
        height=640,
    )
    view.begin(
        column(
            view.place("head", "head"),
            row(search),
            view.place("found", "soft"),
            view.place("empty", "empty"),
            table,
            sizing_mode="stretch_width",
        ),
        figures=[],
    )
