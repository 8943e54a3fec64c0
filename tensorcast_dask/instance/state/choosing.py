"""Which store of its host a process attaches to.

Rules:

1. Among the stores of one cluster: the one that was named, else the only one that runs.
   Several are an error that lists them: nothing is guessed.
2. Among its stores: the one that was named, by identity (or its beginning) or by its worker's
   name; else the one with the fewest instances.
"""

from __future__ import annotations

import msgspec

from tensorcast_dask.exceptions import InvalidArgument, NotFound
from tensorcast_dask.tensors.messages import NodeCard

__all__ = ["Found", "choose"]


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster's stores on this host."""

    #: How people may name it: the folder's name first.
    names: tuple[str, ...]
    cards: tuple[NodeCard, ...]

    @property
    def label(self) -> str:
        """How messages name it."""
        workers = ", ".join(sorted(card.name or card.node[:8] for card in self.cards))
        return f"{' = '.join(name for name in self.names if name)} (nodes {workers})"


def choose(
    found: list[Found], *, cluster: str = "", node: str = ""
) -> tuple[NodeCard, str]:
    """Choose a store; give its card and why.

    Parameters
    ----------
    found : list of Found
        Every cluster that has a store on this host.
    cluster, node : str
        What was asked for; "" where nothing was.

    Raises
    ------
    NotFound, InvalidArgument
        When there is none, or more than one that fits.
    """
    there = [one for one in found if one.cards]
    if cluster:
        there = [one for one in there if cluster in one.names]
    if not there:
        which = f"cluster {cluster!r}" if cluster else "any cluster"
        known = "; ".join(one.label for one in found if one.cards)
        message = (
            f"no node of {which} runs on this host under this run directory"
            f"{f'; there are: {known}' if known else ''}; start a worker here, say cluster= "
            "(TENSORCAST_CLUSTER), or have the run directory of the workers (TENSORCAST_RUN_DIR)"
        )
        raise NotFound(message)
    if len(there) > 1:
        known = "; ".join(one.label for one in there)
        message = f"several clusters run here: {known}; say which with cluster= (TENSORCAST_CLUSTER)"
        raise InvalidArgument(message, {"clusters": len(there)})
    return _node(there[0], node)


def _node(found: Found, node: str) -> tuple[NodeCard, str]:
    if node:
        fit = [
            card
            for card in found.cards
            if node in {card.node, card.name, card.worker} or card.node.startswith(node)
        ]
        if len(fit) != 1:
            message = (
                f"{len(fit)} nodes here are {node!r}; there are {found.label}: name one with "
                "node= (TENSORCAST_NODE)"
            )
            raise NotFound(message)
        return fit[0], "asked for by name"
    least = min(found.cards, key=lambda card: (card.instances, card.node))
    if len(found.cards) == 1:
        return least, "the only node here"
    return (
        least,
        f"fewest instances ({least.instances}) of {len(found.cards)} nodes here",
    )
