"""The store's one lock: what happens to replicas goes in under it.

Rules:

1. All state is under `lock`. Nothing that may block (allocation in steps, files, sockets,
   the catalog's word) happens while it is held.
2. Capacity is asked and taken under one hold of the lock; what was reserved is charged
   before its memory is made.
3. A reservation that cannot be completed is taken back whole: the error leaves nothing
   changed.
4. Every change that the catalog must know of is told through `tell`, in order.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tensorcast_dask.dataplane import faults
from tensorcast_dask.dataplane.hosts import process_start
from tensorcast_dask.exceptions import Gone, Incomplete
from tensorcast_dask.store.records import NO_NODE, ready_of
from tensorcast_dask.store.room import Room
from tensorcast_dask.store.state import eviction
from tensorcast_dask.store.state.counts import Counts
from tensorcast_dask.store.state.leases import check_lease
from tensorcast_dask.store.state.replicas import Life
from tensorcast_dask.store.state.results import Results
from tensorcast_dask.store.state.table import Table
from tensorcast_dask.store.state.tiers import FROM_HOST, TierRow
from tensorcast_dask.tensors.messages import (
    ReplicaDropped,
    StoreSettings,
    Tier,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensorcast_dask.store.machine import Machine
    from tensorcast_dask.store.shelf import File, Shelf
    from tensorcast_dask.store.state.replicas import Copy, Filling, Replica, Wanted
    from tensorcast_dask.tensors.ids import Generation, NodeId
    from tensorcast_dask.tensors.messages import FromNode, TierUse

__all__ = ["Core", "Reading", "check_filled", "now_s", "tier_rows"]

logger = logging.getLogger(__name__)


def now_s() -> float:
    """Read the store's clock."""
    return time.monotonic()


def tier_rows(settings: StoreSettings) -> list[TierRow]:
    """Describe the tiers of a node with these settings, nearest first."""
    disk = settings.disk_bytes > 0 and bool(settings.disk_dir)
    rows = [
        TierRow(
            tier=Tier.HOST,
            capacity_bytes=settings.host_memory_bytes,
            spill=Tier.DISK if disk else None,
            own_segment_bytes=settings.own_segment_bytes,
            slab_bytes=settings.slab_bytes,
            warm_bytes=(
                settings.host_memory_bytes // 4
                if settings.warm_bytes < 0
                else settings.warm_bytes
            ),
        )
    ]
    if disk:
        rows.append(
            TierRow(
                tier=Tier.DISK,
                capacity_bytes=settings.disk_bytes,
                proof=False,
                charges=False,
            )
        )
    return rows


def check_filled(table: Table, generation: Generation, copy: Copy) -> None:
    """Return when a copy is still being filled; under the lock.

    Raises
    ------
    NotFound, Gone
        When it was given up.
    """
    if table.filling(generation, copy.tier).copy is not copy:
        message = f"generation {generation} was given up and is being written anew"
        raise Gone(message, {"generation": generation})


@dataclass(slots=True, eq=False)
class Reading:
    """A use lease on one copy, and the file behind it."""

    replica: Replica
    copy: Copy
    file: File | None

    def view(self) -> memoryview:
        """Return the bytes, as the store maps them itself."""
        assert self.file is not None, "store: this tier has no memory"
        start = self.copy.offset
        return self.file.map_shared().view[start : start + self.replica.nbytes]


