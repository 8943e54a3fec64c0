"""Versions that the catalog itself makes or writes: load, save, copies of registrations.

Rules:

1. Such a version is a creation without a writer: it is committed in the step in which its
   node has it, or rolled back. Nothing half loaded is ever seen.
2. A file is read, and written, by a node whose host is named or that holds the version.
"""

from __future__ import annotations

from tensorcast_dask.exceptions import Gone, Mismatch, TensorCastError
from tensorcast_dask.scheduler_plugin.state.checks import (
    check_count,
    check_labels,
    check_name,
    check_seconds,
    check_size,
)
from tensorcast_dask.scheduler_plugin.state.creations import (
    MAX_REPLICAS,
    Creation,
    Creations,
)
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.operations import (
    Caller,
    Operation,
)
from tensorcast_dask.scheduler_plugin.state.placement import place
from tensorcast_dask.scheduler_plugin.state.records import NodeRecord, VersionRecord
from tensorcast_dask.tensors.ids import ArtifactId, NodeId, Version
from tensorcast_dask.tensors.messages import (
    DoLoad,
    DoPull,
    DoSave,
    LoadFile,
    Location,
    Moved,
    Owner,
    SaveFile,
    TaskDone,
    Tier,
)
from tensorcast_dask.tensors.specs import Index

__all__ = ["Imports"]


