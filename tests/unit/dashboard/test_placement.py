from __future__ import annotations

from typing import Any

import pytest

from tensorcast_dask.dashboard.data.placement import (
    NODES,
    ROWS,
    VERSIONS,
    Place,
    placement,
)
from tensorcast_dask.dashboard.data.search import Grouping, Search, Wanted
from tensorcast_dask.dashboard.data.shared import Told
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import NodeId
from tests.kit.catalogs import MIB, Desk
from tests.kit.crowds import crowd


def page(desk: Desk, place: Place | None = None) -> Told:
    place = place or Place()
    search = Search(desk.catalog, place.wanted)
    search.advance(1 << 30)
    return placement(desk.catalog, search, place)


def lines(told: Told, part: str) -> list[dict[str, Any]]:
    found = told.columns[part]
    assert len({len(column) for column in found.values()}) == 1, "columns of one length"
    return [
        dict(zip(found, values, strict=True))
        for values in zip(*found.values(), strict=True)
    ]


def scene() -> tuple[Desk, m.ArtifactInfo]:
    d = Desk()
    for name in "abc":
        d.node(name)
    p = d.program()
    info = p.put(
        "x", nbytes=8 * MIB, node=NodeId("a"), labels={"stage": "prod", "token": "hush"}
    )
    p.call(
        m.Ensure(
            rid=p.rid(), generation=info.generation, node=NodeId("b"),
            tier=m.Tier.DISK, deadline_s=9.0,
        ),
        m.Moved,
    )  # fmt: skip
    return d, info


def test_a_cell_is_where_a_replica_is_in_the_colour_of_its_tier() -> None:
    d, _ = scene()
    told = page(d)
    assert [(one["x"], one["y"], one["tier"]) for one in lines(told, "cells")] == [
        (0.0, 0, "host"),
        (1.0, 0, "disk"),
    ]
    (row,) = lines(told, "rows")
    assert (row["artifact"], row["note"], row["state"]) == (
        "x",
        "v1 · 8.0 MiB",
        "committed",
    )
    assert [one["name"] for one in lines(told, "heads")] == ["w-a", "w-b", "w-c"]
    assert told.counts["nodes"] == 3


def test_two_tiers_of_one_node_are_two_stripes_of_its_cell() -> None:
    d, info = scene()
    p = d.program("t")
    ask = m.Ensure(
        rid=p.rid(), generation=info.generation, node=NodeId("b"), tier=m.Tier.HOST, deadline_s=9.0
    )  # fmt: skip
    p.call(ask, m.Moved)
    host, disk = [
        one for one in lines(page(d), "cells") if one["node"].startswith("w-b")
    ]
    assert (host["tier"], disk["tier"]) == ("host", "disk")
    assert host["x"] < 1.0 < disk["x"]
    assert host["x"] + host["width"] / 2 < disk["x"] - disk["width"] / 2


def test_labels_are_told_and_secret_ones_never() -> None:
    d, _ = scene()
    told = page(d)
    assert lines(told, "cells")[0]["owner"] == "system; stage=prod"
    assert "hush" not in repr(told)


def test_a_pin_is_marked_and_says_how_long() -> None:
    d, info = scene()
    p = d.program("t")
    p.call(m.Pin(rid=p.rid(), generation=info.generation, ttl_s=95.0), m.Pinned)
    cells = lines(page(d), "cells")
    assert {one["mark"] for one in cells} == {"pin"}
    assert cells[0]["kept"] == "pinned, less than 100.0 s more"


def test_a_node_that_is_gone_stays_a_column_while_anything_lay_on_it() -> None:
    d, _ = scene()
    d.nodes[NodeId("a")].lose_link()
    d.nodes[NodeId("c")].lose_link()
    d.pass_time(60.0)
    told = page(d)
    heads = lines(told, "heads")
    assert [(one["name"], one["color"]) for one in heads] == [
        ("w-b", "live"),
        ("w-a", "gone"),
    ]
    cells = {one["node"][:3]: one for one in lines(told, "cells")}
    assert (cells["w-a"]["line"], cells["w-a"]["alpha"]) == ("gone", 0.2)
    assert (cells["w-b"]["line"], cells["w-b"]["alpha"]) == ("", 1.0)
    d.nodes[NodeId("b")].lose_link()
    d.pass_time(60.0)
    (row,) = lines(page(d), "rows")
    assert (row["state"], row["note"]) == ("lost", "v1 · 8.0 MiB · lost")


