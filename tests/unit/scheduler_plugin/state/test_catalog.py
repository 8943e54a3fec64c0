from __future__ import annotations

from tensorcast_dask.scheduler_plugin.state.catalog import NODE_KEPT_S, Catalog
from tensorcast_dask.scheduler_plugin.state.events import (
    CatalogSettings,
    JournalBack,
    JournalStalled,
    Log,
    NodeJoined,
    Recovered,
    TimePassed,
    WakeAt,
)
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import (
    ClusterId,
    Epoch,
    HostId,
    Incarnation,
    NodeId,
)
from tests.kit.catalogs import Desk


def catalog() -> Catalog:
    recovered = Recovered(cluster=ClusterId("c"), epoch=Epoch(1))
    return Catalog(CatalogSettings(lease_ttl_s=5.0), recovered)


def hello() -> NodeJoined:
    card = m.NodeCard(
        node=NodeId("a"), incarnation=Incarnation(1), host=HostId("h"), socket=""
    )
    return NodeJoined(
        link=1, hello=m.NodeHello(card=card, cluster=ClusterId("c"), epoch=Epoch(0))
    )


def wakes(out: list[object]) -> list[float]:
    return [one.at_s for one in out if isinstance(one, WakeAt)]


def test_the_shell_is_asked_to_wake_it_at_the_next_time_that_matters() -> None:
    c = catalog()
    assert wakes([*c.handle(hello(), now_s=10.0)]) == [15.0]


def test_an_alarm_that_rings_early_is_set_again() -> None:
    c = catalog()
    c.handle(hello(), now_s=10.0)
    assert wakes([*c.handle(TimePassed(), now_s=14.9)]) == [15.0]


def test_a_stall_and_its_end_are_said() -> None:
    c = catalog()
    (log,) = [
        one
        for one in c.handle(JournalStalled(why="disk full"), now_s=1.0)
        if isinstance(one, Log)
    ]
    assert (log.level, "disk full" in log.text) == ("error", True)
    assert c.debug_state()["stalled"] == "disk full"
    c.handle(JournalBack(), now_s=2.0)
    assert c.debug_state()["stalled"] == ""


def test_the_same_events_make_the_same_instructions() -> None:
    def run() -> list[str]:
        d = Desk()
        said: list[str] = []
        tell = d.tell
        for name in ("a", "b"):
            d.node(name)
        p = d.program()
        for number in range(5):
            p.put(f"x{number}", replicas=2)
            said += [repr(one) for one in tell(TimePassed())]
        said += [repr(one) for one in d.rows]
        return said

    assert run() == run()


def test_a_node_that_does_not_come_back_is_forgotten_unless_something_points_to_it() -> (
    None
):
    d = Desk()
    a = d.node("a")
    d.node("b")
    p = d.program()
    p.put("x", node=a.node)
    for node in d.nodes.values():
        node.lose_link()
    d.pass_time(10.0)
    assert d.catalog.debug_state()["nodes_known"] == 2
    d.now_s += NODE_KEPT_S
    d.tell(TimePassed())
    d.flush()
    assert list(d.catalog.nodes.records) == ["a"]
    d = d.restart()
    d.tell(TimePassed())
    assert list(d.catalog.nodes.records) == ["a"]
    a.join()
    assert p.open().resolve("x").version == 1
