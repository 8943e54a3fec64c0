"""Whatever is shown is escaped, and says what there is."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from tensorcast_dask.exceptions import CapacityError, DataLost
from tensorcast_dask.notebook import cards
from tensorcast_dask.notebook.drawing import Picture
from tensorcast_dask.notebook.frames import frame
from tensorcast_dask.notebook.markup import bar, facts, link, markup, table
from tensorcast_dask.notebook.placement import Grid, grid_html, grid_text
from tensorcast_dask.tensors.contexts import Context
from tensorcast_dask.tensors.dtypes import dtype
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    Generation,
    HostId,
    Incarnation,
    NodeId,
    Version,
)
from tensorcast_dask.tensors.messages import (
    ArtifactInfo,
    Fault,
    InstanceRecord,
    InstanceState,
    Location,
    NodeCard,
    NodeState,
    Owner,
    Rows,
    Stage,
    StepOutcome,
    StepStatus,
    Tier,
    TierUse,
)
from tensorcast_dask.tensors.signals import Signal
from tensorcast_dask.tensors.specs import TensorSpec

EVIL = "<script>alert('x')</script>\"&"
CARD = NodeCard(
    node=NodeId("n1"),
    incarnation=Incarnation(1),
    host=HostId("h"),
    socket="",
    name=EVIL,
    worker=EVIL,
)
NODE = NodeState(
    card=CARD,
    uses={Tier.HOST: TierUse(capacity_bytes=100, used_bytes=50)},
    attended=True,
    lease_left_s=1.0,
)
INFO = ArtifactInfo(
    id=ArtifactId(EVIL),
    version=Version(3),
    generation=Generation(7),
    stage=Stage.COMMITTED,
    owner=Owner.CALLER,
    nbytes=2048,
    tensors=1,
    labels={EVIL: EVIL},
    degraded=EVIL,
    base=ArtifactId(EVIL),
    view=b"v",
)
HERE = Location(card=CARD, tier=Tier.HOST)
FAULT = Fault(kind="NotFound", message=EVIL)
GRID = Grid(nodes=(NODE,), artifacts=(INFO,), places={7: (HERE,)}, more=True)

SHOWN = {
    "session": cards.session_card(EVIL, state="open", dashboard=EVIL, nodes=[NODE]),
    "node": cards.node_card(NODE),
    "artifact": cards.artifact_card(
        INFO,
        places=[HERE],
        specs=[TensorSpec(EVIL, dtype("float32"), (2, 3))],
    ),
    "operation": cards.operation_card(
        "put", EVIL, status="failed", done=1, total=2, error=DataLost(EVIL)
    ),
    "plan": cards.plan_card(
        EVIL, Context(id=EVIL, tags=(EVIL,)), EVIL, "<svg/>", steps=1
    ),
    "result": cards.result_card(
        EVIL, "failed", EVIL, {EVIL: StepOutcome(status=StepStatus.FAILED, fault=FAULT)}
    ),
    "signals": cards.signals_card(
        EVIL,
        [Signal(name=EVIL, value={EVIL: EVIL})],
        events=[Signal(name=EVIL, value={"id": EVIL})],
    ),
    "instance": cards.instance_card(
        InstanceState(
            record=InstanceRecord(name=EVIL, attachment="a", poisoned=EVIL), card=CARD
        )
    ),
    "error": cards.error_card(CapacityError(EVIL, {EVIL: EVIL})),
    "rows": cards.rows_card(Rows(columns=(EVIL,), rows=((EVIL,), (None,)))),
    "placement": grid_html(GRID, title=EVIL, state="live"),
    "frame": frame("http://h/" + EVIL, "http://h/" + EVIL, height=10),
    "no frame": frame("javascript:" + EVIL, "javascript:" + EVIL, height=10),
}


@pytest.mark.parametrize("shown", SHOWN)
def test_names_labels_and_messages_stay_text(shown: str) -> None:
    drawn = SHOWN[shown]
    assert "<script" not in drawn
    assert "&lt;script&gt;" in drawn
    # What is drawn is whole, and no name has become a tag or an attribute.
    tags = {one.tag for one in ET.fromstring(f"<all>{drawn}</all>").iter()}
    assert tags <= {
        *("all", "div", "span", "b", "br", "a", "svg", "iframe", "code", "details"),
        *("summary", "table", "thead", "tbody", "tr", "th", "td"),
    }


def test_only_addresses_of_pages_become_links() -> None:
    assert link("javascript:alert(1)") == "javascript:alert(1)"
    assert "href='/user/me/proxy/8787/status'" in link("/user/me/proxy/8787/status")


def test_values_are_said_as_people_say_them() -> None:
    assert [markup(one) for one in (None, True, 0, 1.5)] == ["", "yes", "0", "1.5"]
    assert facts({"a": "", "b": None}) == ""
    assert len(markup("x" * 10_000)) < 400


def test_a_long_table_says_how_much_it_leaves_out() -> None:
    drawn = table(["n"], [[n] for n in range(60)], most=50, more=5)
    assert drawn.count("<td") == 50
    assert "and 15 more" in drawn


def test_a_bar_never_leaves_its_box() -> None:
    assert "width:100.0%" in bar([("#123", 7.0)], "")
    assert "width:0.0%" in bar([("#123", -1.0)], "")


def test_a_grid_has_a_mark_where_an_artifact_lies_and_says_who_else_has_it() -> None:
    elsewhere = Location(
        card=NodeCard(
            node=NodeId("n2"),
            incarnation=Incarnation(1),
            host=HostId("h"),
            socket="",
            name="engine-1",
            kind="instance",
        ),
        tier=Tier.HOST,
    )
    grid = Grid(nodes=(NODE,), artifacts=(INFO,), places={7: (HERE, elsewhere)})
    assert grid.tiers(INFO, "n1") == ["host"]
    assert grid.elsewhere(INFO) == ["engine-1"]
    assert "engine-1" in grid_html(grid, title="all", state="live")
    text = grid_text(grid)
    assert text.endswith(f"2.0 KiB  {EVIL}:host engine-1:host")
    assert "v3 (committed, lent by its owner, degraded)" in text
    empty = Grid(artifacts=(INFO,))
    assert grid_text(empty).endswith("nowhere")
    assert grid_text(Grid()) == ""
    assert "no artifacts" in grid_html(Grid(), title="all", state="live")


def test_a_picture_is_text_that_a_notebook_draws() -> None:
    picture = Picture("a: noop", "<svg/>")
    assert picture == "a: noop"
    assert picture._repr_mimebundle_() == {
        "text/plain": "a: noop",
        "image/svg+xml": "<svg/>",
    }
