from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import (
    AlreadyExists,
    DataLost,
    Gone,
    Incomplete,
    InvalidName,
    Mismatch,
    NotFound,
)
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ArtifactId, Generation
from tests.kit.catalogs import Desk, Program


def scene() -> tuple[Desk, Program]:
    d = Desk()
    d.node("a")
    return d, d.program()


def alias(p: Program, name: str, generation: int, expect: int = -1) -> m.AliasState:
    ask = m.SetAlias(
        rid=p.rid(),
        name=ArtifactId(name),
        generation=Generation(generation),
        expect=expect,
    )
    return p.call(ask, m.AliasState)


def view(p: Program, name: str, generation: int, view: bytes = b"w") -> m.ArtifactInfo:
    ask = m.RegisterView(
        rid=p.rid(),
        id=ArtifactId(name),
        generation=Generation(generation),
        view=view,
        index_digest="d",
        nbytes=5,
        tensors=1,
    )
    return p.call(ask, m.ArtifactInfo)


def test_p18_latest_moves_in_the_commit_of_the_publish_and_not_before_it_is_on_disk() -> (
    None
):
    d, p = scene()
    first = p.put("x")
    p.publish(first.generation)
    second = p.put("x", version=-1)
    d.auto = False
    reader = d.program("reader")
    rid = p.ask(m.Publish(rid=p.rid(), generation=second.generation))
    look = m.Resolve(rid=reader.rid(), id=ArtifactId("x"), published=True)
    reader.ask(look)
    assert not p.answered(rid)
    assert not reader.answered(look.rid)  # it would show what may be forgotten
    d.flush()
    assert p.result(rid, m.ArtifactInfo).stage is m.Stage.PUBLISHED
    assert reader.result(look.rid, m.ArtifactInfo).version == 2


def test_publish_is_idempotent_and_older_versions_do_not_become_the_latest() -> None:
    _, p = scene()
    one, two = p.put("x"), p.put("x", version=-1)
    for info in (two, one, two):
        assert p.publish(info.generation).generation == info.generation
    assert p.resolve("x", published=True).version == 2


def test_p18_what_is_incomplete_lost_or_gone_is_not_published() -> None:
    d, p = scene()
    created = p.create("y")
    with pytest.raises(Incomplete):
        p.publish(created.generation)
    info = p.put("x")
    d.nodes[next(iter(d.nodes))].lose_link()
    d.pass_time(7.0)
    with pytest.raises(DataLost):
        p.publish(info.generation)
    p.destroy("x")
    with pytest.raises(Gone):
        p.publish(info.generation)
    with pytest.raises(NotFound):
        p.publish(Generation(1 << 55))


def test_p31_publish_after_a_restart_waits_until_the_bytes_are_claimed() -> None:
    d, p = scene()
    info = p.put("x")
    d = d.restart()
    p.open()
    rid = p.ask(m.Publish(rid=p.rid(), generation=info.generation))
    d.flush()
    assert not p.answered(rid)
    for node in d.nodes.values():
        node.join()
    d.flush()
    assert p.result(rid, m.ArtifactInfo).stage is m.Stage.PUBLISHED


def test_an_alias_moves_by_compare_and_set() -> None:
    _, p = scene()
    one, two = p.put("x"), p.put("y")
    made = alias(p, "best", one.generation, expect=0)
    assert made.alias_generation == 1
    for stale in (0, 7):
        with pytest.raises(Mismatch) as moved:
            alias(p, "best", two.generation, expect=stale)
        assert moved.value.data["generation"] == 1
    assert alias(p, "best", two.generation, expect=1).alias_generation == 2
    assert p.resolve("best").id == "y"
    assert alias(p, "best", one.generation).alias_generation == 3
    assert alias(p, "best", 0, expect=3).info is None
    with pytest.raises(NotFound):
        p.resolve("best")
    assert alias(p, "best", one.generation, expect=0).alias_generation == 5


def test_removing_an_alias_that_is_not_there_is_fine() -> None:
    _, p = scene()
    assert alias(p, "none", 0).alias_generation == 0


def test_a_name_is_an_artifact_an_alias_or_a_view_but_never_two() -> None:
    _, p = scene()
    info = p.put("x")
    alias(p, "al", info.generation)
    view(p, "vi", info.generation)
    for name in ("al", "vi"):
        with pytest.raises(AlreadyExists):
            p.create(name)
    for name in ("x", "vi"):
        with pytest.raises(AlreadyExists):
            alias(p, name, info.generation)
    for name in ("x", "al"):
        with pytest.raises(AlreadyExists):
            view(p, name, info.generation)
    with pytest.raises(InvalidName):
        alias(p, " bad", info.generation)


def test_a_view_is_found_by_its_id_and_registered_once() -> None:
    d, p = scene()
    info = p.put("x")
    one = view(p, "v", info.generation)
    assert view(p, "v", info.generation) == one
    with pytest.raises(AlreadyExists):
        view(p, "v", info.generation, view=b"other")
    found = p.resolve("v")
    assert (found.base, found.view, found.generation) == ("x", b"w", info.generation)
    d = d.restart()
    p.open()
    assert p.resolve("v").view == b"w"


def test_an_alias_survives_a_restart_with_its_generation() -> None:
    d, p = scene()
    info = p.put("x")
    alias(p, "al", info.generation)
    alias(p, "gone", info.generation)
    alias(p, "gone", 0)
    d = d.restart()
    p.open()
    assert p.resolve("al").generation == info.generation
    assert alias(p, "al", info.generation, expect=1).alias_generation == 2
    assert alias(p, "gone", info.generation, expect=0).alias_generation == 3
