from __future__ import annotations

import math

import pytest

from tensorcast_dask.exceptions import DataLost
from tensorcast_dask.scheduler_plugin.state.replicas import NAMED
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import RequestId
from tests.kit.catalogs import Desk


def test_holders_are_told_what_is_published_spare_and_pinned_and_only_news() -> None:
    d = Desk()
    a, b = d.node("a"), d.node("b")
    p = d.program()
    info = p.put("x", node=a.node)
    assert info.generation not in a.marks
    p.publish(info.generation)
    assert a.marks.pop(info.generation) == m.DoMark(
        generation=info.generation, published=True
    )
    ensure = m.Ensure(
        rid=p.rid(), generation=info.generation, node=b.node, deadline_s=9.0
    )
    p.call(ensure, m.Moved)
    assert a.marks.pop(info.generation).spare
    pin = m.Pin(rid=p.rid(), generation=info.generation, ttl_s=60.0, node=b.node)
    p.call(pin, m.Pinned)
    assert b.marks[info.generation].pinned_s == 60.0
    assert info.generation not in a.marks


def test_a_floor_of_two_hosts_makes_no_copy_spare_before_there_are_three() -> None:
    d = Desk()
    nodes = [d.node(name) for name in ("a", "b", "c")]
    p = d.program()
    info = p.put("x", replicas=2)
    holders = p.locate(info.generation)
    for node in nodes:
        node.say(m.MayDrop(rid=RequestId("r"), generations=(info.generation,)))
    assert p.locate(info.generation) == holders


def test_a_suspect_copy_is_no_copy_when_leave_to_drop_is_asked() -> None:
    d = Desk()
    a, b = d.node("a"), d.node("b")
    p = d.program()
    info = p.put("x", replicas=1, node=a.node)
    p.call(
        m.Ensure(rid=p.rid(), generation=info.generation, node=b.node, deadline_s=9.0),
        m.Moved,
    )
    d = d.restart()
    a.join()
    a.say(m.MayDrop(rid=RequestId("r"), generations=(info.generation,)))
    assert a.granted == []
    b.join()
    a.say(m.MayDrop(rid=RequestId("r"), generations=(info.generation,)))
    assert a.granted == [info.generation]


def test_an_endless_pin_is_told_as_long_not_as_infinite_arithmetic() -> None:
    d = Desk()
    a = d.node("a")
    p = d.program()
    info = p.put("x")
    p.call(m.Pin(rid=p.rid(), generation=info.generation, ttl_s=math.inf), m.Pinned)
    assert a.marks[info.generation].pinned_s > 1e8


def test_a_loss_is_said_once() -> None:
    d = Desk()
    a = d.node("a")
    p = d.program()
    info = p.put("x")
    a.lose_link()
    d.pass_time(20.0, renewing=False)
    for _ in range(3):
        with pytest.raises(DataLost):
            p.locate(info.generation)
    assert sum(one.topic == "lost" for one in d.emitted) == 1


def test_what_was_said_into_a_broken_link_is_said_again() -> None:
    d = Desk()
    a = d.node("a")
    p = d.program()
    info = p.put("x")
    a.lose_link()
    p.publish(info.generation)
    assert info.generation not in a.marks
    a.join()
    assert a.marks[info.generation].published


def test_what_is_given_up_with_leave_is_no_copy_again_before_it_was_dropped() -> None:
    d = Desk()
    a, b = d.node("a"), d.node("b")
    p = d.program()
    info = p.put("x", node=a.node)
    ensure = m.Ensure(
        rid=p.rid(), generation=info.generation, node=b.node, deadline_s=9.0
    )
    p.call(ensure, m.Moved)
    record = a.held[info.generation]
    leave = m.MayDrop(rid=RequestId("r"), generations=(info.generation,))
    d.links.pop(a.link)  # it is slow to hear
    a.say(leave)
    d.links[a.link] = a
    a.say(m.ReplicaReady(record=record))  # its sums became known meanwhile
    assert p.locate(info.generation) == [b.node]
    b.say(m.MayDrop(rid=RequestId("r"), generations=(info.generation,)))
    assert b.granted == []
    dropped = m.ReplicaDropped(generation=info.generation, tier=m.Tier.HOST, why="r")
    a.say(dropped)
    a.say(m.ReplicaReady(record=record))
    assert p.locate(info.generation) == [b.node, a.node]


def test_of_many_that_are_lost_at_once_the_log_names_some_and_events_name_all() -> None:
    d = Desk()
    a = d.node("a")
    p = d.program()
    for number in range(NAMED + 5):
        p.put(f"x{number:02}", node=a.node)
    a.lose_link()
    d.pass_time(100.0, renewing=False)
    lost = [one for one in d.emitted if one.topic == "lost"]
    assert len(lost) == NAMED + 5
    said = [one.text for one in d.logs if "lost" in one.text]
    assert len(said) == NAMED + 1
    assert "'x00' is lost" in said[0]
    assert said[-1].startswith("more versions are lost with what was last on w-a")
