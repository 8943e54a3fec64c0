"""Replicas on their way out.

Rules:

1. A replica that is *leaving* (released, migrated away, or given up with leave) is listed
   again only after its node has dropped it, whatever the node says of it meanwhile.
2. Nothing is brought to a node that is still dropping an earlier copy of it.
"""

from __future__ import annotations

from tensorcast_dask.scheduler_plugin.state.records import NodeRecord, VersionRecord
from tensorcast_dask.scheduler_plugin.state.replicas import Replicas
from tensorcast_dask.tensors.ids import Generation, NodeId

__all__ = ["Leaving"]


class Leaving:
    """Drops that are decided and not done."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        #: By node and generation, how many orders.
        self._orders: dict[tuple[NodeId, Generation], int] = {}

    def __len__(self) -> int:
        return len(self._orders)

    def begin(self, record: VersionRecord, node: NodeRecord) -> None:
        """Take a replica off the list that its node will be ordered to drop."""
        key = node.node, record.generation
        self._orders[key] = self._orders.get(key, 0) + 1
        self._replicas.strike(record, node.node)

    def end(self, record: VersionRecord, node: NodeRecord) -> None:
        """Take note that the order to drop it has ended."""
        key = node.node, record.generation
        self._orders[key] -= 1
        if not self._orders[key]:
            del self._orders[key]

    def has(self, record: VersionRecord, node: NodeRecord) -> bool:
        """Whether what a node has of a version is about to go."""
        key = node.node, record.generation
        return key in self._orders or record.generation in node.granted
