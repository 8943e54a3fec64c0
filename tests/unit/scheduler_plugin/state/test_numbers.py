from __future__ import annotations

import pytest

from tensorcast_dask.scheduler_plugin.state.numbers import Numbers, begin_of, digest_of
from tensorcast_dask.tensors.ids import ClusterId, Epoch, Generation, generation_of

NAMES = ["a/b", "a-SEP-b", "a%2Fb", "a__b", "a--b", "a\\b", "a:b", "a b", "a.b", "a@1"]


def test_a_generation_is_never_minted_twice_over_lives() -> None:
    first = Numbers(epoch=Epoch(3), issued={})
    second = Numbers(epoch=Epoch(4), issued={})
    minted = [one.mint() for one in (first, second) for _ in range(100)]
    assert len(set(minted)) == 200
    assert minted == sorted(minted)


def test_only_what_could_have_been_minted_counts_as_minted() -> None:
    numbers = Numbers(epoch=Epoch(2), issued={})
    one = numbers.mint()
    assert numbers.minted(one)
    assert numbers.minted(Generation(1 << 40 | 77))  # an earlier life
    for never in (0, one + 1, 9 << 40, -5):
        assert not numbers.minted(Generation(never))


def test_a_node_that_has_seen_a_later_epoch_raises_it() -> None:
    numbers = Numbers(epoch=Epoch(2), issued={})
    assert not numbers.seen(Epoch(1), 5)
    assert not numbers.seen(Epoch(2), 5)
    assert numbers.mint() == 2 << 40 | 6
    assert numbers.seen(Epoch(7), 5)
    assert numbers.mint() == 8 << 40 | 1


def test_a_number_is_used_up_once_and_numbers_go_on_after_a_restart() -> None:
    numbers = Numbers(epoch=Epoch(1), issued={})
    digest = numbers.used_up("x", 3)
    assert digest == digest_of("x")
    assert numbers.used_up("x", 3) is None
    assert numbers.used_up("x", 2) is None
    again = Numbers(epoch=Epoch(2), issued={digest_of("x"): 3})
    assert again.issued("x") == 3
    assert again.issued("y") == 0


@pytest.mark.parametrize("name", NAMES)
def test_p14_no_two_legal_ids_share_a_record_in_the_version_log(name: str) -> None:
    assert all(digest_of(name) != digest_of(other) for other in NAMES if other != name)


def test_clusters_of_one_epoch_mint_different_generations() -> None:
    minted: set[int] = set()
    for name in map(str, range(50)):
        begin = begin_of(ClusterId(name))
        assert 0 <= begin < 1 << 39  # as many again are left
        numbers = Numbers(epoch=Epoch(7), issued={}, begin=begin)
        minted |= {numbers.mint() for _ in range(1000)}
        assert numbers.seen(Epoch(9), 1)
        assert numbers.mint() == generation_of(Epoch(10), begin + 1)
    assert len(minted) == 50 * 1000
    assert {generation >> 40 for generation in minted} == {7}
