from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import (
    InvalidArgument,
    InvalidName,
    NotFound,
    QuotaExceeded,
)
from tensorcast_dask.policies import (
    Copy,
    Migrate,
    MoveRequest,
    ReplicaFloor,
    Role,
    Spread,
)
from tensorcast_dask.scheduler_plugin.state.events import PolicyBroke, PolicyDecided
from tensorcast_dask.scheduler_plugin.state.policies import MAX_WAITING, START_S
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import Generation, NodeId
from tests.kit.catalogs import Desk, Program
from tests.kit.policies import FakeProcesses, Given, install
from tests.kit.signals import frame, snapshot


def scene() -> tuple[Desk, Program, FakeProcesses]:
    d = Desk()
    d.node("a")
    d.node("b")
    return d, d.program(), FakeProcesses(d)


def where(d: Desk, name: str) -> list[str]:
    return sorted(node for node, one in d.nodes.items() if holds(one, name))


def holds(node, name: str) -> bool:
    return any(one.id == name for one in node.held.values())


def policies(d: Desk) -> list[tuple[str, str]]:
    return [(one.name, one.status) for one in d.catalog.policies.states()]


def test_a_policy_places_what_names_no_node() -> None:
    d, p, _ = scene()
    install(p, Given(Role.PLACE, "b", "b", None))
    p.put("x")
    assert where(d, "x") == ["b"]
    p.put("named", node=NodeId("a"))
    assert where(d, "named") == ["a"]
    p.put("y")
    assert where(d, "y") == ["b"]
    p.put("z")
    assert where(d, "z") != [], "None leaves it to the default"


@pytest.mark.parametrize("node", ["nowhere", "full"])
def test_a_choice_that_cannot_be_is_none(node: str) -> None:
    d, p, _ = scene()
    d.node("full", capacity_bytes=10)
    install(p, Given(Role.PLACE, node))
    p.put("x", nbytes=100)
    assert where(d, "x") in (["a"], ["b"])
    assert policies(d) == [("p", "running")]


def test_a_refusal_by_a_policy_is_typed_and_nothing_is_taken() -> None:
    d, p, _ = scene()
    install(p, Given(Role.ADMIT, "not today", None))
    with pytest.raises(QuotaExceeded, match="not today"):
        p.create("x")
    assert d.catalog.debug_state()["creations"] == 0
    p.put("x")


def test_who_admits_is_asked_before_who_places() -> None:
    d, p, f = scene()
    install(p, Given(Role.ADMIT, None, "no"), name="admit")
    install(p, Given(Role.PLACE, "b"), name="place")
    p.put("x", labels={"tenant": "t"})
    assert where(d, "x") == ["b"]
    assert [one.wanted.labels for one in f.views if one.wanted] == [{"tenant": "t"}] * 2
    with pytest.raises(QuotaExceeded):
        p.create("y")


@pytest.mark.parametrize("how", ["raises", "returns another thing", "stalls", "dies"])
def test_a_policy_that_fails_is_set_aside_and_the_default_takes_over(how: str) -> None:
    d, p, f = scene()
    bad = {"raises": ValueError("oh"), "returns another thing": [3]}.get(how, "b")
    state = install(p, Given(Role.PLACE, bad), limit_s=0.5)
    f.stalled = how in ("stalls", "dies")
    rid = p.ask(_create(p, "x"))
    life = f.views[0].life
    if how == "dies":
        d.tell(PolicyBroke(life=life, why="its process ended with status -9"))
    if how == "stalls":
        assert not p.answered(rid)
        d.pass_time(0.6)
    assert isinstance(p.result(rid, m.Created), m.Created)
    assert policies(d) == [("p", "aside")]
    assert f.ended == [life]
    told = snapshot(p, "policy/")["policy/p"]
    assert (told["role"], told["status"]) == ("place", "aside")
    assert told["why"]
    names = [one.name for one in frame(p, "event/policy").events]
    assert names == ["event/policy_installed", "event/policy_aside"]
    asked = len(f.views)
    p.ask(_create(p, "y"))
    assert len(f.views) == asked, "it is asked no more"
    assert state.status == "running"
    assert d.catalog.debug_state()["decisions"] == 0
    f.stalled = False
    install(p, Given(Role.PLACE, "b"))
    p.put("z")
    assert where(d, "z") == ["b"]


