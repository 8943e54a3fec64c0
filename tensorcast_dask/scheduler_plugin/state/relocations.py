"""Ensure, migrate, drain: requests that bring replicas to nodes.

Rules:

1. Ensure with no node named is tried on another one when the chosen one is lost or full.
2. Migrate is copy, verify, switch, free: the source is struck only after the target's
   replica is listed. Any failure before leaves the source as it was.
3. Drain moves what a node alone holds (or what its hosts' floor needs), at most `WIDTH`
   at a time, and ends the node only when nothing that it alone held stayed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from tensorcast_dask.exceptions import (
    CapacityError,
    DeviceError,
    Mismatch,
    NotFound,
    PeerLost,
    TensorCastError,
)
from tensorcast_dask.scheduler_plugin.state.checks import check_seconds
from tensorcast_dask.scheduler_plugin.state.endings import Endings
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.moves import Brought, Moves, Wish
from tensorcast_dask.scheduler_plugin.state.operations import (
    Caller,
    Operation,
)
from tensorcast_dask.scheduler_plugin.state.placement import choose, offers
from tensorcast_dask.scheduler_plugin.state.records import NodeRecord, VersionRecord
from tensorcast_dask.tensors.ids import Generation, HostId, NodeId
from tensorcast_dask.tensors.messages import (
    DoEnd,
    Drained,
    DrainNode,
    Ensure,
    Migrate,
    Moved,
    Owner,
    Tier,
)

__all__ = ["Relocations"]

WIDTH: Final = 4
PLACES: Final = 3
_ANY_HOST: Final = HostId("")


@dataclass(slots=True, eq=False, kw_only=True)
class _Drain:
    """One node being emptied."""

    node: NodeRecord
    operation: Operation
    end: bool
    left: list[VersionRecord]
    running: int = 0
    wishes: list[Wish] = field(default_factory=list)
    moved: list[Generation] = field(default_factory=list)
    moved_bytes: int = 0
    stayed: list[tuple[Generation, str]] = field(default_factory=list)
    over: bool = False


class Relocations:
    """Requests that move bytes.

    Attributes
    ----------
    on_leave : callable
        Told of a node that was emptied and is about to end.
    """

    on_leave: Callable[[NodeRecord], None]

    def __init__(self, ground: Ground, moves: Moves, endings: Endings) -> None:
        self._outbox = ground.outbox
        self._names = ground.names
        self._nodes = ground.nodes
        self._replicas = ground.replicas
        self._holders = ground.holders
        self._moves = moves
        self._endings = endings
        self._operations = ground.operations

    # ------------------------------------------------------------ ensure
    def ensure(self, caller: Caller, ask: Ensure) -> None:
        """Bring a replica to a node."""
        deadline_s = check_seconds(ask.deadline_s, what="deadline_s")
        record = self._names.committed(ask.generation)
        if ask.node:
            self._nodes.live(ask.node)
        operation = self._operations.open(caller, ask.why, record, deadline_s)
        self._holders.when_known(
            record, lambda: self._ensure(operation, record, ask, set())
        )

    def _ensure(
        self,
        operation: Operation,
        record: VersionRecord,
        ask: Ensure,
        tried: set[NodeId],
    ) -> None:
        if not operation.open:
            return
        try:
            self.check_there(record)
            node = self._target(record, ask, tried)
        except TensorCastError as error:
            self._operations.fail(operation, error)
            return
        tried.add(node.node)

        def done(how: Moved | TensorCastError) -> None:
            if isinstance(how, Moved):
                self._operations.finish(operation, how)
            elif (
                not ask.node
                and isinstance(how, CapacityError | DeviceError | PeerLost)
                and len(tried) < PLACES
            ):
                self._ensure(operation, record, ask, tried)
            else:
                self._operations.fail(operation, how)

        self._bring(operation, record, node, ask, done)

    def _bring(
        self,
        operation: Operation,
        record: VersionRecord,
        node: NodeRecord,
        ask: Ensure | Migrate,
        done: Brought,
    ) -> None:
        why = ask.why if isinstance(ask, Ensure) else "migrate"
        wish = self._moves.bring(
            record, node, ask.tier, why=why, until_s=operation.until_s, done=done
        )
        move = wish.move
        if move is not None and operation.open:
            operation.node = node.node
            operation.progress = move.progress
            operation.leave = lambda: self._moves.leave(wish)

    def _target(
        self, record: VersionRecord, ask: Ensure, tried: set[NodeId]
    ) -> NodeRecord:
        if ask.node:
            return self._named(ask)
        if ask.host:
            return self._target_at(ask.host, record, ask, tried)
        holders = self._holders.listed(record)
        names = {one.node for one in holders} | tried
        hosts = {one.host for one in holders}
        try:
            return self._choose(record, ask, avoid_nodes=names, avoid_hosts=hosts)
        except CapacityError:
            return self._choose(record, ask, avoid_nodes=names)

    def _named(self, ask: Ensure | Migrate) -> NodeRecord:
        """Find the node that is asked for, which must have the device that is."""
        node = self._nodes.live(ask.node)
        if ask.device and not offers(node, ask.tier, ask.device):
            message = f"node {node.label} does not have device {ask.device}; name its own, or no node"
            raise Mismatch(message, {"node": node.node, "device": ask.device})
        return node

    def _target_at(
        self, host: HostId, record: VersionRecord, ask: Ensure, tried: set[NodeId]
    ) -> NodeRecord:
        """Choose a node of a host: one that holds it already before all others."""
        free = ask.tier is Tier.HOST and not ask.device
        here = [
            one
            for one in self._holders.listed(record)
            if one.host == host
            and one.is_store
            and one.node not in tried
            and (free or offers(one, ask.tier, ask.device))
        ]
        for node in here:
            if ask.tier in record.holders[node.node].tiers:
                return node
        if here:
            return here[0]
        for move in self._moves.of(record.generation):
            same = move.node.host == host and move.tier is ask.tier
            if same and not ask.device and move.node.node not in tried:
                return move.node
        return self._choose(record, ask, host=host, only_host=True, avoid_nodes=tried)

    def _choose(
        self,
        record: VersionRecord,
        ask: Ensure,
        *,
        host: HostId = _ANY_HOST,
        only_host: bool = False,
        avoid_nodes: Collection[NodeId],
        avoid_hosts: Collection[HostId] = (),
    ) -> NodeRecord:
        return choose(
            self._nodes.records.values(),
            nbytes=record.nbytes,
            host=host,
            tier=ask.tier,
            device=ask.device,
            only_host=only_host,
            avoid_nodes=avoid_nodes,
            avoid_hosts=avoid_hosts,
        )[0]

    def check_there(self, record: VersionRecord) -> None:
        """Refuse what has been destroyed or lost meanwhile, and what may still change.

        Raises
        ------
        Gone, DataLost, OwnerGone, Mismatch
            Then.
        """
        self._names.committed(record.generation)
        if not self._holders.is_readable(record):
            raise self._holders.absence(record)
        if record.owner is Owner.CALLER:
            message = (
                f"{record.id!r} lies in the memory of the process that registered it, which "
                "may change it: publish it, and move or replicate what was published"
            )
            raise Mismatch(message, {"generation": record.generation})

    # ------------------------------------------------------------ migrate
    def migrate(self, caller: Caller, ask: Migrate) -> None:
        """Copy, verify, switch, free."""
        deadline_s = check_seconds(ask.deadline_s, what="deadline_s")
        record = self._names.committed(ask.generation)
        target = self._nodes.live(ask.node)
        if ask.source not in self._nodes.records:
            message = f"there is no node {ask.source!r}; ask for the nodes again"
            raise NotFound(message, {"node": ask.source})
        operation = self._operations.open(caller, "migrate", record, deadline_s)
        self._holders.when_known(
            record, lambda: self._migrate(operation, record, target, ask)
        )

    def _migrate(
        self,
        operation: Operation,
        record: VersionRecord,
        target: NodeRecord,
        ask: Migrate,
    ) -> None:
        if not operation.open:
            return
        try:
            self.check_there(record)
            self._named(ask)
            if ask.source not in record.holders:
                label = self._nodes.label(ask.source)
                message = f"node {label} holds no replica of {record.id!r}"
                raise NotFound(message, {"node": ask.source})
        except TensorCastError as error:
            self._operations.fail(operation, error)
            return

        def done(how: Moved | TensorCastError) -> None:
            if isinstance(how, TensorCastError):
                self._operations.fail(operation, how)
            elif ask.source == ask.node:
                self._operations.finish(operation, how)
            else:
                self._switch(operation, record, ask.source, how)

        self._bring(operation, record, target, ask, done)

    def _switch(
        self, operation: Operation, record: VersionRecord, source: NodeId, moved: Moved
    ) -> None:
        if not operation.open:
            return
        try:
            self.check_there(record)
            if source in record.holders:
                self._endings.check_not_last(record, source)
        except TensorCastError as error:
            self._operations.fail(operation, error)
            return
        # From here on the move has happened: a deadline only ends the wait for the drop.
        operation.leave = None
        operation.on_deadline = lambda: self._operations.finish(
            operation, moved, durable=True
        )
        self._endings.free(
            record,
            self._nodes.records[source],
            why=f"migrated to {self._nodes.label(moved.location.card.node)}",
            then=lambda: self._operations.finish(operation, moved, durable=True),
        )

    # ------------------------------------------------------------ drain
    def drain(self, caller: Caller, ask: DrainNode) -> None:
        """Empty a node, then end it."""
        deadline_s = check_seconds(ask.deadline_s, what="deadline_s")
        node = self._nodes.live(ask.node)
        node.draining = True
        held = list(self._replicas.by_node.get(node.node, {}).values())
        alone = [
            record
            for record in held
            if not self._replicas.spare(record, node) and record.owner is Owner.SYSTEM
        ]
        operation = self._operations.open(caller, "drain", None, deadline_s)
        operation.node = node.node
        drain = _Drain(node=node, operation=operation, end=ask.end, left=alone[::-1])
        operation.on_deadline = lambda: self._drain_over(drain, "the deadline passed")
        operation.leave = lambda: self._drain_stop(drain)
        self._drain_on(drain)

    def _drain_on(self, drain: _Drain) -> None:
        while drain.left and drain.running < WIDTH and not drain.over:
            record = drain.left.pop()
            if record.generation not in self._names.versions:
                continue
            hosts = {
                one.host
                for one in self._holders.listed(record)
                if one is not drain.node
            }
            try:
                target = self._drain_target(drain, record, hosts)
            except CapacityError as error:
                self._drain_stays(drain, record, error.message)
                continue
            drain.running += 1
            wish = self._moves.bring(
                record,
                target,
                Tier.HOST,
                why="drain",
                until_s=drain.operation.until_s,
                done=self._on_drained(drain, record),
            )
            drain.wishes.append(wish)
        if not drain.left and not drain.running:
            self._drain_over(drain, "")

    def _drain_target(
        self, drain: _Drain, record: VersionRecord, hosts: set[HostId]
    ) -> NodeRecord:
        nodes = self._nodes.records.values()
        names = {one.node for one in self._holders.listed(record)}
        names.add(drain.node.node)
        for avoid in (hosts | {drain.node.host}, hosts):
            try:
                return choose(
                    nodes,
                    nbytes=record.nbytes,
                    host=HostId(""),
                    avoid_nodes=names,
                    avoid_hosts=avoid,
                )[0]
            except CapacityError:
                continue
        return choose(nodes, nbytes=record.nbytes, host=HostId(""), avoid_nodes=names)[
            0
        ]

    def _on_drained(self, drain: _Drain, record: VersionRecord) -> Brought:
        return lambda how: self._drained_one(drain, record, how)

    def _drained_one(
        self, drain: _Drain, record: VersionRecord, how: Moved | TensorCastError
    ) -> None:
        drain.running -= 1
        if isinstance(how, Moved):
            drain.moved.append(record.generation)
            drain.moved_bytes += how.moved_bytes
        elif record.generation in self._names.versions:
            self._drain_stays(drain, record, how.message)
        if not drain.over:
            self._drain_on(drain)

    def _drain_stays(self, drain: _Drain, record: VersionRecord, why: str) -> None:
        """Note what stayed, when no other copy of it is listed."""
        others = [o for o in self._holders.staying(record) if o is not drain.node]
        if not others:
            drain.stayed.append((record.generation, why))

    def _drain_stop(self, drain: _Drain) -> None:
        drain.over = True
        drain.node.draining = False
        wishes, drain.wishes = drain.wishes, []
        for wish in wishes:
            self._moves.leave(wish)
        for record in self._replicas.by_node.get(drain.node.node, {}).values():
            self._replicas.remark(record)  # it is a copy to count on again

    def _drain_over(self, drain: _Drain, why: str) -> None:
        if drain.over:
            return
        for record in self._replicas.by_node.get(drain.node.node, {}).values():
            told = {generation for generation, _ in drain.stayed}
            if record.generation not in told:  # also what was moved may have gone again
                self._drain_stays(drain, record, why or "it came while draining")
        self._drain_stop(drain)
        receipt = Drained(
            moved=tuple(drain.moved),
            moved_bytes=drain.moved_bytes,
            stayed=tuple(drain.stayed),
        )
        if not drain.stayed and (drain.end or not drain.node.attended):
            # It is about to end: what is written there still has to be put elsewhere, and not
            # committed in the moment until then.
            self.on_leave(drain.node)
        if drain.end and not drain.stayed:
            drain.node.draining = True
            self._outbox.hold(
                lambda: self._end_node(drain.node, "it was drained"),
                after=self._outbox.here,
            )
        self._operations.finish(drain.operation, receipt, durable=True)

    def retired(self, node: NodeId, why: str) -> None:
        """End a node that was emptied, and whose worker Dask has let go."""
        record = self._nodes.records.get(node)
        if record is not None:
            self._end_node(record, why)

    def _end_node(self, node: NodeRecord, why: str) -> None:
        """Tell a node to end, now and should it come back; it counts no more."""
        node.ended = why
        self._outbox.send(node.link, DoEnd(why=why))
        if node.live:
            self._nodes.give_up(node, why=f"{why}, and ended")

    def came_back(self, node: NodeRecord) -> None:
        """End a node that had no link when it was told to."""
        if node.ended:
            self._end_node(node, node.ended)
