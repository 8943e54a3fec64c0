"""How fast bytes really went from node to node: measured by the stores, at their pulls.

Rules:

1. Only transfers of at least `LEAST_BYTES` say how fast a link is; all are counted.
2. A pull from several sources says of each link what came over it in the time of the whole:
   what that link gave *then*, not what it could give alone.
3. Memory is bounded: of many links the one that was silent longest is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tensorcast_dask.tensors.ids import NodeId
from tensorcast_dask.tensors.messages import TaskDone
from tensorcast_dask.tensors.signals import Reading, ewma, rounded

__all__ = ["LEAST_BYTES", "MAX_LINKS", "Bandwidths", "Measured", "Total"]

LEAST_BYTES: Final = 1 << 20
MAX_LINKS: Final = 1024
_ALPHA: Final = 0.3


@dataclass(slots=True)
class Measured:
    """One direction of one pair of nodes."""

    at_s: float = 0.0
    bytes_per_s: float | None = None
    last_bytes_per_s: float = 0.0
    transfers: int = 0
    nbytes: int = 0
    via: str = ""

    @property
    def reading(self) -> Reading:
        """What the signal says."""
        speed = self.bytes_per_s
        return {
            "bytes_per_s": None if speed is None else rounded(speed),
            "last_bytes_per_s": rounded(self.last_bytes_per_s),
            "transfers": self.transfers,
            "bytes": self.nbytes,
            "via": self.via,
        }


@dataclass(slots=True)
class Total:
    """What went over one transport, between all nodes, since the scheduler started."""

    transfers: int = 0
    nbytes: int = 0


class Bandwidths:
    """All links over which something went."""

    def __init__(self) -> None:
        self.totals: dict[str, Total] = {}
        self._links: OrderedDict[tuple[NodeId, NodeId], Measured] = OrderedDict()

    def __len__(self) -> int:
        return len(self._links)

    def transferred(self, node: NodeId, done: TaskDone, *, now_s: float) -> None:
        """Take what a node says of a pull that ended well."""
        shares = done.shares
        if not shares and len(done.sources) == 1:
            shares = (done.moved_bytes,)
        if done.fault is not None or done.seconds <= 0:
            return
        total = self.totals.setdefault(done.via, Total())
        total.transfers += 1
        total.nbytes += sum(shares)
        for source, nbytes in zip(done.sources, shares, strict=False):
            if nbytes > 0 and source != node:
                self._note((source, node), nbytes, done, now_s)

    def _note(
        self, link: tuple[NodeId, NodeId], nbytes: int, done: TaskDone, now_s: float
    ) -> None:
        found = self._links.pop(link, None) or Measured()
        self._links[link] = found
        if len(self._links) > MAX_LINKS:
            self._links.popitem(last=False)
        found.at_s = now_s
        found.transfers += 1
        found.nbytes += nbytes
        found.via = done.via
        if nbytes >= LEAST_BYTES:
            speed = nbytes / done.seconds
            found.last_bytes_per_s = speed
            found.bytes_per_s = ewma(found.bytes_per_s, speed, _ALPHA)

    def get(self, source: NodeId, node: NodeId) -> Measured | None:
        """Find what is known of the way from one node to another."""
        return self._links.get((source, node))

    def best_into(self, node: NodeId) -> float | None:
        """Give the fastest measured way to a node."""
        speeds = [
            one.bytes_per_s
            for (_, target), one in self._links.items()
            if target == node and one.bytes_per_s is not None
        ]
        return max(speeds, default=None)

    def items(self) -> Iterator[tuple[NodeId, NodeId, Measured]]:
        """Go through all of them."""
        for (source, node), found in self._links.items():
            yield source, node, found

    def forget(self, node: NodeId) -> None:
        """Forget a node that is no more."""
        for link in [one for one in self._links if node in one]:
            del self._links[link]