def _create(p: Program, name: str) -> m.Create:
    from tests.kit.catalogs import index_of

    index = index_of(100)
    return m.Create(
        rid=p.rid(),
        id=name,  # type: ignore[arg-type]
        nbytes=index.nbytes,
        index=index.encode(),
        index_digest=index.digest(),
        tensors=1,
    )


def test_questions_wait_their_turn_and_each_has_the_whole_limit() -> None:
    d, p, f = scene()
    install(p, Given(Role.PLACE), limit_s=1.0)
    f.stalled = True
    rids = [p.ask(_create(p, f"x{n}")) for n in range(3)]
    assert len(f.views) == 1
    first = f.views[0]
    d.pass_time(0.9)
    answer = PolicyDecided(life=first.life, number=first.number, decided=_nothing())
    d.tell(answer)
    assert p.answered(rids[0])
    assert len(f.views) == 2
    d.tell(answer)  # late, and of another question
    assert not p.answered(rids[1])
    d.pass_time(0.9)
    assert policies(d) == [("p", "running")]
    d.pass_time(0.2)
    assert all(p.answered(rid) for rid in rids)
    assert policies(d) == [("p", "aside")]


def _nothing():
    from tensorcast_dask.policies.views import Decided

    return Decided()


def test_more_than_so_many_questions_are_decided_by_the_default_at_once() -> None:
    d, p, f = scene()
    install(p, Given(Role.PLACE))
    f.stalled = True
    rids = [p.ask(_create(p, f"x{n}")) for n in range(MAX_WAITING + 1)]
    assert [p.answered(rid) for rid in rids].count(True) == 1
    assert d.catalog.debug_state()["decisions"] == MAX_WAITING


def test_a_session_that_is_gone_meanwhile_gets_no_name() -> None:
    d, p, f = scene()
    install(p, Given(Role.PLACE))
    f.stalled = True
    q = d.program("q")
    q.ask(_create(q, "x"))
    q.ask(m.CloseSession(rid=q.rid()))
    d.pass_time(1.0)
    assert d.catalog.debug_state()["creations"] == 0


def test_another_takes_the_place_once_it_is_loaded_and_a_name_is_one_policy() -> None:
    d, p, f = scene()
    install(p, Given(Role.PLACE, "a"), name="one")
    f.stalled = True
    ask = m.InstallPolicy(
        rid=p.rid(), name="two", role="place", blob=_pickled(Spread())
    )
    p.ask(ask)
    assert policies(d) == [("one", "running")], "the one before goes on"
    d.pass_time(START_S + 0.1)
    with pytest.raises(InvalidArgument, match="not loaded"):
        p.result(ask.rid, m.PolicyState)
    assert policies(d) == [("one", "running")]
    f.stalled = False
    install(p, Spread(), name="two")
    assert policies(d) == [("two", "running")]
    install(p, Given(Role.REPLICATE), name="r")
    install(p, Given(Role.REPLICATE), name="s")
    install(p, Given(Role.REPLICATE), name="s")
    assert policies(d) == [("two", "running"), ("r", "running"), ("s", "running")]


def _pickled(policy: object) -> bytes:
    import pickle

    return pickle.dumps(policy)


def test_a_policy_that_cannot_be_loaded_is_refused() -> None:
    d, p, _ = scene()
    for bad, error in (
        ({"role": "nothing"}, InvalidArgument),
        ({"name": ""}, InvalidName),
        ({"every_s": 0.0}, InvalidArgument),
        ({"limit_s": START_S + 1}, InvalidArgument),
        ({"blob": b"no pickle"}, InvalidArgument),
    ):
        given = {"name": "p", "role": "place", "blob": _pickled(Spread()), **bad}
        ask = m.InstallPolicy(rid=p.rid(), **given)  # type: ignore[arg-type]
        with pytest.raises(error):
            p.call(ask, m.PolicyState)
    assert policies(d) == []


