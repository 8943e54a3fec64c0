"""The page *placement*: which artifact lies on which node, in which tier.

Rules:

1. One page of rows is read, from the catalog as it is now; which rows those are a `Search` says.
2. A cell is one artifact (or group) on one node: as many stripes as tiers, each as high as its
   bytes say, on a logarithmic scale from `LEAST_BYTES` to the largest of the page.
3. Of the versions of an artifact the newest `VERSIONS` are looked at; that there are more is said.
"""

from __future__ import annotations

from itertools import islice
from math import isinf, log2
from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.dashboard.data.search import Grouping, Search, Wanted
from tensorcast_dask.dashboard.data.shared import (
    Cell,
    Columns,
    Told,
    columns,
    duration,
    headline,
    node_name,
    public,
    short,
    text,
)
from tensorcast_dask.tensors.messages import Owner, Tier
from tensorcast_dask.tensors.quantities import human_bytes

if TYPE_CHECKING:
    from tensorcast_dask.dashboard.data.search import Group
    from tensorcast_dask.scheduler_plugin.state.catalog import Catalog
    from tensorcast_dask.scheduler_plugin.state.names import Artifact
    from tensorcast_dask.scheduler_plugin.state.records import (
        NodeRecord,
        Replica,
        VersionRecord,
    )
    from tensorcast_dask.tensors.ids import ArtifactId, NodeId

__all__ = ["NODES", "ROWS", "Place", "placement"]

#: Rows and nodes of one page.
ROWS: Final = 30
NODES: Final = 40
VERSIONS: Final = 16
LEAST_BYTES: Final = 4096
_ORDER: Final = (Tier.DEVICE, Tier.PINNED, Tier.HOST, Tier.DISK)
_LEAST, _MOST = 0.22, 0.84


class Place(msgspec.Struct, frozen=True):
    """Where somebody looks: what is wanted, and which page of rows and of nodes."""

    wanted: Wanted = Wanted()
    page: int = 0
    node_page: int = 0


