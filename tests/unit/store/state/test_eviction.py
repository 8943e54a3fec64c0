from __future__ import annotations

from tensorcast_dask.store.state.eviction import Plan, plan, uses
from tensorcast_dask.store.state.replicas import Wanted
from tensorcast_dask.store.state.table import Table
from tensorcast_dask.store.state.tiers import TierRow
from tensorcast_dask.tensors.ids import ArtifactId, Generation, Version
from tensorcast_dask.tensors.messages import Tier

HOST, DISK = Tier.HOST, Tier.DISK
PAGE = 4096


def table(*, disk_bytes: int = 0) -> Table:
    rows = [
        TierRow(
            tier=HOST,
            capacity_bytes=100 * PAGE,
            spill=DISK if disk_bytes else None,
            slab_bytes=PAGE,
            warm_bytes=100 * PAGE,
        )
    ]
    if disk_bytes:
        rows.append(
            TierRow(tier=DISK, capacity_bytes=disk_bytes, proof=False, charges=False)
        )
    return Table(rows)


def hold(
    t: Table, number: int, *, tier: Tier = HOST, spare: bool = False
) -> Generation:
    gen = Generation(number)
    t.reserve(
        Wanted(
            generation=gen,
            id=ArtifactId("a"),
            version=Version(1),
            nbytes=PAGE,
            tier=tier,
            owner=0,
            deadline_s=0.0,
            labels={},
        )
    )
    t.commit(gen, tier, index=b"", index_digest="d")
    if spare:
        t.mark(gen, published=False, spare=True, pin_ends_s=0.0)
    return gen


def ask(
    t: Table, pages: int, *, mapped: set[int] | None = None, tier: Tier = HOST
) -> Plan:
    busy = mapped or set()
    return plan(t, tier, need_bytes=pages * PAGE, now_s=5.0, mapped=lambda s: s in busy)


def test_a_last_copy_is_never_proposed() -> None:
    t = table()
    hold(t, 1)
    assert ask(t, 1).empty


def test_spare_replicas_are_asked_for_least_recently_used_first_and_no_more() -> None:
    t = table()
    gens = [hold(t, n, spare=True) for n in range(1, 5)]
    t.release(*t.acquire(gens[0]))
    found = ask(t, 2)
    assert found.ask == gens[1:3]
    assert found.frees_bytes == 2 * PAGE


def test_leased_pinned_and_mapped_replicas_are_passed_over() -> None:
    t = table()
    leased, pinned, past, mapped, free = (hold(t, n, spare=True) for n in range(1, 6))
    t.acquire(leased)
    t.mark(pinned, published=False, spare=True, pin_ends_s=5.1)
    t.mark(past, published=False, spare=True, pin_ends_s=5.0)
    segment = t.find(mapped).copies[0].segment
    assert set(ask(t, 9, mapped={segment}).ask) == {past, free}


def test_warm_segments_go_first() -> None:
    t = table()
    hold(t, 1, spare=True)
    (freed,) = t.drop(hold(t, 2), why="x")
    t.tiers[HOST].pool.proved(freed.segment)
    found = ask(t, 1)
    assert (found.trim_bytes, found.ask) == (PAGE, [])
    assert ask(t, 2).ask == [Generation(1)]


def test_copies_that_the_disk_backs_go_before_anything_is_written_or_asked() -> None:
    t = table(disk_bytes=100 * PAGE)
    hold(t, 1)
    hold(t, 2, spare=True)
    backed = hold(t, 3)
    hold(t, 3, tier=DISK)
    assert ask(t, 1).drop == [backed]
    found = ask(t, 3)
    assert (found.drop, found.spill, found.ask) == ([backed], [1, 2], [])


def test_no_more_is_spilled_than_the_disk_takes_and_the_rest_is_asked_for() -> None:
    t = table(disk_bytes=PAGE)
    hold(t, 1)
    two = hold(t, 2, spare=True)
    found = ask(t, 3)
    assert (found.spill, found.ask) == ([1], [two])


