"""Questions: they change nothing, and are carried out again when asked again.

Rules:

1. An answer waits for the journal only where it shows a change that is not on disk yet.
2. While the journal is away, what would show such a change is refused at once
   (CatalogUnavailable) and all other questions are answered.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

from tensorcast_dask.exceptions import CatalogUnavailable, NotFound, TensorCastError
from tensorcast_dask.scheduler_plugin.state.checks import check_count, check_labels
from tensorcast_dask.scheduler_plugin.state.creations import Creations
from tensorcast_dask.scheduler_plugin.state.events import RunQuery, Snapshot
from tensorcast_dask.scheduler_plugin.state.explaining import Explaining
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.instances import Instances
from tensorcast_dask.scheduler_plugin.state.listing import (
    MAX_LOOKS,
    MAX_PAGE,
    cursor_of,
    parse_cursor,
    wears,
)
from tensorcast_dask.scheduler_plugin.state.operations import Caller
from tensorcast_dask.scheduler_plugin.state.outbox import Name
from tensorcast_dask.scheduler_plugin.state.outcomes import Value
from tensorcast_dask.scheduler_plugin.state.records import VersionRecord, info_of
from tensorcast_dask.scheduler_plugin.state.usage import Usage
from tensorcast_dask.tensors.ids import ArtifactId, NodeId, RequestId, Version
from tensorcast_dask.tensors.messages import (
    ArtifactInfo,
    Describe,
    Described,
    ExplainAsked,
    Explained,
    Fault,
    ListArtifacts,
    Listed,
    Locate,
    Located,
    NodesAsked,
    OperationAsked,
    Query,
    Resolve,
)
from tensorcast_dask.tensors.messages import (
    Nodes as NodesAnswer,
)

__all__ = ["Reads"]

#: Instants that differ by less are one: what is told is rounded.
_SAME_S: Final = 1e-5
#: A caller waits so much longer for what its deadline has ended.
_ANSWER_S: Final = 1.0


class Reads:
    """Answers to questions."""

    def __init__(
        self,
        ground: Ground,
        creations: Creations,
        instances: Instances,
        usage: Usage,
        explaining: Explaining,
    ) -> None:
        self._instances = instances
        self._usage = usage
        self._explaining = explaining
        self._outbox = ground.outbox
        self._names = ground.names
        self._nodes = ground.nodes
        self._holders = ground.holders
        self._creations = creations
        self._operations = ground.operations
        self._stories = ground.stories

    def _tell(self, caller: Caller, value: Value, *names: Name) -> None:
        after = max((self._outbox.pending(name) for name in names), default=0)
        self._outbox.reply(caller.session, caller.rid, value, after=after)

    def _tell_all(self, after: int) -> int:
        if self._outbox.stalled and after > self._outbox.durable:
            message = (
                f"the journal cannot write ({self._outbox.stalled}) and this question "
                "concerns changes that wait for it; ask again when it is back"
            )
            raise CatalogUnavailable(message)
        return after

    # ------------------------------------------------------------ one name
    def resolve(self, caller: Caller, ask: Resolve) -> None:
        """Tell which generation a name means now."""
        check_count(ask.version, least=0, most=1 << 62, what="version")
        names: tuple[Name, ...] = (ask.id,)
        value: Value
        try:
            record, view = self._names.resolve(
                ask.id, ask.version, published=ask.published
            )
            lost = self._holders.is_lost(record)
            if lost:
                raise self._holders.absence(record)
        except TensorCastError as error:
            value = Fault.of(error)
        else:
            value = info_of(record, lost=lost, view=view)
            names = (ask.id, record.id, record.generation)
        self._tell(caller, value, *names)

    def describe(self, caller: Caller, ask: Describe) -> None:
        """Tell the index of a generation."""
        try:
            record = self._names.committed(ask.generation)
        except TensorCastError as error:
            self._tell(caller, Fault.of(error), ask.generation)
            return
        info = info_of(record, lost=self._holders.is_lost(record))
        described = Described(info=info, index=record.index)
        self._tell(caller, described, ask.generation)

    def locate(self, caller: Caller, ask: Locate) -> None:
        """Tell where the replicas are; waits while a restart has left that open."""
        try:
            record = self._names.committed(ask.generation)
        except TensorCastError as error:
            self._tell(caller, Fault.of(error), ask.generation)
            return
        self._usage.read(record.id, 1, now_s=self._outbox.now_s)
        self._holders.when_known(record, lambda: self._located(caller, record))

    def _located(self, caller: Caller, record: VersionRecord) -> None:
        value: Value
        try:
            self._names.committed(record.generation)
            if not self._holders.is_readable(record):
                raise self._holders.absence(record)
        except TensorCastError as error:
            value = Fault.of(error)
        else:
            value = Located(
                info=info_of(record, lost=False),
                locations=self._holders.locations(record, host=caller.host),
            )
        self._tell(caller, value, record.generation)

    # ------------------------------------------------------------ lists
    def list_artifacts(self, caller: Caller, ask: ListArtifacts) -> None:
        """One page of the catalog."""
        check_count(ask.limit, least=1, most=1 << 62, what="limit")
        check_labels(ask.labels)
        last, number = parse_cursor(ask.after)
        limit = min(ask.limit, MAX_PAGE)
        infos: list[ArtifactInfo] = []
        after, looks, seen = "", 0, ask.after
        for record in self._from(ask, last, number):
            if looks == MAX_LOOKS:
                after = seen
                break
            looks, seen = looks + 1, cursor_of(record.id, record.version)
            if not wears(record.labels, ask.labels):
                continue
            if len(infos) == limit:
                after = cursor_of(infos[-1].id, infos[-1].version)
                break
            infos.append(info_of(record, lost=self._holders.is_lost(record)))
        listed = Listed(infos=tuple(infos), after=after)
        self._outbox.reply(
            caller.session, caller.rid, listed, after=self._tell_all(self._outbox.firm)
        )

    def _from(
        self, ask: ListArtifacts, last: str, number: int
    ) -> Iterator[VersionRecord]:
        """Go through what is listed after a version of an artifact."""
        for name in self._names.listed.starting(ask.prefix, at=last):
            artifact = self._names.artifacts[name]
            floor = number if name == last else 0
            if not ask.all_versions:
                version = Version(artifact.latest or artifact.newest)
                if version > floor:
                    yield artifact.versions[version]
                continue
            numbers = sorted(artifact.versions)
            for version in numbers[bisect_right(numbers, floor) :]:
                record = artifact.versions[version]
                if not record.creating:
                    yield record

    def nodes(self, caller: Caller, ask: NodesAsked) -> None:
        """All live nodes."""
        answer = NodesAnswer(nodes=self._nodes.states())
        self._outbox.reply(caller.session, ask.rid, answer)

    # ------------------------------------------------------------ why and how
    def explain(self, caller: Caller, ask: ExplainAsked) -> None:
        """Tell why it is as it is."""
        name = ArtifactId(ask.ref)
        lines = self._stories.of(ask.ref, now_s=self._outbox.now_s)
        during = self._during(RequestId(ask.ref))
        both = dict.fromkeys((*lines, *during))
        lines = tuple(sorted(both, key=lambda one: -one[0]))
        lines += tuple((0.0, line) for line in self._explaining.now(ask.ref))
        if not lines and not self._is_known(ask.ref):
            message = (
                f"nothing is known of {ask.ref!r}: no artifact, node or request is called "
                "so; `list` and `nodes` show what there is"
            )
            self._tell(caller, Fault.of(NotFound(message)), name)
            return
        self._tell(caller, Explained(lines=lines), name)

    def _is_known(self, ref: str) -> bool:
        """Say whether there is something of which nothing has to be told."""
        names, name = self._names, ArtifactId(ref)
        return (
            name in names.views
            or name in names.aliases
            or names.numbers.issued(name) > 0
            or NodeId(ref) in self._nodes.records
            or self._operations.state_of(RequestId(ref)).status != "unknown"
        )

    def _during(self, rid: RequestId) -> tuple[tuple[float, str], ...]:
        """Tell what happened to an artifact while a request waited."""
        operation = self._operations.find(rid)
        if operation is None:
            return ()
        now_s = self._outbox.now_s
        ended_s = now_s if operation.open else operation.ended_s
        first, last = now_s - operation.started_s, now_s - ended_s
        told = self._stories.of(operation.id or operation.node, now_s=now_s)
        return tuple(one for one in told if last - _SAME_S <= one[0] <= first + _SAME_S)

    def operation(self, caller: Caller, ask: OperationAsked) -> None:
        """Tell how a request stands."""
        state = self._operations.state_of(ask.asked)
        self._outbox.reply(caller.session, caller.rid, state)

    def query(self, caller: Caller, ask: Query) -> None:
        """One SELECT, run elsewhere on what is on disk."""
        check_count(ask.limit, least=1, most=1 << 62, what="limit")
        run = RunQuery(
            session=caller.session,
            rid=caller.rid,
            sql=ask.sql,
            limit=min(ask.limit, 1_000_000),
            within_s=ask.deadline_s + _ANSWER_S,
            snapshot=Snapshot(
                nodes=self._nodes.facts(),
                instances=self._instances.facts(),
                operations=self._operations.facts(),
                creating=self._creations.facts,
            ),
        )
        self._outbox.hold(run, after=self._tell_all(self._outbox.firm))
