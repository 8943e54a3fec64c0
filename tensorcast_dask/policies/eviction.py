"""What goes first when a tier is full: weights, by which stores choose among what may go.

A store evicts what weighs least first, and of equal weights what was unused longest. What has
no weight weighs nothing. Never does a weight let something go that must stay: leases, pins,
maps and last copies are the store's and the catalog's own rules.
"""

from __future__ import annotations

from typing import ClassVar

from tensorcast_dask.policies.views import ArtifactView, Role, View, Wanted

__all__ = ["Lru", "ValueAware"]


class Lru:
    """Least recently used: no weights at all. It is the default."""

    role: ClassVar[Role] = Role.EVICT

    def decide(self, view: View, wanted: Wanted | None = None) -> dict[int, float]:  # noqa: ARG002
        """Weigh nothing."""
        return {}


class ValueAware:
    """Keep what would be missed most for the memory that it takes.

    The weight of a version is P(reuse) x cost to get it back / bytes: reads a second, times the
    seconds that a copy from another node takes (by measured bandwidth), for each byte. A version
    with no other copy would have to come from disk: `alone` times as dear. Superseded versions,
    that nobody reads, weigh nothing.

    Parameters
    ----------
    bytes_per_s : float
        Taken for links that were not measured yet.
    latency_s : float
        What getting back costs however small it is.
    alone : float
        How much dearer a version is that no other host holds.
    """

    role: ClassVar[Role] = Role.EVICT

    def __init__(
        self, *, bytes_per_s: float = 1e9, latency_s: float = 0.001, alone: float = 4.0
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.alone = alone

    def decide(self, view: View, wanted: Wanted | None = None) -> dict[int, float]:  # noqa: ARG002
        """Weigh what is read."""
        weights = {one.generation: self.weight(one) for one in view.artifacts}
        return {generation: one for generation, one in weights.items() if one > 0.0}

    def weight(self, artifact: ArtifactView) -> float:
        """Give the worth of a version, for each of its bytes."""
        if not artifact.nbytes:
            return 0.0
        cost_s = artifact.refetch_s
        if cost_s is None:
            cost_s = artifact.nbytes / self.bytes_per_s
        cost_s += self.latency_s
        if artifact.hosts < 2:
            cost_s *= self.alone
        reads_per_s = artifact.reads_per_s if artifact.current else 0.0
        return reads_per_s * cost_s / artifact.nbytes
