from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import (
    AlreadyExists,
    Gone,
    Incomplete,
    Mismatch,
    NotFound,
)
from tensorcast_dask.store.state.replicas import Filling, Freed, Life, Wanted
from tensorcast_dask.store.state.table import Table
from tensorcast_dask.store.state.tiers import TierRow
from tensorcast_dask.tensors.ids import ArtifactId, Generation, RequestId, Version
from tensorcast_dask.tensors.messages import Tier

HOST, DISK = Tier.HOST, Tier.DISK
PAGE = 4096
SLAB = 16 * PAGE


def table() -> Table:
    return Table(
        [
            TierRow(
                tier=HOST,
                capacity_bytes=1 << 20,
                spill=DISK,
                own_segment_bytes=PAGE,
                slab_bytes=SLAB,
                warm_bytes=1 << 20,
            ),
            TierRow(tier=DISK, capacity_bytes=1 << 20, proof=False, charges=False),
        ]
    )


def wanted(
    number: int, nbytes: int = 2 * PAGE, tier: Tier = HOST, *, shared: bool = False
) -> Wanted:
    return Wanted(
        generation=Generation(number),
        id=ArtifactId(f"a{number}"),
        version=Version(1),
        nbytes=nbytes,
        tier=tier,
        owner=7,
        deadline_s=10.0,
        rid=RequestId("r"),
        labels={},
        shared=shared,
    )


def reserve(
    t: Table, number: int, nbytes: int = 2 * PAGE, tier: Tier = HOST
) -> Filling:
    return t.reserve(wanted(number, nbytes, tier))


def hold(
    t: Table, number: int, nbytes: int = 2 * PAGE, tier: Tier = HOST
) -> Generation:
    reserve(t, number, nbytes, tier)
    t.commit(Generation(number), tier, index=b"i", index_digest="d")
    t.check()
    return Generation(number)


def spare(t: Table, generation: Generation) -> None:
    t.mark(generation, published=False, spare=True, pin_ends_s=0.0)


def test_a_reservation_is_charged_and_becomes_use_at_its_commit() -> None:
    t = table()
    filling = reserve(t, 1)
    host = t.tiers[HOST]
    assert (filling.make_bytes, filling.copy.life) == (2 * PAGE, Life.RESERVED)
    assert (host.reserved_bytes, host.used_bytes) == (2 * PAGE, 0)
    t.commit(Generation(1), HOST, index=b"i", index_digest="d")
    assert (host.reserved_bytes, host.used_bytes, host.replicas) == (0, 2 * PAGE, 1)
    assert t.find(Generation(1)).index == b"i"
    t.check()


def test_small_artifacts_share_a_slab_that_is_made_once() -> None:
    t = table()
    first, second = reserve(t, 1, 100), reserve(t, 2, 100)
    assert (first.make_bytes, second.make_bytes) == (SLAB, 0)
    assert first.copy.segment == second.copy.segment
    assert first.copy.offset != second.copy.offset
    t.check()


def test_a_generation_is_reserved_once_in_a_tier_whatever_its_state() -> None:
    t = table()
    reserve(t, 1)
    with pytest.raises(AlreadyExists, match="reserved"):
        reserve(t, 1)
    t.commit(Generation(1), HOST, index=b"i", index_digest="d")
    with pytest.raises(AlreadyExists, match="committed"):
        t.may_reserve(wanted(1))
    reserve(t, 1, tier=DISK)
    t.check()


def test_commit_needs_something_that_is_being_filled() -> None:
    t = table()
    with pytest.raises(NotFound):
        t.commit(Generation(1), HOST, index=b"", index_digest="")
    hold(t, 1)
    with pytest.raises(NotFound):
        t.commit(Generation(1), HOST, index=b"", index_digest="")
    t.drop(Generation(1), why="test")
    with pytest.raises(Gone, match="test"):
        t.commit(Generation(1), HOST, index=b"", index_digest="")


def test_what_is_being_written_is_incomplete_and_what_was_dropped_is_gone() -> None:
    t = table()
    with pytest.raises(NotFound):
        t.find(Generation(1))
    reserve(t, 1)
    with pytest.raises(Incomplete):
        t.find(Generation(1))
    t.drop(Generation(1), why="given up")
    with pytest.raises(NotFound):
        t.acquire(Generation(1))
    hold(t, 2)
    t.drop(Generation(2), why="evicted")
    with pytest.raises(Gone, match="evicted"):
        t.acquire(Generation(2))
    t.check()


