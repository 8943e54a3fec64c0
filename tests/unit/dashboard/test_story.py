from __future__ import annotations

from tensorcast_dask.dashboard.data.story import VERSIONS, Subject, story
from tensorcast_dask.tensors.ids import NodeId
from tests.kit.catalogs import MIB, Desk

NAME = "<script>alert(1)</script>"


def test_a_story_tells_how_it_stands_and_what_happened() -> None:
    d = Desk()
    d.node("a")
    p = d.program()
    p.put(NAME, nbytes=MIB, node=NodeId("a"), labels={"stage": "prod", "token": "hush"})
    told = story(d.catalog, Subject(NAME), zero_s=0.0)
    versions = {name: column[0] for name, column in told.columns["versions"].items()}
    assert (versions["version"], versions["stage"], versions["bytes"]) == (
        1,
        "committed",
        "1.0 MiB",
    )
    assert (versions["copies"], versions["labels"]) == ("w-a (a) (host)", "stage=prod")
    assert told.columns["lines"]["what"][0] == "version 1 committed"
    assert told.columns["lines"]["at"][0] == 1_000_000
    assert told.texts["title"] == "&lt;script&gt;alert(1)&lt;/script&gt;"
    assert told.texts["now"].startswith(
        "version 1 is committed, 1048576 bytes, on w-a (a)"
    )
    assert "hush" not in repr(told)


def test_versions_are_bounded_newest_first() -> None:
    d = Desk()
    d.node("a")
    p = d.program()
    for number in range(1, VERSIONS + 4):
        p.put("x", version=number)
    found = story(d.catalog, Subject("x"), zero_s=0.0).columns["versions"]["version"]
    assert found == list(range(VERSIONS + 3, 3, -1))


def test_a_node_has_a_story_too() -> None:
    d = Desk()
    d.node("a")
    told = story(d.catalog, Subject("a"), zero_s=0.0)
    assert told.texts["now"].startswith("node w-a (a) is live")
    assert told.columns["versions"]["version"] == []


def test_of_what_nobody_knows_it_says_so() -> None:
    d = Desk()
    assert (
        story(d.catalog, Subject("gone"), zero_s=0.0)
        .texts["empty"]
        .startswith("Nothing is known")
    )
    assert (
        story(d.catalog, Subject(), zero_s=0.0)
        .texts["empty"]
        .startswith("Open this page")
    )
