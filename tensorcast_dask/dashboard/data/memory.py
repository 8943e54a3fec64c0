"""The page *memory*: what each tier of each node holds, against its limit.

Rules:

1. A bar is one tier of one node, in shares of its capacity; its parts never overlap. What is
   pinned is taken from what is not evictable, since a pin is why it is not.
2. All figures are the store's last word, with its age; of a node that is gone they are the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.dashboard.data.shared import (
    Cell,
    Columns,
    Told,
    columns,
    duration,
    headline,
    node_name,
    short,
)
from tensorcast_dask.tensors.messages import Tier
from tensorcast_dask.tensors.quantities import human_bytes

if TYPE_CHECKING:
    from tensorcast_dask.scheduler_plugin.state.catalog import Catalog
    from tensorcast_dask.scheduler_plugin.state.records import NodeRecord
    from tensorcast_dask.tensors.messages import TierUse

__all__ = ["PARTS", "TIERS", "Page", "memory"]

#: Bars of one page.
TIERS: Final = 40
#: The parts of a bar from left to right, with what they mean.
PARTS: Final = {
    "pinned": "pinned: promised not to be evicted",
    "kept": "used and not evictable",
    "evictable": "used, may be evicted",
    "reserved": "reserved, being filled",
    "leased": "leased: destroyed here, a reader still maps it",
    "warm": "warm: free, pages kept ready",
}
_ORDER: Final = (Tier.DEVICE, Tier.PINNED, Tier.HOST, Tier.DISK)


class Page(msgspec.Struct, frozen=True):
    """Which page of a list."""

    page: int = 0


def memory(catalog: Catalog, page: Page) -> Told:
    """Make the page."""
    found = [
        (node, tier)
        for node in sorted(
            catalog.nodes.records.values(),
            key=lambda one: (not one.live, one.card.name, one.node),
        )
        for tier in _ORDER
        if tier in node.uses and (node.live or node.node in catalog.replicas.by_node)
    ]
    pages = max(1, -(-len(found) // TIERS))
    number = min(max(0, page.page), pages - 1)
    rows = columns(
        "y", "node", "tier", "state", "label", "total", "used", "capacity", "reserved", "pinned",
        "leased", "evictable", "warm", "shared", "free", "replicas", "device", "age",
    )  # fmt: skip
    parts = columns("y", "left", "right", "part", "what", "bytes", "node", "tier")
    limits = columns("y", "x", "what")
    for y, (node, tier) in enumerate(found[number * TIERS : (number + 1) * TIERS]):
        _row(catalog, rows, y, node=node, tier=tier)
        _parts(parts, y, node=node, tier=tier)
        if tier is Tier.HOST:
            use, limit = node.uses[tier], catalog.settings.pin_limit_fraction
            limits["y"].append(y)
            limits["x"].append(limit)
            bytes_ = human_bytes(use.capacity_bytes * limit)
            limits["what"].append(f"pins may hold {bytes_} of {node_name(node)}")
    shown = len(rows["y"])
    return Told(
        columns={"rows": rows, "parts": parts, "limits": limits},
        texts={
            "head": headline(catalog),
            "found": f"{shown} of {len(found):,} tiers" if len(found) > shown else "",
            "empty": ""
            if shown
            else "No node has told of its memory yet. Each tier of each node is a bar here: "
            "used, reserved, pinned, leased, evictable, against its limit.",
        },
        counts={"rows": shown, "page": number, "pages": pages},
    )


def _row(
    catalog: Catalog,
    rows: Columns,
    y: int,
    *,
    node: NodeRecord,
    tier: Tier,
) -> None:
    use = node.uses[tier]
    heard_s = node.lease_until_s - catalog.nodes.lease_ttl_s
    age_s = max(0.0, catalog.outbox.now_s - heard_s)
    values: dict[str, Cell] = {
        "y": y,
        "node": node_name(node),
        "tier": str(tier),
        "state": "live" if node.live else "gone",
        "label": f"{short(node.card.name or node.node[:8], 24)}  {tier}",
        "total": f"{human_bytes(_taken(use))} of {human_bytes(use.capacity_bytes)}"
        + ("" if node.live else ", gone"),
        "used": use.used_bytes,
        "capacity": use.capacity_bytes,
        "reserved": use.reserved_bytes,
        "pinned": use.pinned_bytes,
        "leased": use.lingering_bytes,
        "evictable": use.evictable_bytes,
        "warm": use.warm_bytes,
        "shared": use.shared_bytes,
        "free": max(0, use.capacity_bytes - _taken(use)),
        "replicas": use.replicas,
        "device": short(use.device),
        "age": duration(age_s) if node.lease_until_s else "never heard",
    }
    for name, value in values.items():
        rows[name].append(value)


def _taken(use: TierUse) -> int:
    return use.used_bytes + use.reserved_bytes + use.lingering_bytes


def _parts(
    parts: Columns,
    y: int,
    *,
    node: NodeRecord,
    tier: Tier,
) -> None:
    use = node.uses[tier]
    evictable = min(use.evictable_bytes, use.used_bytes)
    pinned = min(use.pinned_bytes, use.used_bytes - evictable)
    sizes = {
        "pinned": pinned,
        "kept": use.used_bytes - evictable - pinned,
        "evictable": evictable,
        "reserved": use.reserved_bytes,
        "leased": use.lingering_bytes,
        "warm": min(use.warm_bytes, max(0, use.capacity_bytes - _taken(use))),
    }
    whole = max(use.capacity_bytes, sum(sizes.values()), 1)
    left = 0.0
    for part, nbytes in sizes.items():
        if nbytes <= 0:
            continue
        right = left + nbytes / whole
        parts["y"].append(y)
        parts["left"].append(round(left, 5))
        parts["right"].append(round(right, 5))
        parts["part"].append(part)
        parts["what"].append(PARTS[part])
        parts["bytes"].append(
            f"{human_bytes(nbytes)} of {human_bytes(use.capacity_bytes)}"
        )
        parts["node"].append(node_name(node))
        parts["tier"].append(str(tier))
        left = right