def test_only_the_newest_versions_are_looked_at_and_that_is_said() -> None:
    d = Desk()
    d.node("a")
    p = d.program()
    for version in range(1, VERSIONS + 9):
        p.put("x", nbytes=64, version=version)
    (cell,) = lines(page(d), "cells")
    assert (
        cell["what"]
        == "v24, v23, v22, v21, v20, v19 and 10 more; 8 older versions not looked at"
    )
    assert lines(page(d), "rows")[0]["note"].startswith("v24 of 24")


def test_a_cell_without_the_latest_version_is_pale() -> None:
    d, _ = scene()
    d.programs[next(iter(d.programs))].put("x", nbytes=MIB, version=2, node=NodeId("c"))
    assert {one["node"][:3]: one["alpha"] for one in lines(page(d), "cells")} == {
        "w-a": 0.45, "w-b": 0.45, "w-c": 1.0,
    }  # fmt: skip


def test_registered_memory_is_marked_as_leased_by_its_owner() -> None:
    d = Desk()
    lender = d.node("a", kind="instance")
    p = d.program()
    p.put("x", owner=m.Owner.CALLER, node=lender.node)
    (cell,) = lines(page(d), "cells")
    assert (cell["line"], cell["kept"]) == (
        "lent",
        "leased by its owner while that lives",
    )


@pytest.mark.parametrize("group", list(Grouping))
def test_a_page_is_bounded_however_much_there_is(group: Grouping) -> None:
    d = crowd(3000, nodes=NODES + 5, copies=3)
    told = page(d, Place(Wanted(group=group)))
    assert len(told.columns["rows"]["y"]) <= ROWS
    assert len(told.columns["heads"]["x"]) == NODES
    assert len(told.columns["cells"]["x"]) <= ROWS * NODES * len(m.Tier)
    assert told.counts["node_pages"] == 2
    if group is Grouping.NONE:
        assert told.texts["found"].startswith(f"artifacts 1 to {ROWS} of 3,000, ")
        assert told.counts["pages"] == 3000 // ROWS


def test_pages_go_on_where_the_last_one_ended_and_stop_at_the_end() -> None:
    d = crowd(ROWS * 2 + 1)
    seen = [
        one
        for number in range(3)
        for one in page(d, Place(page=number)).columns["rows"]["link"]
    ]
    assert seen == sorted(d.catalog.names.artifacts)
    assert page(d, Place(page=99)).counts["page"] == 2
    d = crowd(10, nodes=NODES + 1)
    assert page(d, Place(node_page=1)).columns["heads"]["name"] == ["w-n40"]


def test_groups_add_up_to_what_they_hold() -> None:
    d = crowd(100, copies=2)
    told = page(d, Place(Wanted(group=Grouping.TENANT)))
    assert [one["artifact"] for one in lines(told, "rows")] == [
        f"t{n}" for n in range(7)
    ]
    counts = [int(str(one).split()[0]) for one in told.columns["cells"]["what"]]
    assert sum(counts) == 200


NAMES = [
    "<script>alert(1)</script>",
    "$$x$$",
    "a" * 255,
    "a <b> $x$ ; -- %s",
    "q\"'&",
    "名前/モデル",
]


def test_odd_names_are_whole_where_they_lead_and_plain_where_they_are_shown() -> None:
    d = Desk()
    d.node("a")
    p = d.program()
    for name in NAMES:
        p.put(name)
    told = page(d)
    assert sorted(map(str, told.columns["rows"]["link"])) == sorted(NAMES)
    assert all(len(str(one)) <= 44 for one in told.columns["rows"]["name"])
    assert not any("<script" in text for text in told.texts.values())


def test_what_is_empty_says_what_would_be_there() -> None:
    d = Desk()
    told = page(d)
    assert told.counts["rows"] == told.counts["nodes"] == 0
    assert told.texts["empty"].startswith("There are no artifacts yet.")
    assert told.texts["nodes"].startswith("No node has joined yet")
    d.node("a")
    d.program().put("x")
    told = page(d, Place(Wanted(name="nothing")))
    assert told.texts["empty"] == "No artifact fits what is asked for above."


def test_what_was_destroyed_since_the_search_is_a_row_that_says_so() -> None:
    d, _ = scene()
    search = Search(d.catalog, Wanted())
    search.advance(9)
    d.programs[next(iter(d.programs))].destroy("x")
    told = placement(d.catalog, search, Place())
    assert told.columns["rows"]["note"] == ["destroyed"]
    assert told.columns["cells"]["x"] == []
