"""What a simulated node does at the catalog's orders: pulls, files, drops, their outcomes.

It follows `store.jobs`, `store.movers`, `store.files` and `store.pulls`; the pull planner is the product's.

Rules:

1. Drops run one after the other, in the catalog's order; pulls beside each other. What
   was not dropped when the catalog greets anew is void: it says again what still holds.
2. A task is carried out once; its outcome is kept until it was seen, or until a catalog of
   another epoch greets.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tensorcast_dask.exceptions import (
    AlreadyExists,
    DeadlineExceeded,
    NotFound,
    PeerLost,
    TensorCastError,
)
from tensorcast_dask.store.records import digest_of_index
from tensorcast_dask.store.state import eviction
from tensorcast_dask.store.state.replicas import Life, Wanted
from tensorcast_dask.store.state.tiers import FROM_HOST
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import Generation, NodeId
from tests.kit.sim_pull import SimPull
from tests.kit.sim_store import index_of, values_of
from tests.kit.sim_timeline import Process, Signal

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests.kit.sim_node import SimNode
    from tests.kit.sim_timeline import Wait

__all__ = ["Job", "SimJobs"]

Brought = tuple[int, str, tuple[NodeId, ...]]
HERE: Brought = (0, "here", ())
FILE: Brought = (0, "file", ())


@dataclass(eq=False)
class Job:
    """One running task."""

    order: m.DoPull | m.DoLoad | m.DoSave
    until_s: float
    cancelled: bool = False
    pull: SimPull | None = None


@dataclass(eq=False)
class Flight:
    """Bytes on their way that several may wait for."""

    ended: Signal = field(default_factory=Signal)
    brought: Brought = HERE
    error: TensorCastError | None = None


class SimJobs:
    """The tasks of one node."""

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.store = node.store
        self.epoch = 0
        self.running: dict[int, Job] = {}
        self.outcomes: dict[int, m.TaskDone] = {}
        self.drops: deque[m.DoDrop | m.DropGranted] = deque()
        self.dropping = False
        self.flights: dict[tuple[Generation, m.Tier], Flight] = {}

    # -------------------------------------------------------------- book-keeping
    def greeted(self, epoch: int) -> list[m.TaskDone]:
        """Outcomes to say again."""
        self.drops.clear()
        if epoch != self.epoch:
            self.epoch = epoch
            self.outcomes.clear()
            self.running.clear()
        return list(self.outcomes.values())

    def seen(self, task: int) -> None:
        """Forget an outcome."""
        self.outcomes.pop(task, None)

    def cancel(self, task: int) -> None:
        """Stop a task, where it still runs."""
        job = self.running.get(task)
        if job is not None:
            job.cancelled = True
            if job.pull is not None:
                job.pull.cancel("the task was cancelled")

    def ended(self, done: m.TaskDone) -> None:
        """Record an outcome, and say it."""
        self.outcomes[done.task] = done
        self.node.tell(done)

    # -------------------------------------------------------------- drops
    def drop(self, order: m.DoDrop | m.DropGranted) -> None:
        """Queue a drop; one that was carried out is only reported again."""
        known = self.outcomes.get(order.task) if isinstance(order, m.DoDrop) else None
        if known is not None:
            self.node.tell(known)
            return
        if order in self.drops:
            return
        self.drops.append(order)
        if not self.dropping:
            self.dropping = True
            self.node.world.time.spawn(self.node.life, self._run_drops())

    def _run_drops(self) -> Process:
        while self.drops:
            yield self.node.store.disk_s()
            if not self.drops:
                break
            order = self.drops.popleft()
            if isinstance(order, m.DropGranted):
                self._granted(order)
                continue
            self.store.drop(
                order.generation,
                order.tier,
                why=order.why or "dropped",
                final=order.final,
            )
            self.ended(m.TaskDone(task=order.task))
        self.dropping = False

    def _granted(self, order: m.DropGranted) -> None:
        for generation in order.generations:
            self.store.drop(generation, why="evicted: other nodes hold it")
        waiting = self.node.asked.pop(order.rid, None)
        if waiting is not None:
            waiting.fire()

    # -------------------------------------------------------------- pulls
    def start(self, order: m.DoPull | m.DoLoad | m.DoSave) -> None:
        """Carry a task out once."""
        known = self.outcomes.get(order.task)
        if known is not None:
            self.node.tell(known)
        elif order.task not in self.running:
            job = Job(order, self.node.now_s() + order.deadline_s)
            self.running[order.task] = job
            self.node.world.time.spawn(self.node.life, self._run(job, self.epoch))

    def _run(self, job: Job, epoch: int) -> Process:
        started_s = self.node.now_s()
        task = job.order.task
        result, brought = b"", FILE
        try:
            match job.order:
                case m.DoPull():
                    brought = yield from self._once(job, job.order)
                case m.DoLoad():
                    result = yield from self._load(job, job.order)
                case m.DoSave():
                    yield from self._save(job, job.order)
            nbytes, via, sources = brought
            done = m.TaskDone(
                task=task,
                moved_bytes=nbytes,
                seconds=self.node.now_s() - started_s,
                via=via,
                sources=sources,
                result=result,
            )
        except TensorCastError as error:
            done = m.TaskDone(task=task, fault=m.Fault.of(error))
        if epoch == self.epoch:
            self.running.pop(task, None)
            self.ended(done)

    # -------------------------------------------------------------- files
    def _load(self, job: Job, order: m.DoLoad) -> Generator[Wait, bool, bytes]:
        """Read a file that holds as many bytes as its path says (`store.files`)."""
        nbytes = int(order.path)
        if not nbytes:
            message = "there is no such file"
            raise NotFound(message)
        index, digest = index_of(nbytes)
        wanted = Wanted(
            generation=order.generation,
            id=order.id,
            version=order.version,
            nbytes=nbytes,
            tier=m.Tier.HOST,
            owner=0,
            deadline_s=job.until_s,
            labels=order.labels,
        )
        filling = yield from self.store.reserve(wanted)
        target = self.store.hold(order.generation, filling.copy)
        try:
            self.store.fresh(filling.copy)
            for at, value in enumerate(values_of(order.generation, nbytes)):
                yield self.store.disk_s()
                self._check(job)
                self.store.write(filling.copy, at, value)
            self.store.commit(order.generation, m.Tier.HOST, index=index, digest=digest)
        finally:
            self.store.release(target)
            self.store.abort(order.generation, m.Tier.HOST)
        return index

    def _save(self, job: Job, order: m.DoSave) -> Generator[Wait, bool, None]:
        """Write a replica to a file, which is right or not there."""
        held = self.store.acquire(order.generation)
        try:
            yield self.store.disk_s()
            self._check(job)
            values = self.store.look(held.copy)
            self.node.world.watch.read(self.node, order.generation, values)
        finally:
            self.store.release(held)

    def _check(self, job: Job) -> None:
        if job.cancelled or self.node.now_s() >= job.until_s:
            message = "the task was cancelled, or is late"
            raise DeadlineExceeded(message)

    # -------------------------------------------------------------- bringing
    def _once(self, job: Job, order: m.DoPull) -> Generator[Wait, bool, Brought]:
        key = (order.generation, order.tier)
        flight = self.flights.get(key)
        if flight is not None:
            patience_s = (job.until_s - self.node.now_s()) / self.node.rate
            if not (yield flight.ended, max(patience_s, 0.0)):
                message = "the same bytes come for somebody else, and not in time"
                raise DeadlineExceeded(message)
            if flight.error is not None:
                raise flight.error
            return flight.brought
        flight = self.flights[key] = Flight()
        try:
            flight.brought = yield from self._bring(job, order)
        except TensorCastError as error:
            flight.error = error
            raise
        finally:
            del self.flights[key]
            flight.ended.fire()
        return flight.brought

    def _bring(self, job: Job, order: m.DoPull) -> Generator[Wait, bool, Brought]:
        if self.store.is_in(order.generation, order.tier):
            return HERE
        if order.tier is m.Tier.HOST:
            return (yield from self._to_host(job, order))
        if not self.store.offers(order.tier):
            message = f"this node has no {order.tier} tier now"
            raise NotFound(message)
        if order.tier is m.Tier.DEVICE and self._comes_from_afar(order):
            return (yield from self._pull(job, order, self._sources(order)))
        brought = HERE
        if not self.store.is_in(order.generation, m.Tier.HOST):
            brought = yield from self._to_host(job, order)
        self._check(job)
        yield from self.store.save(order.generation, order.tier)
        replica = self.store.table.find(order.generation)
        if brought is not HERE and eviction.backed(replica, m.Tier.HOST):
            why = f"asked for in {order.tier} only"
            self.store.drop(order.generation, m.Tier.HOST, why=why)
        return brought

    def _to_host(self, job: Job, order: m.DoPull) -> Generator[Wait, bool, Brought]:
        if any(self.store.is_in(order.generation, tier) for tier in FROM_HOST):
            try:
                yield from self.store.restore(order.generation)
            except TensorCastError:
                if not order.sources:
                    raise
            else:
                return order.nbytes, "here", ()
        return (yield from self._from_others(job, order))

    def _comes_from_afar(self, order: m.DoPull) -> bool:
        """Whether all its bytes come from other hosts, and to nobody else here."""
        here, sources = self.node.card.host, self._sources(order)
        return (
            bool(sources)
            and order.generation not in self.store.table.replicas
            and (order.generation, m.Tier.HOST) not in self.flights
            and all(at.card.host != here for at in sources)
        )

    def _sources(self, order: m.DoPull) -> tuple[m.Location, ...]:
        return tuple(at for at in order.sources if at.card.node != self.node.node)

    def _from_others(self, job: Job, order: m.DoPull) -> Generator[Wait, bool, Brought]:
        sources = self._sources(order)
        wanted = self._wanted(job, order, m.Tier.HOST)
        for location in sources:
            if location.card.host == self.node.card.host:
                shared = yield from self._share(wanted, location)
                if shared:
                    return 0, "shm", (location.card.node,)
        if not sources:
            message = f"generation {order.generation} has no source that lives"
            raise PeerLost(message)
        return (yield from self._pull(job, order, sources, m.Tier.HOST))

    def _wanted(self, job: Job, order: m.DoPull, tier: m.Tier) -> Wanted:
        return Wanted(
            generation=order.generation,
            id=order.id,
            version=order.version,
            nbytes=order.nbytes,
            tier=tier,
            owner=0,
            deadline_s=job.until_s,
            labels=order.labels,
            published=order.published,
        )

    def _pull(
        self,
        job: Job,
        order: m.DoPull,
        sources: tuple[m.Location, ...],
        tier: m.Tier = m.Tier.DEVICE,
    ) -> Generator[Wait, bool, Brought]:
        job.pull = SimPull(
            self.node,
            self._wanted(job, order, tier),
            sources,
            until_s=job.until_s,
            source_generation=order.source_generation or order.generation,
        )
        if job.cancelled:
            job.pull.cancel("the task was cancelled")
        used = yield from job.pull.run()
        return order.nbytes, "tcp", used

    def _share(
        self, wanted: Wanted, location: m.Location
    ) -> Generator[Wait, bool, bool]:
        """Take the memory of another node of this host in (`store.sharing`)."""
        peer = self.node.world.node(location.card.node)
        host = self.store.table.tiers[m.Tier.HOST]
        yield 0.001
        if peer is None or not peer.life.alive or host.in_slab(wanted.nbytes):
            return False
        theirs = peer.store.table.replicas.get(wanted.generation)
        copy = None if theirs is None else theirs.copy(m.Tier.HOST)
        if theirs is None or copy is None or copy.life is not Life.COMMITTED:
            return False
        index = theirs.index
        shared = Wanted(
            generation=wanted.generation,
            id=wanted.id,
            version=wanted.version,
            nbytes=wanted.nbytes,
            tier=wanted.tier,
            owner=0,
            deadline_s=wanted.deadline_s,
            labels=wanted.labels,
            published=wanted.published,
            shared=True,
        )
        unmap = peer.store.map(copy.segment)
        try:
            filling = yield from self.store.reserve(shared)
            self.store.lend(filling.copy.segment, peer.store, copy.segment)
        except AlreadyExists:
            raise
        except TensorCastError:
            return False
        finally:
            unmap()
        self.store.commit(
            wanted.generation,
            wanted.tier,
            index=index,
            digest=digest_of_index(index),
            shared_with=location.card.node,
        )
        return True
