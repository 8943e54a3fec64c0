"""The numbers of a scrape are those of the catalog, and the files beside them name them."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import msgspec
import pytest

from tensorcast_dask.metrics import families
from tensorcast_dask.metrics.families import FAMILIES, OF_WORKERS, samples
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import NodeId
from tests.kit.catalogs import Desk
from tests.kit.source import ROOT

NAMES = {family.name for family in FAMILIES}


def test_a_scrape_tells_what_the_catalog_counts() -> None:
    d = Desk()
    d.node("a")
    d.node("b")
    p = d.program()
    p.put("x")
    p.put("y")
    told = samples(d.catalog)
    state = d.catalog.debug_state()
    for name in ("epoch", "artifacts", "versions", "replicas", "pins", "sessions"):
        assert told[f"tensorcast_{name}"] == [((), state[name])], name
    records = d.catalog.nodes.records.values()
    assert dict(told["tensorcast_node_up"]) == {
        (record.card.name,): 1 for record in records
    }
    assert dict(told["tensorcast_tier_used_bytes"]) == {
        (record.card.name, tier): use.used_bytes
        for record in records
        for tier, use in record.uses.items()
    }
    events = {labels[0]: value for labels, value in told["tensorcast_events_total"]}
    assert events["created"] == 2


def test_of_two_nodes_of_one_name_the_living_one_has_it() -> None:
    d = Desk()
    first, second = d.node("a"), d.node("b")
    first.lose_link()
    d.pass_time(1000.0)
    second.renew()
    for node in (first, second):
        record = d.catalog.nodes.records[node.node]
        record.card = msgspec.structs.replace(record.card, name="worker")
    up = dict(samples(d.catalog)["tensorcast_node_up"])
    assert up == {("worker",): True, ("worker (a)",): False}


def test_copies_count_by_their_transport() -> None:
    d = Desk()
    node = d.node("a")
    for moved, via in ((1000, "tcp"), (24, "tcp"), (5, "ucx")):
        done = m.TaskDone(
            task=1,
            moved_bytes=moved,
            seconds=0.1,
            via=via,
            sources=(NodeId("b"),),
        )
        d.catalog.observed.bandwidths.transferred(node.node, done, now_s=1.0)
    told = samples(d.catalog)
    assert told["tensorcast_transfers_total"] == [(("tcp",), 2), (("ucx",), 1)]
    assert told["tensorcast_transferred_bytes_total"] == [
        (("tcp",), 1024),
        (("ucx",), 5),
    ]


def test_a_crowd_of_nodes_is_told_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "MAX_NODES", 3)
    d = Desk()
    for number in range(5):
        d.node(f"n{number}")
    assert len(samples(d.catalog)["tensorcast_node_up"]) == 3


def test_every_family_has_samples_of_its_labels_alone() -> None:
    d = Desk()
    d.node("a")
    told = samples(d.catalog)
    assert set(told) == NAMES
    for family in FAMILIES:
        assert all(len(labels) == len(family.labels) for labels, _ in told[family.name])
        assert family.name.endswith("_total") == (family.kind == "counter")


def test_the_dashboard_for_grafana_asks_for_nothing_that_is_not_told() -> None:
    board = json.loads((files(families.__package__) / "grafana.json").read_text())
    labels = {label for family in FAMILIES for label in family.labels} | {"instance"}
    shown: set[str] = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            shown |= set(re.findall(r"tensorcast_\w+", target["expr"]))
            legend = re.findall(r"{{(\w+)}}", target["legendFormat"])
            assert set(legend) <= labels, panel["title"]
    assert shown
    assert shown <= NAMES


def test_the_documentation_lists_every_family() -> None:
    lines = (ROOT / "docs" / "metrics.md").read_text().splitlines()
    listed = [line for line in lines if line.startswith("| `tensorcast_")]
    assert listed == [
        f"| `{one.name}` | {one.kind} "
        f"| {', '.join(f'`{label}`' for label in one.labels)} | {one.help} |"
        for one in (*FAMILIES, *OF_WORKERS)
    ]
