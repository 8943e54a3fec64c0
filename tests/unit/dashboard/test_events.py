from __future__ import annotations

import pytest

from tensorcast_dask.dashboard.data.events import LINES, Words, events
from tensorcast_dask.scheduler_plugin.state.signals import MAX_EVENTS
from tensorcast_dask.tensors.ids import NodeId
from tests.kit.catalogs import MIB, Desk


def scene() -> Desk:
    d = Desk()
    d.node("a")
    p = d.program()
    d.pass_time(5.0)
    info = p.put("models/x", nbytes=MIB, node=NodeId("a"))
    p.publish(info.generation)
    return d


def test_what_happened_is_listed_newest_first_with_what_is_known_of_it() -> None:
    told = events(scene().catalog, Words(), zero_s=100.0)
    rows = told.columns["events"]
    assert rows["event"][:2] == ["published", "created"]
    assert rows["subject"][:2] == ["models/x v1", "models/x v1"]
    assert rows["node"][1] == "w-a (a)"
    assert rows["facts"][1] == "1.0 MiB"
    assert rows["link"][1] == "models/x"
    assert rows["at"][0] == 1_105_000  # the desk's clock begins at 1000
    assert told.texts["found"] == f"{len(rows['at'])} events"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("PUBLISHED", ["published"]),
        ("models w-a", ["created"]),
        ("joined", ["node_joined"]),
        ("published w-a", []),
    ],
)
def test_an_event_fits_when_it_has_every_word(words: str, names: list[str]) -> None:
    told = events(scene().catalog, Words(words), zero_s=0.0)
    assert told.columns["events"]["event"] == names
    if not names:
        assert told.texts["empty"] == "No event that is kept has all of these words."


def test_the_list_is_bounded_and_says_what_is_missing() -> None:
    d = Desk()
    for _ in range(MAX_EVENTS + 1):
        d.catalog.outbox.emit("tried", id="x", token="hush")
    told = events(d.catalog, Words("tried"), zero_s=0.0)
    assert told.counts["rows"] == LINES
    assert told.texts["found"] == (
        "1,024 of 1,024 kept events fit, the newest 200 are listed; older ones than the "
        "last 1,024 are forgotten"
    )
    assert "hush" not in repr(told)


def test_where_nothing_has_happened_it_says_what_would_be_here() -> None:
    told = events(Desk().catalog, Words(), zero_s=0.0)
    assert told.texts["empty"].startswith("Nothing has happened yet.")