def test_a_full_disk_gives_up_what_memory_has_too() -> None:
    t = table(disk_bytes=2 * PAGE)
    hold(t, 1, tier=DISK)
    both = hold(t, 2)
    hold(t, 2, tier=DISK)
    found = ask(t, 2, tier=DISK)
    assert (found.drop, found.ask, found.spill) == ([both], [], [])


def test_uses_count_by_unique_storage() -> None:
    t = table(disk_bytes=10 * PAGE)
    one, two, three = (hold(t, n, spare=True) for n in (1, 2, 3))
    hold(t, 1, tier=DISK)
    t.mark(two, published=False, spare=True, pin_ends_s=9.0)
    t.acquire(three)
    found = uses(t, now_s=5.0)
    assert found[HOST].used_bytes == 3 * PAGE
    assert found[HOST].pinned_bytes == PAGE
    assert found[HOST].evictable_bytes == PAGE
    assert found[DISK].used_bytes == PAGE
    assert found[DISK].evictable_bytes == PAGE
    assert found[HOST].replicas == 3
    assert one in t.tiers[HOST].loose


def test_a_replica_that_is_spilled_is_not_asked_for_too() -> None:
    t = table(disk_bytes=PAGE)
    one, two, three = (hold(t, n, spare=True) for n in (1, 2, 3))
    t.acquire(two)
    found = ask(t, 9)
    assert (found.spill, found.ask) == ([one], [three])


def test_what_is_in_use_is_not_spilled() -> None:
    t = table(disk_bytes=100 * PAGE)
    one, two = hold(t, 1), hold(t, 2)
    held = t.acquire(one)
    assert ask(t, 9).spill == [two]
    t.release(*held)
    assert ask(t, 9).spill == [two, one]


def with_device() -> Table:
    t = table()
    device = Tier.DEVICE
    t.set_row(TierRow(tier=device, capacity_bytes=2 * PAGE, spill=HOST, device="GPU-1"))
    t.set_row(
        TierRow(
            tier=Tier.PINNED,
            capacity_bytes=100 * PAGE,
            proof=False,
            charges=False,
            over=HOST,
        )
    )
    return t


def test_a_device_gives_up_what_the_host_has_and_moves_the_rest_there() -> None:
    t = with_device()
    both, alone = hold(t, 1), hold(t, 2, tier=Tier.DEVICE)
    hold(t, 1, tier=Tier.DEVICE)
    found = ask(t, 2, tier=Tier.DEVICE)
    assert (found.drop, found.spill, found.ask) == ([both], [alone], [])
    assert uses(t, now_s=0.0)[Tier.DEVICE].device == "GPU-1"


def test_pinned_memory_backs_nothing_and_is_unpinned_where_nothing_else_helps() -> None:
    t = with_device()
    gen = hold(t, 1, spare=True)
    hold(t, 1, tier=Tier.PINNED)
    copy = t.replicas[gen].copy(HOST)
    assert copy is not None
    pinned = ask(t, 1, mapped={copy.segment})
    assert (pinned.drop, pinned.ask, pinned.unmark) == ([], [], [(gen, Tier.PINNED)])
    free = ask(t, 1)
    assert (free.drop, free.ask, free.unmark) == ([], [gen], [])
    assert ask(t, 1, tier=Tier.PINNED).drop == [gen]


def test_what_weighs_least_goes_first_and_of_equals_what_was_used_longest_ago() -> None:
    t = table()
    first, second, third = (hold(t, number, spare=True) for number in (1, 2, 3))
    t.weights = {first: 5.0, second: 1.0}
    assert ask(t, 1).ask == [third]
    assert ask(t, 2).ask == [third, second]
    t.weights = {}
    assert ask(t, 2).ask == [first, second]


def test_what_weighs_least_is_spilled_first() -> None:
    t = table(disk_bytes=10 * PAGE)
    first, second = hold(t, 1), hold(t, 2)
    t.weights = {first: 1.0}
    assert ask(t, 1).spill == [second]