def test_a_freed_segment_is_to_be_probed_and_charged_until_then() -> None:
    t = table()
    gen = hold(t, 1)
    segment = t.find(gen).copies[0].segment
    assert t.drop(gen, why="test") == [Freed(HOST, segment, 2 * PAGE, probe=True)]
    host = t.tiers[HOST]
    assert (host.used_bytes, host.pool.lingering_bytes) == (0, 2 * PAGE)
    host.pool.proved(segment)
    again = reserve(t, 2)
    assert (again.copy.segment, again.make_bytes) == (segment, 0)


def test_a_slab_is_freed_with_its_last_slot_and_used_again() -> None:
    t = table()
    one, two = hold(t, 1, 100), hold(t, 2, 100)
    assert t.drop(one, why="test") == []
    (freed,) = t.drop(two, why="test")
    assert (freed.size_bytes, freed.probe) == (SLAB, True)
    t.tiers[HOST].pool.proved(freed.segment)
    again = reserve(t, 3, 100)
    assert (again.copy.segment, again.make_bytes) == (freed.segment, 0)


def test_a_leased_copy_is_freed_by_its_last_release_and_takes_no_new_lease() -> None:
    t = table()
    gen = hold(t, 1)
    one, two = t.acquire(gen), t.acquire(gen)
    assert t.leased == {gen: 2}
    assert t.drop(gen, why="test") == []
    assert t.tiers[HOST].used_bytes == 2 * PAGE
    with pytest.raises(Gone, match="being dropped"):
        t.acquire(gen)
    with pytest.raises(Incomplete, match="still read"):
        reserve(t, 1)
    assert t.release(*one) == []
    assert len(t.release(*two)) == 1
    assert t.leased == {}
    t.check()


def test_a_lease_of_a_former_life_does_not_touch_the_next_one() -> None:
    t = table()
    gen = hold(t, 1)
    old = t.acquire(gen)
    t.drop(gen, why="evicted")
    t.release(*old)
    hold(t, 1)
    assert t.find(gen).copies[0].life is Life.COMMITTED
    t.check()


def test_reads_take_the_nearest_tier_and_dropping_one_leaves_the_other() -> None:
    t = table()
    gen = hold(t, 1)
    hold(t, 1, tier=DISK)
    _, copy = t.acquire(gen)
    assert copy.tier is HOST
    assert t.acquire(gen, [DISK])[1].tier is DISK
    t.drop(gen, HOST, why="spilled")
    assert t.find(gen).committed
    assert t.acquire(gen)[1].tier is DISK
    with pytest.raises(NotFound, match="no copy"):
        t.acquire(gen, [HOST])


def test_a_file_is_closed_and_not_probed() -> None:
    t = table()
    gen = hold(t, 1, tier=DISK)
    segment = t.find(gen).copies[0].segment
    assert t.drop(gen, why="x") == [Freed(DISK, segment, 2 * PAGE, probe=False)]
    assert t.tiers[DISK].held_bytes == 0


def test_shared_memory_is_counted_apart_and_never_recycled() -> None:
    t = table()
    t.reserve(wanted(1, shared=True))
    gen = Generation(1)
    t.commit(gen, HOST, index=b"i", index_digest="d")
    host = t.tiers[HOST]
    assert (host.used_bytes, host.shared_bytes) == (0, 2 * PAGE)
    spare(t, gen)
    assert not host.loose
    (freed,) = t.drop(gen, why="x")
    assert (freed.size_bytes, freed.probe) == (0, False)
    assert (host.shared_bytes, host.replicas) == (0, 0)
    t.check()


def test_what_may_go_is_what_is_spare_or_has_another_copy_here() -> None:
    t = table()
    one, two = hold(t, 1), hold(t, 2)
    assert not t.tiers[HOST].loose
    spare(t, one)
    hold(t, 2, tier=DISK)
    assert list(t.tiers[HOST].loose) == [one, two]
    assert list(t.tiers[DISK].loose) == [two]
    t.not_spare(one)
    t.not_spare(Generation(99))
    t.drop(two, DISK, why="x")
    assert not t.tiers[HOST].loose
    assert t.tiers[HOST].loose_bytes == 0


def test_a_destroyed_generation_is_never_taken_in_again_and_a_dropped_one_is() -> None:
    t = table()
    hold(t, 1)
    hold(t, 2)
    t.drop(Generation(1), why="destroyed", final=True)
    t.drop(Generation(2), why="evicted")
    t.drop(Generation(3), why="destroyed", final=True)  # before it ever came
    for number in (1, 3):
        with pytest.raises(Gone, match="destroyed"):
            reserve(t, number)
    hold(t, 2)


