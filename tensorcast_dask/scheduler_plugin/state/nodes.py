"""Nodes and their leases.

Rules:

1. A node's lease runs from when a renewal is read. The node counts from when it sent it,
   so it fences itself before the catalog gives it up.
2. A lease that looks lapsed is *doubted* first and judged one moment later: renewals that
   lay in a socket while the loop was busy are read in between.
3. The end of a link and Dask's `remove_worker` are news, not death.
4. At most one link speaks for a node: the newest of the highest incarnation. What an
   older one says is ignored.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorcast_dask.exceptions import NotFound, PeerLost
from tensorcast_dask.scheduler_plugin.state.events import (
    DOUBT_S,
    CloseLink,
    NodeFacts,
    Row,
)
from tensorcast_dask.scheduler_plugin.state.outbox import Outbox
from tensorcast_dask.scheduler_plugin.state.records import (
    NodeRecord,
    NodeRow,
    packed,
)
from tensorcast_dask.scheduler_plugin.state.timers import Timers
from tensorcast_dask.tensors.ids import NodeId
from tensorcast_dask.tensors.messages import (
    NodeCard,
    NodeHello,
    NodeState,
    Renew,
    Renewed,
    Tier,
)

__all__ = ["Nodes"]


class Nodes:
    """All nodes that are or were here.

    Attributes
    ----------
    records : dict
        By node.
    lease_ttl_s : float
        How long a lease runs.
    on_lapse : callable
        Told of each node whose lease is over, after it is not live any more.
    """

    on_lapse: Callable[[NodeRecord], None]

    def __init__(self, outbox: Outbox, timers: Timers, *, lease_ttl_s: float) -> None:
        self._outbox = outbox
        self._timers = timers
        self.lease_ttl_s = lease_ttl_s
        self.records: dict[NodeId, NodeRecord] = {}
        #: When leases of the scheduler's former life have ended, whoever had them.
        self.unheard_until_s = 0.0
        self._by_link: dict[int, NodeRecord] = {}

    # ------------------------------------------------------------ look-ups
    def at_link(self, link: int) -> NodeRecord | None:
        """Who speaks on a link; None for a link that was superseded or refused."""
        return self._by_link.get(link)

    def live(self, node: NodeId) -> NodeRecord:
        """Find a node whose lease runs.

        Raises
        ------
        NotFound, PeerLost
            When there is none of that name, or it is gone.
        """
        record = self.records.get(node)
        if record is None:
            message = f"there is no node {node!r}; ask for the nodes again"
            raise NotFound(message, {"node": node})
        if not record.live:
            message = f"node {record.label} is gone: {record.gone}"
            raise PeerLost(message, {"node": node})
        return record

    def label(self, node: NodeId) -> str:
        """How messages name a node, also one that is long gone."""
        record = self.records.get(node)
        return record.label if record is not None else node[:8]

    def states(self) -> tuple[NodeState, ...]:
        """All live nodes, ordered by name."""
        now_s = self._outbox.now_s
        live = (node for node in self.records.values() if node.live)
        return tuple(
            NodeState(
                card=node.card,
                uses=node.uses,
                attended=node.attended,
                lease_left_s=max(node.lease_until_s - now_s, 0.0),
            )
            for node in sorted(live, key=lambda node: (node.card.name, node.node))
        )

    def may_be_leased(self, record: NodeRecord) -> bool:
        """Whether a node that is not live may serve under a lease that still runs.

        One that is not back yet under an earlier life's, one that was ended under its own.
        """
        if record.live:
            return False
        now_s = self._outbox.now_s
        return now_s < record.lease_until_s or self._is_missing(record)

    def _is_missing(self, record: NodeRecord) -> bool:
        unheard = not record.live and not record.lease_until_s
        return unheard and self._outbox.now_s < self.unheard_until_s

    def is_unheard(self, record: NodeRecord) -> bool:
        """Whether a node may hold, and give, what this catalog does not know yet."""
        return self._is_missing(record) or (record.live and record.claiming)

    def any_unheard(self) -> bool:
        """Whether any node may."""
        return any(self.is_unheard(one) for one in self.records.values())

    # ------------------------------------------------------------ life
    def join(self, link: int, hello: NodeHello) -> tuple[NodeRecord, bool]:
        """Let a node speak on a link; True when it is a new life of it.

        The caller has checked that the hello is not stale (`is_stale`).
        """
        card = hello.card
        record = self.records.get(card.node)
        fresh = record is None or record.incarnation != card.incarnation
        if record is None:
            record = self.records[card.node] = NodeRecord(node=card.node, card=card)
        elif record.link and record.link != link:
            self._unlink(record, why="the node opened another link")
        if fresh or record.card != card:
            self._outbox.persist(packed("node", card.node, NodeRow(card)))
        record.card = card
        record.link = link
        self._by_link[link] = record
        record.attended = bool(card.worker) or not record.is_store
        record.uses = dict(hello.uses)
        record.promised_bytes = {}
        record.claiming = True
        record.claimed = {}
        record.granted = {}
        record.weights = {}
        self._extend(record)
        return record, fresh

    def is_stale(self, card: NodeCard) -> bool:
        """Recognise an earlier life of a node that has gone on."""
        record = self.records.get(card.node)
        return record is not None and card.incarnation < record.incarnation

    def renew(self, record: NodeRecord, message: Renew) -> None:
        """Extend a lease."""
        record.uses = dict(message.uses) if message.uses else record.uses
        record.promised_bytes = {}
        self._extend(record)
        self._outbox.send(
            record.link, Renewed(seq=message.seq, lease_ttl_s=self.lease_ttl_s)
        )

    def _extend(self, record: NodeRecord) -> None:
        record.lease_until_s = self._outbox.now_s + self.lease_ttl_s
        record.doubted = False
        if not record.live:
            record.live = True
            self._timers.at(record.lease_until_s, lambda: self._judge(record))

    def _judge(self, record: NodeRecord) -> None:
        now_s = self._outbox.now_s
        if not record.live:
            return
        if now_s < record.lease_until_s:
            self._timers.at(record.lease_until_s, lambda: self._judge(record))
        elif not record.doubted:
            record.doubted = True
            self._timers.at(now_s + DOUBT_S, lambda: self._judge(record))
        else:
            self.give_up(record, why="its lease has lapsed")

    def give_up(self, record: NodeRecord, *, why: str) -> None:
        """Count a node as gone."""
        record.gone = why
        record.live = record.doubted = record.claiming = False
        if record.link:
            self._unlink(record, why=why)
        self._outbox.log("warning", f"node {record.label} is gone: {why}")
        topic = "node_ended" if record.ended else "node_lapsed"
        self._outbox.emit(topic, node=record.node, name=record.card.name, why=why)
        self.on_lapse(record)

    def link_lost(self, link: int) -> None:
        """Take the news that a link ended; the lease runs on."""
        record = self._by_link.pop(link, None)
        if record is not None:
            record.link = 0

    def _unlink(self, record: NodeRecord, *, why: str) -> None:
        self._outbox.tell(CloseLink(link=record.link, why=why))
        self._by_link.pop(record.link, None)
        record.link = 0

    def worker_gone(self, address: str) -> None:
        """Dask believes that a worker is gone: no placements until it is adopted."""
        for record in self.records.values():
            if record.card.worker == address and record.is_store:
                record.attended = False

    def forget(self, record: NodeRecord) -> None:
        """Forget a node that does not come back and that nothing points to."""
        del self.records[record.node]
        self._outbox.persist(Row(kind="node", key=record.node, blob=None))

    # ------------------------------------------------------------ sql
    def facts(self) -> tuple[NodeFacts, ...]:
        """All nodes, for the tables."""
        now_s = self._outbox.now_s
        return tuple(self._facts(node, now_s) for node in self.records.values())

    def _facts(self, node: NodeRecord, now_s: float) -> NodeFacts:
        uses = node.uses
        host = uses.get(Tier.HOST)
        return NodeFacts(
            node=node.node,
            name=node.card.name,
            host=node.host,
            worker=node.card.worker,
            kind=node.card.kind,
            incarnation=node.incarnation,
            attended=node.attended,
            live=node.live,
            lease_left_s=max(node.lease_until_s - now_s, 0.0) if node.live else 0.0,
            capacity_bytes=host.capacity_bytes if host is not None else 0,
            used_bytes=host.used_bytes if host is not None else 0,
            pinned_bytes=host.pinned_bytes if host is not None else 0,
        )
