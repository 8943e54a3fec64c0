"""What a store must hold, as plain dictionaries: the oracle of the segment table."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tensorcast_dask.store.state.replicas import Life
from tensorcast_dask.tensors.ids import Generation
from tensorcast_dask.tensors.messages import Tier

__all__ = ["Place", "StoreModel"]

_ORDER = (Tier.DEVICE, Tier.PINNED, Tier.HOST, Tier.DISK)
#: A copy there is a mark on that of the tier below.
_OVER = {Tier.PINNED: Tier.HOST}


@dataclass(frozen=True)
class Place:
    """Where a copy lies."""

    segment: int
    offset: int
    size_bytes: int


@dataclass
class StoreModel:
    """Copies by (generation, tier), and everything said about them."""

    lives: dict[tuple[Generation, Tier], Life] = field(default_factory=dict)
    places: dict[tuple[Generation, Tier], Place] = field(default_factory=dict)
    filled: dict[tuple[Generation, Tier], bool] = field(default_factory=dict)
    nbytes: dict[Generation, int] = field(default_factory=dict)
    leases: Counter[tuple[Generation, Tier]] = field(default_factory=Counter)
    spare: dict[Generation, bool] = field(default_factory=lambda: defaultdict(bool))
    pins: dict[Generation, float] = field(default_factory=dict)
    destroyed: set[Generation] = field(default_factory=set)
    #: Whose memory in `HOST` is another node's.
    shared: set[Generation] = field(default_factory=set)
    #: From here on a replica has a segment of its own.
    own_segment_bytes: int = 0

    # ---------------------------------------------------------------- looking
    def life(self, generation: Generation, tier: Tier) -> Life | None:
        """Return where a copy is in its life."""
        return self.lives.get((generation, tier))

    def may_reserve(self, generation: Generation, tier: Tier) -> bool:
        """Say whether a copy may be made."""
        if generation not in self.nbytes and generation in self.destroyed:
            return False
        below = _OVER.get(tier)
        if below is not None and not self._may_mark(generation, below):
            return False
        return (generation, tier) not in self.lives

    def _may_mark(self, generation: Generation, below: Tier) -> bool:
        alone = self.nbytes.get(generation, 0) >= self.own_segment_bytes
        committed = self.life(generation, below) is Life.COMMITTED
        return committed and alone and generation not in self.shared

    def nearest(self, generation: Generation) -> Tier | None:
        """Return the tier that a read takes."""
        for tier in _ORDER:
            if self.life(generation, tier) is Life.COMMITTED:
                return tier
        return None

    def copies(self, generation: Generation) -> int:
        """Count the readable copies, marks not among them."""
        return sum(
            self.life(generation, tier) is Life.COMMITTED
            for tier in _ORDER
            if tier not in _OVER
        )

    def busy(self, generation: Generation, *, now_s: float) -> bool:
        """Say whether a replica must not be evicted."""
        leased = any(self.leases[generation, tier] for tier in _ORDER)
        return leased or self.pins.get(generation, 0.0) > now_s

    def counts(self, tier: Tier, *, now_s: float) -> tuple[int, int, int, int]:
        """Count (used, reserved, pinned, evictable) by walking over everything."""
        used = reserved = pinned = evictable = 0
        for (generation, where), place in self.places.items():
            if where is not tier:
                continue
            if self.filled[generation, where]:
                used += place.size_bytes
            else:
                reserved += place.size_bytes
            pinned += place.size_bytes if self.pins.get(generation, 0.0) > now_s else 0
            readable = self.life(generation, where) is Life.COMMITTED
            loose = (
                self.spare[generation] or self.copies(generation) > 1 or tier in _OVER
            )
            if readable and loose and not self.busy(generation, now_s=now_s):
                evictable += place.size_bytes
        return used, reserved, pinned, evictable

    def check_places(self) -> None:
        """Assert that no two copies of a tier share a byte."""
        by_segment: dict[tuple[Tier, int], list[Place]] = defaultdict(list)
        for (_, tier), place in self.places.items():
            by_segment[tier, place.segment].append(place)
        for places in by_segment.values():
            places.sort(key=lambda place: place.offset)
            for one, two in itertools.pairwise(places):
                assert one.offset + one.size_bytes <= two.offset

    # ---------------------------------------------------------------- changing
    def reserve(self, generation: Generation, tier: Tier, nbytes: int) -> None:
        """Begin a copy."""
        self.nbytes[generation] = nbytes
        self.lives[generation, tier] = Life.FILLING
        self.filled[generation, tier] = False

    def place(
        self,
        generation: Generation,
        tier: Tier,
        *,
        segment: int,
        offset: int,
        size_bytes: int,
    ) -> None:
        """Note where a copy lies."""
        self.places[generation, tier] = Place(segment, offset, size_bytes)

    def commit(self, generation: Generation, tier: Tier) -> None:
        """Freeze a copy."""
        self.lives[generation, tier] = Life.COMMITTED
        self.filled[generation, tier] = True

    def mark(self, generation: Generation, *, spare: bool, pin_ends_s: float) -> None:
        """Note what the catalog said."""
        self.spare[generation] = spare
        self.pins.pop(generation, None)
        if pin_ends_s:
            self.pins[generation] = pin_ends_s

    def drop(self, generation: Generation, tier: Tier | None, *, final: bool) -> None:
        """Give up one copy or all."""
        if final:
            self.destroyed.add(generation)
        for where in _ORDER:
            key = generation, where
            if tier in (None, where, _OVER.get(where)) and key in self.lives:
                self.lives[key] = Life.DROPPING
                self._settle(key)

    def release(self, generation: Generation, tier: Tier) -> None:
        """End a lease."""
        self.leases[generation, tier] -= 1
        self._settle((generation, tier))

    def _settle(self, key: tuple[Generation, Tier]) -> None:
        if self.lives.get(key) is not Life.DROPPING or self.leases[key]:
            return
        del self.lives[key], self.filled[key]
        self.places.pop(key, None)
        generation = key[0]
        if not any((generation, tier) in self.lives for tier in _ORDER):
            del self.nbytes[generation]
            self.spare.pop(generation, None)
            self.pins.pop(generation, None)
