"""Versions in the making: taken, filled, committed or given back.

Rules:

1. A creation belongs to a session and has a deadline. It is rolled back when it is
   aborted or destroyed, when its session is gone, when its node is gone, and when its
   time is up: whichever comes first. Then its name and number are free at once.
2. It becomes a version in one step, when somebody has asked for the commit and the node
   has announced the replica, in whatever order. Before that no look-up shows it.
3. It is journaled at leisure, so that a put outlives a restart of the scheduler; one that
   was not on disk yet is Gone then, and is put again. One that brought its commit with it is
   journaled once it is `KEEP_AFTER_S` old: most are versions by then, without rows of their
   own.
4. The commit is answered after the wanted copies are made and the journal has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tensorcast_dask.exceptions import (
    Gone,
    Mismatch,
    PeerLost,
    TensorCastError,
)
from tensorcast_dask.scheduler_plugin.state.checks import (
    check_count,
    check_labels,
    check_name,
    check_seconds,
    check_size,
)
from tensorcast_dask.scheduler_plugin.state.events import Row
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.operations import (
    Caller,
    Operation,
)
from tensorcast_dask.scheduler_plugin.state.placement import place, promise
from tensorcast_dask.scheduler_plugin.state.records import (
    CreatingRow,
    NodeRecord,
    SessionRecord,
    VersionRecord,
    info_of,
    packed,
    row_of,
    version_of,
    version_row,
)
from tensorcast_dask.scheduler_plugin.state.spreads import Spreads
from tensorcast_dask.scheduler_plugin.state.timers import Timer
from tensorcast_dask.tensors.ids import ArtifactId, Generation
from tensorcast_dask.tensors.messages import (
    AbortCreated,
    CommitCreated,
    Create,
    Created,
    KeepCreating,
    Owner,
    ReplicaRecord,
    Tier,
)

__all__ = ["KEEP_AFTER_S", "Creation", "Creations"]

MAX_REPLICAS = 1000
KEEP_AFTER_S: Final = 0.05


@dataclass(slots=True, eq=False, kw_only=True)
class Creation:
    """A version that does not exist yet."""

    record: VersionRecord
    #: None for one that the catalog itself makes.
    session: SessionRecord | None
    node: NodeRecord
    until_s: float
    timer: Timer | None = None
    #: False: its node will say how large it is.
    sized: bool = True
    #: It stands in the journal, with its index.
    kept: bool = False
    #: Tiers that the node has announced.
    announced: tuple[Tier, ...] = ()
    commits: list[Operation] = field(default_factory=list)


class Creations:
    """All creations under way."""

    def __init__(self, ground: Ground, spreads: Spreads) -> None:
        self._outbox = ground.outbox
        self._timers = ground.timers
        self._names = ground.names
        self._nodes = ground.nodes
        self._replicas = ground.replicas
        self._holders = ground.holders
        self._tasks = ground.tasks
        self._spreads = spreads
        self._operations = ground.operations
        self._stories = ground.stories
        self._open: dict[Generation, Creation] = {}
        #: (when it is to be journaled, generation, its session, how long it lives after a
        #: restart), in this order; some are over by then.
        self._young: deque[tuple[float, Generation, SessionRecord, float]] = deque()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def facts(self) -> tuple[tuple[ArtifactId, int, Generation, int], ...]:
        """What is being created, for the tables."""
        return tuple(
            (one.record.id, one.record.version, generation, one.record.nbytes)
            for generation, one in self._open.items()
        )

    def waits(self, record: VersionRecord) -> Iterator[str]:
        """Say what a creation waits for."""
        creation = self._open.get(record.generation)
        if creation is None:
            return
        left_s = creation.until_s - self._outbox.now_s
        if not creation.commits:
            yield f"  waits for its writer to commit, at most {left_s:.1f} s more"
        elif not creation.announced:
            yield f"  waits for {creation.node.label} to say that it has the bytes"

    # ------------------------------------------------------------ requests
    def create(self, caller: Caller, session: SessionRecord, ask: Create) -> Generation:
        """Take a name."""
        check_name(ask.id)
        check_size(ask.nbytes, what="the size of an artifact")
        check_count(ask.tensors, least=0, most=1 << 40, what="the number of tensors")
        check_count(ask.version, least=-1, most=1 << 62, what="version")
        check_count(ask.replicas, least=1, most=MAX_REPLICAS, what="replicas")
        check_labels(ask.labels)
        if ask.owner is Owner.CALLER and ask.replicas > 1:
            message = (
                "a registration has no replicas: its owner may change it; publish it"
            )
            raise Mismatch(message)
        ttl_s = check_seconds(ask.ttl_s, what="ttl_s")
        self._make_way(ask.id, ask.version)
        self._names.free_number(ask.id, ask.version)  # AlreadyExists before placement
        node, why = place(
            self._nodes,
            ask.node,
            nbytes=ask.nbytes,
            host=ask.host or caller.host,
            owner=ask.owner,
            device=ask.device,
        )
        creation = self.begin(
            VersionRecord(
                id=ask.id,
                version=self._names.free_number(ask.id, ask.version),
                generation=self._names.numbers.mint(),
                owner=ask.owner,
                nbytes=ask.nbytes,
                tensors=ask.tensors,
                index_digest=ask.index_digest,
                index=ask.index,
                labels=ask.labels,
                replicas=ask.replicas,
            ),
            session,
            node,
            ttl_s,
        )
        record = creation.record
        if ask.commit:
            self._keep_later(record.generation, session, ttl_s)
        else:
            self._keep(creation, session, ttl_s)
        self._stories.tell(
            self._outbox.now_s,
            (record.id, caller.rid),
            "version {} created on {}: {}",
            record.version,
            node.label,
            why,
        )
        # The name was free because of a destroy that may not be on disk yet.
        after = self._outbox.pending(record.id)
        created = Created(
            version=record.version,
            generation=record.generation,
            node=node.card,
            why=why,
        )
        self._operations.give(caller, created, after=after)
        return record.generation

    def commit(self, caller: Caller, ask: CommitCreated) -> None:
        """Make the version exist."""
        deadline_s = check_seconds(ask.deadline_s, what="deadline_s")
        record = self._names.get(ask.generation)
        if not record.creating:
            info = info_of(record, lost=self._holders.is_lost(record))
            self._operations.give(
                caller, info, after=self._outbox.pending(record.generation)
            )
            return
        creation = self._open[ask.generation]
        operation = self._operations.open(caller, "put", record, deadline_s)
        operation.node = creation.node.node
        operation.leave = lambda: self._uncommit(creation, operation)
        creation.commits.append(operation)
        self._extend(creation, deadline_s)
        self._try_commit(creation)

    def _uncommit(self, creation: Creation, operation: Operation) -> None:
        if operation in creation.commits:
            creation.commits.remove(operation)

    def abort(self, caller: Caller, ask: AbortCreated) -> None:
        """Give the name back; what is no creation any more is left alone."""
        creation = self._open.get(ask.generation)
        if creation is not None:
            self.roll_back(creation.record, why="its writer gave it up")
        self._operations.give(caller, None)

    def keep(self, caller: Caller, ask: KeepCreating) -> None:
        """Take a sign of life."""
        ttl_s = check_seconds(ask.ttl_s, what="ttl_s")
        record = self._names.get(ask.generation)
        if record.creating:
            self._extend(self._open[ask.generation], ttl_s)
        self._operations.give(caller, None)

    # ------------------------------------------------------------ steps
    def _make_way(self, name: ArtifactId, version: int) -> None:
        """Free a name that only registrations of dead processes hold."""
        artifact = self._names.artifacts.get(name)
        if version != 0 or artifact is None:
            return
        records = list(artifact.versions.values())
        if all(
            one.owner is Owner.CALLER and self._holders.is_lost(one) for one in records
        ):
            for one in records:
                self._replicas.erase(one)

    def begin(
        self,
        record: VersionRecord,
        session: SessionRecord | None,
        node: NodeRecord,
        ttl_s: float,
    ) -> Creation:
        """Enter a creation."""
        creation = Creation(
            record=record,
            session=session,
            node=node,
            until_s=self._outbox.now_s + ttl_s,
        )
        self._names.add(record)
        self._open[record.generation] = creation
        if session is not None:
            session.creations[record.generation] = None
        promise(node, Tier.HOST, record.nbytes)
        creation.timer = self._timers.at(
            creation.until_s, lambda: self._expire(creation)
        )
        return creation

    def _keep_later(
        self, generation: Generation, session: SessionRecord, ttl_s: float
    ) -> None:
        due_s = self._outbox.now_s + KEEP_AFTER_S
        if not self._young:
            self._timers.at(due_s, self._keep_due)
        self._young.append((due_s, generation, session, ttl_s))

    def _keep_due(self) -> None:
        """Journal the creations that have grown old enough."""
        young = self._young
        while young and (
            young[0][0] <= self._outbox.now_s or young[0][1] not in self._open
        ):
            _, generation, session, ttl_s = young.popleft()
            creation = self._open.get(generation)
            if creation is not None:
                self._keep(creation, session, ttl_s)
        if young:
            self._timers.at(young[0][0], self._keep_due)

    def _keep(self, creation: Creation, session: SessionRecord, ttl_s: float) -> None:
        """Journal a creation at leisure: nobody is told of it before its commit."""
        record = creation.record
        row = CreatingRow(row_of(record), session.session, creation.node.node, ttl_s)
        key = str(record.generation)
        self._outbox.persist(packed("creating", key, row), lazy=True)
        index = Row(kind="index", key=key, blob=record.index)
        self._outbox.persist(index, lazy=True)
        creation.kept = True

    def revive(self, row: CreatingRow, index: bytes, session: SessionRecord) -> None:
        """Take a creation from the journal; its node will say what it has of it."""
        node = self._nodes.records.get(row.node)
        artifact = self._names.artifacts.get(row.record.id)
        taken = artifact is not None and row.record.version in artifact.versions
        used = row.record.version <= self._names.numbers.issued(row.record.id)
        if node is None or taken or used:
            return
        record = version_of(row.record, index, creating=True)
        self.begin(record, session, node, row.ttl_s).kept = True

    def _extend(self, creation: Creation, ttl_s: float) -> None:
        creation.until_s = max(creation.until_s, self._outbox.now_s + ttl_s)

    def _expire(self, creation: Creation) -> None:
        if self._outbox.now_s < creation.until_s:
            creation.timer = self._timers.at(
                creation.until_s, lambda: self._expire(creation)
            )
        else:
            self.roll_back(
                creation.record, why="its writer gave no sign of life in time"
            )

    def announced(
        self, record: VersionRecord, node: NodeRecord, one: ReplicaRecord
    ) -> bool:
        """Take the news that a node has a replica of a creation; False on another node."""
        creation = self._open[record.generation]
        if node is not creation.node:
            return False
        if not creation.sized:
            self._names.resize(record, one.nbytes)
        elif one.nbytes != record.nbytes:
            message = (
                f"node {node.label} holds {one.nbytes} bytes for version "
                f"{record.version} of {record.id!r}, its writer said {record.nbytes}"
            )
            self.roll_back(record, why="its size is another", error=Mismatch(message))
            return True
        record.content_digest = one.content_digest
        if one.tier not in creation.announced:
            creation.announced = (*creation.announced, one.tier)
        self._try_commit(creation)
        return True

    def withdrawn(self, record: VersionRecord, node: NodeRecord, tier: Tier) -> None:
        """Take the news that a creation is not in a tier any more (it was spilled)."""
        creation = self._open[record.generation]
        if node is creation.node:
            left = (one for one in creation.announced if one != tier)
            creation.announced = tuple(left)

    def claimed(self, node: NodeRecord) -> None:
        """Believe what a node's whole inventory says of the creations there."""
        for generation, creation in self._open.items():
            if creation.node is node:
                creation.announced = node.claimed.get(generation, ())

    def _try_commit(self, creation: Creation) -> None:
        if creation.announced and creation.commits:
            operations, creation.commits = creation.commits, []
            self.make(creation)
            for operation in operations:
                operation.leave = None
                self.answer(operation, creation.record)

    def make(self, creation: Creation) -> None:
        """Let the version exist from here on."""
        record = creation.record
        self._close(creation)
        self._names.commit(record)
        for tier in creation.announced or (Tier.HOST,):
            self._replicas.add(record, creation.node, tier, write=False)
        digest = self._names.numbers.used_up(record.id, record.version)
        if digest is not None:
            self._outbox.issue(digest, record.version)
        key = str(record.generation)
        self._outbox.persist(version_row(record), record.id, record.generation)
        if creation.kept:
            self._outbox.persist(Row(kind="creating", key=key, blob=None))
        else:
            self._outbox.persist(Row(kind="index", key=key, blob=record.index))
        self._stories.tell(
            self._outbox.now_s, (record.id,), "version {} committed", record.version
        )
        self._outbox.emit(
            "committed",
            id=record.id,
            version=record.version,
            generation=record.generation,
            nbytes=record.nbytes,
            node=creation.node.node,
        )

    def answer(self, operation: Operation, record: VersionRecord) -> None:
        """Answer once the wanted copies are made, or cannot be."""
        if record.replicas <= 1:
            info = info_of(record, lost=self._holders.is_lost(record))
            self._operations.finish(operation, info, durable=True)
            return

        def made(shortfall: str) -> None:
            if record.generation not in self._names.versions:
                message = f"version {record.version} of {record.id!r} was destroyed"
                self._operations.fail(operation, Gone(message))
                return
            if record.degraded != shortfall:
                record.degraded = shortfall
                self._outbox.persist(version_row(record), record.generation)
            if self._holders.is_lost(record):
                self._operations.fail(operation, self._holders.absence(record))
                return
            info = info_of(record, lost=False)
            self._operations.finish(operation, info, durable=True)

        spread = self._spreads.start(record, until_s=operation.until_s, then=made)
        why = "the deadline passed while copies were made"
        operation.on_deadline = lambda: self._spreads.stop(spread, why)

    # ------------------------------------------------------------ ends
    def roll_back(
        self, record: VersionRecord, *, why: str, error: TensorCastError | None = None
    ) -> None:
        """Give the name back and have the bytes dropped; what is none is left alone."""
        creation = self._open.get(record.generation)
        if creation is None:
            return
        self._close(creation)
        self._names.remove(record)
        if creation.kept:
            for kind in ("creating", "index"):
                gone = Row(kind=kind, key=str(record.generation), blob=None)
                self._outbox.persist(gone, lazy=True)
        self._tasks.drop(creation.node, record.generation, why=why, final=True)
        self._stories.tell(
            self._outbox.now_s,
            (record.id,),
            "creation of version {} rolled back: {}",
            record.version,
            why,
        )
        self._outbox.emit("rolled_back", id=record.id, version=record.version, why=why)
        if error is None:
            what = f"version {record.version} of {record.id!r}"
            error = Gone(f"the creation of {what} was rolled back: {why}")
        for operation in creation.commits:
            self._operations.fail(operation, error)

    def _close(self, creation: Creation) -> None:
        del self._open[creation.record.generation]
        if creation.timer is not None:
            creation.timer.cancel()
        if creation.session is not None:
            creation.session.creations.pop(creation.record.generation, None)

    def session_gone(self, session: SessionRecord) -> None:
        """Roll back what a session that is over will not fill."""
        for generation in list(session.creations):
            self.roll_back(self._open[generation].record, why="its session is gone")

    def node_gone(self, node: NodeRecord) -> None:
        """Roll back what was being written at a node that is gone."""
        for creation in [one for one in self._open.values() if one.node is node]:
            message = f"node {node.label} is gone; put again"
            self.roll_back(
                creation.record, why="its node is gone", error=PeerLost(message)
            )
