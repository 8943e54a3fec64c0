"""Which artifact lies where, as a table: artifacts down, nodes across, a mark for each tier.

Rule: what is known is drawn, in the order in which it was given; equal grids are equal text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tensorcast_dask.notebook.cards import chip_of_tier, use_bar
from tensorcast_dask.notebook.markup import Html, card, joined, table
from tensorcast_dask.tensors.messages import Owner, Stage
from tensorcast_dask.tensors.quantities import human_bytes

if TYPE_CHECKING:
    from tensorcast_dask.tensors.messages import ArtifactInfo, Location, NodeState

__all__ = ["Grid", "grid_html", "grid_text", "grid_words"]

_NODES: Final = 20


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is where.

    Attributes
    ----------
    nodes : tuple of NodeState
        Across, by name.
    artifacts : tuple of ArtifactInfo
        Down.
    places : dict of int to tuple of Location
        By generation.
    more : bool
        There are more artifacts than were looked at.
    """

    nodes: tuple[NodeState, ...] = ()
    artifacts: tuple[ArtifactInfo, ...] = ()
    places: dict[int, tuple[Location, ...]] = field(default_factory=dict)
    more: bool = False

    def tiers(self, info: ArtifactInfo, node: str) -> list[str]:
        """Give the tiers of a node in which an artifact lies."""
        places = self.places.get(info.generation, ())
        return [str(one.tier) for one in places if one.card.node == node]

    def elsewhere(self, info: ArtifactInfo) -> list[str]:
        """Give who has it and is no column: processes that lend it, nodes that just came."""
        known = {one.card.node for one in self.nodes[:_NODES]}
        places = self.places.get(info.generation, ())
        return [_name(one.card) for one in places if one.card.node not in known]


def grid_html(grid: Grid, *, title: str, state: str) -> str:
    """Draw it.

    Parameters
    ----------
    grid : Grid
        What is where.
    title : str
        Which artifacts these are.
    state : str
        Whether it still changes.
    """
    shown = grid.nodes[:_NODES]
    beyond = any(grid.elsewhere(info) for info in grid.artifacts)
    head = [
        "artifact",
        "bytes",
        *(_head(node) for node in shown),
        *(["elsewhere"] if beyond else []),
    ]
    rows = [
        [
            _artifact(info),
            human_bytes(info.nbytes),
            *(
                joined((chip_of_tier(t) for t in grid.tiers(info, node.card.node)), " ")
                for node in shown
            ),
            *([", ".join(grid.elsewhere(info))] if beyond else []),
        ]
        for info in grid.artifacts
    ]
    parts: list[object] = [
        table(head, rows, most=len(rows)) if rows else "no artifacts"
    ]
    if grid.more:
        parts.append(Html("<div style='opacity:.7'>and more: look for a prefix</div>"))
    if len(grid.nodes) > _NODES:
        parts.append(
            f"{len(grid.nodes) - _NODES} more nodes are counted under elsewhere"
        )
    return card(title, *parts, kind="placement", state=state)


def _head(node: NodeState) -> Html:
    away = "" if node.attended else " (without a worker)"
    bars = [
        use_bar(tier, use, wide="5em")
        for tier, use in node.uses.items()
        if use.capacity_bytes
    ]
    return joined(
        (_name(node.card) + away, *(joined((Html("<br/>"), one)) for one in bars))
    )


def _artifact(info: ArtifactInfo) -> Html:
    small = Html("<span style='opacity:.7'>")
    words = grid_words(info)
    return joined(
        (info.id, Html(" "), small, f"v{info.version} {words}", Html("</span>"))
    )


def grid_words(info: ArtifactInfo) -> str:
    """Say what is not as usual."""
    said = [
        "" if info.stage is Stage.PUBLISHED else str(info.stage),
        "lent by its owner" if info.owner is Owner.CALLER else "",
        "degraded" if info.degraded else "",
    ]
    return ", ".join(one for one in said if one)


def grid_text(grid: Grid) -> str:
    """Write it as text, a line an artifact."""
    names = {one.card.node: _name(one.card) for one in grid.nodes}
    lines = []
    for info in grid.artifacts:
        where = [
            f"{names.get(one.card.node) or _name(one.card)}:{one.tier}"
            for one in grid.places.get(info.generation, ())
        ]
        words = grid_words(info)
        says = f"{info.id} v{info.version}{words and f' ({words})'}"
        lines.append(
            f"{says}  {human_bytes(info.nbytes)}  {' '.join(where) or 'nowhere'}"
        )
    return "\n".join([*lines, *(["and more: look for a prefix"] if grid.more else [])])


def _name(card: object) -> str:
    return getattr(card, "name", "") or str(getattr(card, "node", ""))[:8]
