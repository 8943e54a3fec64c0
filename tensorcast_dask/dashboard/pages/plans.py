"""The page *plans*: runs, and the steps of one of them in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bokeh.layouts import column
from bokeh.models import HoverTool, Range1d
from bokeh.transform import factor_cmap

from tensorcast_dask.dashboard.data.plans import Chosen
from tensorcast_dask.dashboard.pages import look
from tensorcast_dask.dashboard.pages.view import View

if TYPE_CHECKING:
    from bokeh.document import Document

    from tensorcast_dask.dashboard.board import Board

__all__ = ["draw"]


def draw(board: Board, doc: Document, arguments: dict[str, str]) -> None:
    """Draw the page in a document."""
    view = View(board, doc, Chosen(arguments.get("key", "")))
    runs = view.source("runs")
    table = look.table(
        runs,
        {
            "key": look.plain("key", 240),
            "status": look.plain("status", 80, font_style="bold"),
            "steps": look.amount("steps", 55, "0"),
            "done": look.amount("done", 55, "0"),
            "failed": look.amount("failed", 55, "0"),
            "left": look.amount("left", 55, "0"),
            "moved": look.plain("moved", 80, text_align="right"),
            "time": look.plain("took", 70, text_align="right"),
            "message": look.plain("why it ended so", 520),
        },
        name="table",
        height=220,
    )

    def chosen(attr: str, old: object, new: list[int]) -> None:  # noqa: ARG001
        if new:
            # What the browser lists just now is what was sent last.
            keys = view.shown("runs").get("link", [])
            if new[0] < len(keys):
                view.ask(Chosen(str(keys[new[0]])))

    runs.selected.on_change("indices", chosen)
    figure = look.chart(
        name="figure-gantt", x_range=Range1d(-0.3, 1.5), y_range=Range1d(1, -0.5),
        frame_width=1180, frame_height=26, y_axis_location=None, x_axis_location="above",
    )  # fmt: skip
    figure.ygrid.visible = False
    figure.above[0].axis_label = "seconds since its first step"
    steps = view.source(
        "steps", "y", "name", "left", "right", "status", "node", "what", "attempts", "text", "said"
    )  # fmt: skip
    bars = figure.hbar(
        source=steps, y="y", left="left", right="right", height=0.62, line_width=2,
        fill_color=factor_cmap("status", list(look.STATUS.values()), list(look.STATUS)),
        line_color=factor_cmap("status", list(look.STATUS.values()), list(look.STATUS)),
    )  # fmt: skip
    name = figure.text(
        source=steps, x=0, y="y", text="name", text_align="right", x_offset=-10,
        text_baseline="middle", text_font_size="12px",
    )  # fmt: skip
    name.glyph.tags = ["ink"]
    said = figure.text(
        source=steps, x="right", y="y", text="said", x_offset=8, text_baseline="middle",
        text_font_size="12px",
    )  # fmt: skip
    said.glyph.tags = ["soft"]
    figure.add_tools(
        HoverTool(renderers=[bars], tooltips=[
            ("step", "@name"), ("does", "@what"), ("status", "@status"), ("node", "@node"),
            ("attempts", "@attempts"), ("", "@text"),
        ]),
    )  # fmt: skip
    legend = look.key(look.STATUS)
    view.fit(
        "rows", figure=figure, count="steps", row=26, also=[legend, table], before=None, after=None, source=steps, right="right", before_it=0.34, behind_it=0.5,
    )  # fmt: skip
    view.begin(
        column(
            view.place("head", "head"),
            view.place("found", "soft"),
            view.place("empty", "empty"),
            table,
            view.place("chosen", "title"),
            view.place("failure", "bad", sizing_mode="stretch_width"),
            legend,
            figure,
            sizing_mode="stretch_width",
        ),
        figures=[figure],
    )
