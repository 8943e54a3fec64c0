"""Destroy and release: the orderly ends of versions and replicas.

Rules:

1. A destroyed version is out of every look-up at once, and its name is free. Its holders,
   and the nodes that were just getting it, are told to drop it once the journal has the
   destroy; a node without a lease is not waited for: it drops it when it comes back.
   After a restart a node that is not back yet may have a lease of the former life, and
   one that has not said what it holds may have been given a copy then: those are waited for,
   as is the lease of a node that was told to end.
2. Destroy is answered when all those nodes have dropped it. A second one meanwhile waits
   for the same drops.
3. Release strikes the replica from the list first, so that nobody is sent there, and
   drops it then. The last copy of a system-owned version is never released.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tensorcast_dask.exceptions import Mismatch, NotFound
from tensorcast_dask.scheduler_plugin.state.checks import check_name, check_seconds
from tensorcast_dask.scheduler_plugin.state.creations import Creations
from tensorcast_dask.scheduler_plugin.state.events import Row
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.inventories import Inventories
from tensorcast_dask.scheduler_plugin.state.moves import Moves
from tensorcast_dask.scheduler_plugin.state.operations import (
    Caller,
    Operation,
)
from tensorcast_dask.scheduler_plugin.state.records import NodeRecord, VersionRecord
from tensorcast_dask.tensors.ids import ArtifactId, Generation, NodeId
from tensorcast_dask.tensors.messages import (
    Destroy,
    Destroyed,
    Owner,
    Release,
    TaskDone,
)

__all__ = ["Ending", "Endings"]

#: How often it is looked whether a node is back after a restart.
_LOOK_S: Final = 0.1


@dataclass(slots=True, eq=False, kw_only=True)
class Ending:
    """A version that is being dropped everywhere."""

    record: VersionRecord
    #: The sequence number of its end.
    seq: int
    #: Nodes that have not dropped it yet.
    nodes: dict[NodeId, NodeRecord]
    waiting: list[Callable[[], None]] = field(default_factory=list)


class Endings:
    """All ends under way."""

    def __init__(
        self,
        ground: Ground,
        inventories: Inventories,
        moves: Moves,
        creations: Creations,
    ) -> None:
        self._outbox = ground.outbox
        self._names = ground.names
        self._nodes = ground.nodes
        self._replicas = ground.replicas
        self._leaving = ground.leaving
        self._holders = ground.holders
        self._inventories = inventories
        self._pins = ground.pins
        self._tasks = ground.tasks
        self._timers = ground.timers
        self._moves = moves
        self._creations = creations
        self._operations = ground.operations
        self._stories = ground.stories
        self._open: dict[Generation, Ending] = {}

    def __len__(self) -> int:
        return len(self._open)

    def of(self, name: ArtifactId) -> list[Ending]:
        """List the ends of versions of an id that are under way."""
        return [one for one in self._open.values() if one.record.id == name]

    # ------------------------------------------------------------ destroy
    def destroy(self, caller: Caller, ask: Destroy) -> None:
        """End one version, or all of an id."""
        check_name(ask.id)
        deadline_s = check_seconds(ask.deadline_s, what="deadline_s")
        alias = self._names.aliases.get(ask.id)
        if alias is not None and alias.target:
            message = (
                f"{ask.id!r} is an alias; remove it, or destroy {alias.target_id!r}"
            )
            raise Mismatch(message, {"generation": alias.target})
        if ask.id in self._names.views:
            self._names.remove_view(ask.id)
            self._outbox.persist(Row(kind="view", key=ask.id, blob=None), ask.id)
            self._operations.give(caller, Destroyed(versions=()), durable=True)
            return
        ended = [
            self._end(record, caller)
            for record in self._chosen(ask)
            if not self._roll_back(record)
        ]
        self._inventories.ended(ask.generation or ask.id)
        versions = tuple(one.record.version for one in ended)
        waited = ended or [
            one for one in self._open.values() if self._concerns(one, ask)
        ]
        durable = bool(ended)
        value = Destroyed(versions=versions)
        if not waited:
            operation = self._operations.open(caller, "destroy", None, deadline_s)
            self._when_heard(operation, ask)
            return
        operation = self._operations.open(
            caller, "destroy", waited[0].record, deadline_s
        )
        self._wait(operation, waited, value, durable=durable)

    def _when_heard(self, operation: Operation, ask: Destroy) -> None:
        """Answer when nothing is there; after a restart, once all nodes have said so."""
        if not operation.open:
            return
        if self._nodes.any_unheard() or self._tasks.drops(ask.generation):
            at_s = self._outbox.now_s + _LOOK_S
            self._timers.at(at_s, lambda: self._when_heard(operation, ask))
            return
        after = self._outbox.pending(ask.generation or ask.id)
        self._operations.finish(operation, Destroyed(versions=()), after=after)

    def _chosen(self, ask: Destroy) -> list[VersionRecord]:
        if ask.generation:
            record = self._names.versions.get(ask.generation)
            if record is not None and record.id != ask.id:
                message = (
                    f"generation {ask.generation} is of {record.id!r}, not {ask.id!r}"
                )
                raise Mismatch(message, {"id": record.id})
            return [] if record is None else [record]
        artifact = self._names.artifacts.get(ask.id)
        return (
            []
            if artifact is None
            else sorted(artifact.versions.values(), key=lambda record: record.version)
        )

    def _concerns(self, ending: Ending, ask: Destroy) -> bool:
        if ask.generation:
            return ending.record.generation == ask.generation
        return ending.record.id == ask.id

    def _roll_back(self, record: VersionRecord) -> bool:
        if not record.creating:
            return False
        self._creations.roll_back(record, why="it was destroyed")
        return True

    def _wait(
        self,
        operation: Operation,
        endings: list[Ending],
        value: Destroyed,
        *,
        durable: bool,
    ) -> None:
        left = len(endings)

        def one_less() -> None:
            nonlocal left
            left -= 1
            if not left:
                after = max(ending.seq for ending in endings)
                self._operations.finish(operation, value, after=after, durable=durable)

        for ending in endings:
            if ending.record.generation in self._open:
                ending.waiting.append(one_less)
            else:
                one_less()

    def _end(self, record: VersionRecord, caller: Caller) -> Ending:
        before = record.generation >> 40 < self._names.numbers.epoch
        targets = {
            node.node: node
            for node in self._nodes.records.values()
            if node.node in record.holders
            or self._leaving.has(record, node)
            or self._tasks.is_stopping(node.node, record.generation)
            or (before and self._nodes.is_unheard(node))
        }
        self._pins.remove(record.generation)
        self._replicas.erase(record)
        for node in self._moves.record_gone(record):
            targets[node.node] = node
        self._inventories.ended(record)
        ending = Ending(record=record, seq=self._outbox.here, nodes=targets)
        self._open[record.generation] = ending
        self._stories.tell(
            self._outbox.now_s,
            (record.id, caller.rid),
            "version {} destroyed",
            record.version,
        )
        self._outbox.emit(
            "destroyed",
            id=record.id,
            version=record.version,
            generation=record.generation,
        )
        self._outbox.hold(lambda: self._drop(ending), after=ending.seq)
        return ending

    def _drop(self, ending: Ending) -> None:
        for node in list(ending.nodes.values()):
            self._drop_at(ending, node)
        self._look(ending)

    def _drop_at(self, ending: Ending, node: NodeRecord) -> None:
        if self._nodes.may_be_leased(node):
            at_s = self._outbox.now_s + _LOOK_S
            self._timers.at(at_s, lambda: self._drop_at(ending, node))
            return
        self._tasks.drop(
            node,
            ending.record.generation,
            why="destroyed",
            final=True,
            on_end=self._on_dropped(ending, node),
        )

    def _on_dropped(
        self, ending: Ending, node: NodeRecord
    ) -> Callable[[TaskDone], None]:
        def dropped(done: TaskDone) -> None:
            if done.fault is not None and self._nodes.may_be_leased(node):
                self._drop_at(ending, node)  # it was given up, and may serve yet
                return
            ending.nodes.pop(node.node, None)
            self._look(ending)

        return dropped

    def _look(self, ending: Ending) -> None:
        if not ending.nodes and ending.record.generation in self._open:
            del self._open[ending.record.generation]
            waiting, ending.waiting = ending.waiting, []
            for act in waiting:
                act()

    # ------------------------------------------------------------ release
    def release(self, caller: Caller, ask: Release) -> None:
        """Drop one node's replica, or end a registration."""
        deadline_s = check_seconds(ask.deadline_s, what="deadline_s")
        record = self._names.committed(ask.generation)
        if not ask.node:
            if record.owner is not Owner.CALLER:
                message = (
                    f"{record.id!r} belongs to the cluster: name the node whose replica "
                    "is to go, or destroy it"
                )
                raise Mismatch(message)
            operation = self._operations.open(caller, "release", record, deadline_s)
            self._after(operation, self._end(record, caller))
            return
        replica = record.holders.get(ask.node)
        if replica is None:
            message = f"node {self._nodes.label(ask.node)} holds no replica of it"
            raise NotFound(message, {"node": ask.node})
        self.check_not_last(record, ask.node)
        operation = self._operations.open(caller, "release", record, deadline_s)
        self.free(
            record,
            self._nodes.records[ask.node],
            why="released",
            then=lambda: self._operations.finish(operation, None, durable=True),
        )

    def _after(self, operation: Operation, ending: Ending) -> None:
        ending.waiting.append(
            lambda: self._operations.finish(operation, None, durable=True)
        )

    def check_not_last(self, record: VersionRecord, node: NodeId) -> None:
        """Refuse to drop the last listed copy, or a pinned one.

        Raises
        ------
        Mismatch
            Then.
        """
        others = [one for one in self._holders.staying(record) if one.node != node]
        if not others:
            message = (
                f"node {self._nodes.label(node)} holds the last copy of version "
                f"{record.version} of {record.id!r}; replicate it first, or destroy it"
            )
            raise Mismatch(message, {"node": node})
        if self._pins.until_s(record.generation, node):
            message = (
                f"version {record.version} of {record.id!r} is pinned at node "
                f"{self._nodes.label(node)}; unpin it first"
            )
            raise Mismatch(message, {"node": node})

    def free(
        self,
        record: VersionRecord,
        node: NodeRecord,
        *,
        why: str,
        then: Callable[[], None],
    ) -> None:
        """Strike a replica, have it dropped once that is on disk, and go on."""

        def dropped(_: TaskDone) -> None:
            self._leaving.end(record, node)
            then()

        def drop() -> None:
            self._tasks.drop(node, record.generation, why=why, on_end=dropped)

        self._leaving.begin(record, node)
        self._outbox.hold(drop, after=self._outbox.here)