class Core:
    """State and its shell.

    Parameters
    ----------
    settings : StoreSettings
        What the store was told.
    shelf : Shelf
        Memory behind segment numbers.
    machine : Machine
        What is free.
    """

    def __init__(
        self, settings: StoreSettings, *, shelf: Shelf, machine: Machine
    ) -> None:
        self.settings = settings
        self.shelf = shelf
        self.machine = machine
        self.lock = threading.RLock()
        self.table = Table(tier_rows(settings))
        self.results = Results(settings.result_ttl_s)
        self.room = Room(
            table=self.table,
            shelf=shelf,
            machine=machine,
            settings=settings,
            lock=self.lock,
        )
        self.room.evict = self._evict
        #: Reads by programs, under the lock.
        self.counts = Counts()
        #: Says something to the catalog; the link puts itself here.
        self.tell: Callable[[FromNode], None] = _nobody
        #: What is left of the node's lease; the link puts itself here.
        self.lease_left_s: Callable[[], float] = _never_greeted
        #: Told of each replica that was committed without chunk sums.
        self.unsummed: Callable[[Generation], None] = _nothing_to_sum

    # -------------------------------------------------------------- filling
    def reserve(self, wanted: Wanted, *, until_s: float) -> Filling:
        """Make room for a copy and the memory for it.

        Raises
        ------
        CapacityError
            When no room can be made in time; data: tier, what, needed, free.
        AlreadyExists, Gone, Incomplete, StaleOwner
            See `Table.reserve` and `NodeLease.check`.
        NotFound, Gone
            When it was given up while its memory was made.
        """
        filling = self._admit(wanted, until_s)
        copy = filling.copy
        try:
            self.room.make(wanted, filling, until_s=until_s)
        except BaseException:
            self.abort(wanted.generation, wanted.tier)
            raise
        finally:
            with self.lock:
                replica = self.table.replicas[wanted.generation]
                self.room.give_back(self.table.release(replica, copy))
        with self.lock:
            check_filled(self.table, wanted.generation, copy)
            copy.life = Life.FILLING
        faults.point("put.reserved", detail=wanted.id)
        return filling

    def _admit(self, wanted: Wanted, until_s: float) -> Filling:
        """Take the room, with a lease: what has no memory yet cannot be given back."""
        while True:
            with self.lock:
                if wanted.owner:
                    check_lease(self.lease_left_s())
                self.table.may_reserve(wanted)
                short = self.room.shortfall(wanted)
                if short is None:
                    filling = self.table.reserve(wanted)
                    replica = self.table.replicas[wanted.generation]
                    self.table.lease(replica, filling.copy)
                    return filling
            missing_bytes = short.missing_bytes
            if not self.room.relieve(wanted.tier, missing_bytes, until_s=until_s):
                self.room.refuse(wanted.tier, short)

    def commit(
        self,
        generation: Generation,
        tier: Tier,
        *,
        index: bytes,
        index_digest: str,
        sums: bytes = b"",
        cut_bytes: int | None = None,
        shared_with: NodeId = NO_NODE,
    ) -> Replica:
        """Freeze a copy whose writers are gone, and tell the catalog.

        `sums` of chunks that were cut otherwise than here (`cut_bytes`; None: as here) are of no use.

        Raises
        ------
        Incomplete
            When the kernel still sees a writer.
        NotFound, Gone, StaleOwner
            When there is nothing to commit, or no right to.
        """
        faults.point("put.before_commit", detail=str(generation))
        with self.lock:
            segment = self.table.filling(generation, tier).copy.segment
        self.shelf.sent(segment)
        with self.lock:
            filling = self.table.filling(generation, tier)
            if filling.owner:
                check_lease(self.lease_left_s())
            self._freeze(filling.copy)
            replica = self.table.commit(
                generation, tier, index=index, index_digest=index_digest
            )
            if sums and cut_bytes in {None, self.settings.chunk_bytes}:
                replica.sums = sums
            self.tell(
                ready_of(
                    replica,
                    tier,
                    chunk_bytes=self.settings.chunk_bytes,
                    shared_with=shared_with,
                )
            )
            summed = bool(replica.sums) or not replica.nbytes
        if not summed:
            self.unsummed(generation)
        return replica

    def _freeze(self, copy: Copy) -> None:
        stock = self.table.tiers[copy.tier]
        if copy.shared or not stock.row.proof or copy.segment in stock.slabs:
            return
        if not self.shelf.freeze(copy.segment):
            message = (
                "the segment still has a writer; close every map and descriptor of it, "
                "then commit again"
            )
            raise Incomplete(message)

    def abort(self, generation: Generation, tier: Tier) -> None:
        """Take a reservation back; one that was committed stays. Idempotent."""
        with self.lock:
            if (generation, tier) in self.table.fillings:
                freed = self.table.drop(generation, tier, why="its writer gave it up")
                self.room.give_back(freed)

    # -------------------------------------------------------------- reading
    @contextlib.contextmanager
    def reading(self, generation: Generation, *tiers: Tier) -> Iterator[Reading]:
        """Hold a use lease, as `acquire` takes it, for the length of a block.

        Raises
        ------
        NotFound, Gone, Incomplete
            When there is nothing to read.
        """
        held = self.acquire(generation, *tiers)
        try:
            yield held
        finally:
            self.release(held)

    def acquire(self, generation: Generation, *tiers: Tier) -> Reading:
        """Take a use lease on the first copy of `tiers`, by default the nearest to the host.

        `release` must follow.
        """
        with self.lock:
            replica, copy = self.table.acquire(generation, tiers or FROM_HOST)
            return Reading(replica, copy, self._file(copy))

    def _file(self, copy: Copy) -> File | None:
        """Give the memory of a copy, where it has some."""
        charges = self.table.tiers[copy.tier].row.charges
        return self.shelf.get(copy.segment) if charges else None

    def hold(self, generation: Generation, copy: Copy) -> Reading:
        """Take a lease on a copy that is being filled, for who fills it.

        Raises
        ------
        Gone
            When it was freed meanwhile: its memory may be somebody else's by now.
        """
        with self.lock:
            replica = self.table.replicas.get(generation)
            if replica is None or not any(own is copy for own in replica.copies):
                message = f"generation {generation} was given up meanwhile"
                raise Gone(message, {"generation": generation})
            self.table.lease(replica, copy)
            return Reading(replica, copy, self._file(copy))

    def release(self, held: Reading) -> None:
        """End a use lease."""
        with self.lock:
            self.room.give_back(self.table.release(held.replica, held.copy))

    # -------------------------------------------------------------- dropping
    def drop(
        self,
        generation: Generation,
        tier: Tier | None = None,
        *,
        why: str,
        final: bool = False,
    ) -> None:
        """Give up a replica, or its copy in one tier, and tell the catalog."""
        with self.lock:
            replica = self.table.replicas.get(generation)
            copies = [] if replica is None else replica.copies
            held = [copy for copy in copies if copy.life is Life.COMMITTED]
            freed = self.table.drop(generation, tier, why=why, final=final)
            self.room.give_back(freed)
            for copy in held:  # a mark goes with what it was on
                if copy.life is not Life.COMMITTED:
                    gone = ReplicaDropped(
                        generation=generation, tier=copy.tier, why=why
                    )
                    self.tell(gone)

    def _evict(self, generation: Generation, tier: Tier) -> bool:
        with self.lock:
            replica = self.table.replicas.get(generation)
            if replica is None or not eviction.backed(replica, tier):
                return False  # the other copy was evicted for the sake of this one
            self.drop(generation, tier, why="evicted: kept in another tier")
            return True

    # -------------------------------------------------------------- time
    def tick(self) -> None:
        """Look at the clock: reservations that ended, readers that are gone."""
        with self.lock:
            self._take_back()
            self.room.probe()

    def abandoned(self, owner: int, *, pid: int) -> None:
        """Take back what a connection had reserved, unless its process lives on.

        `pid` is 0 where the process is not of this host: then it has until
        `reservation_ttl_s` from now to come back.
        """
        with self.lock:
            for filling in self.table.fillings.values():
                if filling.owner == owner:
                    filling.orphan_pid = pid
                    if not pid:
                        ends_s = now_s() + self.settings.reservation_ttl_s
                        filling.deadline_s = min(filling.deadline_s, ends_s)
            self._take_back()

    def _take_back(self) -> None:
        """Abort reservations whose time is over, or whose process is gone."""
        at_s = now_s()
        ended = [
            key
            for key, filling in self.table.fillings.items()
            if filling.owner
            and (
                filling.deadline_s <= at_s
                or (filling.orphan_pid and not process_start(filling.orphan_pid))
            )
        ]
        for generation, tier in ended:
            logger.info("the reservation of generation %d is taken back", generation)
            self.abort(generation, tier)

    def adjust(self, settings: StoreSettings) -> None:
        """Keep to the settings of a new worker; what is cut stays cut as it is."""
        kept = self.settings
        self.settings = msgspec.structs.replace(
            settings,
            chunk_bytes=kept.chunk_bytes,
            own_segment_bytes=kept.own_segment_bytes,
            slab_bytes=kept.slab_bytes,
            disk_dir=kept.disk_dir,
            disk_bytes=kept.disk_bytes,
        )
        self.results.ttl_s = settings.result_ttl_s
        self.room.settings = self.settings
        for row in tier_rows(self.settings):
            self.table.set_row(row)

    def uses(self) -> dict[Tier, TierUse]:
        """Count every tier."""
        with self.lock:
            return eviction.uses(self.table, now_s=now_s())


def _nobody(message: FromNode) -> None:
    logger.debug("no catalog to tell: %s", type(message).__name__)


def _nothing_to_sum(generation: Generation) -> None:
    logger.debug("nobody sums generation %d", generation)


def _never_greeted() -> float:
    return float("inf")
