"""Where new bytes go: far apart, or close together.

Both choose among nodes that take new bytes and have room; None lets the default choose, also
when none has.
"""

from __future__ import annotations

from typing import ClassVar

from tensorcast_dask.policies.views import NodeView, Role, View, Wanted

__all__ = ["Pack", "Spread"]


def _able(view: View, wanted: Wanted) -> list[NodeView]:
    return [
        node
        for node in view.nodes
        if node.placeable and node.free_bytes >= wanted.nbytes
    ]


class Spread:
    """The node with the largest part of its memory free; ties by identity."""

    role: ClassVar[Role] = Role.PLACE

    def decide(self, view: View, wanted: Wanted | None = None) -> str | None:
        """Choose."""
        if wanted is None:
            return None
        able = _able(view, wanted)
        best = min(able, key=lambda one: (-_share(one), one.node), default=None)
        return None if best is None else best.node


class Pack:
    """The fullest node that still has room, so that others can be let go; ties by identity."""

    role: ClassVar[Role] = Role.PLACE

    def decide(self, view: View, wanted: Wanted | None = None) -> str | None:
        """Choose."""
        if wanted is None:
            return None
        able = _able(view, wanted)
        best = min(able, key=lambda one: (_share(one), one.node), default=None)
        return None if best is None else best.node


def _share(node: NodeView) -> float:
    return node.free_bytes / max(1, node.capacity_bytes)
