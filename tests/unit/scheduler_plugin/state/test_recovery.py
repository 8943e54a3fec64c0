from __future__ import annotations

import msgspec
import pytest

from tensorcast_dask.scheduler_plugin.state.events import Recovered, Row, TimePassed
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ArtifactId, ClusterId, Epoch
from tests.kit.catalogs import Desk, index_of


def full() -> Desk:
    d = Desk()
    for name in ("a", "b"):
        d.node(name)
    p = d.program()
    info = p.put("x", replicas=2, labels={"k": "v"})
    p.put("x", version=-1)
    p.publish(info.generation)
    p.put("y")
    p.call(
        m.SetAlias(rid=p.rid(), name=ArtifactId("al"), generation=info.generation),
        m.AliasState,
    )
    p.put("gone")
    p.destroy("gone")
    p.create("never")
    return d


def test_p31_everything_acknowledged_is_there_again_and_nothing_else() -> None:
    d = full()
    before = {g: msgspec.structs.asdict(info) for g, info in _infos(d).items()}
    d = d.restart()
    for node in d.nodes.values():
        node.join()
    assert {g: msgspec.structs.asdict(info) for g, info in _infos(d).items()} == before
    assert d.catalog.epoch == 2
    assert d.catalog.names.numbers.issued("gone") == 1


def _infos(d: Desk) -> dict[int, m.ArtifactInfo]:
    from tensorcast_dask.scheduler_plugin.state.records import info_of

    return {
        record.generation: info_of(record, lost=d.catalog.holders.is_lost(record))
        for record in d.catalog.names.versions.values()
        if not record.creating
    }


def test_a_row_that_cannot_be_read_is_reported_and_left_out() -> None:
    d = full()
    bad = [
        Row(kind="version", key="9", blob=b"\xc1"),
        Row(kind="alias", key="q", blob=b"\x91\xff"),
        Row(
            kind="outcome", key="s|1", blob=msgspec.msgpack.encode(["s", "s-1", b"", 7])
        ),
        Row(kind="what", key="is this", blob=b""),
    ]
    d.rows += bad
    d = d.restart()
    d.tell(TimePassed())
    assert d.catalog.said.count("cannot be read") == 3
    assert len(_infos(d)) == 3


def test_a_version_without_its_index_or_twice_in_the_journal_is_said_to_be_lost() -> (
    None
):
    d = full()
    d.rows = [row for row in d.rows if row.kind != "index" or row.blob is None]
    d = d.restart()
    d.tell(TimePassed())
    assert "index of version" in d.catalog.said
    assert d.catalog.debug_state()["versions"] == 0


def test_holders_that_left_no_card_are_still_named() -> None:
    d = full()
    d.rows = [row for row in d.rows if row.kind != "node"]
    d = d.restart()
    d.tell(TimePassed())
    assert d.catalog.debug_state()["replicas"] == 4
    for node in d.nodes.values():
        node.join()
    assert d.catalog.debug_state()["nodes"] == 2


def test_an_empty_journal_makes_an_empty_catalog() -> None:
    empty = Recovered(cluster=ClusterId("c1"), epoch=Epoch(9))
    d = Desk(recovered=empty)
    d.tell(TimePassed())
    assert (d.catalog.epoch, d.catalog.said) == (9, "")
    assert d.catalog.debug_state()["versions"] == 0


@pytest.mark.parametrize("filled", ["before", "while it was away", "after"])
def test_p31_a_put_outlives_a_restart_in_the_middle_of_it(filled: str) -> None:
    d = Desk()
    a = d.node("a")
    p = d.program()
    created = p.create("x", labels={"k": "v"})
    if filled == "before":
        p.fill("x", created)
    d = d.restart()
    if filled == "while it was away":
        a.held[created.generation] = d.record(
            created.generation, "x", created.version, index_of(100)
        )
    p.open()
    rid = p.ask(
        m.CommitCreated(rid=p.rid(), generation=created.generation, deadline_s=9.0)
    )
    a.join()
    if filled == "after":
        p.fill("x", created)
    d.flush()
    info = p.result(rid, m.ArtifactInfo)
    assert (info.version, info.labels) == (1, {"k": "v"})
    assert p.locate(info.generation) == [a.node]
    again = d.restart()
    a.join()
    p.open()
    assert p.resolve("x").generation == created.generation
    assert again.catalog.debug_state()["creations"] == 0


def test_p25_a_creation_whose_session_does_not_come_back_ends_with_the_recovery() -> (
    None
):
    d = Desk()
    a = d.node("a")
    p = d.program()
    created = p.create("x")
    p.fill("x", created)
    d = d.restart()
    a.join()
    assert d.catalog.debug_state()["creations"] == 1
    d.pass_time(d.settings.recovery_timeout_s + 0.1)
    assert d.catalog.debug_state()["creations"] == 0
    assert a.held == {}
    assert d.program("other").put("x").version == 1
    d = d.restart()
    d.tell(TimePassed())
    assert d.catalog.debug_state()["creations"] == 0


def test_a_creation_that_was_overtaken_is_not_revived() -> None:
    d = Desk()
    d.node("a")
    p = d.program()
    p.create("x")
    rows = [row for row in d.rows if row.kind in {"creating", "index"}]
    p.destroy("x")
    p.put("x")
    d.rows += rows  # as if its end had not been journaled
    d = d.restart()
    d.tell(TimePassed())
    assert d.catalog.debug_state()["creations"] == 0
    assert d.catalog.debug_state()["versions"] == 1
