"""One page in one browser: models that a feed of JSON keeps true.

Rules:

1. The browser is sent the parts that changed, as one text; it puts them where they belong
   (`look/feed.js`). So a tick costs the scheduler a comparison and a copy of text, not a walk
   through columns for each browser.
2. A view whose browser is gone does nothing, and is let go of with its session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bokeh.models import ColumnDataSource

from tensorcast_dask.dashboard.board import EVERY_S
from tensorcast_dask.dashboard.pages import look

if TYPE_CHECKING:
    from bokeh.document import Document
    from bokeh.models import UIElement

    from tensorcast_dask.dashboard.board import Asked, Board, Seen
    from tensorcast_dask.dashboard.data.shared import Columns

__all__ = ["View"]


class View:
    """One page in one browser.

    Parameters
    ----------
    board : Board
        Where the page is made.
    doc : Document
        The browser's.
    asked : Place, Page, Now, Chosen, Words or Subject
        What it shows at first.
    """

    def __init__(self, board: Board, doc: Document, asked: Asked) -> None:
        self._board = board
        self._doc = doc
        self.asked = asked
        seen = board.see(asked)
        self._sent = dict(seen.parts)
        self._told = seen.told
        self.sources: dict[str, ColumnDataSource] = {}
        self.places: dict[str, UIElement] = {}
        self.counts = ColumnDataSource(
            data={name: [one] for name, one in seen.told.counts.items()}, name="counts"
        )
        self.feed = ColumnDataSource(data={"json": ["{}"]}, name="feed")

    def shown(self, name: str) -> Columns:
        """Give the columns that the browser has of one part."""
        return self._told.columns.get(name, {})

    def source(self, name: str, *more: str) -> ColumnDataSource:
        """Make the source of one part, with what is in it now; `more` are columns that it has."""
        found = self._told.columns.get(name) or {one: [] for one in more}
        self.sources[name] = ColumnDataSource(data=dict(found), name=name)
        return self.sources[name]

    def place(self, name: str, kind: str = "", **more: Any) -> UIElement:
        """Make the place of one text."""
        text = self._told.texts.get(name, "")
        self.places[name] = look.div(text, kind, name=f"text-{name}", **more)
        return self.places[name]

    def begin(self, root: UIElement, *, figures: list[Any]) -> None:
        """Show it, and keep it true from now on."""
        self.feed.js_on_change(
            "data",
            look.script(
                "feed", sources=self.sources, places=self.places, counts=self.counts
            ),
        )
        # A browser has the models that its root knows of.
        root.tags = [self.feed]
        self._doc.add_root(root)
        self._doc.js_on_event("document_ready", look.script("paint", figures=figures))
        self._doc.add_periodic_callback(self.update, round(EVERY_S * 1000))

    def fit(self, script: str, /, **arguments: Any) -> None:
        """Run a script now and whenever the counts change."""
        code = look.script(script, **arguments)
        self.counts.js_on_change("data", code)
        # What is run when the page is ready is handed the source as well.
        ready = look.script("ready", code=code, counts=self.counts)
        self._doc.js_on_event("document_ready", ready)

    def ask(self, asked: Asked) -> None:
        """Show something else."""
        self.asked = asked
        self._send(self._board.see(asked))

    def update(self) -> None:
        """Send what changed, if anybody is there to see it."""
        session = getattr(self._doc.session_context, "session", None)
        if session is not None and session.connection_count:
            self._send(self._board.see(self.asked))

    def _send(self, seen: Seen) -> None:
        changed = {
            name: text
            for name, text in seen.parts.items()
            if self._sent.get(name) != text
        }
        if not changed:
            return
        self._sent |= changed
        self._told = seen.told
        parts = ",".join(
            f'"{name.removeprefix("columns/")}":{text}'
            for name, text in changed.items()
            if name.startswith("columns/")
        )
        rest = "".join(
            f',"{name}":{text}'
            for name, text in changed.items()
            if not name.startswith("columns/")
        )
        self.feed.data = {"json": [f'{{"columns":{{{parts}}}{rest}}}']}
