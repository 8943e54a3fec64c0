"""What the pages say in common: columns, names as they are shown, labels that are shown at all.

Rules:

1. A page's data is a pure function of the catalog. It is bounded in what it reads and in what
   it gives, however much there is.
2. Names are given whole to be looked at closely, and short to be drawn. They are plain text:
   whoever makes HTML of them escapes them (`text`).
3. Labels whose key says that they hold a secret are not shown, and cannot be searched for.
"""

from __future__ import annotations

import html
import unicodedata
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from tensorcast_dask.tensors.secrets import is_secret

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tensorcast_dask.scheduler_plugin.state.catalog import Catalog
    from tensorcast_dask.scheduler_plugin.state.records import NodeRecord

__all__ = [
    "Cell",
    "Columns",
    "Told",
    "columns",
    "duration",
    "headline",
    "node_name",
    "public",
    "short",
    "text",
]

Cell: TypeAlias = str | int | float | bool | None
Columns: TypeAlias = dict[str, list[Cell]]

_MOST_LABELS: Final = 8


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """All that one page shows.

    Attributes
    ----------
    columns : dict
        By what is drawn of them.
    texts : dict
        HTML, by place.
    counts : dict
        Numbers that the drawing needs: lengths of axes, pages.
    """

    columns: dict[str, Columns]
    texts: dict[str, str]
    counts: dict[str, int] = {}


def columns(*names: str) -> Columns:
    """Make empty columns."""
    return {name: [] for name in names}


def short(name: str, most: int = 40) -> str:
    """Cut the middle out of a long name; what has no shape becomes a mark."""
    if len(name) > 4 * most:  # what is looked at is bounded too
        name = f"{name[: 2 * most]}…{name[-2 * most :]}"
    seen = "".join(
        one if unicodedata.category(one)[0] not in "CZ" or one == " " else "·"
        for one in name
    )
    if len(seen) <= most:
        return seen
    head = (most - 1) * 2 // 3
    return f"{seen[:head]}…{seen[head + 1 - most :]}"


def text(value: object, most: int = 400) -> str:
    """Make HTML that shows a value as it is."""
    return html.escape(short(str(value), most))


def duration(seconds: float) -> str:
    """Give a time as people read it."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172800 else f"{seconds / 86400:.0f} d"


def public(labels: Mapping[str, str]) -> str:
    """Write the labels that may be shown (rule 3)."""
    shown = [
        f"{short(key)}={short(value)}"
        for key, value in sorted(labels.items())
        if not is_secret(key)
    ]
    more = len(shown) - _MOST_LABELS
    return ", ".join(shown[:_MOST_LABELS]) + (f" and {more} more" if more > 0 else "")


def node_name(node: NodeRecord) -> str:
    """Name a node as the pages do."""
    return short(node.label, 32)


def headline(catalog: Catalog) -> str:
    """Say how much there is."""
    names, replicas = catalog.names, catalog.replicas
    count = sum(map(len, replicas.by_node.values()))
    live = sum(one.live for one in catalog.nodes.records.values())
    parts = [
        _many(len(names.artifacts), "artifact"),
        _many(len(names.versions), "version"),
        _many(count, "replica"),
        _many(live, "node"),
    ]
    said = " · ".join(parts)
    if catalog.outbox.stalled:
        said += f" · <b>the journal cannot write: {text(catalog.outbox.stalled)}</b>"
    return said


def _many(count: int, what: str) -> str:
    return f"<b>{count:,}</b> {what}{'' if count == 1 else 's'}"
