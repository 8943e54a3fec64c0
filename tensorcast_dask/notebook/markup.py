"""HTML in small parts, for front ends that are light or dark.

Rules:

1. Whatever is not `Html` yet is escaped when it becomes part of one. `Html` is made here and of
   constants only, so no name, label or message can bring a tag with it.
2. Nothing sets the colour of text or page: those are the front end's. Lines and shades are
   see-through greys, marks are colours that can be read on white and on black.
3. Styles stand in the tags: front ends drop style sheets of outputs that they do not trust.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "TIERS",
    "Html",
    "bar",
    "card",
    "chip",
    "facts",
    "joined",
    "link",
    "markup",
    "table",
]

#: Colours that can be told apart by the colour-blind too.
TIERS: Final = {
    "device": "#d55e00",
    "pinned": "#c98a00",
    "host": "#2b83c6",
    "disk": "#8a939b",
}
_STATES: Final = {
    "done": "#00936b",
    "open": "#00936b",
    "published": "#00936b",
    "fresh": "#00936b",
    "live": "#00936b",
    "running": "#2b83c6",
    "committed": "#2b83c6",
    "failed": "#d55e00",
    "lost": "#d55e00",
    "stale": "#d55e00",
    "cancelled": "#c05a94",
    "interrupted": "#c05a94",
}
_GREY: Final = "#8a939b"
_LINE: Final = "1px solid rgba(128,128,128,.35)"
_CELL: Final = "text-align:left;vertical-align:top;padding:2px 10px 2px 4px"
#: Longer text is cut: a card is to be read at a glance.
_LONGEST: Final = 300
_MOST_ROWS: Final = 50
#: Text of a cell that stays on one line.
_SHORT: Final = 24


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def markup(value: object) -> Html:
    """Give a value as HTML: escaped, unless it is HTML already; None and True as people say them."""
    if isinstance(value, Html):
        return value
    if value is None:
        return Html("")
    text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}…"
    return Html(escape(text))


def joined(parts: Iterable[object], between: str = "") -> Html:
    """Put parts together."""
    return Html(escape(between).join(markup(part) for part in parts))


def card(title: object, *parts: object, kind: str = "", state: str = "") -> Html:
    """Give a box with a head.

    Parameters
    ----------
    title : object
        Its name.
    *parts : object
        What stands in it.
    kind : str
        What it is, before the name.
    state : str
        How it stands, after the name.
    """
    mark = chip(state) if state else ""
    head = (
        "<div style='padding:2px 0 4px'>"
        f"<span style='opacity:.7'>{markup(kind)}</span> <b>{markup(title)}</b> {mark}</div>"
    )
    style = f"border-left:3px solid {_GREY};padding:2px 0 2px 12px;margin:4px 0"
    return Html(f"<div style='{style}'>{head}{joined(parts)}</div>")


def chip(state: object) -> Html:
    """Give a word in the colour of what it says."""
    colour = _STATES.get(str(state), _GREY)
    style = f"border:1px solid {colour};border-radius:9px;padding:0 8px;font-size:90%;white-space:nowrap"
    return Html(f"<span style='{style}'>{markup(state)}</span>")


def facts(rows: Mapping[str, object]) -> Html:
    """Give a table of names and values; empty values are left out."""
    lines = "".join(
        f"<tr><th style='{_CELL};font-weight:normal;opacity:.7'>{markup(name)}</th>"
        f"<td style='{_CELL}'>{markup(value)}</td></tr>"
        for name, value in rows.items()
        if value not in ("", None)
    )
    return Html(f"<table style='border:0'>{lines}</table>" if lines else "")


def table(
    head: Sequence[object],
    rows: Sequence[Sequence[object]],
    *,
    most: int = _MOST_ROWS,
    more: int = 0,
) -> Html:
    """Give a table with a head.

    Parameters
    ----------
    head : sequence
        Of its columns.
    rows : sequence of sequence
        Its cells.
    most : int
        Rows that are shown; of the others is said how many they are.
    more : int
        Rows that were not even given.
    """
    tops = "".join(f"<th style='{_CELL};opacity:.7'>{markup(one)}</th>" for one in head)
    lines = "".join(
        "<tr>"
        + "".join(f"<td style='{_cell(one)}'>{markup(one)}</td>" for one in row)
        + "</tr>"
        for row in rows[:most]
    )
    left = max(0, len(rows) - most) + more
    foot = f"<div style='opacity:.7'>and {left:,} more</div>" if left else ""
    return Html(
        f"<div style='overflow-x:auto'><table style='border-collapse:collapse;"
        f"border-bottom:{_LINE}'><thead style='border-bottom:{_LINE}'><tr>{tops}</tr></thead>"
        f"<tbody>{lines}</tbody></table></div>{foot}"
    )


def _cell(value: object) -> str:
    """Give the style of a cell: a few words are not broken."""
    short = not isinstance(value, Html) and len(str(value)) <= _SHORT
    return f"{_CELL};white-space:nowrap" if short else _CELL


def bar(parts: Iterable[tuple[str, float]], says: object, *, wide: str = "9em") -> Html:
    """Give a bar of coloured parts, with words behind it.

    Parameters
    ----------
    parts : iterable of tuple of str and float
        Colour (a constant of ours) and share, from the left; together at most 1.
    says : object
        The words.
    wide : str
        How wide it is.
    """
    pieces = "".join(
        f"<span style='display:inline-block;height:100%;width:{100 * min(max(share, 0.0), 1.0):.1f}%;"
        f"background:{colour}'></span>"
        for colour, share in parts
    )
    style = (
        f"display:inline-block;width:{wide};height:.75em;line-height:0;overflow:hidden;"
        f"white-space:nowrap;border:{_LINE};border-radius:3px;margin-right:.6em"
    )
    line = f"<span style='{style}'>{pieces}</span>{markup(says)}"
    return Html(f"<span style='white-space:nowrap'>{line}</span>")


def link(address: str, says: object = "") -> Html:
    """Give a link to a page; what is no address of a page stays text."""
    words = markup(says or address)
    if not address.startswith(("http://", "https://", "/")):
        return words
    where = escape(address, quote=True)
    look = "color:inherit;text-decoration:underline"
    return Html(
        f"<a href='{where}' target='_blank' rel='noopener' style='{look}'>{words}</a>"
    )
