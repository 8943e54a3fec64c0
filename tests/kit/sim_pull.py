"""One pull of a simulated node: the product's planner over virtual sources.

Rules:

1. A source serves a chunk under a lease of its own, from where the bytes lie.
2. What is closed sends nothing more: answers of an earlier *life* of a source are dropped.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tensorcast_dask.exceptions import CapacityError, PeerLost, TensorCastError
from tensorcast_dask.store.records import digest_of_index
from tensorcast_dask.store.state import pull
from tensorcast_dask.store.state.replicas import Filling
from tensorcast_dask.tensors.messages import Fault, Tier
from tests.kit.sim_lender import SimLender
from tests.kit.sim_store import CHUNK_BYTES, Reading
from tests.kit.sim_timeline import Process, Signal

if TYPE_CHECKING:
    from collections.abc import Generator

    from tensorcast_dask.store.state.replicas import Wanted
    from tensorcast_dask.tensors.ids import Generation, NodeId
    from tensorcast_dask.tensors.messages import Location
    from tests.kit.sim_node import SimNode
    from tests.kit.sim_timeline import Wait

__all__ = ["SimPull"]

TICK_S = 0.25
STALL_S = 2.0


class SimPull:
    """The shell of one pull."""

    def __init__(
        self,
        node: SimNode,
        wanted: Wanted,
        sources: tuple[Location, ...],
        *,
        until_s: float,
        source_generation: Generation,
    ) -> None:
        #: Under which the sources hold it.
        self.source = source_generation
        self.node, self.world = node, node.world
        self.wanted, self.sources = wanted, sources
        self.plan = pull.Pull(
            sources=len(sources),
            nbytes=wanted.nbytes,
            window=2,
            stall_s=STALL_S,
            deadline_s=until_s,
        )
        self.events: deque[pull.Event] = deque()
        self.woken = Signal()
        self.lives = [0] * len(sources)
        self.owed: list[list[int]] = [[] for _ in sources]
        self.filling: Filling | None = None
        self.held: Reading | None = None
        self.outcome: pull.Finished | pull.Failed | None = None
        self.todo: deque[pull.Instruction] = deque()

    # -------------------------------------------------------------- running
    def cancel(self, why: str) -> None:
        """Give up; `run` raises soon."""
        self._put(pull.Cancelled(why=why))

    def run(self) -> Generator[Wait, bool, tuple[NodeId, ...]]:
        """Pull and commit; the nodes that gave something."""
        node, wanted = self.node, self.wanted
        try:
            self.todo.extend(self.plan.start(now_s=node.now_s()))
            while True:
                yield from self._do()
                if self.outcome is not None:
                    break
                if not self.events:
                    self.woken = Signal()
                    yield self.woken, TICK_S
                event = self.events.popleft() if self.events else pull.TimePassed()
                self.todo.extend(self.plan.handle(event, now_s=node.now_s()))
            if isinstance(self.outcome, pull.Failed):
                raise self.outcome.fault.error()
            yield from self._reserve()
            index = self.plan.index
            assert index is not None
            assert self.filling is not None
            if self.source != wanted.generation:
                values = node.store.look(self.filling.copy)
                self.world.watch.copied(self.source, wanted.generation, values)
            node.store.commit(
                wanted.generation,
                wanted.tier,
                index=index,
                digest=digest_of_index(index),
            )
        finally:
            self.lives = [life + 1 for life in self.lives]
            if self.held is not None:
                node.store.release(self.held)
            node.store.abort(wanted.generation, wanted.tier)
        share = self.plan.share()
        return tuple(one.card.node for at, one in enumerate(self.sources) if share[at])

    def _put(self, event: pull.Event) -> None:
        self.events.append(event)
        self.woken.fire()

    def _later(self, source: int, delay_s: float, event: pull.Event) -> None:
        life = self.lives[source]

        def tell() -> None:
            if self.lives[source] == life and self.node.life.alive:
                self._put(event)

        self.world.time.after(delay_s, tell)

    # -------------------------------------------------------------- instructions
    def _do(self) -> Generator[Wait, bool, None]:
        while self.todo and self.outcome is None:
            told = self.todo.popleft()
            match told:
                case pull.AskMap():
                    self._ask(told.source)
                case pull.Fetch():
                    try:
                        yield from self._reserve()
                    except TensorCastError as error:
                        self.outcome = pull.Failed(fault=Fault.of(error))
                        return
                    self.owed[told.source].append(told.chunk)
                    life = self.lives[told.source]
                    # The source's side of it goes on when this node dies.
                    self.world.time.spawn(
                        self.world.life, self._fetch(told.source, told.chunk, life)
                    )
                case pull.Steal():
                    self._steal(told.source)
                case pull.Leave():
                    self._lose(told.source, PeerLost("left"))
                case pull.Finished() | pull.Failed():
                    self.outcome = told

    def _reserve(self) -> Generator[Wait, bool, None]:
        if self.held is None:
            store = self.node.store
            filling = yield from store.reserve(self.wanted)
            store.fresh(filling.copy)
            self.held = store.hold(self.wanted.generation, filling.copy)
            self.filling = filling

    def _forget(self, source: int) -> list[int]:
        self.lives[source] += 1
        owed, self.owed[source] = self.owed[source], []
        return owed

    def _lose(self, source: int, error: TensorCastError, after_s: float = 0.01) -> None:
        self._forget(source)
        life = self.lives[source]

        def tell() -> None:
            if self.lives[source] == life and self.node.life.alive:
                self._forget(source)  # what was asked meanwhile does not come either
                self._put(pull.Lost(source=source, fault=Fault.of(error)))

        self.world.time.after(after_s, tell)

    def _steal(self, source: int) -> None:
        for chunk in self._forget(source):
            self._later(source, 0.01, pull.Dropped(source=source, chunk=chunk))

    # -------------------------------------------------------------- sources
    def _peer(self, source: int) -> SimNode | SimLender | None:
        """Who answers there now; None when nobody does."""
        name = self.sources[source].card.node
        peer = self.world.node(name) or self.world.lender(name)
        if peer is None or not peer.life.alive:
            return None
        return peer if self.world.network.reaches(self.node.host, peer.host) else None

    def _ask(self, source: int) -> None:
        life = self.lives[source]

        def ask() -> None:
            if self.lives[source] != life:
                return
            peer = self._peer(source)
            if peer is None:
                # A host that is gone says nothing; one whose process is gone says so.
                if self.world.rng.random() < 0.5:
                    self._lose(source, PeerLost("nobody answers"), 0.5)
                return
            try:
                told = self._map_of(peer, source)
            except TensorCastError as error:
                self._lose(source, error)
                return
            self._later(source, self.world.network.latency_s(), told)

        self.world.time.after(self.world.network.latency_s(), ask)

    def _map_of(self, peer: SimNode | SimLender, source: int) -> pull.Mapped:
        stamp = 0
        if isinstance(peer, SimLender):
            lent = peer.at_rest(self.source)
            nbytes, index, stamp = lent.record.nbytes, lent.record.index, lent.stamp
        else:
            replica = peer.store.table.find(self.source)
            nbytes, index = replica.nbytes, replica.index
        return pull.Mapped(
            source=source,
            nbytes=nbytes,
            chunk_bytes=CHUNK_BYTES,
            index=index,
            stamp=stamp,
        )

    def _fetch(self, source: int, chunk: int, life: int) -> Process:
        yield self.world.network.latency_s()
        peer = self._peer(source)
        if self.lives[source] != life:
            return
        if peer is None:
            if self.world.rng.random() < 0.5:
                self._lose(source, PeerLost("nobody answers"))
            return
        stamp = 0
        try:
            if isinstance(peer, SimLender):
                yield self._chunk_s()
                lent = peer.at_rest(self.source)
                value, stamp = lent.values[chunk], lent.stamp
            else:
                held = peer.store.acquire(self.source)
                disk = held.copy.tier is Tier.DISK
                yield peer.store.disk_s() if disk else self._chunk_s()
                value = peer.store.look(held.copy)[chunk] if peer.life.alive else 0
                peer.store.release(held)
        except TensorCastError as error:
            if self.lives[source] == life:
                self._lose(source, error)
            return
        if self.lives[source] != life or not self.node.life.alive:
            return
        if self._peer(source) is None or self._unlucky(self.world.faults.truncated):
            self._lose(source, PeerLost("the transfer broke off"))
            return
        self._arrived(source, chunk, value, stamp)

    def _chunk_s(self) -> float:
        return self.world.rng.choice((0.002, 0.002, self.world.habits.chunk_s))

    def _unlucky(self, chance: float) -> bool:
        return chance > 0 and self.world.rng.random() < chance

    def _arrived(self, source: int, chunk: int, value: int, stamp: int) -> None:
        if self._unlucky(self.world.faults.out_of_room / 4):
            error = CapacityError("the machine has no more pages")
            self.outcome = pull.Failed(fault=Fault.of(error))
            self.woken.fire()
            return
        damaged = self._unlucky(self.world.faults.truncated / 2)
        digest = value + 1 if damaged else value
        assert self.filling is not None
        self.node.store.write(self.filling.copy, chunk, digest)
        self.owed[source].remove(chunk)
        self._put(
            pull.Arrived(
                source=source, chunk=chunk, digest=digest, claimed=value, stamp=stamp
            )
        )
