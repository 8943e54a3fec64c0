from __future__ import annotations

from tensorcast_dask.policies import InstanceView, RequestView, Role
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import NodeId
from tests.kit.catalogs import MIB, Desk
from tests.kit.policies import FakeProcesses, Given, install
from tests.kit.signals import load


def test_versions_that_lack_copies_come_first_then_what_is_read_most() -> None:
    d = Desk()
    d.node("a")
    b = d.node("b")
    p = d.program()
    p.put("short", node=NodeId("a"), replicas=2)
    p.put("enough", node=NodeId("a"), replicas=2)
    hot, warm = p.put("hot", nbytes=8 * MIB), p.put("warm")
    p.put("cold")
    d.nodes[NodeId("a")].say(
        m.Renew(seq=1, reads={hot.generation: 9, warm.generation: 1})
    )
    short = p.resolve("short").generation
    b.held.pop(short)
    b.say(m.ReplicaDropped(generation=short, tier=m.Tier.HOST, why="lost"))
    views = d.catalog.policies._views
    shown = views.of(Role.REPLICATE)
    assert [one.id for one in shown.artifacts] == ["short", "hot", "warm"]
    first, second = shown.artifacts[:2]
    assert (first.wanted, first.hosts, first.holders) == (2, 1, ("a",))
    assert (second.current, second.reads_per_s > 0) == (True, True)
    assert {one.node for one in shown.nodes} == {"a", "b"}
    assert views.of(Role.PLACE).artifacts == ()
    p.destroy("short")
    assert [one.id for one in views.of(Role.EVICT).artifacts] == ["hot", "warm"]


def test_what_it_takes_to_get_a_version_again_is_told_from_measured_links() -> None:
    d = Desk()
    d.node("a")
    b = d.node("b")
    p = d.program()
    info = p.put("x", nbytes=8 * MIB, node=NodeId("a"))
    p.locate(info.generation)
    views = d.catalog.policies._views
    assert views.of(Role.EVICT).artifacts[0].refetch_s is None
    ensure = m.Ensure(
        rid=p.rid(), generation=info.generation, node=b.node, deadline_s=9.0
    )
    p.call(ensure, m.Moved)
    assert views.of(Role.EVICT).artifacts[0].refetch_s == 0.1
    assert views.of(Role.EVICT).links == (("a", "b", 8 * MIB / 0.1),)


def test_instances_are_shown_with_their_requests_on_the_catalogs_clock() -> None:
    d = Desk()
    node = d.node("a")
    p = d.program()
    FakeProcesses(d)
    requests = (
        m.RequestLoad(request="r", tokens=5, idle_s=3.0, migrations=1, running=True),
    )
    node.say(load(1, queue=2.0, requests=requests))
    install(p, Given(Role.REBALANCE))
    view = d.catalog.policies._views.of(Role.REBALANCE)
    assert view.instances == (
        InstanceView(
            instance="i",
            node="a",
            epoch=1,
            values={"queue": 2.0},
            requests=(
                RequestView(
                    request="r",
                    tokens=5,
                    last_active_s=d.now_s - 3.0,
                    migrations=1,
                    running=True,
                ),
            ),
        ),
    )
    node.lose_link()
    d.pass_time(6.0)
    assert not d.catalog.policies._views.of(Role.REBALANCE).instances[0].fresh