class _Drawing:
    """Rows and cells in the making; heights are known when all are there."""

    def __init__(self, catalog: Catalog, nodes: list[NodeRecord]) -> None:
        self._catalog = catalog
        self._at = {node.node: x for x, node in enumerate(nodes)}
        self.rows = columns(
            "y", "top", "bottom", "band", "name", "artifact", "note", "state", "kind", "link",
        )  # fmt: skip
        self._cells = columns(
            "x", "y", "width", "height", "tier", "artifact", "node", "what", "bytes",
            "owner", "kept", "mark", "line", "alpha", "edge", "kind", "link",
        )  # fmt: skip
        self._sizes: list[int] = []

    def cells(self) -> Columns:
        """Give the cells with their heights (rule 2)."""
        most = max(self._sizes, default=0)
        self._cells["height"] = [_height(one, most) for one in self._sizes]
        return self._cells

    def _row(self, y: int, name: str, *, note: str, state: str, kind: str) -> None:
        values: dict[str, Cell] = {
            "y": y,
            "top": y - 0.5,
            "bottom": y + 0.5,
            "band": 0.0 if y % 2 else 0.05,
            "name": short(name, 44),
            "artifact": short(name, 400),
            "note": note,
            "state": state,
            "kind": kind,
            "link": name,
        }
        for column, value in values.items():
            self.rows[column].append(value)

    def _stripes(
        self,
        y: int,
        node: NodeId,
        sizes: dict[Tier, int],
        what: dict[Tier, str],
        **facts: Cell,
    ) -> None:
        """Add what one node holds: a stripe for each tier."""
        tiers = [tier for tier in _ORDER if tier in sizes]
        width = 0.84 / len(tiers)
        for number, tier in enumerate(tiers):
            x = self._at[node] + (number - (len(tiers) - 1) / 2) * width
            values: dict[str, Cell] = {
                "x": round(x, 4),
                "y": y,
                "width": round(width * 0.94, 4),
                "tier": str(tier),
                "bytes": human_bytes(sizes[tier]),
                "node": short(self._catalog.nodes.label(node), 60),
                "what": what[tier],
                "line": "",
                "alpha": 1.0,
                "edge": 1.0 if facts.get("line") else 0.0,
                **facts,
                "mark": "" if number else facts.get("mark", ""),
            }
            for column, value in values.items():
                self._cells[column].append(value)
            self._sizes.append(sizes[tier])

    def artifact(self, y: int, name: ArtifactId) -> None:
        """Add the row of an artifact."""
        catalog = self._catalog
        artifact = catalog.names.artifacts.get(name)
        if artifact is None:  # since the search
            self._row(y, name, note="destroyed", state="gone", kind="artifact")
            return
        number = artifact.latest or artifact.newest or next(iter(artifact.versions))
        record = artifact.versions[number]
        state = _stage(catalog, record)
        note = _note(catalog, artifact, record, state)
        self._row(y, name, note=note, state=state, kind="artifact")
        newest = list(islice(reversed(artifact.versions.values()), VERSIONS))
        held: dict[NodeId, list[tuple[VersionRecord, Replica]]] = {}
        for one in newest:
            for node, replica in one.holders.items():
                if node in self._at:
                    held.setdefault(node, []).append((one, replica))
        more = len(artifact.versions) - len(newest)
        for node, replicas in held.items():
            self._cell(y, node, replicas, more, latest=record)

    def _cell(
        self,
        y: int,
        node: NodeId,
        replicas: list[tuple[VersionRecord, Replica]],
        more: int,
        *,
        latest: VersionRecord,
    ) -> None:
        sizes: dict[Tier, int] = {}
        numbers: dict[Tier, list[str]] = {}
        for record, replica in replicas:
            for tier in replica.tiers:
                sizes[tier] = sizes.get(tier, 0) + record.nbytes
                numbers.setdefault(tier, []).append(f"v{record.version}")
        newest = replicas[0][0]
        lent = newest.owner is Owner.CALLER
        gone = all(replica.suspect for _, replica in replicas)
        pinned = _pinned(self._catalog, node, replicas)
        kept = [
            pinned,
            "leased by its owner while that lives" if lent else "",
            "its node is gone, or has not claimed it yet" if gone else "",
        ]
        older = f"; {more:,} older versions not looked at" if more > 0 else ""
        self._stripes(
            y,
            node,
            sizes,
            {tier: _listed(found) + older for tier, found in numbers.items()},
            artifact=short(newest.id, 400),
            owner=f"{newest.owner}; {public(newest.labels) or 'no labels'}",
            kept="; ".join(filter(None, kept)) or "no pin",
            mark="pin" if pinned else "",
            line="gone" if gone else "lent" if lent else "",
            alpha=0.2
            if gone
            else 1.0
            if latest in [one for one, _ in replicas]
            else 0.45,
            kind="artifact",
            link=newest.id,
        )

    def group(self, y: int, group: Group) -> None:
        """Add the row of a group."""
        note = f"{group.artifacts:,} artifacts · {human_bytes(group.nbytes)}"
        if group.lost:
            note += f" · {group.lost:,} lost"
        state = "lost" if group.lost else "group"
        self._row(y, group.name, note=note, state=state, kind="group")
        of_node: dict[NodeId, dict[Tier, list[int]]] = {}
        for (node, tier), held in group.held.items():
            if node in self._at:
                of_node.setdefault(node, {})[tier] = held
        for node, found in of_node.items():
            self._stripes(
                y,
                node,
                {tier: nbytes for tier, (_, nbytes) in found.items()},
                {
                    tier: f"{count:,} latest versions"
                    for tier, (count, _) in found.items()
                },
                artifact=short(group.name, 400),
                owner="several",
                kept="ungroup to see pins and leases",
                kind="group",
                link=group.name,
            )


def _listed(numbers: list[str]) -> str:
    left = len(numbers) - 6
    return ", ".join(numbers[:6]) + (f" and {left} more" if left > 0 else "")


def _pinned(
    catalog: Catalog, node: NodeId, replicas: list[tuple[VersionRecord, Replica]]
) -> str:
    until_s = max(catalog.pins.until_s(one.generation, node) for one, _ in replicas)
    if not until_s:
        return ""
    left_s = until_s - catalog.outbox.now_s
    if isinf(left_s) or left_s > 1e9:
        return "pinned"
    # In steps: a page does not change each time that it is looked at.
    return f"pinned, less than {duration(10 * (left_s // 10 + 1))} more"


def _height(nbytes: int, most: int) -> float:
    span = log2(max(most, 2 * LEAST_BYTES) / LEAST_BYTES)
    share = log2(max(nbytes, LEAST_BYTES) / LEAST_BYTES) / span
    return round(_LEAST + (_MOST - _LEAST) * min(1.0, share), 3)


def _stage(catalog: Catalog, record: VersionRecord) -> str:
    if record.creating:
        return "creating"
    if catalog.holders.is_lost(record):
        return "lost"
    if not catalog.holders.is_readable(record):
        return "awaited"
    return "published" if record.published else "committed"


