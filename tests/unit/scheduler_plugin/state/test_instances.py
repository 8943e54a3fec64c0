from __future__ import annotations

from tensorcast_dask.tensors import messages as m
from tests.kit.catalogs import Desk, FakeNode, Program


def record(attachment: str, name: str = "e", **more: object) -> m.InstanceRecord:
    return m.InstanceRecord(name=name, attachment=attachment, **more)  # type: ignore[arg-type]


def here(node: FakeNode, *records: m.InstanceRecord, **more: object) -> None:
    node.say(m.InstancesHere(records=records, **more))  # type: ignore[arg-type]


def terms(node: FakeNode) -> dict[str, int]:
    return {
        one.attachment: one.term
        for one in node.inbox
        if isinstance(one, m.InstanceSeen)
    }


def let_go(node: FakeNode) -> list[str]:
    return [one.attachment for one in node.inbox if isinstance(one, m.DoDetach)]


def listed(program: Program) -> list[tuple[str, str, str]]:
    asked = m.InstancesAsked(rid=program.rid())
    told = program.call(asked, m.Instances)
    return [
        (one.record.name, one.record.attachment, one.card.node)
        for one in told.instances
    ]


def load(term: int, number: int, **values: float) -> m.InstanceLoad:
    return m.InstanceLoad(
        instance="e", epoch=term, number=number, values=values, age_s=0.5
    )


def state(program: Program) -> m.InstanceState:
    asked = m.InstancesAsked(rid=program.rid())
    (one,) = program.call(asked, m.Instances).instances
    return one


def scene() -> tuple[Desk, FakeNode, FakeNode, Program]:
    d = Desk()
    a, b = d.node("a"), d.node("b")
    return d, a, b, d.program()


def test_instances_are_listed_by_name_with_their_nodes() -> None:
    d, a, b, p = scene()
    here(b, record("b1", "y"))
    here(a, record("a1", "z"), record("a2", "x", labels={"k": "v"}))
    assert listed(p) == [("x", "a2", "a"), ("y", "b1", "b"), ("z", "a1", "a")]
    assert sorted(terms(a)) == ["a1", "a2"]
    assert d.catalog.debug_state()["instances"] == 3
    assert [e.topic for e in d.emitted if e.topic.startswith("instance")] == [
        "instance_attached"
    ] * 3


def test_the_later_life_of_a_name_counts_and_the_other_node_lets_the_earlier_go() -> (
    None
):
    _, a, b, p = scene()
    here(a, record("a1"))
    here(b, record("b1"))
    assert listed(p) == [("e", "b1", "b")]
    assert let_go(a) == ["a1"]
    assert terms(b)["b1"] > terms(a)["a1"]


def test_late_news_of_an_earlier_life_of_the_same_host_does_not_end_the_later_one() -> (
    None
):
    d = Desk()
    a, b, p = d.node("a", host="h"), d.node("b", host="h"), d.program()
    here(b, record("b1", since_s=2.0))
    here(a, record("a1", since_s=1.0))
    assert listed(p) == [("e", "b1", "b")]
    assert (let_go(a), let_go(b), terms(a)) == (["a1"], [], {})
    here(a, record("a2", since_s=3.0))
    assert listed(p) == [("e", "a2", "a")]
    # Clocks of two hosts say nothing of each other: who is heard of later counts.
    c = d.node("c", host="other")
    here(c, record("c1", since_s=0.5))
    assert listed(p) == [("e", "c1", "c")]


def test_late_news_of_the_node_that_an_instance_has_left_does_not_count() -> None:
    _, a, b, p = scene()
    here(b, record("e1", times=2))
    here(a, record("e1", times=1), whole=True)
    here(a, gone={"e1": "its connection ended"})
    assert listed(p) == [("e", "e1", "b")]


def test_an_earlier_life_that_is_told_again_is_refused() -> None:
    _, a, b, p = scene()
    here(a, record("a1"))
    term = terms(a)["a1"]
    here(b, record("b1"))
    here(a, record("a1", term=term), whole=True)
    assert listed(p) == [("e", "b1", "b")]
    assert let_go(a) == ["a1", "a1"]


def test_a_catalog_that_starts_anew_believes_the_terms_that_nodes_bring() -> None:
    _, a, b, p = scene()
    here(a, record("a1", term=5))
    here(b, record("b1", term=7))
    assert listed(p) == [("e", "b1", "b")]
    here(a, record("a1", term=5))
    assert listed(p) == [("e", "b1", "b")]


def test_what_a_node_tells_whole_is_all_that_there_is() -> None:
    _, a, _, p = scene()
    here(a, record("a1", "x"), record("a2", "y"))
    here(a, record("a2", "y", term=terms(a)["a2"]), whole=True)
    assert listed(p) == [("y", "a2", "a")]


def test_one_that_is_gone_is_gone_and_another_nodes_word_does_not_count() -> None:
    _, a, b, p = scene()
    here(a, record("a1"))
    here(b, gone={"a1": "not mine"})
    assert listed(p) == [("e", "a1", "a")]
    here(a, gone={"a1": "its process ended"})
    assert listed(p) == []


def test_instances_go_with_the_lease_of_their_node() -> None:
    d, a, b, p = scene()
    here(a, record("a1"))
    a.lose_link()
    d.pass_time(4.0)
    b.renew()
    assert listed(p) == [("e", "a1", "a")]
    d.pass_time(2.0)
    assert listed(p) == []


def test_load_is_the_last_that_was_pushed_with_its_age_and_goes_with_its_instance() -> (
    None
):
    d, a, b, p = scene()
    here(a, record("a1"))
    assert (state(p).load, state(p).load_age_s) == ({}, None)
    term = terms(a)["a1"]
    a.say(load(term, 2, queue=4.0))
    a.say(load(term, 1, queue=9.0))  # late
    a.say(load(term - 1, 3, queue=9.0))  # of an earlier life
    b.say(load(term, 3, queue=9.0))  # of another node
    d.pass_time(2.0)
    assert (state(p).load, state(p).load_age_s) == ({"queue": 4.0}, 2.5)
    here(a, record("a1", functions=("f",), term=terms(a)["a1"]))
    assert state(p).load == {"queue": 4.0}
    here(a, record("a2"))
    assert state(p).load == {}


def test_what_is_poisoned_and_mended_is_told() -> None:
    d, a, _, p = scene()
    here(a, record("a1"))
    here(a, record("a1", poisoned="half of m v2"))
    assert state(p).record.poisoned == "half of m v2"
    here(a, record("a1"))
    assert state(p).record.poisoned == ""
    assert [e.topic for e in d.emitted if e.topic.startswith("instance")] == [
        "instance_attached",
        "instance_poisoned",
        "instance_repaired",
    ]
    told = p.call(m.ExplainAsked(rid=p.rid(), ref="instance:e"), m.Explained)
    assert [line for _, line in told.lines] == [
        "instance e at w-a (a) attached, process 0",
        "instance e at w-a (a) poisoned: half of m v2",
        "instance e at w-a (a) repaired",
    ]
