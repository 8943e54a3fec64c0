from __future__ import annotations

import msgspec

from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.contexts import Context
from tensorcast_dask.tensors.ids import NodeId
from tests.kit.catalogs import Desk, Program
from tests.kit.plans import Runner, chain


def scene() -> tuple[Desk, Program]:
    d = Desk()
    d.node("a")
    d.node("b")
    return d, d.program()


def now(p: Program, ref: str) -> list[str]:
    """The lines about the present."""
    ask = m.ExplainAsked(rid=p.rid(), ref=ref)
    told = p.call(ask, m.Explained)
    return [line.strip() for ago_s, line in told.lines if not ago_s and "is " in line]


def everything(p: Program, ref: str) -> str:
    told = p.call(m.ExplainAsked(rid=p.rid(), ref=ref), m.Explained)
    return "\n".join(line for _, line in told.lines)


def test_what_keeps_a_copy_and_which_may_go_is_told() -> None:
    _, p = scene()
    info = p.put("x", node=NodeId("a"))
    assert "evicted" not in everything(p, "x"), "it is the only copy"
    for node in ("b",):
        p.call(
            m.Ensure(
                rid=p.rid(),
                generation=info.generation,
                node=NodeId(node),
                deadline_s=9.0,
            ),
            m.Moved,
        )
    assert (
        "may be evicted from w-a (a), w-b (b): enough other hosts hold it"
        in everything(p, "x")
    )
    pin = m.Pin(rid=p.rid(), generation=info.generation, ttl_s=30.0, node=NodeId("a"))
    p.call(pin, m.Pinned)
    told = everything(p, "x")
    assert "pinned on w-a (a): 30.0 s, it is not evicted there" in told
    assert "may be evicted from w-b (b)" in told


def test_what_a_move_and_who_wants_it_wait_for_is_told() -> None:
    d, p = scene()
    info = p.put("x", node=NodeId("a"))
    b = d.nodes[NodeId("b")]
    b.obedient = False
    ensure = m.Ensure(
        rid=p.rid(), generation=info.generation, node=b.node, deadline_s=9.0
    )
    p.ask(ensure)
    on_its_way = "on its way to w-b (b) (prefetch), try 1"
    assert on_its_way in everything(p, "x")
    told = everything(p, ensure.rid)
    assert "is running, 0.000 s, at most 9.0 s more" in told
    assert on_its_way in told
    assert "has had to pull 'x' v1 for 0.0 s" in everything(p, "b")
    b.obey_all()
    assert "is done" in everything(p, ensure.rid)


def test_what_a_creation_waits_for_is_told() -> None:
    _, p = scene()
    created = p.create("x", node=NodeId("a"))
    assert "waits for its writer to commit, at most 60.0 s more" in everything(p, "x")
    commit = m.CommitCreated(rid=p.rid(), generation=created.generation, deadline_s=9.0)
    p.ask(commit)
    waits = "waits for w-a (a) to say that it has the bytes"
    assert waits in everything(p, "x")
    assert waits in everything(p, commit.rid)


def test_who_blocks_the_end_of_a_version_is_told() -> None:
    d, p = scene()
    p.put("x", node=NodeId("a"))
    d.nodes[NodeId("a")].obedient = False
    destroy = m.Destroy(rid=p.rid(), id="x", deadline_s=9.0)  # type: ignore[arg-type]
    p.ask(destroy)
    d.flush()
    assert "its end waits for w-a (a) to drop it" in everything(p, "x")
    assert "waits for w-a (a) to drop version 1" in everything(p, destroy.rid)


def test_a_node_says_what_it_is() -> None:
    d, p = scene()
    assert now(p, "a") == ["node w-a (a) is live"]
    d.nodes[NodeId("a")].lose_link()
    assert now(p, "a") == ["node w-a (a) is live, its link is down"]
    d.pass_time(6.0)
    assert now(p, "a") == ["node w-a (a) is gone: its lease has lapsed"]


def test_steps_say_what_they_wait_for_and_a_context_has_the_lines_of_its_plans() -> (
    None
):
    _, p = scene()
    spec = msgspec.structs.replace(chain("s", "t"), context=Context(id="req-81"))
    r = Runner(p)
    r.open(spec)
    told = everything(p, "plan:k")
    assert "step 's' may run, or runs, at any node" in told
    assert "step 't' waits for 's'" in told
    r.ended("s")
    assert "step 't' may run" in everything(p, "plan:k")
    r.ended("t")
    r.end()
    assert "waits for" not in everything(p, "plan:k")
    story = everything(p, "context:req-81")
    assert "submit: 2 steps by req-81" in story
    assert "report: done" in story
