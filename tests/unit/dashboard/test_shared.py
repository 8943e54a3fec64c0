from __future__ import annotations

from tensorcast_dask.dashboard.data.shared import (
    duration,
    headline,
    public,
    short,
    text,
)
from tests.kit.catalogs import Desk


def test_labels_are_shown_without_secrets_and_not_without_end() -> None:
    labels = {"stage": "prod", "api-token": "hush", "a": "1"}
    assert public(labels) == "a=1, stage=prod"
    many = public({f"l{number:02}": "x" for number in range(100)})
    assert many.endswith("l07=x and 92 more")


def test_a_long_name_keeps_its_ends_and_a_short_one_everything() -> None:
    assert short("models/llama", 40) == "models/llama"
    found = short("a" * 5000 + "/step-00017", 30)
    assert len(found) == 30
    assert found.endswith("step-00017"[-10:])
    assert found.startswith("aaaa")


def test_what_has_no_shape_is_a_mark_in_a_name() -> None:
    assert short("a\nb\u202ec\x00d e") == "a·b·c·d e"


def test_text_is_html_that_shows_a_name_as_it_is() -> None:
    name = "<script>alert(1)</script>&\"'"
    shown = "&lt;script&gt;alert(1)&lt;/script&gt;&amp;&quot;&#x27;"
    assert text(name) == shown


def test_durations_are_written_in_the_unit_that_fits() -> None:
    said = [duration(one) for one in (0.0314, 7.25, 600.0, 10_000.0, 400_000.0)]
    assert said == ["31 ms", "7.2 s", "10 min", "3 h", "5 d"]


def test_the_head_counts_what_debug_state_counts() -> None:
    d = Desk()
    d.node("a")
    p = d.program()
    p.put("x")
    p.put("y")
    p.create("z")
    state = d.catalog.debug_state()
    assert (state["artifacts"], state["versions"], state["replicas"]) == (3, 3, 2)
    assert headline(d.catalog) == (
        "<b>3</b> artifacts · <b>3</b> versions · <b>2</b> replicas · <b>1</b> node"
    )
    d.stall("the disk of <db> is full")
    assert "the journal cannot write: the disk of &lt;db&gt; is full" in headline(
        d.catalog
    )
