"""The segment table against a dictionary: every step compared exactly."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tensorcast_dask.exceptions import AbsentError, AlreadyExists, Mismatch
from tensorcast_dask.store.state.eviction import plan, uses
from tensorcast_dask.store.state.replicas import Copy, Freed, Life, Replica, Wanted
from tensorcast_dask.store.state.table import Table
from tensorcast_dask.store.state.tiers import TierRow
from tensorcast_dask.tensors.ids import ArtifactId, Generation, Version
from tensorcast_dask.tensors.messages import Tier
from tests.kit.store_model import StoreModel

PAGE = 4096
SLAB = 8 * PAGE
OWN = 2 * PAGE
DEVICE, PINNED, HOST, DISK = Tier

generations = st.integers(1, 6).map(Generation)
tiers = st.sampled_from(Tier)
lengths = st.sampled_from([0, 1, 64, 100, PAGE, OWN - 1, OWN, OWN + 1, 5 * PAGE])


class StoreMachine(RuleBasedStateMachine):
    """Random requests, readers and evictions on a small table."""

    @initialize()
    def start(self) -> None:
        self.table = Table(
            [
                TierRow(
                    tier=HOST,
                    capacity_bytes=64 * PAGE,
                    spill=DISK,
                    own_segment_bytes=OWN,
                    slab_bytes=SLAB,
                    warm_bytes=16 * PAGE,
                ),
                TierRow(
                    tier=DISK, capacity_bytes=64 * PAGE, proof=False, charges=False
                ),
            ]
        )
        device = TierRow(
            tier=DEVICE,
            capacity_bytes=64 * PAGE,
            charges=False,
            spill=HOST,
            grain_bytes=2 * PAGE,
            warm_bytes=8 * PAGE,
        )
        pins = TierRow(
            tier=PINNED,
            capacity_bytes=64 * PAGE,
            proof=False,
            charges=False,
            over=HOST,
        )
        self.table.set_row(device)
        self.table.set_row(pins)
        self.model = StoreModel(own_segment_bytes=OWN)
        self.held: list[tuple[Replica, Copy]] = []
        self.probing: list[Freed] = []
        self.now_s = 0.0

    # ---------------------------------------------------------------- writing
    @rule(generation=generations, tier=tiers, nbytes=lengths, shared=st.booleans())
    def reserve(
        self, generation: Generation, tier: Tier, nbytes: int, *, shared: bool
    ) -> None:
        known = self.model.nbytes.get(generation)
        shared = shared and tier is HOST and nbytes >= OWN
        wanted = Wanted(
            generation=generation,
            id=ArtifactId("a"),
            version=Version(1),
            nbytes=nbytes if known is None else known,
            tier=tier,
            owner=1,
            deadline_s=0.0,
            labels={},
            shared=shared and known is None,
        )
        may = self.model.may_reserve(generation, tier)
        try:
            filling = self.table.reserve(wanted)
        except (AlreadyExists, AbsentError, Mismatch):
            assert not may
            return
        assert may
        if wanted.shared:
            self.model.shared.add(generation)
        elif tier is HOST:
            self.model.shared.discard(generation)
        copy = filling.copy
        self.model.reserve(generation, tier, wanted.nbytes)
        self.model.place(
            generation,
            tier,
            segment=copy.segment,
            offset=copy.offset,
            size_bytes=copy.size_bytes,
        )
        if not wanted.shared:
            assert copy.size_bytes >= wanted.nbytes

    @rule(generation=generations, tier=tiers)
    def commit(self, generation: Generation, tier: Tier) -> None:
        may = self.model.life(generation, tier) is Life.FILLING
        try:
            digest = f"digest-{generation % 2}"
            self.table.commit(generation, tier, index=b"i", index_digest=digest)
        except AbsentError:
            assert not may
            return
        assert may
        self.model.commit(generation, tier)

    # ---------------------------------------------------------------- reading
    @rule(generation=generations)
    def acquire(self, generation: Generation) -> None:
        tier = self.model.nearest(generation)
        try:
            replica, copy = self.table.acquire(generation)
        except AbsentError:
            assert tier is None
            return
        assert copy.tier is tier
        self.held.append((replica, copy))
        self.model.leases[generation, copy.tier] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.held) - 1))
        replica, copy = self.held.pop(at)
        self._freed(self.table.release(replica, copy))
        self.model.release(replica.generation, copy.tier)

    # ---------------------------------------------------------------- dropping
    @rule(
        generation=generations,
        tier=st.sampled_from([None, *Tier]),
        final=st.booleans(),
    )
    def drop(self, generation: Generation, tier: Tier | None, *, final: bool) -> None:
        final = final and tier is None
        self._freed(self.table.drop(generation, tier, why="test", final=final))
        self.model.drop(generation, tier, final=final)

    @rule(generation=generations, spare=st.booleans(), pin_s=st.sampled_from([0, 2]))
    def mark(self, generation: Generation, pin_s: float, *, spare: bool) -> None:
        known = generation in self.model.nbytes
        ends_s = self.now_s + pin_s if pin_s else 0.0
        assert known == self.table.mark(
            generation, published=False, spare=spare, pin_ends_s=ends_s
        )
        if known:
            self.model.mark(generation, spare=spare, pin_ends_s=ends_s)

    @rule()
    def pass_time(self) -> None:
        self.now_s += 1.0

    @precondition(lambda self: self.probing)
    @rule(data=st.data())
    def prove(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.probing) - 1))
        freed = self.probing.pop(at)
        self.table.tiers[freed.tier].pool.proved(freed.segment)

    def _freed(self, freed: list[Freed]) -> None:
        self.probing += [gone for gone in freed if gone.probe]

    # ---------------------------------------------------------------- evicting
    @rule(tier=tiers, pages=st.integers(1, 20))
    def evict(self, tier: Tier, pages: int) -> None:
        found = plan(
            self.table,
            tier,
            need_bytes=pages * PAGE,
            now_s=self.now_s,
            mapped=lambda _: False,
        )
        proposed = [*found.drop, *found.spill, *found.ask]
        assert len(set(proposed)) == len(proposed)
        for generation in proposed:
            assert not self.model.busy(generation, now_s=self.now_s)
            assert self.model.life(generation, tier) is Life.COMMITTED
        for generation in found.drop:
            assert self.model.copies(generation) > (tier is not PINNED)
            self._freed(self.table.drop(generation, tier, why="evicted"))
            self.model.drop(generation, tier, final=False)
        for generation in found.ask:
            assert self.model.spare[generation]
        for generation in found.spill:
            assert tier in (HOST, DEVICE)
            assert self.model.copies(generation) == 1

    # ---------------------------------------------------------------- always
    @invariant()
    def the_table_is_consistent(self) -> None:
        self.table.check()

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        lives = {
            (generation, copy.tier): copy.life
            for generation, replica in self.table.replicas.items()
            for copy in replica.copies
        }
        assert {
            key: Life.FILLING if life is Life.RESERVED else life
            for key, life in lives.items()
        } == self.model.lives

    @invariant()
    def no_two_copies_share_a_byte(self) -> None:
        self.model.check_places()

    @invariant()
    def it_counts_what_the_model_counts(self) -> None:
        found = uses(self.table, now_s=self.now_s)
        for tier in Tier:
            used, reserved, pinned, evictable = self.model.counts(
                tier, now_s=self.now_s
            )
            use = found[tier]
            assert (use.used_bytes, use.reserved_bytes) == (used, reserved)
            assert use.pinned_bytes == pinned
            assert use.evictable_bytes == evictable


TestStoreMachine = StoreMachine.TestCase
