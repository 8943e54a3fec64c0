"""The page *placement*: artifacts x nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from bokeh.layouts import column
from bokeh.models import (
    CDSView,
    GroupFilter,
    HoverTool,
    Range1d,
    Select,
    TapTool,
    TextInput,
)
from bokeh.transform import factor_cmap

from tensorcast_dask.dashboard.data.placement import Place
from tensorcast_dask.dashboard.data.search import Grouping, Sort, Wanted
from tensorcast_dask.dashboard.pages import look
from tensorcast_dask.dashboard.pages.view import View

if TYPE_CHECKING:
    from bokeh.document import Document

    from tensorcast_dask.dashboard.board import Board

__all__ = ["draw"]

#: Pixels: a row, the names, the heads of nodes.
ROW: Final = 25
NAMES: Final = 520
HEADS: Final = 84
_ANY: Final = ("", "any")


class _Asking:
    """The widgets with which rows are chosen."""

    def __init__(self, view: View, place: Place) -> None:
        self._view = view
        wanted, style = place.wanted, look.sheet("widget")
        self.name = TextInput(
            title="name has (^ begins with)", value=wanted.name, name="name", width=210,
            placeholder="part of an id", stylesheets=[style],
        )  # fmt: skip
        self.label = TextInput(
            title="label", value=wanted.label, name="label", width=160,
            placeholder="key or key=value", stylesheets=[style],
        )  # fmt: skip
        self.tenant = TextInput(
            title="tenant", value=wanted.tenant, name="tenant", width=120,
            placeholder="any", stylesheets=[style],
        )  # fmt: skip
        self.group = Select(
            title="group by", value=str(wanted.group), name="group", width=110,
            options=[
                ("none", "nothing"), ("name", "name, to /"), ("tenant", "tenant"), ("owner", "owner")
            ], stylesheets=[style],
        )  # fmt: skip
        self.sort = Select(
            title="first", value=str(wanted.sort), name="sort", width=130,
            options=[
                ("name", "by name"), ("size", "largest"), ("copies", "fewest copies"),
                ("reads", "most read"),
            ], stylesheets=[style],
        )  # fmt: skip
        for widget in (self.name, self.label, self.tenant, self.group, self.sort):
            widget.on_change("value", self._changed)

    def _changed(self, attr: str, old: object, new: object) -> None:  # noqa: ARG002
        wanted = Wanted(
            name=self.name.value.strip(),
            label=self.label.value.strip(),
            tenant=self.tenant.value.strip(),
            group=Grouping(self.group.value),
            sort=Sort(self.sort.value),
        )
        self._view.ask(Place(wanted=wanted))

    def turn(self, *, rows: int = 0, nodes: int = 0) -> None:
        """Turn over pages."""
        asked = self._view.asked
        assert isinstance(asked, Place), "placement: it asks for places"
        self._view.ask(
            msgspec.structs.replace(
                asked,
                page=max(0, asked.page + rows),
                node_page=max(0, asked.node_page + nodes),
            )
        )


def draw(board: Board, doc: Document, arguments: dict[str, str]) -> None:
    """Draw the page in a document."""
    place = _place(arguments)
    view = View(board, doc, place)
    asking = _Asking(view, place)
    before, after = look.button("◀", "before"), look.button("▶", "after")
    before.on_click(lambda: asking.turn(rows=-1))
    after.on_click(lambda: asking.turn(rows=1))
    nodes_before = look.button("◀", "nodes-before")
    nodes_after = look.button("▶", "nodes-after")
    nodes_before.on_click(lambda: asking.turn(nodes=-1))
    nodes_after.on_click(lambda: asking.turn(nodes=1))
    figure, fitted = _figure(view, asking)
    view.fit(
        "placement",
        figure=figure, names=NAMES, row=ROW, heads=HEADS, before=before, after=after,
        nodes_before=nodes_before, nodes_after=nodes_after, **fitted,
    )  # fmt: skip
    view.begin(
        column(
            view.place("head", "head"),
            look.beside(asking.name, asking.label, asking.tenant, asking.group, asking.sort),
            look.beside(
                before, after, view.place("found", "beside"),
                nodes_before, nodes_after, view.place("nodes", "beside"),
            ),
            _key(),
            view.place("empty", "empty"),
            figure,
            sizing_mode="stretch_width",
        ),
        figures=[figure],
    )  # fmt: skip


def _place(arguments: dict[str, str]) -> Place:
    """Read what an address asks for; what it says wrongly counts as not said."""
    given: dict[str, Any] = {
        name: arguments[name]
        for name in ("name", "label", "tenant")
        if name in arguments
    }
    if arguments.get("group") in {str(one) for one in Grouping}:
        given["group"] = Grouping(arguments["group"])
    if arguments.get("sort") in {str(one) for one in Sort}:
        given["sort"] = Sort(arguments["sort"])
    return Place(wanted=Wanted(**given))


def _key() -> Any:
    return look.key(
        look.TIERS,
        '<span class="key">height: bytes, logarithmic</span>',
        '<span class="key">pale: older versions only</span>',
        '<span class="key">▼&nbsp;pinned</span>',
        f'<span class="key"><i style="border:2px solid {look.LENT}"></i>leased by its owner</span>',
        '<span class="key"><i style="border:2px solid #8a939b"></i>gone or not claimed</span>',
    )


def _figure(view: View, asking: _Asking) -> tuple[Any, dict[str, Any]]:
    figure = look.chart(
        name="figure-placement", x_range=Range1d(-10, 1), y_range=Range1d(1, -4),
        frame_width=NAMES + 84, frame_height=HEADS, x_axis_location=None, y_axis_location=None,
    )  # fmt: skip
    figure.grid.visible = False
    rows = view.source(
        "rows",
        "y",
        "name",
        "artifact",
        "note",
        "state",
        "kind",
        "link",
        "band",
        "top",
        "bottom",
    )
    cells = view.source(
        "cells", "x", "y", "width", "height", "tier", "artifact", "node", "what", "bytes",
        "owner", "kept", "mark", "line", "alpha", "kind", "link",
    )  # fmt: skip
    heads = view.source("heads", "x", "name", "node", "host", "state", "color", "note")
    bands = figure.quad(
        source=rows, left=-10, right=1, top="top", bottom="bottom", fill_alpha="band",
        fill_color="#888888", line_color=None,
    )  # fmt: skip
    bands.glyph.tags = ["band"]
    clicked = figure.quad(
        source=rows, left=-10, right=-0.5, top="top", bottom="bottom", fill_alpha=0.0,
        line_color=None, hover_fill_color="#eaaa6d", hover_fill_alpha=0.25,
    )  # fmt: skip
    name = figure.text(
        source=rows,
        x=-10,
        y="y",
        text="name",
        text_font_size="13px",
        text_baseline="middle",
    )
    name.glyph.tags = ["ink"]
    note = figure.text(
        source=rows, x=-1, y="y", text="note", text_align="right", text_font_size="12px",
        text_baseline="middle",
    )  # fmt: skip
    note.glyph.tags = ["soft"]
    tiers = list(look.TIERS)
    drawn = figure.rect(
        source=cells, x="x", y="y", width="width", height="height", fill_alpha="alpha",
        fill_color=factor_cmap("tier", list(look.TIERS.values()), tiers), line_width=2,
        line_color=factor_cmap("line", [look.LENT, "#8a939b"], ["lent", "gone"], nan_color="#00000000"),
        line_alpha="edge",
    )  # fmt: skip
    figure.scatter(
        source=cells, x="x", y="y", marker="inverted_triangle", size=8, fill_color="#ffffff",
        line_color="#222222", view=CDSView(filter=GroupFilter(column_name="mark", group="pin")),
    )  # fmt: skip
    dots = figure.scatter(
        source=heads, x="x", y=-0.85, size=9, line_color=None,
        fill_color=factor_cmap("color", list(look.NODES.values()), list(look.NODES)),
    )  # fmt: skip
    labels = figure.text(
        source=heads, x="x", y=-1.25, text="name", angle=0.6, text_font_size="12px",
        text_baseline="middle", x_offset=2,
    )  # fmt: skip
    labels.glyph.tags = ["soft"]
    for renderer in (bands, clicked, drawn, dots, name, note, labels):
        renderer.nonselection_glyph = renderer.selection_glyph = None
        renderer.muted_glyph = None
    figure.add_tools(
        HoverTool(renderers=[clicked], tooltips=[("", "@artifact"), ("", "@note"), ("state", "@state")], point_policy="follow_mouse", attachment="right"),
        HoverTool(renderers=[drawn], tooltips=[
            ("artifact", "@artifact"), ("node", "@node"), ("tier", "@tier"), ("holds", "@what"),
            ("bytes", "@bytes"), ("owner", "@owner"), ("kept", "@kept"),
        ]),
        HoverTool(renderers=[dots, labels], tooltips=[
            ("node", "@node"), ("host", "@host"), ("state", "@state"), ("", "@note"),
        ]),
        TapTool(
            renderers=[clicked, drawn], behavior="select",
            callback=look.script("story", name=asking.name, tenant=asking.tenant, group=asking.group),
        ),
    )  # fmt: skip
    fitted = {
        "left": [bands.glyph, clicked.glyph], "name": name.glyph, "note": note.glyph,
        "wide": bands.glyph, "label": labels.glyph, "sources": heads,
    }  # fmt: skip
    return figure, fitted
