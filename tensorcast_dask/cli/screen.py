"""What `tensorcast top` shows: rows made of signals, and drawn.

Rules:

1. What is shown is decided from what was read alone, so that it can be tested without a terminal.
2. The busiest stand first, and only as many as there is room for; the rest is counted.
3. Names are text: nothing in one is taken for markup or a control character.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from tensorcast_dask.tensors.quantities import human_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from tensorcast_dask.tensors.signals import Signal

__all__ = ["Frame", "Table", "draw", "frame_of"]

_BAR: Final = 12
_PERCENT: Final = 100.0


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """One table; `more` rows were left out."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    more: int = 0


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One picture."""

    head: str
    nodes: Table
    artifacts: Table
    transfers: Table


def frame_of(
    signals: Mapping[str, Signal],
    transfers: Sequence[Sequence[Any]],
    *,
    rows: int,
) -> Frame:
    """Make a picture.

    Parameters
    ----------
    signals : mapping of str to Signal
        Those of nodes, links, artifacts and the catalog.
    transfers : sequence of rows
        Id, kind, node, status, bytes done, bytes in all, seconds, way; the newest last.
    rows : int
        How many rows a table may have.
    """
    names = _names(signals)
    counts = signals.get("catalog/counts")
    told = {} if counts is None else counts.value
    head = "  ".join(
        f"{name} {told.get(name, 0)}"
        for name in ("nodes", "artifacts", "operations", "plans", "pins", "sessions")
    )
    return Frame(
        head=head,
        nodes=_cut("nodes", _NODE, _node_rows(signals), rows),
        artifacts=_cut("artifacts", _ARTIFACT, _artifact_rows(signals), rows),
        transfers=_cut(
            "transfers", _TRANSFER, _transfer_rows(transfers, signals, names), rows
        ),
    )


_NODE: Final = (
    "node",
    "tier",
    "used",
    "of",
    "",
    "reserved",
    "pinned",
    "replicas",
    "queue",
    "",
)
_ARTIFACT: Final = ("artifact", "version", "bytes", "replicas", "hosts", "reads/s", "")
_TRANSFER: Final = ("what", "how", "to", "bytes", "rate", "status")


def _cut(
    title: str, columns: tuple[str, ...], found: list[tuple[str, ...]], rows: int
) -> Table:
    more = max(0, len(found) - rows)
    return Table(title=title, columns=columns, rows=found[:rows], more=more)


def _names(signals: Mapping[str, Signal]) -> dict[str, str]:
    """Give the names of nodes by their identities."""
    return {
        name.split("/")[1]: _plain(one.value.get("name") or name.split("/")[1][:8])
        for name, one in signals.items()
        if name.startswith("node/")
    }


def _node_rows(signals: Mapping[str, Signal]) -> list[tuple[str, ...]]:
    found = []
    for name, one in signals.items():
        family, _, rest = name.partition("/")
        node, _, tier = rest.partition("/")
        if family != "node" or tier == "orders":
            continue
        value = one.value
        orders = signals.get(f"node/{node}/orders")
        busy = {} if orders is None else orders.value
        used, capacity = _int(value, "used_bytes"), _int(value, "capacity_bytes")
        share = used / capacity if capacity else 0.0
        state = "stale" if not one.fresh else "draining" if busy.get("draining") else ""
        if not state and busy.get("attended") is False:
            state = "no worker"
        row = (
            _plain(value.get("name") or node[:8]),
            tier,
            human_bytes(used),
            human_bytes(capacity),
            _bar(share),
            human_bytes(_int(value, "reserved_bytes")),
            human_bytes(_int(value, "pinned_bytes")),
            str(_int(value, "replicas")),
            str(_int(busy, "queue")),
            state,
        )
        found.append((-share, row[0], row))
    return [row for *_, row in sorted(found)]


def _artifact_rows(signals: Mapping[str, Signal]) -> list[tuple[str, ...]]:
    found = []
    for name, one in signals.items():
        if not name.startswith("artifact/"):
            continue
        value, id_ = one.value, _plain(name.removeprefix("artifact/"))
        heat = float(value.get("reads_per_s") or 0.0)
        state = "lost" if value.get("lost") else "pinned" if value.get("pinned") else ""
        if _int(value, "missing"):
            state = f"{_int(value, 'missing')} missing"
        nbytes = _int(value, "bytes")
        row = (
            id_,
            str(value.get("latest") or value.get("newest") or ""),
            human_bytes(nbytes),
            str(_int(value, "replicas")),
            str(_int(value, "hosts")),
            f"{heat:.2f}",
            state,
        )
        found.append((-heat, -nbytes, id_, row))
    return [row for *_, row in sorted(found)]


def _transfer_rows(
    transfers: Sequence[Sequence[Any]],
    signals: Mapping[str, Signal],
    names: Mapping[str, str],
) -> list[tuple[str, ...]]:
    live: list[tuple[str, ...]] = [
        (
            _plain(id_),
            str(kind),
            names.get(node, str(node)[:8]),
            f"{human_bytes(done or 0)} of {human_bytes(total or 0)}",
            f"{human_bytes((done or 0) / seconds)}/s" if seconds else "",
            f"{status} {via}".strip(),
        )
        for id_, kind, node, status, done, total, seconds, via in reversed(transfers)
    ]
    links: list[tuple[str, ...]] = [
        (
            f"{names.get(source, source[:8])} -> {names.get(target, target[:8])}",
            "link",
            names.get(target, target[:8]),
            human_bytes(_int(one.value, "bytes")),
            f"{human_bytes(float(one.value.get('bytes_per_s') or 0.0))}/s",
            f"{_int(one.value, 'transfers')} by {one.value.get('via')}",
        )
        for name, one in sorted(signals.items())
        if name.startswith("link/")
        for _, source, target in [name.split("/", 2)]
    ]
    running = [row for row in live if row[-1].startswith("running")]
    return running + links + [row for row in live if row not in running]


def _int(value: Mapping[str, Any], name: str) -> int:
    return int(value.get(name) or 0)


def _plain(text: object) -> str:
    return "".join(one if one.isprintable() else "?" for one in str(text))


def _bar(share: float) -> str:
    full = min(_BAR, round(share * _BAR))
    return f"{'#' * full}{'.' * (_BAR - full)} {share * _PERCENT:3.0f}%"


def draw(frame: Frame) -> RenderableType:
    """Draw a picture for a terminal."""
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    parts: list[RenderableType] = [Text(frame.head, style="bold", no_wrap=True)]
    for table in (frame.nodes, frame.artifacts, frame.transfers):
        more = f" ({table.more} more)" if table.more else ""
        drawn = RichTable(
            title=Text(table.title + more),
            title_justify="left",
            header_style="bold",
            expand=True,
            box=None,
        )
        for column in table.columns:
            drawn.add_column(column, no_wrap=True, overflow="ellipsis")
        for row in table.rows:
            drawn.add_row(*(Text(cell) for cell in row))
        parts.append(drawn)
    return Group(*parts)
