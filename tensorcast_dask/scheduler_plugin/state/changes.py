"""Small changes: publish, pin, alias, view.

Each is one step in memory and one batch in the journal; publish waits only where a
restart has left it open whether the bytes can be read.
"""

from __future__ import annotations

from tensorcast_dask.exceptions import (
    AlreadyExists,
    Mismatch,
    TensorCastError,
)
from tensorcast_dask.scheduler_plugin.state.checks import (
    check_count,
    check_name,
    check_seconds,
    check_size,
)
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.imports import Imports
from tensorcast_dask.scheduler_plugin.state.operations import (
    Caller,
    Operation,
)
from tensorcast_dask.scheduler_plugin.state.records import (
    AliasRecord,
    AliasRow,
    VersionRecord,
    ViewRecord,
    ViewRow,
    info_of,
    packed,
    version_row,
)
from tensorcast_dask.tensors.ids import Generation
from tensorcast_dask.tensors.messages import (
    AliasState,
    ArtifactInfo,
    Owner,
    Pin,
    Pinned,
    Publish,
    RegisterView,
    SetAlias,
    Unpin,
)

__all__ = ["Changes"]


class Changes:
    """Changes of names and promises."""

    def __init__(self, ground: Ground, imports: Imports, *, deadline_s: float) -> None:
        self._outbox = ground.outbox
        self._names = ground.names
        self._nodes = ground.nodes
        self._replicas = ground.replicas
        self._holders = ground.holders
        self._pins = ground.pins
        self._imports = imports
        self._operations = ground.operations
        self._stories = ground.stories
        self._deadline_s = deadline_s

    def _info(self, record: VersionRecord) -> ArtifactInfo:
        return info_of(record, lost=self._holders.is_lost(record))

    # ------------------------------------------------------------ publish
    def publish(self, caller: Caller, ask: Publish) -> None:
        """Make a version visible to `latest`."""
        record = self._names.committed(ask.generation)
        if record.published:
            after = self._outbox.pending(record.generation)
            self._operations.give(caller, self._info(record), after=after)
            return
        operation = self._operations.open(caller, "publish", record, self._deadline_s)
        self._holders.when_known(record, lambda: self._publish(operation, record))

    def _publish(self, operation: Operation, record: VersionRecord) -> None:
        if not operation.open:
            return
        caller = operation.caller
        try:
            self._names.committed(record.generation)
            if not self._holders.is_readable(record):
                raise self._holders.absence(record)
            if record.owner is Owner.CALLER:
                self._imports.copy(operation, record)
                return
        except TensorCastError as error:
            self._operations.fail(operation, error)
            return
        if not record.published:
            self._names.publish(record)
            self._outbox.persist(version_row(record), record.id, record.generation)
            self._replicas.remark(record)
            self._stories.tell(
                self._outbox.now_s,
                (record.id, caller.rid),
                "version {} published",
                record.version,
            )
            self._outbox.emit(
                "published",
                id=record.id,
                version=record.version,
                generation=record.generation,
            )
        self._operations.finish(operation, self._info(record), durable=True)

    # ------------------------------------------------------------ pins
    def pin(self, caller: Caller, ask: Pin) -> None:
        """Promise not to evict."""
        ttl_s = check_seconds(ask.ttl_s, what="ttl_s")
        record = self._names.committed(ask.generation)
        nodes = self._holders.listed(record)
        if ask.node:
            nodes = [one for one in nodes if one.node == ask.node]
            self._nodes.live(ask.node)
        if not nodes:
            if not self._holders.listed(record):
                raise self._holders.absence(record)
            label = self._nodes.label(ask.node)
            message = (
                f"node {label} does not hold {record.id!r}; replicate it there first"
            )
            raise Mismatch(message, {"node": ask.node})
        self._pins.check(record, nodes)
        number = self._pins.add(record, ask.node, ttl_s)
        pinned = Pinned(pin=number, nodes=tuple(one.node for one in nodes))
        self._operations.give(caller, pinned, durable=True)

    def unpin(self, caller: Caller, ask: Unpin) -> None:
        """Take a promise back."""
        self._pins.remove(ask.generation, ask.pin)
        self._operations.give(caller, None, durable=True)

    # ------------------------------------------------------------ aliases
    def alias(self, caller: Caller, ask: SetAlias) -> None:
        """Move a name by compare-and-set."""
        check_name(ask.name, what="alias")
        check_count(ask.expect, least=-1, most=1 << 62, what="expect")
        alias = self._names.aliases.get(ask.name)
        seen = alias.alias_generation if alias is not None and alias.target else 0
        if ask.expect not in (-1, seen):
            message = (
                f"alias {ask.name!r} has moved: it is at {seen}, not {ask.expect}; look "
                "again before you move it"
            )
            raise Mismatch(message, {"generation": seen})
        record = self._names.committed(ask.generation) if ask.generation else None
        if record is not None:
            self._check_alias_name(ask)
        elif not seen:
            state = AliasState(name=ask.name, alias_generation=0, info=None)
            self._operations.give(caller, state, after=self._outbox.pending(ask.name))
            return
        moved = AliasRecord(
            name=ask.name,
            target=record.generation if record is not None else Generation(0),
            target_id=record.id if record is not None else ask.name,
            alias_generation=(alias.alias_generation if alias is not None else 0) + 1,
        )
        self._names.aliases[ask.name] = moved
        row = AliasRow(
            moved.name, moved.target, moved.target_id, moved.alias_generation
        )
        self._outbox.persist(packed("alias", ask.name, row), ask.name)
        self._tell_alias(caller, moved, record)
        state = AliasState(
            name=ask.name,
            alias_generation=moved.alias_generation,
            info=None if record is None else self._info(record),
        )
        self._operations.give(caller, state, durable=True)

    def _check_alias_name(self, ask: SetAlias) -> None:
        if ask.name in self._names.artifacts or ask.name in self._names.views:
            message = f"{ask.name!r} is an artifact or a view; choose another alias"
            raise AlreadyExists(message)

    def _tell_alias(
        self, caller: Caller, moved: AliasRecord, record: VersionRecord | None
    ) -> None:
        if record is None:
            self._stories.tell(
                self._outbox.now_s, (moved.name, caller.rid), "alias removed"
            )
            return
        self._stories.tell(
            self._outbox.now_s,
            (moved.name, record.id, caller.rid),
            "alias {} means version {} of {}",
            moved.name,
            record.version,
            record.id,
        )

    # ------------------------------------------------------------ views
    def view(self, caller: Caller, ask: RegisterView) -> None:
        """Make a view findable."""
        check_name(ask.id, what="view id")
        check_size(ask.nbytes, what="the size of a view")
        check_count(ask.tensors, least=0, most=1 << 40, what="the number of tensors")
        record = self._names.committed(ask.generation)
        known = self._names.views.get(ask.id)
        if known is None:
            self._names.check_unaliased(ask.id)
            if ask.id in self._names.artifacts:
                message = f"{ask.id!r} is an artifact; give the view another name"
                raise AlreadyExists(message, {"generation": 0})
            view = ViewRecord(
                id=ask.id,
                base=record.generation,
                view=ask.view,
                index_digest=ask.index_digest,
                nbytes=ask.nbytes,
                tensors=ask.tensors,
            )
            self._names.add_view(view)
            row = ViewRow(
                ask.id,
                record.generation,
                ask.view,
                ask.index_digest,
                ask.nbytes,
                ask.tensors,
            )
            self._outbox.persist(packed("view", ask.id, row), ask.id)
        elif (known.base, known.view) != (record.generation, ask.view):
            message = f"{ask.id!r} is another view already; give this one another name"
            raise AlreadyExists(message, {"generation": known.base})
        info = info_of(
            record,
            lost=self._holders.is_lost(record),
            view=self._names.views[ask.id],
        )
        self._operations.give(caller, info, durable=True)