def test_a_policy_is_removed_and_comes_back_with_a_restart_unless_it_was() -> None:
    d, p, f = scene()
    install(p, Given(Role.PLACE, "b"), name="kept")
    install(p, Given(Role.REPLICATE), name="removed")
    p.call(m.RemovePolicy(rid=p.rid(), name="removed"), type(None))
    with pytest.raises(NotFound, match="kept"):
        p.call(m.RemovePolicy(rid=p.rid(), name="removed"), type(None))
    assert len(f.ended) == 1
    e = d.restart()
    f = FakeProcesses(e)
    p.open()
    e.nodes[NodeId("a")].join()
    e.nodes[NodeId("b")].join()
    assert f.started == ["kept"]
    assert policies(e) == [("kept", "running")]
    p.put("x")
    assert where(e, "x") == ["b"]


def test_copies_that_a_policy_suggests_are_made_and_told() -> None:
    d, p, _ = scene()
    info = p.put("x", node=NodeId("a"))
    copy = Copy(generation=info.generation, node="b", why="repair")
    other = Copy(generation=12345, node="b")
    install(p, Given(Role.REPLICATE, [copy, copy, other]))
    assert where(d, "x") == ["a", "b"]
    events = {one.name: one for one in frame(p, "event/").events}
    assert events["event/repaired"]["node"] == "b"
    lines = p.call(m.ExplainAsked(rid=p.rid(), ref="x"), m.Explained).lines
    assert any("policy p: repaired" in line for _, line in lines)
    assert d.catalog.debug_state()["decisions"] == 0


def test_a_suggestion_that_cannot_be_is_told_and_costs_nothing() -> None:
    d, p, _ = scene()
    info = p.put("x", node=NodeId("a"))
    gone = Copy(generation=info.generation, node="nowhere")
    install(p, Given(Role.REPLICATE, [gone], (), ()), every_s=0.5)
    (failed,) = frame(p, "event/policy_failed").events
    assert "nowhere" in str(failed["why"])
    assert policies(d) == [("p", "running")]


def test_a_copy_is_moved_and_a_request_is_told_to_who_routes() -> None:
    d, p, _ = scene()
    info = p.put("x", node=NodeId("a"))
    actions = [
        Migrate(generation=info.generation, source="a", node="b"),
        MoveRequest(
            request="r", source="i", target="k", source_epoch=1, target_epoch=2
        ),
    ]
    install(p, Given(Role.REBALANCE, actions))
    assert where(d, "x") == ["b"]
    (told,) = frame(p, "event/rebalance").events
    assert (told["request"], told["source"], told["target"]) == ("r", "i", "k")
    assert told["target_epoch"] == 2


def test_policies_are_asked_in_their_time_and_not_twice_at_once() -> None:
    d, p, f = scene()
    install(p, Given(Role.REPLICATE), every_s=2.0, limit_s=1.5)
    assert len(f.views) == 1
    d.pass_time(2.1)
    assert len(f.views) == 2
    f.stalled = True
    d.pass_time(2.1)
    assert len(f.views) == 3
    d.pass_time(1.5)
    assert policies(d) == [("p", "aside")]
    d.pass_time(5.0)
    assert len(f.views) == 3


def test_weights_go_to_those_who_hold_and_are_taken_back_with_the_policy() -> None:
    d, p, _ = scene()
    info = p.put("x", node=NodeId("a"))
    weights = {info.generation: 2.0, 99: 1.0}
    install(p, Given(Role.EVICT, weights, weights), every_s=1.0)
    a, b = d.nodes[NodeId("a")], d.nodes[NodeId("b")]

    def told(node) -> list[dict[Generation, float]]:
        return [one.weights for one in node.inbox if isinstance(one, m.DoWeigh)]

    assert told(a) == [{info.generation: 2.0}]
    assert told(b) == []
    d.pass_time(1.1)
    assert len(told(a)) == 1, "what is the same is not said again"
    p.call(m.RemovePolicy(rid=p.rid(), name="p"), type(None))
    assert told(a)[-1] == {}


def test_a_floor_that_is_repaired_is_no_longer_degraded() -> None:
    d = Desk()
    d.node("a")
    p = d.program()
    FakeProcesses(d)
    install(p, ReplicaFloor(), every_s=1.0)
    assert p.put("x", replicas=2).degraded.startswith("1 of 2 hosts")
    d.node("b")
    d.pass_time(2.0)
    assert where(d, "x") == ["a", "b"]
    assert p.resolve("x").degraded == ""
    e = d.restart()
    p.open()
    e.nodes[NodeId("a")].join()
    assert p.resolve("x").degraded == ""
