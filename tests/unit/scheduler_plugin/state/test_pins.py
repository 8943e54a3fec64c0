from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import CapacityError, Mismatch, NotFound
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import Generation, NodeId, RequestId
from tests.kit.catalogs import Desk, Program


def pin(p: Program, generation: int, ttl_s: float = 60.0, node: str = "") -> m.Pin:
    return m.Pin(
        rid=p.rid(), generation=Generation(generation), ttl_s=ttl_s, node=NodeId(node)
    )


def unpin(p: Program, generation: int, pin: int = 0) -> None:
    p.call(m.Unpin(rid=p.rid(), generation=Generation(generation), pin=pin), type(None))


def pins(d: Desk) -> object:
    return d.catalog.debug_state()["pins"]


def test_p24_questions_pin_nothing_and_pins_are_back_to_none_when_idle() -> None:
    d = Desk()
    d.node("a")
    p = d.program()
    info = p.put("x")
    for _ in range(200):
        p.resolve("x")
        p.locate(info.generation)
        p.call(m.Describe(rid=p.rid(), generation=info.generation), m.Described)
    assert pins(d) == 0
    p.call(pin(p, info.generation, ttl_s=5.0), m.Pinned)
    assert pins(d) == 1
    d.pass_time(5.1)
    assert pins(d) == 0


def test_pins_are_counted_one_by_one_and_taken_back_one_by_one_or_all() -> None:
    d = Desk()
    a = d.node("a")
    p = d.program()
    info = p.put("x")
    one = p.call(pin(p, info.generation), m.Pinned)
    p.call(pin(p, info.generation, ttl_s=90.0), m.Pinned)
    assert one.nodes == (a.node,)
    unpin(p, info.generation, one.pin)
    unpin(p, info.generation, one.pin)  # twice is fine
    assert pins(d) == 1
    assert a.marks[info.generation].pinned_s == pytest.approx(90.0)
    unpin(p, info.generation)
    assert pins(d) == 0
    assert a.marks[info.generation].pinned_s == 0.0
    unpin(p, 999)


def test_a_pinned_copy_is_not_dropped_and_the_other_may_be() -> None:
    d = Desk()
    a, b = d.node("a"), d.node("b")
    p = d.program()
    info = p.put("x", node=a.node)
    ensure = m.Ensure(
        rid=p.rid(), generation=info.generation, node=b.node, deadline_s=9.0
    )
    p.call(ensure, m.Moved)
    p.call(pin(p, info.generation, node="a"), m.Pinned)
    for node in (a, b):
        node.say(m.MayDrop(rid=RequestId("r"), generations=(info.generation,)))
    assert p.locate(info.generation) == [a.node]


def test_a_pin_over_the_limit_of_its_node_is_refused_whole() -> None:
    d = Desk()
    d.node("a", capacity_bytes=1000)
    p = d.program()
    small, large = p.put("s", nbytes=500), p.put("l", nbytes=400)
    p.call(pin(p, small.generation), m.Pinned)
    with pytest.raises(CapacityError):
        p.call(pin(p, large.generation), m.Pinned)
    assert pins(d) == 1
    p.call(pin(p, small.generation), m.Pinned)  # no bytes more
    unpin(p, small.generation)
    p.call(pin(p, large.generation), m.Pinned)


def test_a_pin_may_be_taken_back_twice() -> None:
    d = Desk()
    d.node("a")
    p = d.program()
    info = p.put("x")
    one, other = (p.call(pin(p, info.generation), m.Pinned).pin for _ in range(2))
    for _ in range(2):
        unpin(p, info.generation, one)
        assert pins(d) == 1
    assert other != one
    for _ in range(2):
        unpin(p, info.generation)
        assert pins(d) == 0


def test_a_pin_where_there_is_no_replica_is_refused() -> None:
    d = Desk()
    d.node("a")
    d.node("b")
    p = d.program()
    info = p.put("x", node=NodeId("a"))
    with pytest.raises(Mismatch):
        p.call(pin(p, info.generation, node="b"), m.Pinned)
    with pytest.raises(NotFound):
        p.call(pin(p, info.generation, node="zz"), m.Pinned)


def test_a_pin_survives_a_restart_and_ends_with_its_version() -> None:
    d = Desk()
    a = d.node("a")
    p = d.program()
    info = p.put("x")
    first = p.call(pin(p, info.generation), m.Pinned)
    d = d.restart()
    a.join()
    p.open()
    assert pins(d) == 1
    second = p.call(pin(p, info.generation), m.Pinned)
    assert second.pin > first.pin
    p.destroy("x")
    assert pins(d) == 0
    assert Desk.restart(d).catalog.debug_state()["pins"] == 0


def test_the_number_of_a_pin_is_not_used_again_after_a_restart() -> None:
    d = Desk()
    d.node("a")
    p = d.program()
    info = p.put("x")

    def pin() -> int:
        ask = m.Pin(rid=p.rid(), generation=info.generation, ttl_s=60.0)
        return p.call(ask, m.Pinned).pin

    old = pin()
    ask = m.Unpin(rid=p.rid(), generation=info.generation, pin=old)
    p.call(ask, type(None))
    d = d.restart()
    p.open(settled=p.count)
    for node in d.nodes.values():
        node.join()
    fresh = pin()
    assert fresh != old
    ask = m.Unpin(rid=p.rid(), generation=info.generation, pin=old)
    p.call(ask, type(None))
    assert d.catalog.debug_state()["pins"] == 1, "a late unpin took another's pin"
