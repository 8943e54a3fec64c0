"""Who holds what, as readers may be told.

Rules:

1. A replica is *listed* while its node's lease runs and the node's current life has
   claimed it. Only listed replicas are told to readers and counted as copies.
2. A replica that is not claimed yet is *suspect*. It is *awaited* while its node is
   sending its inventory, or the catalog has just restarted. A version with no listed and
   no awaited replica is lost.
3. Whoever needs to know waits until it is known, not longer.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorcast_dask.exceptions import DataLost, OwnerGone, TensorCastError
from tensorcast_dask.scheduler_plugin.state.nodes import Nodes
from tensorcast_dask.scheduler_plugin.state.outbox import Outbox
from tensorcast_dask.scheduler_plugin.state.records import (
    NEAREST,
    NO_HOST,
    NodeRecord,
    VersionRecord,
)
from tensorcast_dask.tensors.ids import Generation, HostId, NodeId
from tensorcast_dask.tensors.messages import Fact, Location, Owner

__all__ = ["Holders"]


class Holders:
    """Questions about the holders of versions.

    Attributes
    ----------
    awaited_until_s : float
        Until when suspect replicas of silent nodes are awaited (set at a restart).
    """

    def __init__(self, outbox: Outbox, nodes: Nodes) -> None:
        self._outbox = outbox
        self._nodes = nodes
        self.awaited_until_s = 0.0
        self._waiting: dict[Generation, list[Callable[[], None]]] = {}

    def listed(self, record: VersionRecord) -> list[NodeRecord]:
        """Live nodes with a claimed replica, in order of arrival."""
        records = self._nodes.records
        return [
            node
            for name, replica in record.holders.items()
            if not replica.suspect
            and (node := records.get(name)) is not None
            and node.live
        ]

    def staying(self, record: VersionRecord) -> list[NodeRecord]:
        """List holders that are not being drained: only these let another go."""
        return [node for node in self.listed(record) if not node.draining]

    def hosts(self, record: VersionRecord) -> set[HostId]:
        """Distinct hosts with a listed replica."""
        return {node.host for node in self.listed(record)}

    def locations(
        self, record: VersionRecord, *, host: HostId = NO_HOST
    ) -> tuple[Location, ...]:
        """Tell the listed replicas, best first for a reader on `host`."""
        found = [
            Location(card=node.card, tier=record.holders[node.node].nearest)
            for node in self.listed(record)
        ]
        found.sort(key=lambda one: (one.card.host != host, NEAREST.index(one.tier)))
        return tuple(found)

    def is_readable(self, record: VersionRecord) -> bool:
        """Whether a copy is listed."""
        records = self._nodes.records
        for name, replica in record.holders.items():
            if not replica.suspect and records[name].live:
                return True
        return False

    def is_awaited(self, record: VersionRecord) -> bool:
        """Whether a copy may still be claimed."""
        if not record.holders:
            return False
        if self._outbox.now_s < self.awaited_until_s:
            return True
        records = self._nodes.records
        return any(
            replica.suspect and records[name].claiming
            for name, replica in record.holders.items()
        )

    def is_lost(self, record: VersionRecord) -> bool:
        """No copy is left, as far as can be known."""
        return not (
            record.creating or self.is_readable(record) or self.is_awaited(record)
        )

    def label(self, node: NodeId) -> str:
        """Name a node in a message."""
        return self._nodes.label(node)

    def absence(self, record: VersionRecord) -> TensorCastError:
        """Why a version that is lost cannot be read."""
        holders = list(record.holders) or [record.last_holder]
        names = ", ".join(self._nodes.label(name) for name in holders if name)
        facts: dict[str, Fact] = {
            "id": record.id,
            "version": record.version,
            "generation": record.generation,
            "nodes": names,
        }
        what = f"version {record.version} of {record.id!r}"
        if record.owner is Owner.CALLER:
            message = (
                f"the process that registered {what} is gone ({names or 'it let go'}) and "
                "its memory with it; register again or ask for a published version"
            )
            return OwnerGone(message, facts)
        message = (
            f"{what} is lost: its last copy was on {names or 'a node that dropped it'}; "
            "destroy it and put it again"
        )
        return DataLost(message, facts)

    def when_known(self, record: VersionRecord, act: Callable[[], None]) -> None:
        """Act once it is told whether the version can be read, at once when it is."""
        if self.is_readable(record) or not self.is_awaited(record):
            act()
        else:
            self._waiting.setdefault(record.generation, []).append(act)

    def settle(self, generation: Generation) -> None:
        """Wake whoever waits for news of a version."""
        for act in self._waiting.pop(generation, ()):
            act()
