from __future__ import annotations

from tensorcast_dask.store.state.slabs import GRAIN_BYTES, Slab, Slabs, Slot, grains

SLAB = 16 * GRAIN_BYTES


def slabs(count: int = 1) -> Slabs:
    made = Slabs(SLAB)
    for number in range(1, count + 1):
        made.add(number)
    return made


def test_a_length_takes_whole_grains_and_nothing_takes_one() -> None:
    assert [grains(n) for n in (0, 1, 64, 65)] == [64, 64, 64, 128]


def test_slots_are_given_first_fit_and_do_not_overlap() -> None:
    made = slabs()
    slots = [made.take(100) for _ in range(8)]
    assert slots == [Slot(1, 128 * n, 128) for n in range(8)]
    assert made.take(1) is None
    assert made.taken_bytes == SLAB
    made.check()


def test_neighbours_that_come_free_are_one_range_again() -> None:
    made = slabs()
    slots = [made.take(SLAB // 4) for _ in range(4)]
    for at in (0, 2, 1):
        slot = slots[at]
        assert slot is not None
        assert not made.release(slot)
        made.check()
    assert made.take(3 * SLAB // 4) == Slot(1, 0, 3 * SLAB // 4)


def test_a_slab_without_slots_is_given_back() -> None:
    made = slabs()
    slot = made.take(10)
    assert slot is not None
    assert made.release(slot)
    assert made.segments == ()
    assert (made.taken_bytes, made.free_bytes) == (0, 0)


def test_a_full_slab_is_passed_over() -> None:
    made = slabs(2)
    assert made.take(SLAB) == Slot(1, 0, SLAB)
    assert made.take(1) == Slot(2, 0, GRAIN_BYTES)
    assert 1 in made
    assert 3 not in made


def test_can_take_says_what_take_does_also_after_fragmentation() -> None:
    made = slabs()
    slots = [made.take(64) for _ in range(16)]
    for slot in slots[::2]:
        assert slot is not None
        made.release(slot)
    assert made.can_take(64)
    assert not made.can_take(65)
    assert made.take(65) is None
    assert made.free_bytes == SLAB // 2


def test_a_slab_knows_how_long_its_longest_range_may_be() -> None:
    slab = Slab(1, SLAB, [0], {0: SLAB}, SLAB, SLAB)
    assert slab.take(64) == 0
    assert not slab.has_room(SLAB)
    assert slab.longest_bytes == SLAB - 64


def test_a_slab_that_was_believed_to_have_room_corrects_itself() -> None:
    slab = Slab(1, SLAB, [0, 256], {0: 64, 256: 64}, 128, SLAB)
    assert slab.take(128) is None
    assert slab.longest_bytes == 64
    assert slab.take(64) == 0


def test_a_slab_that_knows_it_has_no_room_is_not_searched() -> None:
    made = slabs()
    for _ in range(16):
        made.take(64)
    assert not made.can_take(64)
    assert not made.can_take(64)