class Imports:
    """Load, save, and copies of registrations."""

    def __init__(self, ground: Ground, creations: Creations) -> None:
        self._outbox = ground.outbox
        self._names = ground.names
        self._nodes = ground.nodes
        self._holders = ground.holders
        self._tasks = ground.tasks
        self._creations = creations
        self._operations = ground.operations

    # ------------------------------------------------------------ load
    def load(self, caller: Caller, ask: LoadFile) -> None:
        """Import a model file."""
        check_name(ask.id)
        check_count(ask.version, least=-1, most=1 << 62, what="version")
        check_count(ask.replicas, least=1, most=MAX_REPLICAS, what="replicas")
        check_labels(ask.labels)
        deadline_s = check_seconds(ask.deadline_s, what="deadline_s")
        number = self._names.free_number(ask.id, ask.version)
        node, _ = place(
            self._nodes,
            ask.node,
            nbytes=0,
            host=ask.host or caller.host,
            owner=Owner.SYSTEM,
        )
        record = self._record(ask.id, number, labels=ask.labels, replicas=ask.replicas)
        creation = self._creations.begin(record, None, node, deadline_s + 1.0)
        creation.sized = False
        operation = self._operations.open(caller, "load", record, deadline_s)

        def make(task: int) -> DoLoad:
            return DoLoad(
                task=task,
                generation=record.generation,
                id=record.id,
                version=record.version,
                path=ask.path,
                deadline_s=deadline_s,
                labels=ask.labels,
            )

        task = self._tasks.start(
            node, make, lambda done: self._loaded(operation, creation, done)
        )
        operation.node = node.node
        operation.progress = lambda: (task.done_bytes, task.total_bytes)
        operation.leave = lambda: self._give_up(creation, operation)

    def _record(
        self,
        name: ArtifactId,
        number: Version,
        *,
        labels: dict[str, str],
        replicas: int,
    ) -> VersionRecord:
        return VersionRecord(
            id=name,
            version=number,
            generation=self._names.numbers.mint(),
            owner=Owner.SYSTEM,
            nbytes=0,
            tensors=0,
            index_digest="",
            index=b"",
            labels=labels,
            replicas=replicas,
        )

    def _give_up(self, creation: Creation, operation: Operation) -> None:
        self._creations.roll_back(
            creation.record, why=f"{operation.kind} was cancelled or late"
        )

    def _loaded(self, operation: Operation, creation: Creation, done: TaskDone) -> None:
        record = creation.record
        if self._names.versions.get(record.generation) is not record:
            message = f"version {record.version} of {record.id!r} was destroyed"
            self._operations.fail(operation, Gone(message))
            return
        try:
            if done.fault is not None:
                raise done.fault.error()
            index = Index.decode(done.result)
            if not creation.announced:
                message = (
                    f"node {creation.node.label} says that {record.id!r} is loaded but "
                    "has not announced it"
                )
                raise Mismatch(message)
        except TensorCastError as error:
            self._creations.roll_back(record, why=error.message, error=error)
            self._operations.fail(operation, error)
            return
        record.index = done.result
        record.tensors = len(index)
        record.index_digest = index.digest()
        operation.leave = None
        self._creations.make(creation)
        self._creations.answer(operation, record)

    # ------------------------------------------------------------ copy
    def copy(self, operation: Operation, source: VersionRecord) -> None:
        """Make what a registration holds now a version of the cluster's own, published.

        Raises
        ------
        CapacityError
            When no node can take it.
        """
        deadline_s = max(operation.until_s - self._outbox.now_s, 0.0)
        host = operation.caller.host
        node, _ = place(
            self._nodes, NodeId(""), nbytes=source.nbytes, host=host, owner=Owner.SYSTEM
        )
        number = self._names.free_number(source.id, -1)
        record = self._record(source.id, number, labels=source.labels, replicas=1)
        record.nbytes, record.tensors = source.nbytes, source.tensors
        record.index, record.index_digest = source.index, source.index_digest
        creation = self._creations.begin(record, None, node, deadline_s + 1.0)
        sources = self._holders.locations(source, host=node.host)

        def make(task: int) -> DoPull:
            return self._pull(task, source, record, sources, deadline_s)

        task = self._tasks.start(
            node, make, lambda done: self._copied(operation, creation, done)
        )
        operation.node = node.node
        operation.progress = lambda: (task.done_bytes, record.nbytes)
        operation.leave = lambda: self._give_up(creation, operation)

    def _pull(
        self,
        task: int,
        source: VersionRecord,
        record: VersionRecord,
        sources: tuple[Location, ...],
        deadline_s: float,
    ) -> DoPull:
        return DoPull(
            task=task,
            generation=record.generation,
            id=record.id,
            version=record.version,
            nbytes=record.nbytes,
            tier=Tier.HOST,
            sources=sources,
            deadline_s=deadline_s,
            labels=record.labels,
            published=True,
            source_generation=source.generation,
        )

    def _copied(self, operation: Operation, creation: Creation, done: TaskDone) -> None:
        record = creation.record
        if self._names.versions.get(record.generation) is not record:
            message = f"version {record.version} of {record.id!r} was destroyed"
            self._operations.fail(operation, Gone(message))
        elif done.fault is not None:
            error = done.fault.error()
            self._creations.roll_back(record, why=error.message, error=error)
            self._operations.fail(operation, error)
        else:
            operation.leave = None
            record.published = True
            self._creations.make(creation)
            self._creations.answer(operation, record)

    # ------------------------------------------------------------ save
    def save(self, caller: Caller, ask: SaveFile) -> None:
        """Write a version as safetensors."""
        deadline_s = check_seconds(ask.deadline_s, what="deadline_s")
        check_size(ask.max_shard_bytes, what="max_shard_bytes")
        record = self._names.committed(ask.generation)
        if ask.node:
            self._nodes.live(ask.node)
        operation = self._operations.open(caller, "save", record, deadline_s)
        self._holders.when_known(record, lambda: self._save(operation, record, ask))

    def _save(self, operation: Operation, record: VersionRecord, ask: SaveFile) -> None:
        if not operation.open:
            return
        try:
            node = self._writer(record, ask, operation.caller)
        except TensorCastError as error:
            self._operations.fail(operation, error)
            return
        left_s = operation.until_s - self._outbox.now_s

        def make(task: int) -> DoSave:
            return DoSave(
                task=task,
                generation=record.generation,
                path=ask.path,
                deadline_s=max(left_s, 0.0),
                metadata=ask.metadata,
                max_shard_bytes=ask.max_shard_bytes,
            )

        task = self._tasks.start(
            node, make, lambda done: self._saved(operation, node, done)
        )
        operation.node = node.node
        operation.progress = lambda: (task.done_bytes, task.total_bytes)
        operation.leave = lambda: self._tasks.cancel(task, node)

    def _writer(
        self, record: VersionRecord, ask: SaveFile, caller: Caller
    ) -> NodeRecord:
        self._names.committed(record.generation)
        if not self._holders.is_readable(record):
            raise self._holders.absence(record)
        holders = [one for one in self._holders.listed(record) if one.is_store]
        if ask.node:
            for node in holders:
                if node.node == ask.node:
                    return node
            label = self._nodes.label(ask.node)
            message = (
                f"node {label} does not hold {record.id!r}; replicate it there first"
            )
            raise Mismatch(message, {"node": ask.node})
        if not holders:
            message = (
                f"{record.id!r} lies only in the memory of the process that registered "
                "it; publish it first"
            )
            raise Mismatch(message)
        host = ask.host or caller.host
        return min(holders, key=lambda one: (one.host != host, one.node))

    def _saved(self, operation: Operation, node: NodeRecord, done: TaskDone) -> None:
        if done.fault is not None:
            self._operations.fail(operation, done.fault.error())
            return
        path, *files = done.result.decode(errors="replace").split("\0")
        moved = Moved(
            location=Location(card=node.card, tier=Tier.DISK),
            moved_bytes=done.moved_bytes,
            seconds=done.seconds,
            via=done.via or "disk",
            path=path,
            files=tuple(files),
        )
        self._operations.finish(operation, moved, durable=True)
