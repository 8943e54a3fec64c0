"""The page *transfers*: flows, bandwidths, sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bokeh.layouts import column
from bokeh.models import FixedTicker, HoverTool, NumeralTickFormatter, Range1d
from bokeh.transform import linear_cmap

from tensorcast_dask.dashboard.data.transfers import Now
from tensorcast_dask.dashboard.pages import look
from tensorcast_dask.dashboard.pages.view import View

if TYPE_CHECKING:
    from bokeh.document import Document
    from bokeh.models import ColumnDataSource

    from tensorcast_dask.dashboard.board import Board

__all__ = ["draw"]

#: From slow to fast; text on it is white or dark as its row says.
_SPEEDS = ("#b7d9ee", "#8cc3e3", "#56a5d3", "#2b86bf", "#0e659f", "#084a78")


def draw(board: Board, doc: Document, arguments: dict[str, str]) -> None:  # noqa: ARG001
    """Draw the page in a document."""
    view = View(board, doc, Now())
    flows = look.table(
        view.source("flows"),
        {
            "artifact": look.link("artifact", 240),
            "version": look.amount("version", 60, "0"),
            "source": look.plain("from", 200),
            "target": look.plain("to", 150),
            "tier": look.plain("tier", 60),
            "share": look.amount("done", 60, "0%"),
            "done": look.size("bytes", 80),
            "total": look.size("of", 80),
            "speed": look.plain("speed", 90, text_align="right"),
            "age": look.plain("for", 70, text_align="right"),
            "tries": look.amount("try", 40, "0"),
            "why": look.plain("why", 120),
        },
        name="table",
        height=190,
    )
    axis = view.source("axis", "at", "name", "node")
    matrix, column_names = _matrix(view, axis)
    bars = _sources(view)
    speeds = look.div(
        "Speed of copies from node (row) to node (column), bytes/s", "title"
    )
    given = look.div("Where the bytes came from", "title")
    view.fit(
        "matrix",
        matrix=matrix,
        bars=bars,
        axis=axis,
        also=[speeds, given],
        table=flows,
        column=column_names,
    )
    view.begin(
        column(
            view.place("head", "head"),
            look.div("Under way", "title"),
            view.place("found", "soft"),
            flows,
            look.beside(
                column(speeds, view.place("total", "empty"), matrix),
                column(given, view.place("sources", "empty"), bars),
                spacing=48,
            ),
            sizing_mode="stretch_width",
        ),
        figures=[matrix, bars],
    )


def _matrix(view: View, axis: ColumnDataSource) -> tuple[Any, Any]:
    figure = look.chart(
        name="figure-matrix", x_range=Range1d(-1, 0.5), y_range=Range1d(0.5, -1), frame_width=60,
        frame_height=60, x_axis_location=None, y_axis_location=None,
    )  # fmt: skip
    figure.grid.visible = False
    source = view.source(
        "matrix", "x", "y", "value", "alpha", "text", "ink", "source", "target", "what"
    )
    drawn = figure.rect(
        source=source, x="x", y="y", width=0.94, height=0.94, line_color=None, fill_alpha="alpha",
        fill_color=linear_cmap("value", list(_SPEEDS), low=0, high=5),
    )  # fmt: skip
    figure.text(
        source=source, x="x", y="y", text="text", text_align="center", text_baseline="middle",
        text_font_size="11px", text_color="ink",
    )  # fmt: skip
    left = figure.text(
        source=axis, x=-0.5, y="at", text="name", text_align="right", x_offset=-8,
        text_baseline="middle", text_font_size="12px",
    )  # fmt: skip
    above = figure.text(
        source=axis, x="at", y=-0.5, text="name", y_offset=-8, text_font_size="12px"
    )
    left.glyph.tags = above.glyph.tags = ["soft"]
    figure.add_tools(
        HoverTool(
            renderers=[drawn],
            tooltips=[("from", "@source"), ("to", "@target"), ("", "@what")],
        )
    )
    return figure, above.glyph


def _sources(view: View) -> Any:
    figure = look.chart(
        name="figure-sources", x_range=Range1d(-0.36, 1.6), y_range=Range1d(0.5, -0.5), frame_width=620,
        frame_height=26, y_axis_location=None, x_axis_location="above",
    )  # fmt: skip
    figure.ygrid.visible = False
    for one in (figure.above[0], figure.xgrid[0]):
        one.ticker = FixedTicker(ticks=[0, 0.25, 0.5, 0.75, 1])
        one.bounds = (0, 1)
    figure.above[0].formatter = NumeralTickFormatter(format="0%")
    source = view.source("sources", "y", "name", "node", "share", "text")
    bars = figure.hbar(
        source=source, y="y", left=0, right="share", height=0.62, line_color=None,
        fill_color=look.TIERS["host"],
    )  # fmt: skip
    name = figure.text(
        source=source, x=0, y="y", text="name", text_align="right", x_offset=-8,
        text_baseline="middle", text_font_size="12px",
    )  # fmt: skip
    name.glyph.tags = ["ink"]
    said = figure.text(
        source=source, x=1, y="y", text="text", x_offset=8, text_baseline="middle",
        text_font_size="12px",
    )  # fmt: skip
    said.glyph.tags = ["soft"]
    figure.add_tools(
        HoverTool(renderers=[bars], tooltips=[("node", "@node"), ("", "@text")])
    )
    return figure
