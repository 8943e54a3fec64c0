"""P17: no request, whatever it says, stops the catalog or goes without an answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    Generation,
    HostId,
    NodeId,
    RequestId,
    SessionId,
)
from tests.kit.catalogs import Desk, FakeNode, Program, index_of

NAMES = ["x", "y", "alias", "view", "", " x", "a\x00b", "\ud800", "x" * 600]
ids = st.sampled_from(NAMES).map(ArtifactId)
times = st.sampled_from([0.0, 0.5, 3.0, -1.0, math.nan])
lifetimes = times | st.just(math.inf)
numbers = st.sampled_from([-2, -1, 0, 1, 2, 3, 1 << 62, -(1 << 63)])
nodes = st.sampled_from(["", "a", "b", "i", "gone"]).map(NodeId)
labels = st.sampled_from([{}, {"k": "v"}, {"": ""}])
tiers = st.sampled_from(list(m.Tier))
sizes = st.sampled_from([0, 10, 100, -1, 1 << 40, 1 << 63])


@dataclass
class Scene:
    """A catalog with a little of everything in it."""

    desk: Desk
    program: Program
    owner: FakeNode
    generations: list[Generation]


def scene() -> Scene:
    d = Desk()
    for name, host in (("a", "h1"), ("b", "h2")):
        d.node(name, host)
    owner = d.node("i", "h1", kind="instance")
    p = d.program(host="h1")
    x = p.put("x", node=NodeId("a"))
    lent = p.put("lent", owner=m.Owner.CALLER, node=owner.node)
    creating = p.create("y")
    p.call(
        m.SetAlias(rid=p.rid(), name=ArtifactId("alias"), generation=x.generation),
        m.AliasState,
    )
    gone = p.put("z")
    p.destroy("z")
    made = [x.generation, lent.generation, creating.generation, gone.generation]
    return Scene(d, p, owner, [*made, Generation(0), Generation(7), Generation(-3)])


def requests(generations: list[Generation]) -> st.SearchStrategy[m.SessionRequest]:
    rids = st.integers(1000, 1012).map(lambda n: RequestId(f"s-{n}"))
    some = st.sampled_from(generations)
    index = index_of(100)
    return st.one_of(
        st.builds(
            m.Create,
            rid=rids,
            id=ids,
            nbytes=sizes,
            index=st.just(index.encode()),
            index_digest=st.just(index.digest()),
            tensors=numbers,
            version=numbers,
            owner=st.sampled_from(list(m.Owner)),
            labels=labels,
            node=nodes,
            replicas=st.sampled_from([0, 1, 2, 5]),
            ttl_s=lifetimes,
            commit=st.one_of(st.just(RequestId("")), rids),
            commit_deadline_s=times,
        ),
        st.builds(m.CommitCreated, rid=rids, generation=some, deadline_s=times),
        st.builds(m.AbortCreated, rid=rids, generation=some),
        st.builds(m.KeepCreating, rid=rids, generation=some, ttl_s=lifetimes),
        st.builds(
            m.Resolve, rid=rids, id=ids, version=numbers, published=st.booleans()
        ),
        st.builds(m.Describe, rid=rids, generation=some),
        st.builds(m.Locate, rid=rids, generation=some),
        st.builds(
            m.Ensure,
            rid=rids,
            generation=some,
            node=nodes,
            deadline_s=times,
            tier=tiers,
            host=st.sampled_from(["", "h1", "h2", "h9"]).map(HostId),
        ),
        st.builds(
            m.Migrate,
            rid=rids,
            generation=some,
            source=nodes,
            node=nodes,
            deadline_s=times,
        ),
        st.builds(m.Release, rid=rids, generation=some, node=nodes, deadline_s=times),
        st.builds(m.Publish, rid=rids, generation=some),
        st.builds(m.Destroy, rid=rids, id=ids, generation=some, deadline_s=times),
        st.builds(m.Pin, rid=rids, generation=some, ttl_s=lifetimes, node=nodes),
        st.builds(m.Unpin, rid=rids, generation=some, pin=numbers),
        st.builds(m.SetAlias, rid=rids, name=ids, generation=some, expect=numbers),
        st.builds(
            m.RegisterView,
            rid=rids,
            id=ids,
            generation=some,
            view=st.sampled_from([b"", b"v"]),
            index_digest=st.just(""),
            nbytes=sizes,
            tensors=numbers,
        ),
        st.builds(
            m.LoadFile,
            rid=rids,
            id=ids,
            path=st.sampled_from(["", "/m"]),
            deadline_s=times,
            version=numbers,
            node=nodes,
            labels=labels,
        ),
        st.builds(
            m.SaveFile,
            rid=rids,
            generation=some,
            path=st.just("/out"),
            deadline_s=times,
            node=nodes,
            max_shard_bytes=sizes,
        ),
        st.builds(
            m.ListArtifacts,
            rid=rids,
            prefix=ids,
            labels=labels,
            after=st.sampled_from(["", "x", "x\x001", "\x00"]),
            limit=numbers,
            all_versions=st.booleans(),
        ),
        st.builds(m.NodesAsked, rid=rids),
        st.builds(m.ExplainAsked, rid=rids, ref=ids),
        st.builds(m.OperationAsked, rid=rids, asked=rids),
        st.builds(m.CancelAsked, rid=rids, asked=rids),
        st.builds(m.DrainNode, rid=rids, node=nodes, deadline_s=times),
        st.builds(m.CatalogStateAsked, rid=rids),
        st.just(
            m.OpenSession(
                rid=RequestId("s-1013"),
                session=SessionId("s"),
                pid=1,
                host=HostId(""),
            )
        ),
    )


@given(st.data())
def test_p17_no_request_stops_the_catalog_or_goes_without_an_answer(
    data: st.DataObject,
) -> None:
    s = scene()
    asked = data.draw(st.lists(requests(s.generations), min_size=1, max_size=8))
    for request in asked:
        s.program.ask(request)
    s.desk.pass_time(30.0)
    s.desk.flush()
    for request in asked:
        if not isinstance(request, m.Query):
            assert s.program.answered(request.rid), request
    assert s.desk.catalog.debug_state()["held"] == 0
    assert s.program.put("afterwards").version >= 1