def _note(
    catalog: Catalog, artifact: Artifact, record: VersionRecord, state: str
) -> str:
    count = len(artifact.versions)
    parts = [f"v{record.version}" + (f" of {count}" if count > 1 else "")]
    parts.append(human_bytes(record.nbytes))
    if state in {"creating", "lost", "awaited"}:
        parts.append(state)
    else:
        hosts = len(catalog.holders.hosts(record))
        if hosts < record.replicas:
            parts.append(f"{hosts} of {record.replicas} hosts")
    return " · ".join(parts)


# ---------------------------------------------------------------- the page
def placement(catalog: Catalog, search: Search, place: Place) -> Told:
    """Make the page."""
    grouped = place.wanted.group is not Grouping.NONE
    total = len(search.groups) if grouped else len(search.ids)
    pages = max(1, -(-total // ROWS))
    page = min(max(0, place.page), pages - 1)
    nodes, node_pages, node_page = _nodes(catalog, place.node_page)
    drawing = _Drawing(catalog, nodes)
    span = slice(page * ROWS, (page + 1) * ROWS)
    if grouped:
        for y, group in enumerate(search.groups[span]):
            drawing.group(y, group)
    else:
        for y, name in enumerate(search.ids[span]):
            drawing.artifact(y, name)
    shown = len(drawing.rows["y"])
    return Told(
        columns={
            "cells": drawing.cells(),
            "rows": drawing.rows,
            "heads": _heads(catalog, nodes),
        },
        texts={
            "head": headline(catalog),
            "found": _found(search, total, page, shown, grouped=grouped),
            "empty": _empty(catalog, search, shown),
            "nodes": _which_nodes(node_page, node_pages, len(nodes)),
        },
        counts={
            "rows": shown,
            "nodes": len(nodes),
            "page": page,
            "pages": pages,
            "node_page": node_page,
            "node_pages": node_pages,
        },
    )


# ---------------------------------------------------------------- nodes
def _nodes(catalog: Catalog, wanted: int) -> tuple[list[NodeRecord], int, int]:
    """Give one page of nodes: those that are here, then those that only something lay on."""
    held = catalog.replicas.by_node
    found = sorted(
        (one for one in catalog.nodes.records.values() if one.live or one.node in held),
        key=lambda one: (not one.live, not one.is_store, one.card.name, one.node),
    )
    pages = max(1, -(-len(found) // NODES))
    page = min(max(0, wanted), pages - 1)
    return found[page * NODES : (page + 1) * NODES], pages, page


def _heads(catalog: Catalog, nodes: list[NodeRecord]) -> Columns:
    heads = columns("x", "name", "node", "host", "state", "color", "note")
    now_s = catalog.outbox.now_s
    for x, node in enumerate(nodes):
        heads["x"].append(x)
        heads["name"].append(short(node.card.name or node.node[:8], 18))
        heads["node"].append(node_name(node))
        heads["host"].append(short(node.host))
        state, color, note = _state(node, now_s)
        heads["state"].append(state)
        heads["color"].append(color)
        held = len(catalog.replicas.by_node.get(node.node, ()))
        heads["note"].append(f"{held:,} replicas; {note}")
    return heads


def _state(node: NodeRecord, now_s: float) -> tuple[str, str, str]:
    if not node.live:
        return "gone", "gone", short(node.gone, 120)
    note = f"lease runs {max(0.0, node.lease_until_s - now_s):.0f} s more"
    if node.draining:
        return "draining", "busy", note
    if not node.attended:
        return "without a worker", "busy", f"{note}; read from, not placed on"
    if node.claiming:
        return "announcing", "busy", note
    kind = "live" if node.is_store else "live, lends its own memory"
    return kind, "live", note


# ---------------------------------------------------------------- texts


def _found(search: Search, total: int, page: int, shown: int, *, grouped: bool) -> str:
    what = "groups" if grouped else "artifacts"
    if not search.over:
        return f"looking: {search.seen:,} of {search.total:,} artifacts"
    if not shown:
        return f"no {what}"
    first = page * ROWS + 1
    size = f", {human_bytes(search.nbytes)} in latest versions"
    return f"{what} {first:,} to {first + shown - 1:,} of {total:,}{size}"


def _empty(catalog: Catalog, search: Search, shown: int) -> str:
    if shown:
        return ""
    if not search.over:
        return "Looking through the catalog…"
    if catalog.names.artifacts:
        return "No artifact fits what is asked for above."
    return (
        "There are no artifacts yet. Each one that is put, loaded or registered is a row here, "
        "and each node that holds it a coloured cell."
    )


def _which_nodes(page: int, pages: int, known: int) -> str:
    if not known:
        return "No node has joined yet: nodes are columns, and come with Dask workers."
    if pages == 1:
        return ""
    return text(
        f"nodes {page * NODES + 1} to {(page + 1) * NODES}, page {page + 1} of {pages}"
    )