def test_marks_of_what_is_not_here_are_ignored() -> None:
    t = table()
    assert not t.mark(Generation(1), published=True, spare=True, pin_ends_s=1.0)
    gen = hold(t, 1)
    assert t.mark(gen, published=True, spare=False, pin_ends_s=5.0)
    assert t.find(gen).published
    assert t.pins == {gen: 5.0}
    t.mark(gen, published=True, spare=False, pin_ends_s=0.0)
    assert t.pins == {}
    t.mark(gen, published=True, spare=False, pin_ends_s=5.0)
    t.drop(gen, why="x")
    assert t.pins == {}


def test_equal_indexes_are_kept_once() -> None:
    t = table()
    for number in (1, 2):
        reserve(t, number, 100)
        index = bytes(bytearray(b"same"))
        t.commit(Generation(number), HOST, index=index, index_digest="d")
    one, two = (t.find(Generation(n)) for n in (1, 2))
    assert one.index is two.index
    t.drop(Generation(1), why="x")
    t.check()
    t.drop(Generation(2), why="x")
    t.check()


def test_the_highest_generation_is_remembered_after_it_went() -> None:
    t = table()
    gen = hold(t, 9)
    hold(t, 3)
    t.drop(gen, why="x")
    assert t.highest == 9


def test_only_the_newest_of_what_is_gone_is_remembered() -> None:
    t = table()
    for number in range(1, 16_387):
        t.drop(Generation(number), why="destroyed", final=True)
    assert len(t.gone) == 16_384
    hold(t, 2)
    with pytest.raises(Gone):
        reserve(t, 3)


# ------------------------------------------------------------------ tiers over tiers
PINNED = Tier.PINNED


def with_pins() -> Table:
    t = table()
    t.set_row(
        TierRow(
            tier=PINNED,
            capacity_bytes=1 << 20,
            proof=False,
            charges=False,
            over=HOST,
            device="GPU-1",
        )
    )
    return t


def test_a_mark_shares_the_segment_below_and_goes_with_it() -> None:
    t = with_pins()
    gen = hold(t, 1)
    host = t.replicas[gen].copy(HOST)
    reserve(t, 1, tier=PINNED)
    t.commit(gen, PINNED, index=b"i", index_digest="d")
    mark = t.replicas[gen].copy(PINNED)
    assert host is not None
    assert mark is not None
    assert (mark.segment, mark.mark, mark.size_bytes) == (host.segment, True, 2 * PAGE)
    assert list(t.tiers[PINNED].loose) == [gen]
    assert list(t.tiers[HOST].loose) == []
    assert t.drop(gen, HOST, why="test") == [
        Freed(HOST, host.segment, 2 * PAGE, probe=True),
        Freed(PINNED, host.segment, 2 * PAGE, probe=False),
    ]
    t.check()


def test_a_mark_alone_goes_and_leaves_what_it_was_on() -> None:
    t = with_pins()
    gen = hold(t, 1)
    hold(t, 1, tier=PINNED)
    assert [f.tier for f in t.drop(gen, PINNED, why="test")] == [PINNED]
    assert [c.tier for c in t.replicas[gen].copies] == [HOST]


def test_what_has_no_memory_of_its_own_cannot_be_marked() -> None:
    t = with_pins()
    hold(t, 1, nbytes=100)
    with pytest.raises(Mismatch, match="slab"):
        reserve(t, 1, 100, PINNED)
    t.reserve(wanted(2, shared=True))
    t.commit(Generation(2), HOST, index=b"i", index_digest="d")
    with pytest.raises(Mismatch):
        reserve(t, 2, tier=PINNED)
    with pytest.raises(NotFound):
        reserve(t, 3, tier=PINNED)
    t.check()


def test_a_tier_that_comes_later_stands_where_it_belongs() -> None:
    t = with_pins()
    t.set_row(TierRow(tier=Tier.DEVICE, capacity_bytes=1, grain_bytes=1 << 21))
    assert list(t.tiers) == [Tier.DEVICE, PINNED, HOST, DISK]
    assert t.tiers[Tier.DEVICE].need_bytes(5) == 1 << 21
    t.set_row(TierRow(tier=Tier.DEVICE, capacity_bytes=2))
    assert t.tiers[Tier.DEVICE].row.capacity_bytes == 2
