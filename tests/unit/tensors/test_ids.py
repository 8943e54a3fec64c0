from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import InvalidName
from tensorcast_dask.tensors.ids import Epoch, check_name, generation_of


@pytest.mark.parametrize("name", ["a", "qwen3/weights", "a b", "é" * 256, "重み"])
def test_a_legal_name_is_returned_as_it_is(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", " ", "a ", "\ta", "a\n", "a\x00b", "\u200b", "\ud800", "é" * 257, "a" * 513],
)
def test_an_illegal_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidName):
        check_name(name)


@pytest.mark.parametrize("name", [None, 3, b"a", ["a"]])
def test_what_is_not_text_is_no_name(name: object) -> None:
    with pytest.raises(InvalidName, match="alias must be text"):
        check_name(name, what="alias")


def test_generations_are_unique_and_grow_over_epochs() -> None:
    generations = [
        generation_of(Epoch(e), n) for e in (1, 2) for n in (1, 2, (1 << 40) - 1)
    ]
    assert sorted(set(generations)) == generations


@pytest.mark.parametrize("counter", [0, -1, 1 << 40])
def test_a_counter_never_runs_into_the_epoch(counter: int) -> None:
    with pytest.raises(AssertionError):
        generation_of(Epoch(1), counter)
