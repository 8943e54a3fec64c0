"""The memory and disk of one simulated node, under the store's real table.

The table, slabs, pool, eviction, budget and leases are the product's; this file is the
shell around them (`store.core`, `store.room`, `store.disk`) with virtual memory.

Rules:

1. Bytes are *values*, one a chunk, and lie at (tier, segment, offset): whoever reads, reads
   what lies there, so two copies in one place are seen.
2. Everything that may wait is a process; between two waits the state is consistent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from random import Random

from tensorcast_dask.exceptions import CapacityError, Incomplete, TensorCastError
from tensorcast_dask.store.records import NO_NODE, ready_of
from tensorcast_dask.store.state import budget, eviction
from tensorcast_dask.store.state.leases import check_lease
from tensorcast_dask.store.state.replicas import (
    Copy,
    Filling,
    Freed,
    Life,
    Replica,
    Wanted,
)
from tensorcast_dask.store.state.table import Table
from tensorcast_dask.store.state.tiers import FROM_HOST, TierRow
from tensorcast_dask.tensors.checksums import encode_sums
from tensorcast_dask.tensors.dtypes import dtype
from tensorcast_dask.tensors.ids import Generation, NodeId
from tensorcast_dask.tensors.messages import FromNode, ReplicaDropped, Tier, TierUse
from tensorcast_dask.tensors.specs import Index, TensorSpec
from tests.kit.sim_faults import Faults
from tests.kit.sim_timeline import Signal, Wait

__all__ = [
    "CHUNK_BYTES",
    "DEVICE_TIERS",
    "Reading",
    "SimStore",
    "index_of",
    "tier_rows",
    "values_of",
]

CHUNK_BYTES = 4096
DISK_BYTES = 16 * CHUNK_BYTES
DEVICE_BYTES = 10 * CHUNK_BYTES
DEVICE_TIERS = (Tier.DEVICE, Tier.PINNED)
_ASK_S = 2.0


def values_of(generation: Generation, nbytes: int) -> list[int]:
    """The right bytes of a generation, one value a chunk."""
    count = -(-nbytes // CHUNK_BYTES)
    return [hash((generation, chunk)) & 0x7FFFFFFF or 1 for chunk in range(count)]


@functools.cache
def index_of(nbytes: int) -> tuple[bytes, str]:
    """An index of one uint8 tensor, and its digest."""
    index = Index.of([TensorSpec("t", dtype("uint8"), (nbytes,))])
    assert index.nbytes >= nbytes
    return index.encode(), index.digest()


def tier_rows(*, pages: int, disk: bool, device: str = "") -> list[TierRow]:
    """A small node: so many pages of memory, sixteen of disk and ten of a device if it has one."""
    host_bytes = pages * CHUNK_BYTES
    rows = device_rows(device, host_bytes) if device else []
    rows.append(
        TierRow(
            tier=Tier.HOST,
            capacity_bytes=host_bytes,
            spill=Tier.DISK if disk else None,
            own_segment_bytes=CHUNK_BYTES,
            slab_bytes=2 * CHUNK_BYTES,
            warm_bytes=host_bytes // 4,
        )
    )
    if disk:
        rows.append(
            TierRow(
                tier=Tier.DISK, capacity_bytes=DISK_BYTES, proof=False, charges=False
            )
        )
    return rows


def device_rows(device: str, host_bytes: int) -> list[TierRow]:
    """The tiers of a device (`store.devices`)."""
    return [
        TierRow(
            tier=Tier.DEVICE,
            capacity_bytes=DEVICE_BYTES,
            charges=False,
            spill=Tier.HOST,
            grain_bytes=2 * CHUNK_BYTES,
            warm_bytes=DEVICE_BYTES // 4,
            device=device,
        ),
        TierRow(
            tier=Tier.PINNED,
            capacity_bytes=host_bytes,
            proof=False,
            charges=False,
            over=Tier.HOST,
            device=device,
        ),
    ]


@dataclass(eq=False)
class Reading:
    """A use lease."""

    replica: Replica
    copy: Copy


@dataclass(eq=False)
class SimStore:
    """State and memory of one store process."""

    name: str
    rng: Random
    faults: Faults
    now_s: Callable[[], float]
    lease_left_s: Callable[[], float]
    tell: Callable[[FromNode], object]
    pages: int = 24
    disk: bool = False
    #: Name of its device; "" without one.
    device: str = ""
    #: Asks the catalog for leave to drop; the signal fires when it has answered.
    ask_leave: Callable[[list[Generation]], Signal] = field(default=lambda _: Signal())
    #: Told of each generation that is given up here before it is (never-last-copy).
    giving_up: Callable[[Generation, Tier | None, bool], None] = field(
        default=lambda *_: None
    )
    #: Told of each copy that was committed without chunk sums.
    unsummed: Callable[[Generation, Tier], None] = field(default=lambda *_: None)
    memory: dict[tuple[Tier, int], dict[int, list[int]]] = field(default_factory=dict)
    #: How many outside this process map a segment.
    maps: dict[int, int] = field(default_factory=dict)
    #: Gives back the memory of another store that is shared here, by segment number.
    lent: dict[int, Callable[[], None]] = field(default_factory=dict)
    #: Whose memory a segment really is, where it is another store's.
    origins: dict[int, tuple[SimStore, int]] = field(default_factory=dict)
    #: Unpins host memory that is marked as pinned, by segment number.
    pinned: dict[int, Callable[[], None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = tier_rows(pages=self.pages, disk=self.disk, device=self.device)
        self.table = Table(rows)

    # -------------------------------------------------------------- the device
    def offers(self, tier: Tier) -> bool:
        """Whether a tier is there now."""
        stock = self.table.tiers.get(tier)
        return stock is not None and stock.row.capacity_bytes > 0

    def lose_device(self) -> None:
        """The device process ends, and what is there is lost (`Devices`)."""
        for tier in DEVICE_TIERS:
            stock = self.table.tiers[tier]
            held = [g for g, r in self.table.replicas.items() if r.copy(tier)]
            for generation in held:
                self._drop(generation, tier, why="its device is lost", final=False)
            self.table.set_row(stock.row.lost())
            for segment in stock.pool.trim(stock.pool.warm_bytes):
                self._close(tier, segment)

    def find_device(self) -> None:
        """The device process is started again."""
        for row in device_rows(self.device, self.pages * CHUNK_BYTES):
            self.table.set_row(row)

    # -------------------------------------------------------------- filling
    def reserve(self, wanted: Wanted) -> Generator[Wait, bool, Filling]:
        """Make room for a copy (`Core.reserve`)."""
        while True:
            if wanted.owner:
                self._check_lease()
            self.table.may_reserve(wanted)
            short = self._shortfall(wanted)
            if short is None:
                break
            before = self.now_s()
            if before >= wanted.deadline_s:
                self._refuse(wanted, short)
            relieved = yield from self._relieve(wanted.tier, short.missing_bytes)
            if not relieved:
                self._refuse(wanted, short)
        filling = self.table.reserve(wanted)
        stock = self.table.tiers[wanted.tier]
        assert stock.held_bytes <= stock.row.capacity_bytes, (
            f"{self.name} holds {stock.held_bytes} in {wanted.tier}"
        )
        if self._unlucky(self.faults.out_of_room) and not wanted.shared:
            self.abort(wanted.generation, wanted.tier)
            message = f"{self.name}: the machine gave no pages"
            raise CapacityError(message)
        filling.copy.life = Life.FILLING
        filling.make_bytes = 0
        return filling

    def _check_lease(self) -> None:
        check_lease(self.lease_left_s())
        assert self.lease_left_s() > 0.0, f"{self.name} takes bytes without a lease"

    def _shortfall(self, wanted: Wanted) -> budget.Shortfall | None:
        stock = self.table.tiers[wanted.tier]
        need_bytes = 0 if wanted.shared else stock.need_bytes(wanted.nbytes)
        if not need_bytes:
            return None
        return budget.shortfall(
            need_bytes,
            held_bytes=stock.held_bytes,
            limits=budget.Limits(stock.row.capacity_bytes, 0.0, 0),
            headroom=budget.Headroom(),
        )

    def _refuse(self, wanted: Wanted, short: budget.Shortfall) -> None:
        message = f"{self.name}: no room for {wanted.nbytes} bytes in {wanted.tier}"
        raise CapacityError(message, {"needed": short.needed_bytes})

    def _place(self, copy: Copy) -> tuple[Tier, int]:
        """Where a copy's bytes lie: a mark's where what it marks does."""
        return self.table.tiers[copy.tier].row.over or copy.tier, copy.segment

    def write(self, copy: Copy, at: int, value: int) -> None:
        """Put one chunk where it belongs."""
        place = self.memory.setdefault(self._place(copy), {})
        values = place.setdefault(copy.offset, [])
        values.extend([0] * (at + 1 - len(values)))
        values[at] = value

    def fresh(self, copy: Copy) -> None:
        """Forget what a recycled place held."""
        place = self.memory.setdefault(self._place(copy), {})
        place[copy.offset] = []

    def commit(
        self,
        generation: Generation,
        tier: Tier,
        *,
        index: bytes,
        digest: str,
        shared_with: NodeId = NO_NODE,
    ) -> Replica:
        """Freeze a copy, and tell the catalog (`Core.commit`)."""
        filling = self.table.filling(generation, tier)
        if filling.owner:
            self._check_lease()
        replica = self.table.commit(generation, tier, index=index, index_digest=digest)
        self.tell(
            ready_of(replica, tier, chunk_bytes=CHUNK_BYTES, shared_with=shared_with)
        )
        if not replica.sums:
            self.unsummed(generation, tier)
        return replica

    def sum(self, generation: Generation, tier: Tier) -> None:
        """Compute the chunk sums of a copy, and announce it again (`store.sums`)."""
        replica = self.table.replicas.get(generation)
        copy = None if replica is None else replica.copy(tier)
        if replica is None or copy is None or copy.life is not Life.COMMITTED:
            return
        replica.sums = encode_sums(self.look(copy))
        self.tell(ready_of(replica, tier, chunk_bytes=CHUNK_BYTES))

    def abort(self, generation: Generation, tier: Tier) -> None:
        """Take a reservation back; one that was committed stays."""
        if (generation, tier) in self.table.fillings:
            self.give_back(self.table.drop(generation, tier, why="given up"))

    def take_back(self, owner: int = 0) -> None:
        """Abort reservations whose time is over, or whose writer (`owner`) is dead."""
        now_s = self.now_s()
        for (generation, tier), filling in list(self.table.fillings.items()):
            if filling.owner and (
                filling.owner == owner or filling.deadline_s <= now_s
            ):
                self.abort(generation, tier)

    # -------------------------------------------------------------- reading
    def acquire(self, generation: Generation, tier: Tier | None = None) -> Reading:
        """Take a use lease; of whatever tier host memory is best filled from."""
        return Reading(*self.table.acquire(generation, (tier,) if tier else FROM_HOST))

    def hold(self, generation: Generation, copy: Copy) -> Reading:
        """Lease a copy that is being filled."""
        replica = self.table.replicas[generation]
        self.table.lease(replica, copy)
        return Reading(replica, copy)

    def release(self, held: Reading) -> None:
        """End a use lease."""
        self.give_back(self.table.release(held.replica, held.copy))

    def look(self, copy: Copy) -> list[int]:
        """The values that lie where a copy is."""
        return self.memory.get(self._place(copy), {}).get(copy.offset, [])

    # -------------------------------------------------------------- dropping
    def drop(
        self,
        generation: Generation,
        tier: Tier | None = None,
        *,
        why: str,
        final: bool = False,
    ) -> None:
        """Give a replica up, and tell the catalog (`Core.drop`)."""
        replica = self.table.replicas.get(generation)
        copies = [] if replica is None else replica.copies
        if any(
            copy.life is Life.COMMITTED and tier in (None, copy.tier) for copy in copies
        ):
            self.giving_up(generation, tier, final)
        self._drop(generation, tier, why=why, final=final)

    def _drop(
        self, generation: Generation, tier: Tier | None, *, why: str, final: bool
    ) -> None:
        replica = self.table.replicas.get(generation)
        copies = [] if replica is None else replica.copies
        held = [copy for copy in copies if copy.life is Life.COMMITTED]
        self.give_back(self.table.drop(generation, tier, why=why, final=final))
        for copy in held:  # a mark goes with what it was on
            if copy.life is not Life.COMMITTED:
                gone = ReplicaDropped(generation=generation, tier=copy.tier, why=why)
                self.tell(gone)

    def give_back(self, freed: list[Freed]) -> None:
        """Carry out what the table freed."""
        for gone in freed:
            if gone.probe:
                self._probe(gone.tier, gone.segment)
            else:
                self._close(gone.tier, gone.segment)

    def _close(self, tier: Tier, segment: int) -> None:
        if self.table.tiers[tier].row.over:
            self.pinned.pop(segment, lambda: None)()  # refused before it was pinned
            return
        self.memory.pop((tier, segment), None)
        self.origins.pop(segment, None)
        lent = self.lent.pop(segment, None)
        if lent is not None:
            lent()

    def _probe(self, tier: Tier, segment: int) -> bool:
        if self.maps.get(segment):
            return False
        for closing in self.table.tiers[tier].pool.proved(segment):
            self._close(tier, closing)
        return True

    def probe(self) -> bool:
        """Probe all that lingers; whether anything went."""
        found = [
            self._probe(tier, segment)
            for tier, stock in self.table.tiers.items()
            for segment in stock.pool.lingering
        ]
        return any(found)

    # -------------------------------------------------------------- maps
    def lend(self, segment: int, owner: SimStore, theirs: int) -> None:
        """Let a segment number of ours mean a segment of another store."""
        owner, theirs = owner.origins.get(theirs, (owner, theirs))
        self.origins[segment] = owner, theirs
        self.lent[segment] = owner.map(theirs)
        self.memory[Tier.HOST, segment] = owner.memory[Tier.HOST, theirs]

    def map(self, segment: int) -> Callable[[], None]:
        """Let somebody map a segment; returns how it is unmapped."""
        owner, segment = self.origins.get(segment, (self, segment))
        maps = owner.maps
        maps[segment] = maps.get(segment, 0) + 1

        def unmap() -> None:
            maps[segment] -= 1
            if not maps[segment]:
                del maps[segment]

        return unmap

    # -------------------------------------------------------------- making room
    def _relieve(self, tier: Tier, need_bytes: int) -> Generator[Wait, bool, bool]:
        """Free some of `need_bytes` (`Room.relieve`)."""
        if self.probe():
            return True
        stock = self.table.tiers[tier]
        plan = eviction.plan(
            self.table,
            tier,
            need_bytes=need_bytes,
            now_s=self.now_s(),
            mapped=lambda segment: bool(self.maps.get(segment)),
        )
        for segment in stock.pool.trim(plan.trim_bytes):
            self._close(tier, segment)
        for generation in plan.drop:
            self.drop(generation, tier, why="evicted: kept in another tier")
        if plan.trim_bytes or plan.drop:
            return True
        spilled = False
        for generation in plan.spill:
            spilled |= yield from self.spill(generation, tier)
        if spilled:
            return True
        for generation, mark in plan.unmark:
            self.drop(generation, mark, why="its memory is wanted")
        if plan.unmark or not plan.ask:
            return bool(plan.unmark)
        answered = self.ask_leave(plan.ask)
        yield answered, _ASK_S
        left = [gen for gen in plan.ask if gen in self.table.replicas]
        for generation in left:
            self.table.not_spare(generation)
        return len(left) < len(plan.ask)

    def squeezed(self) -> Generator[Wait, bool, None]:
        """Make room for as much as there is memory, as far as that goes."""
        need_bytes = self.pages * CHUNK_BYTES
        yield from self._relieve(Tier.HOST, need_bytes)

    def spill(self, generation: Generation, tier: Tier) -> Generator[Wait, bool, bool]:
        """Move a replica to the tier below (`Room`)."""
        try:
            if tier is Tier.HOST:
                yield from self.save(generation, Tier.DISK)
            else:
                yield from self.restore(generation, tier)
        except TensorCastError:
            return False
        replica = self.table.replicas.get(generation)
        if replica is None or not eviction.backed(replica, tier):
            return False  # what it was moved to is gone already
        self.drop(generation, tier, why="spilled to the tier below")
        return True

    def save(self, generation: Generation, tier: Tier) -> Generator[Wait, bool, None]:
        """Put a copy of a replica in memory into another tier."""
        held = self.acquire(generation, Tier.HOST)
        try:
            there = held.replica.copy(tier)
            if there is None:
                yield from self._copy(held, tier)
            elif there.life is not Life.COMMITTED:
                message = f"{generation} is being written to, or dropped from, {tier}"
                raise Incomplete(message)
        finally:
            self.release(held)

    def restore(
        self, generation: Generation, tier: Tier | None = None
    ) -> Generator[Wait, bool, None]:
        """Bring a replica of another tier back into memory."""
        held = self.acquire(generation, tier)
        try:
            yield from self._copy(held, Tier.HOST)
        finally:
            self.release(held)

    def _copy(self, held: Reading, tier: Tier) -> Generator[Wait, bool, None]:
        replica = held.replica
        wanted = Wanted(
            generation=replica.generation,
            id=replica.id,
            version=replica.version,
            nbytes=replica.nbytes,
            tier=tier,
            owner=0,
            deadline_s=self.now_s() + 30.0,
            labels=replica.labels,
            published=replica.published,
        )
        filling = yield from self.reserve(wanted)
        target = self.hold(replica.generation, filling.copy)
        if filling.copy.mark:
            self.pinned[filling.copy.segment] = self.map(filling.copy.segment)
        else:
            self.fresh(filling.copy)
        try:
            yield self.disk_s()
            for at, value in enumerate(self.look(held.copy)):
                self.write(filling.copy, at, value)
            self.commit(
                replica.generation,
                tier,
                index=replica.index,
                digest=replica.index_digest,
            )
        finally:
            self.release(target)
            self.abort(replica.generation, tier)

    def disk_s(self) -> float:
        """Draw how long one piece of disk work takes."""
        return self.faults.slow_disk_s if self._unlucky(self.faults.slow_disk) else 0.01

    def _unlucky(self, chance: float) -> bool:
        return chance > 0 and self.rng.random() < chance

    # -------------------------------------------------------------- state
    def uses(self) -> dict[Tier, TierUse]:
        """Count every tier."""
        return eviction.uses(self.table, now_s=self.now_s())

    def committed(self) -> list[tuple[Generation, Tier]]:
        """All copies that can be read."""
        return [
            (generation, copy.tier)
            for generation, replica in self.table.replicas.items()
            for copy in replica.copies
            if copy.life is Life.COMMITTED
        ]

    def is_in(self, generation: Generation, tier: Tier) -> bool:
        """Whether a copy in a tier can be read."""
        replica = self.table.replicas.get(generation)
        copy = None if replica is None else replica.copy(tier)
        return copy is not None and copy.life is Life.COMMITTED

    def has(self, generation: Generation) -> bool:
        """Whether a copy can be read here."""
        replica = self.table.replicas.get(generation)
        return replica is not None and replica.committed
