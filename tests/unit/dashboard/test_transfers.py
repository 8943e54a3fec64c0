from __future__ import annotations

from tensorcast_dask.dashboard.data.transfers import FLOWS, transfers
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import NodeId
from tests.kit.catalogs import MIB, Desk, Program


def ensure(p: Program, info: m.ArtifactInfo, node: str) -> m.Ensure:
    ask = m.Ensure(
        rid=p.rid(), generation=info.generation, node=NodeId(node), deadline_s=60.0
    )
    p.ask(ask)
    return ask


def scene() -> tuple[Desk, Program]:
    d = Desk()
    for name in "abc":
        d.node(name)
    return d, d.program()


def test_a_flow_is_listed_with_its_bytes_while_it_is_under_way() -> None:
    d, p = scene()
    info = p.put("x", nbytes=8 * MIB, node=NodeId("a"))
    d.nodes[NodeId("b")].obedient = False
    ensure(p, info, "b")
    order = d.nodes[NodeId("b")].inbox[0]
    assert isinstance(order, m.DoPull)
    d.pass_time(1.0)
    d.nodes[NodeId("b")].say(
        m.TaskProgress(task=order.task, done_bytes=2 * MIB, total_bytes=8 * MIB)
    )
    told = transfers(d.catalog)
    flow = {name: column[0] for name, column in told.columns["flows"].items()}
    assert (flow["artifact"], flow["source"], flow["target"]) == (
        "x",
        "w-a (a)",
        "w-b (b)",
    )
    assert (flow["done"], flow["total"], flow["share"]) == (2 * MIB, 8 * MIB, 0.25)
    assert (flow["speed"], flow["age"]) == ("2.0 MiB/s", "1.0 s")
    d.nodes[NodeId("b")].obey_all()
    told = transfers(d.catalog)
    assert told.columns["flows"]["artifact"] == []
    assert told.texts["found"].startswith("Nothing moves now.")


def test_the_matrix_has_a_square_for_each_way_and_sources_their_share() -> None:
    d, p = scene()
    for number in range(3):
        ensure(p, p.put(f"x{number}", nbytes=8 * MIB, node=NodeId("a")), "b")
    ensure(p, p.put("y", nbytes=8 * MIB, node=NodeId("c")), "a")
    told = transfers(d.catalog)
    assert told.columns["axis"]["name"] == ["w-a", "w-b", "w-c"]
    matrix = told.columns["matrix"]
    assert list(zip(matrix["y"], matrix["x"], matrix["text"], strict=True)) == [
        (0, 1, "84 M"),
        (2, 0, "84 M"),
    ]
    assert matrix["what"][0] == "84 MB/s; 3 pulls, 24.0 MiB by tcp, the last 0 ms ago"
    sources = told.columns["sources"]
    assert sources["name"] == ["w-a", "w-c"]
    assert sources["text"] == ["75%  24.0 MiB in 3 pulls", "25%  8.0 MiB in 1 pulls"]
    d.pass_time(301.0)
    assert transfers(d.catalog).columns["matrix"]["alpha"] == [0.45, 0.45]


def test_small_pulls_are_counted_and_say_nothing_of_speed() -> None:
    d, p = scene()
    ensure(p, p.put("x", nbytes=100, node=NodeId("a")), "b")
    matrix = transfers(d.catalog).columns["matrix"]
    assert (matrix["text"], matrix["value"]) == (["small"], [0.0])


def test_flows_are_bounded_and_that_is_said() -> None:
    d, p = scene()
    d.nodes[NodeId("b")].obedient = False
    for number in range(FLOWS + 2):
        ensure(p, p.put(f"x{number}", node=NodeId("a")), "b")
    told = transfers(d.catalog)
    assert len(told.columns["flows"]["artifact"]) == FLOWS
    assert (
        told.texts["found"] == f"{FLOWS + 2} under way, the oldest {FLOWS} are listed"
    )


def test_a_node_that_vanished_keeps_its_place_by_its_identity() -> None:
    d, p = scene()
    ensure(p, p.put("x", nbytes=8 * MIB, node=NodeId("a")), "b")
    del d.catalog.nodes.records[NodeId("a")]
    assert transfers(d.catalog).columns["axis"]["name"] == ["a", "w-b"]


def test_without_transfers_it_says_what_would_be_here() -> None:
    told = transfers(Desk().catalog)
    assert told.counts == {"nodes": 0, "sources": 0, "flows": 0}
    assert told.texts["total"].startswith("No bytes have gone from node to node yet.")
