"""The page *memory*: what each tier of each node holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from bokeh.layouts import column, row
from bokeh.models import FixedTicker, HoverTool, NumeralTickFormatter, Range1d
from bokeh.transform import factor_cmap

from tensorcast_dask.dashboard.data.memory import Page
from tensorcast_dask.dashboard.pages import look
from tensorcast_dask.dashboard.pages.view import View

if TYPE_CHECKING:
    from bokeh.document import Document

    from tensorcast_dask.dashboard.board import Board

__all__ = ["draw"]


def draw(board: Board, doc: Document, arguments: dict[str, str]) -> None:  # noqa: ARG001
    """Draw the page in a document."""
    view = View(board, doc, Page())
    rows = view.source("rows")
    parts = view.source(
        "parts", "y", "left", "right", "part", "what", "bytes", "node", "tier"
    )
    limits = view.source("limits", "y", "x", "what")
    figure = look.chart(
        name="figure-memory", x_range=Range1d(-0.3, 1.3), y_range=Range1d(1, -0.5), frame_width=1180,
        frame_height=30, y_axis_location=None, x_axis_location="above",
    )  # fmt: skip
    figure.ygrid.visible = False
    figure.xgrid.ticker = FixedTicker(ticks=[0, 0.2, 0.4, 0.6, 0.8, 1])
    figure.above[0].formatter = NumeralTickFormatter(format="0%")
    figure.above[0].ticker = FixedTicker(ticks=[0, 0.2, 0.4, 0.6, 0.8, 1])
    figure.above[0].axis_label = "share of the tier's capacity"
    figure.hbar(
        source=rows, y="y", left=0, right=1, height=0.66, fill_alpha=0.06, fill_color="#888888",
        line_color="#888888", line_alpha=0.35,
    )  # fmt: skip
    drawn = figure.hbar(
        source=parts, y="y", left="left", right="right", height=0.66, line_color=None,
        fill_color=factor_cmap("part", list(look.PARTS.values()), list(look.PARTS)),
    )  # fmt: skip
    dashes = figure.scatter(
        marker="dash",
        source=limits,
        x="x",
        y="y",
        size=22,
        angle=1.5708,
        line_width=2,
        line_dash="dotted",
    )
    dashes.glyph.tags = ["line"]
    label = figure.text(
        source=rows, x=0, y="y", text="label", text_align="right", x_offset=-8,
        text_baseline="middle", text_font_size="13px",
    )  # fmt: skip
    label.glyph.tags = ["ink"]
    total = figure.text(
        source=rows, x=1, y="y", text="total", x_offset=8, text_baseline="middle",
        text_font_size="12px",
    )  # fmt: skip
    total.glyph.tags = ["soft"]
    figure.add_tools(
        HoverTool(renderers=[drawn], tooltips=[
            ("", "@what"), ("bytes", "@bytes"), ("node", "@node"), ("tier", "@tier"),
        ]),
        HoverTool(renderers=[dashes], tooltips=[("limit", "@what")]),
    )  # fmt: skip
    before, after = look.button("◀", "before"), look.button("▶", "after")

    def turn(by: int) -> None:
        asked = view.asked
        assert isinstance(asked, Page), "memory: it asks for pages"
        view.ask(msgspec.structs.replace(asked, page=max(0, asked.page + by)))

    before.on_click(lambda: turn(-1))
    after.on_click(lambda: turn(1))
    table = look.table(
        rows,
        {
            "node": look.plain("node", 190),
            "tier": look.plain("tier", 60),
            "state": look.plain("state", 60),
            "capacity": look.size("capacity"),
            "used": look.size("used"),
            "pinned": look.size("pinned"),
            "evictable": look.size("evictable"),
            "reserved": look.size("reserved"),
            "leased": look.size("leased"),
            "warm": look.size("warm"),
            "shared": look.size("shared"),
            "free": look.size("free"),
            "replicas": look.amount("replicas", 70, "0,0"),
            "age": look.plain("told", 70, text_align="right"),
        },
        name="table",
        height=260,
    )
    legend = look.key(
        look.PARTS, '<span class="key">┆ what pins may hold of host memory</span>'
    )
    view.fit(
        "rows", figure=figure, count="rows", row=26, also=[table, legend], before=before, after=after, source=None, right="", before_it=0.22, behind_it=0.26,
    )  # fmt: skip
    view.begin(
        column(
            view.place("head", "head"),
            row(before, after, view.place("found", "beside")),
            view.place("empty", "empty"),
            legend,
            figure,
            table,
            sizing_mode="stretch_width",
        ),
        figures=[figure],
    )
