from __future__ import annotations

from tensorcast_dask.store.state.tiers import TierRow, TierStock, page_rounded
from tensorcast_dask.tensors.ids import Generation
from tensorcast_dask.tensors.messages import Tier

ROW = TierRow(
    tier=Tier.HOST,
    capacity_bytes=1 << 20,
    own_segment_bytes=4096,
    slab_bytes=65536,
    warm_bytes=1 << 20,
)


def test_lengths_are_charged_in_pages() -> None:
    assert [page_rounded(n) for n in (0, 1, 4096, 4097)] == [4096, 4096, 4096, 8192]


def test_memory_is_needed_only_where_neither_slab_nor_warm_segment_has_it() -> None:
    stock = TierStock(ROW)
    assert stock.need_bytes(100) == 65536
    assert stock.need_bytes(5000) == 8192
    stock.slabs.add(1)
    stock.pool.free(2, 8192)
    stock.pool.proved(2)
    assert stock.need_bytes(100) == 0
    assert stock.need_bytes(5000) == 0
    assert stock.need_bytes(20_000) == 20_480


def test_a_warm_segment_of_a_slabs_length_serves_as_slab() -> None:
    stock = TierStock(ROW)
    stock.pool.free(2, 65536)
    stock.pool.proved(2)
    assert stock.need_bytes(100) == 0


def test_held_is_all_that_is_taken_of_the_capacity() -> None:
    stock = TierStock(ROW)
    stock.used_bytes, stock.reserved_bytes = 100, 20
    stock.slabs.add(1)
    stock.pool.free(2, 3)
    assert stock.held_bytes == 100 + 20 + 65536 + 3


def test_what_may_go_is_counted_and_newest_last() -> None:
    stock = TierStock(ROW)
    one, two = Generation(1), Generation(2)
    stock.set_loose(one, 10)
    stock.set_loose(two, 20)
    stock.set_loose(one, 11)
    assert (list(stock.loose), stock.loose_bytes) == ([two, one], 31)
    stock.set_loose(two, 0)
    stock.set_loose(two, 0)
    assert (list(stock.loose), stock.loose_bytes) == ([one], 11)
