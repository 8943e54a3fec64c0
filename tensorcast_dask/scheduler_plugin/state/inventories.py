"""What nodes say of their replicas, held against what the catalog knows.

Rules:

1. A node's first words after joining are its inventory. Until it is complete its replicas
   of an earlier life are suspect.
2. A record counts for a version only when generation, id, version and index agree.
3. Leftovers are reported, then dropped; unless the journal lost rows: then versions of
   earlier lives are taken back, but none that was destroyed in this one, known or not.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.scheduler_plugin.state.events import Row
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.records import (
    NodeRecord,
    VersionRecord,
    version_row,
)
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    Generation,
    Version,
    check_name,
)
from tensorcast_dask.tensors.messages import (
    DropGranted,
    Inventory,
    MayDrop,
    Owner,
    ReplicaDropped,
    ReplicaReady,
    ReplicaRecord,
    TaskDone,
    Tier,
)
from tensorcast_dask.tensors.specs import Index

__all__ = ["Inventories"]


class Inventories:
    """The reconciling of nodes with the catalog.

    Attributes
    ----------
    on_announced : callable
        Told of each replica of a version that is being created; says whether its writer
        put it there.
    on_withdrawn : callable
        Told when a node has a creation in a tier no more.
    on_complete : callable
        Told when a node has said all that it holds (`claimed`).
    rebuilding : bool
        The journal lost rows: unknown replicas are taken back.
    """

    on_announced: Callable[[VersionRecord, NodeRecord, ReplicaRecord], bool]
    on_withdrawn: Callable[[VersionRecord, NodeRecord, Tier], None]
    on_complete: Callable[[NodeRecord], None]

    def __init__(self, ground: Ground, *, rebuilding: bool) -> None:
        self._outbox = ground.outbox
        self._names = ground.names
        self._replicas = ground.replicas
        self._leaving = ground.leaving
        self._holders = ground.holders
        self._tasks = ground.tasks
        self._stories = ground.stories
        self.rebuilding = rebuilding
        #: Destroyed in this life, while rebuilding.
        self._ended: set[Generation | ArtifactId | tuple[ArtifactId, Version]] = set()

    def ended(self, what: Generation | ArtifactId | VersionRecord) -> None:
        """Note that a generation, or all of an id, was destroyed: it is not taken back.

        Of a version that was there the number too: it stood for that content in this life.
        """
        if not self.rebuilding:
            return
        if isinstance(what, VersionRecord):
            self._ended |= {what.generation, (what.id, what.version)}
        else:
            self._ended.add(what)

    # ------------------------------------------------------------ messages
    def inventory(self, node: NodeRecord, message: Inventory) -> None:
        """Take a part of what a node holds; the last part settles the rest."""
        for one in message.replicas:
            if self._take(node, one):
                tiers = node.claimed.get(one.generation, ())
                node.claimed[one.generation] = (*tiers, one.tier)
        if message.more or not node.claiming:
            return
        node.claiming = False
        self._replicas.claim_rest(node)
        self.on_complete(node)
        for record in self._replicas.by_node.get(node.node, {}).values():
            self._holders.settle(record.generation)
        node.claimed = {}

    def ready(self, node: NodeRecord, message: ReplicaReady) -> None:
        """Take the news that a replica is complete."""
        one = message.record
        if self._take(node, one) and node.claiming:
            tiers = node.claimed.get(one.generation, ())
            node.claimed[one.generation] = (*tiers, one.tier)

    def dropped(self, node: NodeRecord, message: ReplicaDropped) -> None:
        """Take the news that a replica is no more."""
        node.granted.pop(message.generation, None)
        record = self._names.versions.get(message.generation)
        if record is None:
            return
        if message.generation in node.claimed:
            left = (
                t for t in node.claimed.pop(message.generation) if t != message.tier
            )
            if tiers := tuple(left):
                node.claimed[message.generation] = tiers
        self._stories.tell(
            self._outbox.now_s,
            (record.id, node.node),
            "replica of version {} in {} on {} dropped: {}",
            record.version,
            message.tier,
            node.label,
            message.why,
        )
        if message.why.startswith("evicted"):
            self._outbox.emit(
                "evicted",
                id=record.id,
                version=record.version,
                node=node.node,
                tier=str(message.tier),
                nbytes=record.nbytes,
                why=message.why,
            )
        if record.creating:
            self.on_withdrawn(record, node, message.tier)
        self._replicas.drop_tier(record, node, message.tier)

    def may_drop(self, node: NodeRecord, message: MayDrop) -> None:
        """Give leave for what is spare, and strike it first."""
        granted: list[Generation] = []
        for generation in dict.fromkeys(message.generations):
            record = self._names.versions.get(generation)
            if record is None:
                granted.append(generation)
            elif self._replicas.may_drop(record, node):
                if node.node in record.holders:
                    node.granted[generation] = None
                self._replicas.strike(record, node.node)
                granted.append(generation)
                self._stories.tell(
                    self._outbox.now_s,
                    (record.id, node.node),
                    "version {} may be evicted from {}: others hold it",
                    record.version,
                    node.label,
                )
        grant = DropGranted(rid=message.rid, generations=tuple(granted))
        self._outbox.send(node.link, grant)

    # ------------------------------------------------------------ one record
    def _take(self, node: NodeRecord, one: ReplicaRecord) -> bool:
        # Told of without its index first, it may be unknown, and on its way out.
        ending = self.rebuilding and self._tasks.is_ending(node.node, one.generation)
        return not ending and self._taken(node, one)

    def _taken(self, node: NodeRecord, one: ReplicaRecord) -> bool:
        record = self._names.versions.get(one.generation)
        if record is None:
            record = self._rebuilt(one)
            if record is None:
                self._unknown(node, one)
                return False
        elif (record.id, record.version) != (one.id, one.version) or (
            one.index_digest
            and record.index_digest
            and one.index_digest != record.index_digest
        ):
            self._leftover(node, one, "the catalog knows other content by it")
            return False
        if record.creating:
            if self.on_announced(record, node, one):
                return True
            self._stray(record, node)
            return False
        if self._leaving.has(record, node):
            return False
        if one.content_digest and not record.content_digest:
            record.content_digest = one.content_digest
        if one.published and not record.published and self.rebuilding:
            # The row that said so is lost; a node was told of it in an earlier life.
            self._names.publish(record)
            self._outbox.persist(version_row(record), record.id, record.generation)
        self._replicas.add(record, node, one.tier, published=one.published)
        return True

    def _stray(self, record: VersionRecord, node: NodeRecord) -> None:
        """Have a copy dropped that was made of a commit which the journal lost."""
        if self._leaving.has(record, node):
            return

        def dropped(_: TaskDone) -> None:
            self._leaving.end(record, node)

        self._leaving.begin(record, node)
        why = "it is a copy of what is not committed"
        self._tasks.drop(node, record.generation, why=why, on_end=dropped)

    def _unknown(self, node: NodeRecord, one: ReplicaRecord) -> None:
        if one.generation >> 40 == self._names.numbers.epoch:
            # Minted in this life and ended since: late news, and no surprise to anybody.
            self._tasks.drop(node, one.generation, why="it was ended", final=True)
        else:
            self._leftover(node, one, "the catalog does not know it")

    def _leftover(self, node: NodeRecord, one: ReplicaRecord, why: str) -> None:
        self._outbox.log(
            "warning",
            f"node {node.label} holds version {one.version} of {one.id!r} (generation "
            f"{one.generation}), but {why}: dropped there",
        )
        self._outbox.emit(
            "leftover",
            node=node.node,
            id=one.id,
            version=one.version,
            generation=one.generation,
            nbytes=one.nbytes,
            why=why,
        )
        self._tasks.drop(node, one.generation, why=why, final=True)

    def _rebuilt(self, one: ReplicaRecord) -> VersionRecord | None:
        """Take a version back from a replica, when the journal lost it."""
        known = {one.generation, one.id, (one.id, one.version)}
        ended = not known.isdisjoint(self._ended)
        if not self.rebuilding or ended or not one.index:
            return None
        if one.generation >> 40 >= self._names.numbers.epoch:
            return None  # of this life: given back, never committed
        artifact = self._names.artifacts.get(one.id)
        taken = artifact is not None and one.version in artifact.versions
        if taken or one.id in self._names.aliases or one.version <= 0:
            return None
        try:
            check_name(one.id)
            index = Index.decode(one.index)
        except TensorCastError:
            return None
        record = VersionRecord(
            id=one.id,
            version=one.version,
            generation=one.generation,
            owner=Owner(one.owner),
            nbytes=one.nbytes,
            tensors=len(index),
            index_digest=index.digest(),
            index=one.index,
            labels=one.labels,
            creating=False,
            published=one.published,
            content_digest=one.content_digest,
        )
        self._names.add(record)
        digest = self._names.numbers.used_up(record.id, record.version)
        if digest is not None:
            self._outbox.issue(digest, record.version)
        key = str(record.generation)
        self._outbox.persist(version_row(record), record.id, record.generation)
        self._outbox.persist(Row(kind="index", key=key, blob=record.index))
        self._outbox.emit("recovered", id=record.id, version=record.version)
        self._stories.tell(
            self._outbox.now_s,
            (record.id,),
            "version {} taken back from what a node holds: the journal had lost it",
            record.version,
        )
        return record
