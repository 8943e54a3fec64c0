"""How the pages look: templates, style sheets, colours, tables.

Rules:

1. Colours of what is drawn say the same everywhere; they can be told apart by those who do not
   see red from green (the palette of Okabe and Ito).
2. What a browser is given is a constant of this package, or JSON, or text that was escaped:
   no name ever becomes part of a script or a tag.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import distributed.http
from bokeh.layouts import row
from bokeh.models import (
    Button,
    ColumnDataSource,
    CustomJS,
    DataTable,
    DateFormatter,
    Div,
    HTMLTemplateFormatter,
    InlineStyleSheet,
    NumberFormatter,
    Row,
    StringFormatter,
    TableColumn,
    UIElement,
)
from bokeh.plotting import figure
from jinja2 import Environment, FileSystemLoader

from tensorcast_dask.dashboard.board import PAGES

__all__ = [
    "LENT",
    "NODES",
    "PARTS",
    "STATUS",
    "TIERS",
    "amount",
    "beside",
    "button",
    "chart",
    "div",
    "key",
    "link",
    "plain",
    "script",
    "sheet",
    "size",
    "table",
    "template",
    "variables",
    "when",
]

_FILES: Final = Path(__file__).parents[1] / "look"

TIERS: Final = {
    "device": "#d55e00",
    "pinned": "#e69f00",
    "host": "#0072b2",
    "disk": "#8a939b",
}
PARTS: Final = {
    "pinned": "#d55e00",
    "kept": "#0072b2",
    "evictable": "#56b4e9",
    "reserved": "#e69f00",
    "leased": "#cc79a7",
    "warm": "#8a939b55",
}
STATUS: Final = {
    "done": "#009e73",
    "running": "#0072b2",
    "failed": "#d55e00",
    "skipped": "#8a939b",
    "cancelled": "#cc79a7",
    "waits": "#8a939b55",
    "left": "#e69f00",
}
#: States of nodes.
NODES: Final = {"live": "#009e73", "busy": "#e69f00", "gone": "#d55e00"}
LENT: Final = "#cc79a7"
#: What legends say where the name of a part is not enough.
_SAID: Final = {
    "kept": "used",
    "leased": "leased by readers",
    "warm": "warm (free)",
    "left": "left undone",
}

_SHOWN: Final = """\
<nav class="tc-pages">
{% for page in tc_pages %}<a href="tensorcast-{{ page }}">{{ page|title }}</a>
{% endfor %}</nav>
<script>
  for (const one of document.querySelectorAll(".tc-pages a")) {
    if (location.pathname.endsWith("/" + one.getAttribute("href"))) one.classList.add("active");
    one.href += location.search.match(/[?&]theme=(dark|light)/) ? "?theme=" + RegExp.$1 : "";
  }
</script>
"""
_THEME: Final = """\
<style>{{ tc_style }}</style>
<script>
  {
    const [, theme] = location.search.match(/[?&]theme=(dark|light)(&|$)/) ?? [];
    if (theme !== undefined) document.documentElement.dataset.theme = theme;
  }
</script>
"""
_WHOLE: Final = (
    '{% extends "base.html" %}{% block extra_resources %}'
    + _THEME
    + "{% endblock %}{% block content %}"
    + _SHOWN
    + "{{ plot_div }}{{ plot_script }}{% endblock %}"
)
_ALONE: Final = (
    "{% extends base %}{% block inner_head %}{{ super() }}" + _THEME + "{% endblock %}"
)


def _file(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    """Where Dask's own templates are: our pages have its frame."""
    folder = Path(distributed.http.__file__).parent / "templates"
    # Nothing but constants of this package goes into these templates.
    return Environment(loader=FileSystemLoader(folder))  # noqa: S701


@cache
def template(*, alone: bool) -> Any:
    """Give the frame of a page, or (`alone`) of a plot that is embedded somewhere."""
    return _environment().from_string(_ALONE if alone else _WHOLE)


def variables() -> dict[str, Any]:
    """Give what the templates need."""
    return {"tc_pages": PAGES, "tc_style": _file("page.css")}


