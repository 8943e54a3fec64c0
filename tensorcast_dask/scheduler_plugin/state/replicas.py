"""Who comes to hold what, and who may forget it.

Rules:

1. That a version is lost is said once; a node that brings a copy later makes it found
   again. Of many that are lost at one instant the log names `NAMED`; events name all.
2. The last listed copy is never given up: a node may drop a replica by itself only after
   `MayDrop`, which strikes it from the list first.
3. What a holder is told (`DoMark`) is what was last told it, changed: never again the same
   on one link.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tensorcast_dask.scheduler_plugin.state.events import Row
from tensorcast_dask.scheduler_plugin.state.holders import Holders
from tensorcast_dask.scheduler_plugin.state.names import Names
from tensorcast_dask.scheduler_plugin.state.outbox import Outbox
from tensorcast_dask.scheduler_plugin.state.pins import Pins
from tensorcast_dask.scheduler_plugin.state.records import (
    NO_NODE,
    NodeRecord,
    Replica,
    VersionRecord,
    gone_rows,
    version_row,
)
from tensorcast_dask.tensors.ids import Generation, NodeId
from tensorcast_dask.tensors.messages import DoMark, Tier

__all__ = ["NAMED", "Replicas"]

#: Versions lost at one instant that the log names; a node may have had very many.
NAMED: Final = 20


class Replicas:
    """The holders of every version.

    Attributes
    ----------
    by_node : dict
        Versions by holder; mirrors `VersionRecord.holders`.
    """

    def __init__(
        self, outbox: Outbox, names: Names, holders: Holders, pins: Pins
    ) -> None:
        self._outbox = outbox
        self._names = names
        self._holders = holders
        self._pins = pins
        self.by_node: dict[NodeId, dict[Generation, VersionRecord]] = {}
        #: When something was lost last, and how much at that instant.
        self._lost_s, self._lost = 0.0, 0
        #: Told of each version whose holders, pins or publication changed.
        self.on_remark: Callable[[VersionRecord], None] = _nobody

    # ------------------------------------------------------------ changes
    def add(
        self,
        record: VersionRecord,
        node: NodeRecord,
        tier: Tier,
        *,
        published: bool = False,
        write: bool = True,
    ) -> None:
        """List a replica in a tier, which its node takes for published or not.

        `write` False leaves the row to the caller.
        """
        replica = record.holders.get(node.node)
        changed = True
        if replica is None:
            record.holders[node.node] = Replica(
                node=node.node, tiers=(tier,), told=(published, False, 0.0)
            )
            self.by_node.setdefault(node.node, {})[record.generation] = record
        elif replica.suspect:
            changed = replica.tiers != (tier,)
            replica.tiers, replica.suspect = (tier,), False
            replica.told = None
        elif tier not in replica.tiers:
            replica.tiers = (*replica.tiers, tier)
        else:
            changed = False
        if changed and write:
            self._write(record)
        if record.said_lost:
            record.said_lost = False
            self._outbox.emit("found", id=record.id, version=record.version)
        self.remark(record)
        self._holders.settle(record.generation)

    def drop_tier(self, record: VersionRecord, node: NodeRecord, tier: Tier) -> None:
        """Take one tier of a replica off the list."""
        replica = record.holders.get(node.node)
        if replica is None or tier not in replica.tiers:
            return
        left = tuple(one for one in replica.tiers if one != tier)
        if left:
            replica.tiers = left
            self._write(record)
        else:
            self.strike(record, node.node)

    def strike(self, record: VersionRecord, node: NodeId) -> None:
        """Take a holder off the list."""
        if record.holders.pop(node, None) is None:
            return
        self._unlink(record, node)
        record.last_holder = node
        self._write(record)
        self.remark(record)
        self._say_lost(record, last=node)

    def erase(self, record: VersionRecord) -> None:
        """Take a committed version out of catalog and journal."""
        for view in self._names.remove(record):
            self._outbox.persist(Row(kind="view", key=view.id, blob=None), view.id)
        for row in gone_rows(record):
            self._outbox.persist(row, record.id, record.generation)
        for node in list(record.holders):
            self._unlink(record, node)
        record.holders.clear()
        self._holders.settle(record.generation)

    def _unlink(self, record: VersionRecord, node: NodeId) -> None:
        held = self.by_node[node]
        del held[record.generation]
        if not held:
            del self.by_node[node]

    def _write(self, record: VersionRecord) -> None:
        """Journal a version as it is now; nobody waits for a change of holders."""
        if not record.creating and record.generation in self._names.versions:
            self._outbox.persist(version_row(record))

    # ------------------------------------------------------------ lives of nodes
    def forget_told(self, node: NodeRecord) -> None:
        """Doubt what a node was told: on a link that broke it may have got lost."""
        for record in self.by_node.get(node.node, {}).values():
            record.holders[node.node].told = None

    def suspect(self, node: NodeRecord) -> None:
        """Doubt what a node held in an earlier life."""
        for record in list(self.by_node.get(node.node, {}).values()):
            replica = record.holders[node.node]
            if not replica.suspect:
                replica.suspect = True
                self.remark(record)
            if not node.claiming:
                self._say_lost(record, last=node.node)

    def claim_rest(self, node: NodeRecord) -> None:
        """Strike what a node's complete inventory did not claim."""
        for generation, record in list(self.by_node.get(node.node, {}).items()):
            tiers = node.claimed.get(generation)
            if tiers is None:
                self.strike(record, node.node)
            elif record.holders[node.node].tiers != tiers:
                record.holders[node.node].tiers = tiers
                self._write(record)

    def recovery_over(self) -> None:
        """Say what nobody has claimed in time."""
        for record in list(self._names.versions.values()):
            if not record.creating:
                self._say_lost(record)

    def _say_lost(self, record: VersionRecord, last: NodeId = NO_NODE) -> None:
        """Say that a version is lost, once, when it is; wake who waits for it."""
        if record.said_lost or not self._holders.is_lost(record):
            return
        record.said_lost = True
        name = self._holders.label(last) if last else ""
        where = name or "nodes that did not come back"
        if self._lost_s != self._outbox.now_s:
            self._lost_s, self._lost = self._outbox.now_s, 0
        self._lost += 1
        if self._lost <= NAMED:
            self._outbox.log(
                "warning",
                f"version {record.version} of {record.id!r} is lost: no copy is left "
                f"(last on {where})",
            )
        elif self._lost == NAMED + 1:
            self._outbox.log(
                "warning",
                f"more versions are lost with what was last on {where}; `tensorcast ls -a` "
                "shows all of them",
            )
        self._outbox.emit(
            "lost",
            id=record.id,
            version=record.version,
            generation=record.generation,
            node=last,
        )
        self._holders.settle(record.generation)

    # ------------------------------------------------------------ leave to drop
    def spare(self, record: VersionRecord, node: NodeRecord) -> bool:
        """Whether a node's replica may go: enough others are listed elsewhere, to stay."""
        if record.creating:
            return False
        others = [one for one in self._holders.staying(record) if one is not node]
        hosts = {one.host for one in others}
        return len(hosts) >= max(record.replicas, 1)

    def may_drop(self, record: VersionRecord, node: NodeRecord) -> bool:
        """Whether a node may drop all it has of a version, now."""
        return self.spare(record, node) and not self._pins.until_s(
            record.generation, node.node
        )

    def remark(self, record: VersionRecord) -> None:
        """Tell holders what changed for them: published, spare, pinned."""
        if record.creating:
            return
        self.on_remark(record)
        now_s = self._outbox.now_s
        for node in self._holders.listed(record):
            replica = record.holders[node.node]
            until_s = self._pins.until_s(record.generation, node.node)
            told = (record.published, self.spare(record, node), until_s)
            if told != replica.told:
                replica.told = told
                mark = DoMark(
                    generation=record.generation,
                    published=told[0],
                    spare=told[1],
                    pinned_s=max(until_s - now_s, 0.0),
                )
                self._outbox.send(node.link, mark)


def _nobody(record: VersionRecord) -> None:
    """Nobody repairs."""
