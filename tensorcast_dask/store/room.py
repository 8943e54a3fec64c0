"""Making room and giving it back: admission, memory in steps, eviction, proofs.

Rules:

1. Whether memory may be had is asked before it is made: the whole when it is reserved,
   and each step again where it is tight.
2. Memory that was promised and is not made yet counts as taken, so that two puts are not
   promised the same bytes.
3. What is freed is probed at once; what is not ours alone lingers and is probed again by
   `probe` and whenever room is needed.
4. One thread evicts at a time; the lock is not held while it waits for a file, a reader or
   the catalog.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final, NoReturn

from tensorcast_dask.exceptions import CapacityError, TensorCastError
from tensorcast_dask.store.state import budget, eviction
from tensorcast_dask.tensors.quantities import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.store.machine import Machine
    from tensorcast_dask.store.media import Medium
    from tensorcast_dask.store.shelf import Shelf
    from tensorcast_dask.store.state.replicas import Filling, Freed, Wanted
    from tensorcast_dask.store.state.table import Table
    from tensorcast_dask.tensors.ids import Generation
    from tensorcast_dask.tensors.messages import StoreSettings, Tier

__all__ = ["Room"]

logger = logging.getLogger(__name__)

_ASK_S: Final = 2.0  # how long a put waits for the catalog's leave to drop
_LINGER_WAIT_S: Final = 0.25
_LOOK_S: Final = 0.01
_NO_BUDGET: Final = 1 << 62
_SAID: Final = {
    "budget": "its budget (tensorcast.node.host-memory, device-memory or disk-memory)",
    "cgroup": "the memory limit of its container",
    "machine": "the memory of the machine",
}


class Room:
    """Room for copies in the tiers of one store.

    Parameters
    ----------
    table : Table
        State; guarded by `lock`.
    shelf : Shelf
        Memory behind segment numbers.
    machine : Machine
        What is free.
    settings : StoreSettings
        Limits.
    lock : RLock
        The store's one lock.
    """

    def __init__(
        self,
        *,
        table: Table,
        shelf: Shelf,
        machine: Machine,
        settings: StoreSettings,
        lock: threading.RLock,
    ) -> None:
        self._table = table
        self._shelf = shelf
        self._machine = machine
        self.settings = settings
        self._lock = lock
        self._evicting = threading.RLock()  # a spill may evict from the disk
        #: Asks the catalog for leave to drop, at most until an instant; True once it has
        #: answered and what it granted is dropped.
        self.ask_leave: Callable[[list[Generation], float], bool] = _nobody_asked
        #: Lets others go on for some seconds.
        self.pause: Callable[[float], None] = time.sleep
        #: What keeps the bytes of the tiers that are not host memory.
        self.media: dict[Tier, Medium] = {}
        #: Drops the copy of a generation in a tier while another tier backs it; whether.
        self.evict: Callable[[Generation, Tier], bool] = _nothing_to_evict

    # -------------------------------------------------------------- admission
    def shortfall(self, wanted: Wanted) -> budget.Shortfall | None:
        """Return why a reservation has no room, or None; under the lock."""
        stock = self._table.tiers[wanted.tier]
        need_bytes = 0 if wanted.shared else stock.need_bytes(wanted.nbytes)
        if not need_bytes:
            return None
        headroom = self._headroom() if stock.row.charges else budget.Headroom()
        return budget.shortfall(
            need_bytes,
            held_bytes=stock.held_bytes,
            limits=self._limits(stock.row.capacity_bytes),
            headroom=headroom,
        )

    def _limits(self, capacity_bytes: int) -> budget.Limits:
        return budget.Limits(
            capacity_bytes,
            self.settings.reserve_fraction,
            self.settings.reserve_min_bytes,
        )

    def _headroom(self) -> budget.Headroom:
        """Return what the machine has, less what was promised and is not made yet."""
        found = self._machine.headroom()
        with self._lock:
            tiers = self._table.tiers
            pending_bytes = sum(
                filling.make_bytes
                for filling in self._table.fillings.values()
                if tiers[filling.copy.tier].row.charges
            )
        available, cgroup = found.available_bytes, found.cgroup_free_bytes
        return found._replace(
            available_bytes=max(0, available - pending_bytes) if available >= 0 else -1,
            cgroup_free_bytes=max(0, cgroup - pending_bytes) if cgroup >= 0 else -1,
        )

    @staticmethod
    def refuse(tier: Tier, short: budget.Shortfall) -> NoReturn:
        """Raise the CapacityError that says what is missing where."""
        message = (
            f"no room for {human_bytes(short.needed_bytes)} in {tier}: {_SAID[short.what]} "
            f"leaves {human_bytes(short.free_bytes)}; destroy or release artifacts, or raise it"
        )
        data: dict[str, str | int] = {
            "tier": str(tier),
            "what": short.what,
            "needed": short.needed_bytes,
            "free": short.free_bytes,
        }
        raise CapacityError(message, data)

    def check_machine(self, tier: Tier, nbytes: int) -> None:
        """Return when the machine has `nbytes`, whatever the budget says.

        Raises
        ------
        CapacityError
            When it has not.
        """
        limits, headroom = self._limits(_NO_BUDGET), self._headroom()
        short = budget.shortfall(nbytes, held_bytes=0, limits=limits, headroom=headroom)
        if short is not None:
            self.refuse(tier, short)

    # -------------------------------------------------------------- memory
    def make(self, wanted: Wanted, filling: Filling, *, until_s: float) -> None:
        """Make the memory of a reservation that was admitted.

        Raises
        ------
        CapacityError
            When the machine has it no longer; the reservation is to be taken back.
        """
        stock = self._table.tiers[wanted.tier]
        segment, medium = filling.copy.segment, self.media.get(wanted.tier)
        if medium is not None:
            medium.make(wanted, filling, until_s=until_s)
            filling.make_bytes = 0
        elif wanted.shared:
            filling.make_bytes = 0
        elif stock.in_slab(wanted.nbytes):
            with self._lock:  # whoever comes second finds it made
                if segment not in self._shelf:
                    self._shelf.make(segment, stock.row.slab_bytes)
        elif filling.make_bytes:
            self._shelf.make(segment, filling.make_bytes)
            if self._tight(filling.make_bytes):
                self._make_pages(wanted.tier, filling, until_s)

    def _tight(self, nbytes: int) -> bool:
        """Say whether the pages must be made ahead: twice as much would not be had.

        Where there is plenty, whoever writes first makes them, in one go with the copy.
        """
        limits, headroom = self._limits(_NO_BUDGET), self._headroom()
        short = budget.shortfall(nbytes, held_bytes=0, limits=limits, headroom=headroom)
        return short is not None

    def _make_pages(self, tier: Tier, filling: Filling, until_s: float) -> None:
        file = self._shelf.own(filling.copy.segment)
        limits = self._limits(_NO_BUDGET)
        total_bytes = filling.make_bytes
        step_bytes = self.settings.alloc_step_bytes
        for offset, length in budget.steps(total_bytes, step_bytes):
            while True:
                headroom = self._machine.headroom()
                short = budget.shortfall(
                    length, held_bytes=0, limits=limits, headroom=headroom
                )
                if short is None:
                    break
                if not self.relieve(tier, short.missing_bytes, until_s=until_s):
                    self.refuse(tier, short)
            file.prefault(offset, length)
            with self._lock:
                filling.make_bytes = total_bytes - offset - length

    # -------------------------------------------------------------- giving back
    def give_back(self, freed: list[Freed]) -> None:
        """Carry out what the table freed; under the lock."""
        for gone in freed:
            if gone.probe:
                self._probe(gone.tier, gone.segment)
            else:
                self._close(gone.tier, gone.segment)

    def _close(self, tier: Tier, segment: int) -> None:
        medium = self.media.get(tier)
        if medium is None:
            self._shelf.close(segment)
        else:
            medium.close(segment)

    def _probe(self, tier: Tier, segment: int) -> bool:
        """Make a lingering segment warm when it is ours alone; whether it went."""
        pool = self._table.tiers[tier].pool
        if segment not in self._shelf:  # its reservation failed before it was made
            pool.forget(segment)
        elif not self._shelf.leases:  # nothing can be proved: its pages go when they go
            pool.forget(segment)
            self._close(tier, segment)
        elif not self._shelf.alone(segment):
            return False
        elif tier in self.media and not self.media[tier].keeps(segment):
            pool.forget(segment)
            self._close(tier, segment)
        else:
            for closing in pool.proved(segment):
                self._close(tier, closing)
        return True

    def probe(self) -> bool:
        """Probe all that lingers; whether anything went."""
        with self._lock:
            found = [
                self._probe(tier, segment)
                for tier, stock in self._table.tiers.items()
                for segment in stock.pool.lingering
            ]
        return any(found)

    # -------------------------------------------------------------- eviction
    def relieve(self, tier: Tier, need_bytes: int, *, until_s: float) -> bool:
        """Free some of `need_bytes` in a tier; True when it is worth asking again."""
        with self._evicting:
            if self.probe():
                self._shelf.settle()
                return True
            with self._lock:
                stock = self._table.tiers[tier]
                plan = eviction.plan(
                    self._table,
                    tier,
                    need_bytes=need_bytes,
                    now_s=time.monotonic(),
                    mapped=self._shelf.mapped,
                )
                for segment in stock.pool.trim(plan.trim_bytes):
                    self._close(tier, segment)
                for generation in plan.drop:
                    self.evict(generation, tier)
                waits = stock.pool.lingering_bytes > 0
            self._shelf.settle()
            if plan.trim_bytes or plan.drop:
                return True
            if [gen for gen in plan.spill if self._spill(gen, tier, until_s)]:
                return True
            if plan.unmark and self._unmark(plan.unmark, until_s):
                return True
            return self._ask(plan.ask, until_s) or (waits and self._wait(until_s))

    def _unmark(self, marks: list[tuple[Generation, Tier]], until_s: float) -> bool:
        """Give marks up, and wait until one no longer keeps its memory in use."""
        segments: list[int] = []
        with self._lock:
            for generation, tier in marks:
                copy = self._table.replicas[generation].copy(tier)
                segments += [] if copy is None else [copy.segment]
                self.evict(generation, tier)
        end_s = min(until_s, time.monotonic() + _ASK_S)
        while time.monotonic() < end_s:
            with self._lock:
                held = [at for at in segments if at in self._shelf]
            if any(not self._shelf.mapped(segment) for segment in held):
                return True
            self.pause(_LOOK_S)
        return False

    def _spill(self, generation: Generation, tier: Tier, until_s: float) -> bool:
        """Move a replica to the tier below; False, and nothing changed, when it fails."""
        below = self._table.tiers[tier].row.spill
        assert below is not None, "store: a spill from a tier with none below"
        try:
            if tier in self.media:
                self.media[tier].restore(generation, until_s=until_s)
            else:
                self.media[below].save(generation, until_s=until_s)
        except TensorCastError as error:
            logger.warning("generation %d is not spilled: %s", generation, error)
            return False
        return self.evict(generation, tier)

    def _wait(self, until_s: float) -> bool:
        """Wait a moment for readers that are about to end; whether one did."""
        end_s = min(until_s, time.monotonic() + _LINGER_WAIT_S)
        while time.monotonic() < end_s:
            self.pause(_LOOK_S)
            if self.probe():
                return True
        return False

    def _ask(self, generations: list[Generation], until_s: float) -> bool:
        """Ask the catalog for leave; whether anything was dropped for it."""
        if not generations:
            return False
        end_s = min(until_s, time.monotonic() + _ASK_S)
        if not self.ask_leave(generations, end_s):
            return False
        with self._lock:
            left = [gen for gen in generations if gen in self._table.replicas]
            for generation in left:  # others went meanwhile: it is not spare any more
                self._table.not_spare(generation)
            return len(left) < len(generations)


def _nobody_asked(generations: list[Generation], until_s: float) -> bool:
    logger.debug("no catalog to ask for %d until %f", len(generations), until_s)
    return False


def _nothing_to_evict(generation: Generation, tier: Tier) -> bool:
    logger.debug("nothing evicts generation %d from %s", generation, tier)
    return False