def sheet(name: str) -> InlineStyleSheet:
    """Make a style sheet of this package."""
    return InlineStyleSheet(css=_file(f"{name}.css"))


def script(file: str, /, **arguments: Any) -> CustomJS:
    """Make a script of this package."""
    return CustomJS(args=arguments, code=_file(f"{file}.js"))


# ---------------------------------------------------------------- parts of pages
def div(text: str, kind: str = "", **more: Any) -> Div:
    """Make a place for text that is HTML."""
    return Div(
        text=text,
        visible=bool(text),
        disable_math=True,
        css_classes=[kind] if kind else [],
        stylesheets=[sheet("text")],
        **more,
    )


def beside(*parts: UIElement, spacing: int = 0) -> Row:
    """Put parts beside one another, and below where the window is too narrow."""
    return row(
        *parts,
        spacing=spacing,
        sizing_mode="stretch_width",
        styles={"flex-wrap": "wrap"},
    )


def key(colors: dict[str, str], *more: str) -> Div:
    """Make a legend."""
    parts = [
        f'<span class="key"><i style="background:{color}"></i>{_SAID.get(name, name)}</span>'
        for name, color in colors.items()
    ]
    return div("".join([*parts, *more]), sizing_mode="stretch_width")


def button(label: str, name: str) -> Button:
    """Make a small button."""
    return Button(label=label, name=name, width=44, stylesheets=[sheet("widget")])


def chart(**more: Any) -> figure:
    """Make a figure without tools; `paint.js` gives it its colours."""
    found = figure(
        tools="", toolbar_location=None, min_border=4, outline_line_color=None, **more
    )
    found.toolbar.logo = None
    found.toolbar.active_drag = None
    found.toolbar.active_scroll = None
    return found


def table(
    source: ColumnDataSource, columns: dict[str, TableColumn], **more: Any
) -> DataTable:
    """Make a table; columns by field."""
    for field, column in columns.items():
        column.field = field
    return DataTable(
        source=source,
        columns=list(columns.values()),
        index_position=None,
        sortable=True,
        reorderable=False,
        selectable=True,
        row_height=26,
        sizing_mode="stretch_width",
        autosize_mode="force_fit",
        stylesheets=[sheet("table")],
        **more,
    )


def plain(title: str, width: int, **style: Any) -> TableColumn:
    """Make a column of text."""
    return TableColumn(title=title, width=width, formatter=StringFormatter(**style))


def amount(title: str, width: int, form: str = "0,0") -> TableColumn:
    """Make a column of numbers."""
    formatter = NumberFormatter(format=form, text_align="right")
    return TableColumn(title=title, width=width, formatter=formatter)


def size(title: str, width: int = 85) -> TableColumn:
    """Make a column of bytes: sorted as numbers, written as `human_bytes` does."""
    form = (
        '<% let at = 0, left = value; const units = ["B", "KiB", "MiB", "GiB", "TiB"]; '
        "while (left >= 1024 && at < 4) { left /= 1024; at += 1 } %>"
        '<div style="text-align: right"><%- left.toFixed(at ? 1 : 0) + " " + units[at] %></div>'
    )
    formatter = HTMLTemplateFormatter(template=form)
    return TableColumn(title=title, width=width, formatter=formatter)


def when(title: str, width: int) -> TableColumn:
    """Make a column of times, in milliseconds since 1970, as the browser's clock shows them."""
    return TableColumn(
        title=title, width=width, formatter=DateFormatter(format="%H:%M:%S.%3N")
    )


def link(title: str, width: int) -> TableColumn:
    """Make a column that leads to the story of what the column `link` names."""
    form = (
        '<% if (link) { %><a target="_blank" rel="noopener" '
        'href="tensorcast-story?ref=<%- encodeURIComponent(link) %>"><%- value %></a>'
        "<% } else { %><%- value %><% } %>"
    )
    return TableColumn(
        title=title, width=width, formatter=HTMLTemplateFormatter(template=form)
    )
