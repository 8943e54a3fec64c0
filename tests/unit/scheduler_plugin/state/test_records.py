from __future__ import annotations

import msgspec
import pytest

from tensorcast_dask.scheduler_plugin.state.records import (
    Replica,
    VersionRecord,
    VersionRow,
    ViewRecord,
    gone_rows,
    info_of,
    version_row,
)
from tensorcast_dask.tensors.ids import ArtifactId, Generation, NodeId, Version
from tensorcast_dask.tensors.messages import Owner, Stage, Tier


def record(**more: object) -> VersionRecord:
    return VersionRecord(
        id=ArtifactId("x"),
        version=Version(2),
        generation=Generation(5),
        owner=Owner.SYSTEM,
        nbytes=9,
        tensors=1,
        index_digest="d",
        index=b"i",
        labels={"k": "v"},
        **more,  # type: ignore[arg-type]
    )


def test_a_version_row_holds_all_but_the_index() -> None:
    one = record(creating=False, published=True, degraded="why", replicas=2)
    one.holders[NodeId("n")] = Replica(node=NodeId("n"), tiers=(Tier.HOST, Tier.DISK))
    row = version_row(one)
    assert (row.kind, row.key) == ("version", "5")
    assert row.blob is not None
    back = msgspec.msgpack.decode(row.blob, type=VersionRow)
    assert back.holders == (("n", (Tier.HOST, Tier.DISK)),)
    for name in ("id", "version", "generation", "owner", "nbytes", "tensors", "labels"):
        assert getattr(back, name) == getattr(one, name)
    assert (back.published, back.degraded, back.replicas) == (True, "why", 2)
    assert [(row.kind, row.key, row.blob) for row in gone_rows(one)] == [
        ("version", "5", None),
        ("index", "5", None),
    ]


@pytest.mark.parametrize(
    ("creating", "published", "lost", "stage"),
    [
        (True, False, False, Stage.CREATING),
        (False, False, False, Stage.COMMITTED),
        (False, True, False, Stage.PUBLISHED),
        (False, True, True, Stage.LOST),
    ],
)
def test_the_stage_is_the_sum_of_what_is_known(
    creating: bool, published: bool, lost: bool, stage: Stage
) -> None:
    assert (
        info_of(record(creating=creating, published=published), lost=lost).stage
        is stage
    )


def test_a_view_is_described_with_its_base() -> None:
    view = ViewRecord(
        id=ArtifactId("v"),
        base=Generation(5),
        view=b"w",
        index_digest="e",
        nbytes=3,
        tensors=2,
    )
    info = info_of(record(creating=False), lost=False, view=view)
    assert (info.id, info.base, info.view) == ("v", "x", b"w")
    assert (info.generation, info.version, info.nbytes) == (5, 2, 3)


def test_the_nearest_tier_is_what_a_reader_is_sent_to() -> None:
    one = Replica(node=NodeId("n"), tiers=(Tier.DISK, Tier.HOST))
    assert one.nearest is Tier.HOST
