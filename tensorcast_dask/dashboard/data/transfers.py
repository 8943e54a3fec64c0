"""The page *transfers*: what moves now, how fast links were, and who gives most of it.

Rules:

1. A flow is a copy under way as the catalog knows it; its bytes are what its node last said.
   Its speed is the mean since it began.
2. Bandwidths are those that stores measured at their pulls (`bandwidths`), the nodes with the
   most bytes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.dashboard.data.shared import (
    Columns,
    Told,
    columns,
    duration,
    headline,
    short,
)
from tensorcast_dask.tensors.messages import DoPull
from tensorcast_dask.tensors.quantities import human_bytes

if TYPE_CHECKING:
    from tensorcast_dask.scheduler_plugin.state.bandwidths import Measured
    from tensorcast_dask.scheduler_plugin.state.catalog import Catalog
    from tensorcast_dask.scheduler_plugin.state.moves import Move
    from tensorcast_dask.tensors.ids import NodeId

__all__ = ["FLOWS", "NODES", "Now", "transfers"]

#: Most flows that are listed, and most nodes of the matrix.
FLOWS: Final = 100
NODES: Final = 24
_OLD_S: Final = 300.0
#: From here on a square is dark.
_FAST: Final = 1.6e9


class Now(msgspec.Struct, frozen=True):
    """What moves now: there is nothing to choose."""


def transfers(catalog: Catalog) -> Told:
    """Make the page."""
    moves = catalog.moves.under_way
    links = list(catalog.observed.bandwidths.items())
    flows = columns(
        "artifact", "version", "source", "target", "tier", "done", "total", "share",
        "speed", "age", "why", "tries", "link",
    )  # fmt: skip
    for move in moves[:FLOWS]:
        _flow(catalog, flows, move)
    given: dict[NodeId, list[int]] = {}
    busy: dict[NodeId, int] = {}
    for source, target, found in links:
        given.setdefault(source, [0, 0])
        given[source][0] += found.nbytes
        given[source][1] += found.transfers
        for node in (source, target):
            busy[node] = busy.get(node, 0) + found.nbytes
    nodes = sorted(busy, key=lambda one: (-busy[one], one))[:NODES]
    nodes.sort(key=lambda one: (catalog.nodes.label(one), one))
    total = sum(nbytes for nbytes, _ in given.values())
    moving = (
        f"{len(moves):,} under way"
        if moves
        else "Nothing moves now. Copies under way are listed here, with bytes and speed."
    )
    if len(moves) > FLOWS:
        moving += f", the oldest {FLOWS} are listed"
    return Told(
        columns={
            "flows": flows,
            "matrix": _matrix(catalog, links, nodes),
            "axis": _axis(catalog, nodes),
            "sources": _sources(catalog, given, total),
        },
        texts={
            "head": headline(catalog),
            "found": moving,
            "total": f"{human_bytes(total)} over {len(links):,} links"
            if links
            else "No bytes have gone from node to node yet. Each pair of nodes between which a "
            "copy goes is a square here, with the speed that was measured.",
            "sources": ""
            if links
            else "Which nodes the bytes come from is shown here.",
        },
        counts={
            "nodes": len(nodes),
            "sources": min(len(given), NODES),
            "flows": min(len(moves), FLOWS),
        },
    )


def _label(catalog: Catalog, node: NodeId) -> str:
    return short(catalog.nodes.label(node), 26)


def _flow(catalog: Catalog, flows: Columns, move: Move) -> None:
    task, record = move.task, move.record
    done, total = move.progress()
    seconds = max(0.0, catalog.outbox.now_s - move.started_s)
    order = task.order if task is not None else None
    sources = order.sources if isinstance(order, DoPull) else ()
    names = [_label(catalog, one.card.node) for one in sources[:3]]
    if len(sources) > 3:
        names.append(f"{len(sources) - 3} more")
    flows["artifact"].append(short(record.id))
    flows["version"].append(record.version)
    flows["source"].append(", ".join(names) or "rests before another try")
    flows["target"].append(_label(catalog, move.node.node))
    flows["tier"].append(str(move.tier))
    flows["done"].append(done)
    flows["total"].append(total)
    flows["share"].append(round(done / total, 4) if total else 0.0)
    flows["speed"].append(
        f"{human_bytes(done / seconds)}/s" if done and seconds > 0.05 else "-"
    )
    flows["age"].append(duration(seconds))
    flows["why"].append(short(move.why, 60))
    flows["tries"].append(move.attempts)
    flows["link"].append(record.id)


def _axis(catalog: Catalog, nodes: list[NodeId]) -> Columns:
    axis = columns("at", "name", "node")
    for number, node in enumerate(nodes):
        record = catalog.nodes.records.get(node)
        axis["at"].append(number)
        name = record.card.name if record is not None else ""
        axis["name"].append(short(name or node[:8], 14))
        axis["node"].append(_label(catalog, node))
    return axis


def _matrix(
    catalog: Catalog, links: list[tuple[NodeId, NodeId, Measured]], nodes: list[NodeId]
) -> Columns:
    at = {node: number for number, node in enumerate(nodes)}
    matrix = columns(
        "x", "y", "value", "alpha", "text", "ink", "source", "target", "what"
    )
    now_s = catalog.outbox.now_s
    for source, target, found in links:
        if source not in at or target not in at:
            continue
        speed, age_s = found.bytes_per_s, max(0.0, now_s - found.at_s)
        matrix["x"].append(at[target])
        matrix["y"].append(at[source])
        matrix["value"].append(0.0 if speed is None else round(speed / 1e9, 4))
        matrix["alpha"].append(0.45 if age_s > _OLD_S else 1.0)
        matrix["text"].append("small" if speed is None else _speed(speed))
        matrix["ink"].append(
            "#ffffff" if speed is not None and speed > _FAST else "#10222f"
        )
        matrix["source"].append(_label(catalog, source))
        matrix["target"].append(_label(catalog, target))
        said = (
            "no pull was large enough to measure"
            if speed is None
            else f"{_speed(speed)}B/s"
        )
        count = f"{found.transfers:,} pulls, {human_bytes(found.nbytes)}"
        via = f" by {short(found.via)}" if found.via else ""
        matrix["what"].append(f"{said}; {count}{via}, the last {duration(age_s)} ago")
    return matrix


def _speed(bytes_per_s: float) -> str:
    """Write a speed into a square: in G or M bytes a second."""
    if bytes_per_s >= 995e6:
        return f"{bytes_per_s / 1e9:.1f} G"
    return f"{bytes_per_s / 1e6:.{0 if bytes_per_s >= 10e6 else 1}f} M"


def _sources(catalog: Catalog, given: dict[NodeId, list[int]], total: int) -> Columns:
    sources = columns("y", "name", "node", "share", "text")
    order = sorted(given, key=lambda one: (-given[one][0], one))[:NODES]
    for y, node in enumerate(order):
        nbytes, count = given[node]
        share = nbytes / total if total else 0.0
        sources["y"].append(y)
        record = catalog.nodes.records.get(node)
        name = record.card.name if record is not None else ""
        sources["name"].append(short(name or node[:8], 14))
        sources["node"].append(_label(catalog, node))
        sources["share"].append(round(share, 4))
        sources["text"].append(f"{share:.0%}  {human_bytes(nbytes)} in {count:,} pulls")
    return sources
