"""The segment table: which replicas this node holds, where, and who uses them.

Rules:

1. State changes here and nowhere else. Bytes, descriptors, clocks and threads are the
   shell's; it is told what to free by `Freed` values.
2. A call that raises has changed nothing.
3. A copy with a lease is never freed; one that is given up while leased is dropping: no
   new lease, freed with the last.
4. `used_bytes` and its kin are kept by every change and equal what a walk over all
   copies would count (`check`).
5. What was committed here and is no more is remembered as gone (the newest 16,384): a
   late reader gets Gone, not NotFound.
6. Equal encoded indexes are stored once.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from tensorcast_dask.exceptions import (
    AlreadyExists,
    Gone,
    Incomplete,
    Mismatch,
    NotFound,
)
from tensorcast_dask.store.state.replicas import (
    Copy,
    Filling,
    Freed,
    Life,
    Replica,
    Wanted,
)
from tensorcast_dask.store.state.slabs import Slot
from tensorcast_dask.store.state.tiers import TierRow, TierStock
from tensorcast_dask.tensors.ids import Generation
from tensorcast_dask.tensors.messages import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Table"]

_GONE_KEPT: Final = 16_384
_NO_LABELS: Final[dict[str, str]] = {}
_NEAREST: Final = tuple(Tier)


class Table:
    """All replicas of one node.

    Parameters
    ----------
    rows : iterable of TierRow
        The node's tiers, nearest first.
    """

    def __init__(self, rows: Iterable[TierRow]) -> None:
        self.tiers = {row.tier: TierStock(row) for row in rows}
        #: All replicas, the one longest unused first.
        self.replicas: OrderedDict[Generation, Replica] = OrderedDict()
        #: Copies that are reserved or being filled.
        self.fillings: dict[tuple[Generation, Tier], Filling] = {}
        #: Not to be evicted before, by generation; inf = until unpinned.
        self.pins: dict[Generation, float] = {}
        #: What a policy holds replicas to be worth; what is not in it is worth nothing.
        self.weights: dict[Generation, float] = {}
        #: Leases by generation, over all its copies; no zeros.
        self.leased: dict[Generation, int] = {}
        #: Why, and whether for ever; oldest first.
        self.gone: OrderedDict[Generation, tuple[str, bool]] = OrderedDict()
        #: Encoded indexes by digest: the bytes and how many replicas use them.
        self._indexes: dict[str, tuple[bytes, int]] = {}
        self._segments = 0
        #: The highest generation ever held.
        self.highest = Generation(0)

    def set_row(self, row: TierRow) -> None:
        """Take a tier in, or change what is said of one."""
        stock = self.tiers.get(row.tier)
        if stock is not None:
            stock.row, stock.pool.limit_bytes = row, row.warm_bytes
            return
        self.tiers[row.tier] = TierStock(row)
        self.tiers = {tier: self.tiers[tier] for tier in _NEAREST if tier in self.tiers}

    # -------------------------------------------------------------- filling
    def reserve(self, wanted: Wanted) -> Filling:
        """Make room for a copy; the caller has seen to the capacity.

        Raises
        ------
        AlreadyExists
            When the tier holds the generation already, in whatever state.
        Incomplete
            When it is being dropped there and still read.
        Gone
            When it was destroyed.
        Mismatch
            When the tier lies over another, whose copy cannot be marked.
        """
        replica = self.replicas.get(wanted.generation)
        self.may_reserve(wanted)
        if replica is None:
            replica = self._new_replica(wanted)
        copy, make_bytes = self._place(wanted)
        replica.copies = (*replica.copies, copy)
        filling = Filling(
            copy=copy,
            owner=wanted.owner,
            deadline_s=wanted.deadline_s,
            rid=wanted.rid,
            make_bytes=make_bytes,
        )
        self.fillings[wanted.generation, wanted.tier] = filling
        return filling

    def may_reserve(self, wanted: Wanted) -> None:
        """Return when `reserve` would not raise.

        Raises
        ------
        AlreadyExists, Incomplete, Gone, Mismatch
            As `reserve` does.
        """
        replica = self.replicas.get(wanted.generation)
        if replica is None and self.gone.get(wanted.generation, ("", False))[1]:
            raise self._absent(wanted.generation, "was destroyed")
        held = None if replica is None else replica.copy(wanted.tier)
        data = {"generation": wanted.generation}
        if held is not None and held.life is Life.DROPPING:
            message = (
                f"generation {wanted.generation} is being dropped from {wanted.tier} of "
                "this node and still read; try again when its readers are done"
            )
            raise Incomplete(message, data)
        if held is not None:
            message = (
                f"generation {wanted.generation} is {held.life.name.lower()} in "
                f"{wanted.tier} of this node already; drop it first"
            )
            raise AlreadyExists(message, data)
        below = self.tiers[wanted.tier].row.over
        if below is not None:
            self._marked(wanted.generation, below)

    def _marked(self, generation: Generation, below: Tier) -> Copy:
        """Return the copy that a mark is put on: one with a segment of its own."""
        replica = self.find(generation)
        copy = replica.copy(below)
        own = not self.tiers[below].in_slab(replica.nbytes)
        if copy is None or copy.life is not Life.COMMITTED or copy.shared or not own:
            message = (
                f"generation {generation} has no memory of its own in {below} here: it is "
                "small and shares a slab, or lies in another node's memory; read it there"
            )
            raise Mismatch(message, {"generation": generation})
        return copy

    def _new_replica(self, wanted: Wanted) -> Replica:
        self.gone.pop(wanted.generation, None)
        replica = self.replicas[wanted.generation] = Replica(
            generation=wanted.generation,
            id=wanted.id,
            version=wanted.version,
            nbytes=wanted.nbytes,
            labels=wanted.labels or _NO_LABELS,
            published=wanted.published,
        )
        self.highest = max(self.highest, wanted.generation)
        return replica

    def _place(self, wanted: Wanted) -> tuple[Copy, int]:
        """Find a segment; the copy, and how many bytes the shell must make for it."""
        stock = self.tiers[wanted.tier]
        make_bytes = 0
        if wanted.shared:
            copy = Copy(wanted.tier, self._number(), 0, 0, shared=True)
        elif stock.row.over is not None:
            below = self._marked(wanted.generation, stock.row.over)
            make_bytes = stock.rounded(wanted.nbytes)
            copy = Copy(wanted.tier, below.segment, 0, make_bytes, mark=True)
        elif stock.in_slab(wanted.nbytes):
            slot = stock.slabs.take(wanted.nbytes)
            if slot is None:
                make_bytes = self._add_slab(stock)
                slot = stock.slabs.take(wanted.nbytes)
                assert slot is not None, "store: a new slab has no room"
            copy = Copy(wanted.tier, slot.segment, slot.offset, slot.size_bytes)
        else:
            size_bytes = stock.rounded(wanted.nbytes)
            warm = stock.pool.take(size_bytes)
            segment, size_bytes = warm or (self._number(), size_bytes)
            make_bytes = 0 if warm else size_bytes
            copy = Copy(wanted.tier, segment, 0, size_bytes)
        stock.reserved_bytes += copy.size_bytes
        return copy, make_bytes

    def _add_slab(self, stock: TierStock) -> int:
        warm = stock.pool.take(stock.row.slab_bytes, exact=True)
        stock.slabs.add(warm[0] if warm else self._number())
        return 0 if warm else stock.row.slab_bytes

    def _number(self) -> int:
        self._segments += 1
        return self._segments

    def commit(
        self, generation: Generation, tier: Tier, *, index: bytes, index_digest: str
    ) -> Replica:
        """Freeze a copy that is being filled.

        Raises
        ------
        NotFound, Gone
            When nothing of that generation is being filled here.
        """
        filling = self.filling(generation, tier)
        copy, replica = filling.copy, self.replicas[generation]
        copy.life, copy.filled = Life.COMMITTED, True
        del self.fillings[generation, tier]
        stock = self.tiers[tier]
        stock.reserved_bytes -= copy.size_bytes
        stock.used_bytes += copy.size_bytes
        stock.shared_bytes += replica.nbytes if copy.shared else 0
        stock.replicas += 1
        if not replica.index_digest:
            known, uses = self._indexes.get(index_digest, (index, 0))
            self._indexes[index_digest] = (known, uses + 1)
            replica.index, replica.index_digest = known, index_digest
        self.replicas.move_to_end(generation)
        self._settle(replica)
        return replica

    def filling(self, generation: Generation, tier: Tier) -> Filling:
        """Return what fills a copy.

        Raises
        ------
        NotFound, Gone
            When nothing does.
        """
        filling = self.fillings.get((generation, tier))
        if filling is None or filling.copy.life is Life.DROPPING:
            raise self._absent(generation, "is not being written")
        return filling

    # -------------------------------------------------------------- reading
    def find(self, generation: Generation) -> Replica:
        """Return a replica that can be read.

        Raises
        ------
        NotFound, Gone, Incomplete
            When it cannot.
        """
        replica = self.replicas.get(generation)
        if replica is None:
            raise self._absent(generation, "is not held")
        if replica.committed:
            return replica
        if any(copy.life is not Life.DROPPING for copy in replica.copies):
            message = (
                f"generation {generation} is still being written; wait for its commit"
            )
            raise Incomplete(message, {"generation": generation})
        message = f"generation {generation} is being dropped; read it from another node"
        raise Gone(message, {"generation": generation})

    def acquire(
        self, generation: Generation, tiers: Sequence[Tier] = ()
    ) -> tuple[Replica, Copy]:
        """Take a use lease on the first committed copy; of `tiers` in their order, if given.

        Raises
        ------
        NotFound, Gone, Incomplete
            When there is none.
        """
        replica = self.find(generation)
        for name in tiers or self.tiers:
            copy = replica.copy(name)
            if copy is not None and copy.life is Life.COMMITTED:
                self.lease(replica, copy)
                self.replicas.move_to_end(generation)
                loose = self.tiers[name].loose
                if generation in loose:
                    loose.move_to_end(generation)
                return replica, copy
        raise self._absent(generation, f"has no copy in {', '.join(tiers)}")

    def lease(self, replica: Replica, copy: Copy) -> None:
        """Keep a copy from being freed until `release`."""
        copy.leases += 1
        self.leased[replica.generation] = self.leased.get(replica.generation, 0) + 1

    def release(self, replica: Replica, copy: Copy) -> list[Freed]:
        """End a lease; what a dropping copy gives up with its last one."""
        assert copy.leases > 0, "store: a lease was released twice"
        copy.leases -= 1
        left = self.leased[replica.generation] - 1
        if left:
            self.leased[replica.generation] = left
        else:
            del self.leased[replica.generation]
        if copy.life is Life.DROPPING and not copy.leases:
            return self._free(replica, copy)
        return []

    # -------------------------------------------------------------- dropping
    def drop(
        self,
        generation: Generation,
        tier: Tier | None = None,
        *,
        why: str,
        final: bool = False,
    ) -> list[Freed]:
        """Give up one copy, or all; unknown generations are fine (it is idempotent).

        `final`: it was destroyed and is never taken in again; otherwise it may come back.
        """
        replica = self.replicas.get(generation)
        if replica is None:
            if final:
                self._note_gone(generation, why, final=True)
            return []
        freed: list[Freed] = []
        for copy in replica.copies:
            below = self.tiers[copy.tier].row.over  # a mark goes with what it is on
            if tier not in (None, copy.tier, below) or copy.life is Life.DROPPING:
                continue
            copy.life = Life.DROPPING
            if not copy.leases:
                freed += self._free(replica, copy)
        left = any(copy.life is not Life.DROPPING for copy in replica.copies)
        if not left and (final or replica.index_digest):
            self._note_gone(generation, why, final=final)
        self._settle(replica)
        return freed

    def _note_gone(self, generation: Generation, why: str, *, final: bool) -> None:
        self.gone[generation] = (why, final)
        while len(self.gone) > _GONE_KEPT:
            self.gone.popitem(last=False)

    def _free(self, replica: Replica, copy: Copy) -> list[Freed]:
        stock = self.tiers[copy.tier]
        if copy.filled:
            stock.used_bytes -= copy.size_bytes
            stock.shared_bytes -= replica.nbytes if copy.shared else 0
            stock.replicas -= 1
        else:
            stock.reserved_bytes -= copy.size_bytes
            del self.fillings[replica.generation, copy.tier]
        replica.copies = tuple(other for other in replica.copies if other is not copy)
        if not replica.copies:
            self._forget(replica)
        if copy.shared or not stock.row.proof:
            return [Freed(copy.tier, copy.segment, copy.size_bytes, probe=False)]
        if stock.in_slab(replica.nbytes):
            slot = Slot(copy.segment, copy.offset, copy.size_bytes)
            if not stock.slabs.release(slot):
                return []
        size_bytes = (
            stock.row.slab_bytes if stock.in_slab(replica.nbytes) else copy.size_bytes
        )
        stock.pool.free(copy.segment, size_bytes)
        return [Freed(copy.tier, copy.segment, size_bytes, probe=True)]

    def _forget(self, replica: Replica) -> None:
        del self.replicas[replica.generation]
        self.pins.pop(replica.generation, None)
        if not replica.index_digest:
            return
        index, uses = self._indexes[replica.index_digest]
        if uses > 1:
            self._indexes[replica.index_digest] = (index, uses - 1)
        else:
            del self._indexes[replica.index_digest]

    # -------------------------------------------------------------- marks
    def mark(
        self, generation: Generation, *, published: bool, spare: bool, pin_ends_s: float
    ) -> bool:
        """Note what the catalog knows of a replica; False when it is not here."""
        replica = self.replicas.get(generation)
        if replica is None:
            return False
        replica.published, replica.spare = published, spare
        if pin_ends_s > 0.0:
            self.pins[generation] = pin_ends_s
        else:
            self.pins.pop(generation, None)
        self._settle(replica)
        return True

    def not_spare(self, generation: Generation) -> None:
        """Note that the catalog did not give leave: it is not asked for again."""
        replica = self.replicas.get(generation)
        if replica is not None:
            replica.spare = False
            self._settle(replica)

    def _settle(self, replica: Replica) -> None:
        """Enter the copies that may go in `loose`, strike the others out."""
        readable = [c for c in replica.copies if c.life is Life.COMMITTED]
        may_go = replica.spare or sum(not c.mark for c in readable) > 1
        sizes = {
            c.tier: c.size_bytes
            for c in readable
            if c.mark or (may_go and not c.shared)
        }
        for tier, stock in self.tiers.items():
            frees_bytes = sizes.get(tier, 0)
            if stock.loose.get(replica.generation, 0) != frees_bytes:
                stock.set_loose(replica.generation, frees_bytes)

    def _absent(self, generation: Generation, what: str) -> Gone | NotFound:
        gone = self.gone.get(generation)
        data = {"generation": generation}
        if gone is None:
            return NotFound(f"generation {generation} {what} at this node", data)
        return Gone(f"generation {generation} is gone from this node: {gone[0]}", data)

    def check(self) -> None:
        """Assert rule 4; for tests."""
        for tier, stock in self.tiers.items():
            stock.slabs.check()
            copies = [
                copy
                for replica in self.replicas.values()
                if (copy := replica.copy(tier)) is not None
            ]
            used = sum(copy.size_bytes for copy in copies if copy.filled)
            reserved = sum(copy.size_bytes for copy in copies if not copy.filled)
            assert (stock.used_bytes, stock.reserved_bytes) == (used, reserved)
            assert stock.replicas == sum(copy.filled for copy in copies)
            assert stock.loose_bytes == sum(stock.loose.values())
        assert sum(self.leased.values()) == sum(
            copy.leases for replica in self.replicas.values() for copy in replica.copies
        )
        assert sum(uses for _, uses in self._indexes.values()) == sum(
            bool(replica.index_digest) for replica in self.replicas.values()
        )
