from __future__ import annotations

from tensorcast_dask.store.state.pool import Pool


def warm(pool: Pool, *segments: tuple[int, int]) -> None:
    for number, size in segments:
        pool.free(number, size)
        assert pool.proved(number) == []


def test_a_freed_segment_lingers_until_it_is_proved_ours() -> None:
    pool = Pool(1000)
    pool.free(1, 100)
    assert (pool.lingering, pool.lingering_bytes, pool.warm_bytes) == ((1,), 100, 0)
    assert pool.take(100) is None
    assert pool.proved(1) == []
    assert (pool.lingering_bytes, pool.warm_bytes) == (0, 100)
    assert pool.take(100) == (1, 100)
    assert pool.warm_bytes == 0


def test_the_segment_that_fits_best_is_given_and_none_far_too_large() -> None:
    pool = Pool(10_000)
    warm(pool, (1, 130), (2, 120), (3, 500))
    assert pool.find(100) == 120
    assert pool.take(100) == (2, 120)
    assert pool.take(100) is None  # 130 is more than a quarter too large
    assert pool.take(110) == (1, 130)
    assert pool.take(600) is None
    assert pool.take(499, exact=True) is None
    assert pool.take(500, exact=True) == (3, 500)


def test_the_pool_stays_within_its_limit_and_closes_the_longest_unused() -> None:
    pool = Pool(250)
    warm(pool, (1, 100), (2, 100))
    pool.free(3, 100)
    assert pool.proved(3) == [1]
    pool.free(4, 300)
    assert pool.proved(4) == [4]
    assert pool.warm_bytes == 200


def test_trimming_gives_up_no_more_than_is_needed() -> None:
    pool = Pool(1000)
    warm(pool, (1, 100), (2, 100), (3, 100))
    assert pool.trim(101) == [1, 2]
    assert pool.trim(1000) == [3]
    assert pool.trim(1) == []


def test_a_segment_that_is_forgotten_is_charged_no_more() -> None:
    pool = Pool(1000)
    pool.free(1, 100)
    assert pool.forget(1) == 100
    assert pool.lingering_bytes == 0
