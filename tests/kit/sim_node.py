"""A simulated node: the store process, its link to the catalog, its worker.

It follows `store.catalog` and `dataplane.link` step for step; adoption and the lease fence
are the product's own.

Rules:

1. A node sees time through its own clock only.
2. What it says while the link is down is dropped: the next inventory says it.
3. A store process dies whole: nothing of it acts afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from tensorcast_dask.exceptions import StaleOwner
from tensorcast_dask.store.records import record_of
from tensorcast_dask.store.state import adoption
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import (
    ClusterId,
    Epoch,
    Generation,
    HostId,
    Incarnation,
    NodeId,
    RequestId,
)
from tests.kit.sim_desk import SimDesk
from tests.kit.sim_jobs import SimJobs
from tests.kit.sim_plans import SimPlans
from tests.kit.sim_store import CHUNK_BYTES, SimStore
from tests.kit.sim_timeline import Life, Signal

if TYPE_CHECKING:
    from tests.kit.sim_network import End
    from tests.kit.world import World

__all__ = ["SimNode"]

RETRY_S = 1.0
CONNECT_S = 5.0
BATCH = 3


@dataclass(eq=False)
class SimNode:
    """One store process."""

    world: World
    name: str
    host: str
    #: How fast its clock runs.
    rate: float = 1.0
    disk: bool = False
    device: bool = False
    seen_epoch: int = 0
    workers: int = 0
    link: End | None = None
    up: bool = False
    greeted: bool = False
    lease_until_s: float = 0.0
    seq: int = 0
    sent_s: dict[int, float] = field(default_factory=dict)
    asked: dict[RequestId, Signal] = field(default_factory=dict)
    rids: int = 0
    ended: str = ""

    def __post_init__(self) -> None:
        self.life = Life(self.name)
        self.born_s = self.welcomed_s = self.world.time.now_s
        self.node = NodeId(self.name)
        self.adoption = adoption.Adoption(orphan_ttl_s=10_000.0)
        self.store = SimStore(
            name=self.name,
            rng=self.world.rng,
            faults=self.world.faults,
            now_s=self.now_s,
            lease_left_s=self.lease_left_s,
            tell=self.tell,
            disk=self.disk,
            device=f"EMU-{self.name}" if self.device else "",
            pages=self.world.habits.pages,
            ask_leave=self._ask_leave,
            giving_up=self._giving_up,
            unsummed=self._unsummed,
        )
        self.jobs = SimJobs(self)
        self.desk = SimDesk(self)
        self.card = m.NodeCard(
            node=self.node,
            incarnation=Incarnation(0),
            host=HostId(self.host),
            socket=f"/run/{self.name}",
        )
        self.plans = SimPlans(self)

    # -------------------------------------------------------------- time
    def now_s(self) -> float:
        """Read this node's clock."""
        return self.world.time.now_s * self.rate

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something after so long by this node's clock, if it lives then."""

        def guarded() -> None:
            if self.life.alive:
                act()

        self.world.time.after(seconds / self.rate, guarded)

    def lease_left_s(self) -> float:
        """What is left of the lease; infinite while never greeted."""
        return self.lease_until_s - self.now_s() if self.greeted else float("inf")

    # -------------------------------------------------------------- life
    def start(self) -> None:
        """Be adopted, connect, look at the clock from time to time."""
        self.adopted()
        self._connect()
        self._tick()

    def _tick(self) -> None:
        self.store.take_back()
        self.store.probe()
        self.after(1.0, self._tick)

    def die(self) -> None:
        """End at once."""
        self.life.alive = False
        for unmap in self.store.lent.values():
            unmap()
        self.desk.die()
        link, self.link = self.link, None
        if link is not None:
            self.world.network.break_one(link.connection)

    def adopted(self) -> None:
        """A (new) worker takes the store."""
        self.workers += 1
        asked = adoption.Asked(
            link=self.workers,
            worker=f"tcp://{self.name}:{self.workers}",
            pid=self.workers,
            holder_dead=True,
        )
        try:
            self.adoption.handle(asked, now_s=self.now_s())
        except StaleOwner:
            return
        self.card = msgspec.structs.replace(
            self.card,
            incarnation=self.adoption.incarnation,
            worker=asked.worker,
            name=f"w-{self.name}",
        )
        self._relink()

    def orphaned(self) -> None:
        """The worker died; the store lives on, unattended."""
        gone = adoption.WorkerDied(incarnation=self.adoption.incarnation)
        if self.adoption.handle(gone, now_s=self.now_s()):
            self.card = msgspec.structs.replace(self.card, worker="")
            self._relink()

    # -------------------------------------------------------------- link
    def _relink(self) -> None:
        if self.link is not None:
            link, self.link = self.link, None
            link.close()
            self._down()
            self._connect()

    def _connect(self) -> None:
        self.world.dial_link(self, self._connected)

    def _connected(self, end: End | None) -> None:
        if not self.life.alive or self.link is not None:
            if end is not None:
                end.close()
            return
        if end is None:
            self.after(RETRY_S, self._connect_again)
            return
        self.link = end
        sent_s = self.now_s()
        end.on_message = lambda message: self._hear(end, message, sent_s)
        end.on_closed = lambda: self._closed(end)
        end.send(
            m.NodeHello(
                card=self.card,
                cluster=ClusterId("c1") if self.greeted else ClusterId(""),
                epoch=Epoch(self.seen_epoch),
                counter=self.store.table.highest,
                uses=self.store.uses(),
            )
        )

    def _connect_again(self) -> None:
        if self.link is None:
            self._connect()

    def _closed(self, end: End) -> None:
        if self.link is end and self.life.alive:
            self.link = None
            self._down()
            self.after(RETRY_S, self._connect_again)

    def _down(self) -> None:
        self.up = False
        self.desk.link_down()
        self.plans.session.heard_of(up=False)
        for waiting in self.asked.values():
            waiting.fire()

    def tell(self, message: m.FromNode) -> bool:
        """Say something to the catalog, if it listens."""
        if not self.up or self.link is None:
            return False
        repeatable = isinstance(message, m.TaskDone | m.ReplicaReady)
        self.link.send(message, times=self.world.network.twice() if repeatable else 1)
        return True

    def _hear(self, end: End, message: object, sent_s: float) -> None:
        if not self.life.alive or self.link is not end:
            return
        match message:
            case m.NodeWelcome():
                self._welcomed(message, sent_s)
            case m.LinkRefused():
                end.close()
                self.link = None
                self.world.refused(self, message)
                if message.retry:
                    self.after(RETRY_S, self._connect_again)
            case m.Renewed():
                self._renewed(message)
            case _:
                self._order(message)

    # -------------------------------------------------------------- lease
    def _welcomed(self, welcome: m.NodeWelcome, sent_s: float) -> None:
        self.greeted = self.up = True
        self.welcomed_s = self.world.time.now_s
        self.seen_epoch = max(self.seen_epoch, welcome.epoch)
        self.sent_s.clear()
        self.lease_until_s = max(self.lease_until_s, sent_s + welcome.lease_ttl_s)
        outcomes = self.jobs.greeted(welcome.epoch)
        held = self.store.committed()
        for at in range(0, max(1, len(held)), BATCH):
            records = tuple(
                record_of(
                    self.store.table.replicas[generation],
                    tier,
                    chunk_bytes=CHUNK_BYTES,
                    with_index=welcome.need_index,
                )
                for generation, tier in held[at : at + BATCH]
            )
            self.tell(m.Inventory(replicas=records, more=at + BATCH < len(held)))
        for outcome in outcomes:
            self.tell(outcome)
        if self.world.habits.calls:
            self.tell(self.desk.greeted())
            self.plans.session.heard_of(up=True)
        link = self.link
        wait_s = sent_s + welcome.lease_ttl_s / 3 - self.now_s()
        self.after(max(0.0, wait_s), lambda: self._renew(link, welcome.lease_ttl_s))

    def _renew(self, link: End | None, ttl_s: float) -> None:
        if self.link is not link or not self.up:
            return
        self.seq += 1
        self.sent_s[self.seq] = self.now_s()
        self.tell(m.Renew(seq=self.seq, uses=self.store.uses()))
        self.after(ttl_s / 3, lambda: self._renew(link, ttl_s))

    def _renewed(self, message: m.Renewed) -> None:
        sent_s = self.sent_s.pop(message.seq, None)
        if sent_s is not None:
            self.lease_until_s = max(self.lease_until_s, sent_s + message.lease_ttl_s)

    # -------------------------------------------------------------- leave to drop
    def _ask_leave(self, generations: list[Generation]) -> Signal:
        self.rids += 1
        rid = RequestId(f"{self.name}-{self.rids}")
        answered = Signal()
        if self.tell(m.MayDrop(rid=rid, generations=tuple(generations))):
            self.asked[rid] = answered
            self.after(3.0, lambda: self.asked.pop(rid, Signal()).fire())
        else:
            answered.fire()
        return answered

    def _unsummed(self, generation: Generation, tier: m.Tier) -> None:
        wait_s = self.world.rng.choice((0.01, 0.1, 1.0))
        self.after(wait_s, lambda: self.store.sum(generation, tier))

    def _giving_up(
        self, generation: Generation, tier: m.Tier | None, final: bool
    ) -> None:
        self.world.watch.dropping(self, generation, tier, final=final)

    # -------------------------------------------------------------- orders
    def _order(self, message: object) -> None:
        match message:
            case m.DoPull() | m.DoLoad() | m.DoSave():
                self.jobs.start(message)
            case m.DoDrop() | m.DropGranted():
                self.jobs.drop(message)
            case m.DoMark():
                ends_s = (
                    self.now_s() + message.pinned_s if message.pinned_s > 0 else 0.0
                )
                self.store.table.mark(
                    message.generation,
                    published=message.published,
                    spare=message.spare,
                    pin_ends_s=ends_s,
                )
            case m.DoCancel():
                self.jobs.cancel(message.task)
            case m.TaskSeen():
                self.jobs.seen(message.task)
            case m.DoEnd():
                self.ended = message.why
                self.world.ended(self)
            case _:
                self._of_others(message)

    def _of_others(self, message: object) -> None:
        match message:
            case m.SessionOut(session=session, raw=raw):
                if session == self.plans.session.session:
                    self.plans.session.heard(raw)
                else:
                    self.desk.told(message)
            case m.InstanceSeen() | m.DoDetach():
                self.desk.told(message)
            case m.DoRun():
                self.plans.ordered(message)
            case _:
                message = f"{self.name} does not know {message}"
                raise AssertionError(message)
