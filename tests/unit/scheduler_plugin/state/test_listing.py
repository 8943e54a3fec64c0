from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.scheduler_plugin.state.listing import (
    SortedIds,
    cursor_of,
    parse_cursor,
    wears,
)
from tensorcast_dask.tensors.ids import ArtifactId

short = st.text(st.sampled_from("ab/"), min_size=1, max_size=4).map(ArtifactId)


@given(st.lists(st.tuples(st.booleans(), short), max_size=60), short, short)
def test_a_listing_agrees_with_a_sorted_set(
    steps: list[tuple[bool, ArtifactId]], prefix: ArtifactId, at: ArtifactId
) -> None:
    ids, model = SortedIds(), set[ArtifactId]()
    for add, name in steps:
        if add and name not in model:
            ids.add(name)
            model.add(name)
        elif not add:
            ids.discard(name)
            model.discard(name)
    assert len(ids) == len(model)
    assert list(ids.starting("", at="")) == sorted(model)
    wanted = sorted(n for n in model if n.startswith(prefix) and n >= at)
    assert list(ids.starting(prefix, at=at)) == wanted


def test_many_ids_stay_in_order_over_the_splits_of_their_chunks() -> None:
    ids = SortedIds()
    names = [ArtifactId(f"n{(i * 7919) % 5000:05}") for i in range(5000)]
    for name in names:
        ids.add(name)
    assert list(ids.starting("", at="")) == sorted(names)
    for name in names[::2]:
        ids.discard(name)
    assert list(ids.starting("n04", at="")) == sorted(
        n for n in names[1::2] if n.startswith("n04")
    )


def test_a_cursor_comes_back_as_it_was_for_every_legal_id() -> None:
    for name in ("a", "a/b", "a\x01b", "1", "ä", "a 1"):
        assert parse_cursor(cursor_of(name, 12)) == (name, 12)
    assert parse_cursor("") == ("", 0)


@pytest.mark.parametrize("bad", ["x", "x\x00", "x\x00y", "\x001", "x\x00-1", "x\x00²"])
def test_what_is_no_cursor_is_refused(bad: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_cursor(bad)


def test_labels_match_when_all_that_are_wanted_are_there() -> None:
    assert wears({"a": "1", "b": "2"}, {"a": "1"})
    assert not wears({"a": "1"}, {"a": "2"})
    assert not wears({}, {"a": "1"})
