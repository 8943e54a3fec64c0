from __future__ import annotations

import msgspec

from tensorcast_dask.scheduler_plugin.state.events import Recovered, Row, TimePassed
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ArtifactId, ClusterId, Epoch
from tests.kit.catalogs import Desk


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
    before = {
        g: msgspec.structs.asdict(info)
        for g, info in _infos(d).items()
        if info.id != "never"
    }
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
    assert d.catalog.debug_state()["versions"] == 3


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
