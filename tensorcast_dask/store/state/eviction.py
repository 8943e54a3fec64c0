"""What may go when a tier is full, and how much that would be.

Rules:

1. Never a replica that is leased, pinned or mapped by a reader (its memory would not come
   free), never a last copy that the catalog has not given leave for.
2. The order: warm segments (nobody's bytes); copies that this node has in another tier
   too (nothing is lost); a move to the tier below (nothing is lost, it costs a write);
   spare replicas, for which the catalog is asked.
3. Where all that is not enough, marks on copies of the tier go: they keep its memory in use.
4. Within each kind what weighs least goes first (`Table.weights`), of equal weights what was
   used longest ago; no more than is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tensorcast_dask.store.state.replicas import Life, Replica
from tensorcast_dask.store.state.tiers import TierStock
from tensorcast_dask.tensors.messages import Tier, TierUse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tensorcast_dask.store.state.table import Table
    from tensorcast_dask.tensors.ids import Generation

__all__ = ["Plan", "backed", "plan", "uses"]


@dataclass(slots=True)
class Plan:
    """What would make room, in the order in which it is to be done."""

    #: Warm bytes to trim.
    trim_bytes: int = 0
    #: Copies in this tier that another tier of this node backs.
    drop: list[Generation] = field(default_factory=list)
    #: Replicas to move to the tier below first.
    spill: list[Generation] = field(default_factory=list)
    #: Replicas to ask the catalog for (`MayDrop`).
    ask: list[Generation] = field(default_factory=list)
    #: Marks on copies of this tier: without them the memory might come free.
    unmark: list[tuple[Generation, Tier]] = field(default_factory=list)
    #: What all of it frees.
    frees_bytes: int = 0

    @property
    def empty(self) -> bool:
        """Say whether nothing can go."""
        return not (
            self.trim_bytes or self.drop or self.spill or self.ask or self.unmark
        )


def plan(
    table: Table,
    tier: Tier,
    *,
    need_bytes: int,
    now_s: float,
    mapped: Callable[[int], bool],
) -> Plan:
    """Propose what to give up so that `need_bytes` more are free in a tier.

    Parameters
    ----------
    table : Table
        What is held.
    tier : Tier
        Where room is wanted.
    need_bytes : int
        How much.
    now_s : float
        The store's clock; pins end by it.
    mapped : callable
        Says of a segment that has one tenant whether somebody else maps it.
    """

    def free(replica: Replica) -> bool:
        copy = replica.copy(tier)
        assert copy is not None, "store: a candidate without a copy"
        if _busy(table, replica.generation, now_s):
            return False
        alone = copy.segment in stock.slabs or not stock.row.proof
        return alone or not mapped(copy.segment)

    stock = table.tiers[tier]
    found = Plan(trim_bytes=min(need_bytes, stock.pool.warm_bytes))
    found.frees_bytes = found.trim_bytes
    asking: list[tuple[Generation, int]] = []
    for generation in _by_worth(table, stock.loose):
        if found.frees_bytes >= need_bytes:
            return found
        frees_bytes = stock.loose[generation]
        replica = table.replicas[generation]
        if not free(replica):
            continue
        if backed(replica, tier):
            found.drop.append(replica.generation)
            found.frees_bytes += frees_bytes
        else:
            asking.append((replica.generation, frees_bytes))
    _spill(table, stock, found, need_bytes=need_bytes, free=free)
    _ask(found, asking, need_bytes)
    if found.frees_bytes < need_bytes:
        found.unmark = _marks(table, tier, now_s)
    return found


def _by_worth(
    table: Table, generations: Mapping[Generation, object]
) -> Iterable[Generation]:
    """Go through them, what weighs least first; they come in the order of their use."""
    weights = table.weights
    if not weights:
        return generations
    return sorted(generations, key=lambda one: weights.get(one, 0.0))


def _ask(found: Plan, asking: list[tuple[Generation, int]], need_bytes: int) -> None:
    chosen = set(found.spill)
    for generation, frees_bytes in asking:
        if found.frees_bytes >= need_bytes:
            break
        if generation not in chosen:
            found.ask.append(generation)
            found.frees_bytes += frees_bytes


def _marks(table: Table, tier: Tier, now_s: float) -> list[tuple[Generation, Tier]]:
    """List the marks on copies of a tier that nobody uses or has pinned."""
    return [
        (generation, over)
        for over, stock in table.tiers.items()
        if stock.row.over is tier
        for generation in stock.loose
        if not _busy(table, generation, now_s)
    ]


def _busy(table: Table, generation: Generation, now_s: float) -> bool:
    return generation in table.leased or table.pins.get(generation, 0.0) > now_s


def backed(replica: Replica, tier: Tier) -> bool:
    """Say whether another tier of this node has the bytes of a copy too."""
    return any(
        copy.life is Life.COMMITTED and copy.tier is not tier and not copy.mark
        for copy in replica.copies
    )


def _spill(
    table: Table,
    stock: TierStock,
    found: Plan,
    *,
    need_bytes: int,
    free: Callable[[Replica], bool],
) -> None:
    below = None if stock.row.spill is None else table.tiers.get(stock.row.spill)
    if below is None or found.frees_bytes >= need_bytes:
        return
    room_bytes = below.row.capacity_bytes
    if below.row.spill is None:  # else it makes room in its turn
        room_bytes -= below.held_bytes - below.loose_bytes - below.pool.warm_bytes
    for generation in _by_worth(table, table.replicas):
        replica = table.replicas[generation]
        copy = replica.copy(stock.row.tier)
        if found.frees_bytes >= need_bytes:
            return
        if copy is None or copy.life is not Life.COMMITTED or copy.shared:
            continue
        file_bytes = below.need_bytes(replica.nbytes)
        if file_bytes > room_bytes or backed(replica, stock.row.tier):
            continue
        if free(replica):
            room_bytes -= file_bytes
            found.spill.append(generation)
            found.frees_bytes += copy.size_bytes


def uses(table: Table, *, now_s: float) -> dict[Tier, TierUse]:
    """Count each tier, by unique storage."""
    pinned = [gen for gen, ends_s in table.pins.items() if ends_s > now_s]
    busy = dict.fromkeys([*pinned, *table.leased])
    return {
        tier: TierUse(
            capacity_bytes=stock.row.capacity_bytes,
            used_bytes=stock.used_bytes,
            reserved_bytes=stock.reserved_bytes,
            pinned_bytes=sum(_size(table, gen, tier) for gen in pinned),
            evictable_bytes=stock.loose_bytes
            - sum(stock.loose.get(generation, 0) for generation in busy),
            warm_bytes=stock.pool.warm_bytes + stock.slabs.free_bytes,
            lingering_bytes=stock.pool.lingering_bytes,
            shared_bytes=stock.shared_bytes,
            replicas=stock.replicas,
            device=stock.row.device,
        )
        for tier, stock in table.tiers.items()
    }


def _size(table: Table, generation: Generation, tier: Tier) -> int:
    replica = table.replicas.get(generation)
    copy = None if replica is None else replica.copy(tier)
    return 0 if copy is None else copy.size_bytes
