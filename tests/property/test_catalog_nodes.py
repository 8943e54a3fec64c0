"""No message of a node, whatever it says and however late, stops the catalog."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensorcast_dask.scheduler_plugin.state.events import (
    Journaled,
    NodeLinkLost,
    NodeSaid,
    SessionLost,
    TimePassed,
    WorkerGone,
)
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    Generation,
    NodeId,
    RequestId,
    SessionId,
    Version,
)
from tests.kit.catalogs import Desk, index_of

MINTED = [Generation(1 << 40 | n) for n in range(1, 6)]
generations = st.sampled_from([*MINTED, Generation(0), Generation(9 << 40 | 1)])
tiers = st.sampled_from(list(m.Tier))
tasks = st.sampled_from([1 << 40 | n for n in range(1, 6)])
index = index_of(100)
records = st.builds(
    m.ReplicaRecord,
    generation=generations,
    id=st.sampled_from(["x", "y", " bad"]).map(ArtifactId),
    version=st.sampled_from([0, 1, 2]).map(Version),
    tier=tiers,
    nbytes=st.sampled_from([0, 100, -1]),
    index_digest=st.sampled_from(["", "other", index.digest()]),
    index=st.sampled_from([b"", b"\xff", index.encode()]),
    owner=st.sampled_from(list(m.Owner)),
    published=st.booleans(),
)
faults = st.none() | st.builds(
    m.Fault,
    kind=st.sampled_from(["PeerLost", "CapacityError", "NoSuchKind"]),
    message=st.just("it failed"),
)
said = st.one_of(
    st.builds(
        m.Inventory,
        replicas=st.lists(records, max_size=3).map(tuple),
        more=st.booleans(),
    ),
    st.builds(m.Renew, seq=st.integers(-1, 3)),
    st.builds(m.ReplicaReady, record=records),
    st.builds(m.ReplicaDropped, generation=generations, tier=tiers, why=st.just("")),
    st.builds(
        m.MayDrop,
        rid=st.just(RequestId("d")),
        generations=st.lists(generations, max_size=3).map(tuple),
    ),
    st.builds(
        m.TaskProgress,
        task=tasks,
        done_bytes=st.integers(-1, 5),
        total_bytes=st.integers(-1, 5),
    ),
    st.builds(
        m.TaskDone,
        task=tasks,
        fault=faults,
        moved_bytes=st.integers(-1, 5),
        result=st.sampled_from([b"", b"\xff", index.encode()]),
    ),
    st.builds(m.Hello),
    st.builds(m.Proof, proof=st.just(b"")),
)
links = st.integers(0, 6)
sessions = st.sampled_from(["s", "z"]).map(SessionId)
events = st.one_of(
    st.tuples(links, said).map(lambda one: NodeSaid(link=one[0], message=one[1])),
    links.map(lambda link: NodeLinkLost(link=link)),
    st.sampled_from(["", "tcp://a"]).map(lambda one: WorkerGone(address=one)),
    st.tuples(sessions, links).map(
        lambda one: SessionLost(session=one[0], connection=one[1])
    ),
    st.integers(-1, 99).map(lambda seq: Journaled(seq=seq)),
    st.just(TimePassed()),
)


@given(st.booleans(), st.lists(events, max_size=20))
def test_no_message_of_a_node_stops_the_catalog(
    lost: bool, history: list[NodeSaid]
) -> None:
    d = Desk(auto=False)
    d.node("a", obedient=False)
    d.node("b", obedient=False)
    p = d.program()
    p.put("x", replicas=1)
    p.create("y")
    p.ask(
        m.Ensure(rid=p.rid(), generation=MINTED[0], node=NodeId("b"), deadline_s=60.0)
    )
    p.ask(m.LoadFile(rid=p.rid(), id=ArtifactId("z"), path="/m", deadline_s=60.0))
    if lost:
        d.flush()
        d = d.restart(lost=True)
        p.open()
        d.nodes[NodeId("a")].join()
    for event in history:
        d.tell(event)
    d.flush()
    for node in d.nodes.values():
        node.obedient = True
        node.join()
    d.pass_time(90.0)
    d.flush()
    assert d.catalog.debug_state()["held"] == 0
    assert d.program("afterwards").put("new").version == 1
