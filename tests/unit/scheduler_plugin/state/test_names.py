from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import (
    AlreadyExists,
    Gone,
    Incomplete,
    Mismatch,
    NotFound,
)
from tensorcast_dask.scheduler_plugin.state.names import Names
from tensorcast_dask.scheduler_plugin.state.numbers import Numbers
from tensorcast_dask.scheduler_plugin.state.records import (
    AliasRecord,
    VersionRecord,
    ViewRecord,
)
from tensorcast_dask.tensors.ids import ArtifactId, Epoch, Generation, Version
from tensorcast_dask.tensors.messages import Owner

X = ArtifactId("x")


def names() -> Names:
    return Names(Numbers(epoch=Epoch(1), issued={}))


def make(names: Names, version: int = 0, *, name: ArtifactId = X) -> VersionRecord:
    record = VersionRecord(
        id=name,
        version=names.free_number(name, version),
        generation=names.numbers.mint(),
        owner=Owner.SYSTEM,
        nbytes=1,
        tensors=1,
        index_digest="d",
        index=b"i",
        labels={},
    )
    names.add(record)
    return record


def commit(names: Names, record: VersionRecord) -> VersionRecord:
    names.commit(record)
    names.numbers.used_up(record.id, record.version)
    return record


def resolved(names: Names, version: int = 0, *, published: bool = False) -> int:
    return names.resolve(X, version, published=published)[0].version


def test_the_first_version_is_one_and_the_next_follow() -> None:
    table = names()
    assert commit(table, make(table)).version == 1
    assert commit(table, make(table, -1)).version == 2
    assert commit(table, make(table, 9)).version == 9
    assert commit(table, make(table, -1)).version == 10


def test_an_id_with_a_version_is_taken_whatever_state_it_is_in() -> None:
    table = names()
    record = make(table)
    with pytest.raises(AlreadyExists) as creating:
        table.free_number(X, 0)
    assert creating.value.data["creating"] is True
    commit(table, record)
    with pytest.raises(AlreadyExists) as committed:
        table.free_number(X, 0)
    assert committed.value.data["generation"] == record.generation
    with pytest.raises(AlreadyExists):
        table.free_number(X, 1)


def test_numbers_go_on_after_a_destroy_and_are_never_issued_again() -> None:
    table = names()
    table.remove(commit(table, make(table, 5)))
    assert table.free_number(X, 0) == 6
    for used in (1, 4, 5):
        with pytest.raises(Mismatch):
            table.free_number(X, used)


def test_a_creation_that_was_given_back_frees_its_number() -> None:
    table = names()
    table.remove(make(table))
    assert table.free_number(X, 0) == 1


def test_an_id_means_the_newest_published_else_the_newest_committed() -> None:
    table = names()
    commit(table, make(table))
    second = commit(table, make(table, -1))
    make(table, -1)
    assert resolved(table) == 2
    with pytest.raises(NotFound, match="no version"):
        resolved(table, published=True)
    table.publish(second)
    commit(table, make(table, 7))
    assert resolved(table) == 2
    assert resolved(table, published=True) == 2
    assert resolved(table, 7) == 7
    with pytest.raises(NotFound):
        resolved(table, 7, published=True)


def test_latest_never_goes_back_when_an_older_version_is_published() -> None:
    table = names()
    first, second = commit(table, make(table)), commit(table, make(table, -1))
    table.publish(second)
    table.publish(first)
    assert resolved(table, published=True) == 2


def test_a_version_in_the_making_is_incomplete_and_no_other_look_up_shows_it() -> None:
    table = names()
    record = make(table)
    for version in (0, 1):
        with pytest.raises(Incomplete):
            resolved(table, version)
    with pytest.raises(Incomplete):
        table.committed(record.generation)
    assert len(table.listed) == 0


def test_what_was_destroyed_is_gone_and_what_never_was_is_not_found() -> None:
    table = names()
    record = commit(table, make(table))
    table.remove(record)
    with pytest.raises(Gone):
        resolved(table)
    with pytest.raises(Gone):
        resolved(table, 1)
    with pytest.raises(Gone):
        table.get(record.generation)
    with pytest.raises(NotFound):
        resolved(table, 2)
    with pytest.raises(NotFound):
        table.resolve(ArtifactId("never"), 0, published=False)
    with pytest.raises(NotFound):
        table.get(Generation(1 << 50))


def test_a_view_and_an_alias_mean_what_they_were_set_to_or_that_it_is_gone() -> None:
    table = names()
    record = commit(table, make(table))
    view = ViewRecord(
        id=ArtifactId("v"),
        base=record.generation,
        view=b"v",
        index_digest="",
        nbytes=1,
        tensors=1,
    )
    table.add_view(view)
    table.aliases[ArtifactId("a")] = AliasRecord(
        name=ArtifactId("a"),
        target=record.generation,
        target_id=X,
        alias_generation=1,
    )
    assert table.resolve(ArtifactId("v"), 0, published=False) == (record, view)
    assert table.resolve(ArtifactId("a"), 1, published=False)[0] is record
    with pytest.raises(NotFound):
        table.resolve(ArtifactId("a"), 2, published=False)
    with pytest.raises(NotFound):
        table.resolve(ArtifactId("a"), 0, published=True)
    for taken in ("a", "v"):
        with pytest.raises(AlreadyExists):
            table.free_number(ArtifactId(taken), 0)
    assert table.remove(record) == [view]
    assert table.views == {}
    with pytest.raises(Gone, match="alias"):
        table.resolve(ArtifactId("a"), 0, published=False)


def test_a_removed_view_frees_its_name() -> None:
    table = names()
    record = commit(table, make(table))
    view = ViewRecord(
        id=ArtifactId("v"),
        base=record.generation,
        view=b"",
        index_digest="",
        nbytes=0,
        tensors=0,
    )
    table.add_view(view)
    table.remove_view(view.id)
    assert table.free_number(ArtifactId("v"), 0) == Version(1)
