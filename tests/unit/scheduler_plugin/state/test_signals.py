from __future__ import annotations

from collections import deque

import pytest

from tensorcast_dask.exceptions import CapacityError, CatalogUnavailable
from tensorcast_dask.scheduler_plugin.state import signals
from tensorcast_dask.scheduler_plugin.state.signals import (
    HISTORY,
    MAX_EVENTS,
    MAX_WATCHERS,
)
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ArtifactId, NodeId
from tests.kit.catalogs import Desk, Program
from tests.kit.signals import begin_watch, by_name, frame, load, next_watch, snapshot


def scene() -> tuple[Desk, Program]:
    d = Desk()
    d.node("a")
    return d, d.program()


def push(d: Desk, number: int, queue: float, **more: object) -> None:
    d.nodes[NodeId("a")].say(load(number, queue=queue, **more))  # type: ignore[arg-type]


def test_a_watch_begins_with_all_that_there_is_and_goes_on_with_changes() -> None:
    d, p = scene()
    push(d, 1, 5.0)
    first = begin_watch(p, "instance/", "node/")
    assert first.whole
    assert set(by_name(first)) == {"instance/i", "node/a/host", "node/a/orders"}
    rid = next_watch(p, first, "instance/", "node/")
    d.pass_time(1.0)
    assert not p.answered(rid), "nothing has changed"
    push(d, 2, 6.0)
    push(d, 3, 7.0)
    d.pass_time(0.2)
    second = p.result(rid, m.SignalFrame)
    assert not second.whole
    assert list(by_name(second)) == ["instance/i"]
    assert second.changed[0]["queue"] == 7.0, "the newest, not those between"
    assert second.number > first.number


def test_a_frame_comes_no_sooner_than_it_is_wanted_and_no_later_than_the_wait() -> None:
    d, p = scene()
    last = begin_watch(p, "instance/")
    rid = next_watch(p, last, "instance/", after_s=1.0, wait_s=1.0)
    push(d, 1, 5.0)
    d.pass_time(0.9)
    assert not p.answered(rid)
    d.pass_time(0.2)
    assert p.result(rid, m.SignalFrame).changed
    last = frame(p, "instance/")
    rid = next_watch(p, last, "instance/", wait_s=1.0)
    d.pass_time(1.1)
    empty = p.result(rid, m.SignalFrame)
    assert (empty.changed, empty.gone, empty.whole) == ((), (), False)


def test_what_goes_is_told_once_and_what_comes_again_is_new() -> None:
    d, p = scene()
    push(d, 1, 5.0)
    first = begin_watch(p, "instance/")
    d.nodes[NodeId("a")].say(m.InstanceGone(instance="i", epoch=1))
    rid = next_watch(p, first, "instance/")
    d.pass_time(0.2)
    second = p.result(rid, m.SignalFrame)
    assert (second.gone, second.changed) == (("instance/i",), ())
    push(d, 1, 5.0)
    rid = next_watch(p, second, "instance/")
    d.pass_time(0.2)
    third = p.result(rid, m.SignalFrame)
    assert (third.gone, list(by_name(third))) == ((), ["instance/i"])


def test_that_a_source_is_late_is_a_change() -> None:
    d, p = scene()
    push(d, 1, 5.0, ttl_s=2.0)
    first = begin_watch(p, "instance/")
    assert first.changed[0].fresh
    rid = next_watch(p, first, "instance/", wait_s=30.0)
    d.pass_time(2.5)
    stale = p.result(rid, m.SignalFrame).changed[0]
    assert not stale.fresh
    assert stale.staleness >= 2.0


def test_events_are_told_each_once_in_their_order_from_when_the_watch_began() -> None:
    d, p = scene()
    p.put("before")
    last = begin_watch(p, "event/")
    assert last.events == ()
    one = p.put("x")
    p.publish(one.generation)
    p.destroy("x")
    rid = next_watch(p, last, "event/")
    d.pass_time(0.2)
    told = p.result(rid, m.SignalFrame)
    assert [e.name for e in told.events] == [
        "event/created",
        "event/published",
        "event/destroyed",
    ]
    assert told.events[0]["id"] == "x"
    rid = next_watch(p, told, "event/published")
    d.pass_time(6.0)
    assert p.result(rid, m.SignalFrame).events == ()


def test_a_lapsed_lease_and_an_eviction_are_events() -> None:
    d, p = scene()
    b = d.node("b")
    info = p.put("x", node=NodeId("a"), replicas=2)
    b.held.clear()
    b.say(
        m.ReplicaDropped(
            generation=info.generation, tier=m.Tier.HOST, why="evicted: others hold it"
        )
    )
    b.lose_link()
    d.pass_time(10.0)
    names = [one.name for one in frame(p, "event/").events]
    assert "event/evicted" in names
    assert names[-1] == "event/lease_expired"


def test_who_was_too_slow_for_events_is_told_that_some_are_missing() -> None:
    d, p = scene()
    last = begin_watch(p, "event/")
    for number in range(MAX_EVENTS + 2):
        d.catalog.outbox.emit("thing", number=number)
    rid = next_watch(p, last, "event/")
    d.pass_time(0.2)
    told = p.result(rid, m.SignalFrame)
    assert told.missed
    assert told.events[-1]["number"] == MAX_EVENTS + 1


def test_a_cursor_of_another_life_gets_everything() -> None:
    d, p = scene()
    last = begin_watch(p, "node/")
    e = d.restart()
    p.open()
    e.nodes[NodeId("a")].join()
    rid = next_watch(p, last, "node/")
    e.pass_time(0.2)
    told = p.result(rid, m.SignalFrame)
    assert (told.whole, told.epoch) == (True, 2)
    assert set(by_name(told)) == {"node/a/host", "node/a/orders"}


def test_a_cursor_that_is_too_old_gets_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    d, p = scene()
    d.catalog.observed.signals._gone = deque(maxlen=2)
    monkeypatch.setattr(signals, "MAX_GONE", 2)
    last = begin_watch(p, "instance/")
    for number in range(4):
        push(d, 1, 1.0, name=f"i{number}")
        d.nodes[NodeId("a")].say(m.InstanceGone(instance=f"i{number}", epoch=1))
        frame(p, "instance/")
    rid = next_watch(p, last, "instance/")
    d.pass_time(0.2)
    assert p.result(rid, m.SignalFrame).whole


def test_a_watcher_may_be_let_go_and_goes_with_its_session() -> None:
    d, p = scene()
    last = begin_watch(p, "instance/")
    rid = next_watch(p, last, "instance/")
    p.ask(m.CancelAsked(rid=p.rid(), asked=rid))
    assert p.result(rid, m.SignalFrame).changed == ()
    next_watch(p, last, "instance/")
    other = d.program("other")
    next_watch(other, last, "instance/")
    assert d.catalog.debug_state()["watchers"] == 2
    p.lose_comm()
    assert d.catalog.debug_state()["watchers"] == 1
    d.pass_time(6.0)
    assert d.catalog.debug_state()["watchers"] == 0


def test_no_more_than_so_many_watch() -> None:
    _, p = scene()
    last = begin_watch(p, "instance/")
    for _ in range(MAX_WATCHERS):
        next_watch(p, last, "instance/")
    rid = next_watch(p, last, "instance/")
    with pytest.raises(CapacityError):
        p.result(rid, m.SignalFrame)


def test_history_is_kept_as_readings_arrive_and_is_bounded() -> None:
    d, p = scene()
    for number in range(HISTORY + 5):
        push(d, number + 1, float(number))
        d.pass_time(1.0)
    ask = m.HistoryAsked(rid=p.rid(), name="instance/i", seconds=1e9)
    found = p.call(ask, m.SignalHistory).points
    assert len(found) == HISTORY
    assert [value["queue"] for _, value in found[-2:]] == [HISTORY + 3.0, HISTORY + 4.0]
    assert found[-1][0] == pytest.approx(1.0, abs=0.01)
    ask = m.HistoryAsked(rid=p.rid(), name="instance/i", seconds=10.5)
    assert len(p.call(ask, m.SignalHistory).points) == 10


def test_the_history_of_what_is_not_kept_is_its_present_and_of_events_what_happened() -> (
    None
):
    _, p = scene()
    p.put("x")
    p.put("y")

    def history(name: str) -> list[dict[str, object]]:
        ask = m.HistoryAsked(rid=p.rid(), name=name, seconds=100.0)
        return [dict(one) for _, one in p.call(ask, m.SignalHistory).points]

    assert [one["versions"] for one in history("artifact/x")] == [1]
    assert [one["id"] for one in history("event/created")] == ["x", "y"]
    assert history("artifact/nothing") == []


def test_nothing_is_told_that_the_journal_could_forget() -> None:
    d, p = scene()
    d.auto = False
    p.put("x")
    p.ask(m.Destroy(rid=p.rid(), id=ArtifactId("x")))
    rid = p.ask(m.SignalsAsked(rid=p.rid(), prefixes=("artifact/",)))
    other = p.ask(m.SignalsAsked(rid=p.rid(), prefixes=("node/",)))
    assert p.answered(other)
    assert not p.answered(rid)
    d.flush()
    assert p.answered(rid)


def test_while_the_journal_is_away_only_what_waits_for_it_is_refused() -> None:
    d, p = scene()
    info = p.put("x")
    d.auto = False
    p.ask(m.Publish(rid=p.rid(), generation=info.generation))
    d.stall()
    rid = p.ask(m.SignalsAsked(rid=p.rid(), prefixes=("artifact/",)))
    with pytest.raises(CatalogUnavailable):
        p.result(rid, m.SignalFrame)
    rid = p.ask(m.SignalsAsked(rid=p.rid(), prefixes=("node/",)))
    assert p.result(rid, m.SignalFrame).changed


def test_a_whole_frame_is_as_long_as_was_asked_and_says_that_there_is_more() -> None:
    d, p = scene()
    for number in range(3):
        push(d, 1, 1.0, name=f"i{number}")
    found = frame(p, "instance/", limit=2)
    assert (len(found.changed), found.more) == (2, True)
    assert not frame(p, "instance/", limit=3).more


def test_what_nobody_watches_any_more_is_forgotten_and_its_watcher_told_all_again() -> (
    None
):
    d, p = scene()
    p.put("x")
    book = d.catalog.observed.signals
    last = begin_watch(p, "artifact/")
    kept = book.kept
    d.pass_time(120.0)
    begin_watch(p, "node/")
    d.pass_time(0.2)
    assert book.kept == kept - 1
    rid = next_watch(p, last, "artifact/")
    d.pass_time(0.2)
    assert p.result(rid, m.SignalFrame).whole


def test_p40_a_thousand_requests_of_which_many_are_cancelled_or_lose_their_client_leave_nothing() -> (
    None
):
    d, p = scene()
    idle = {name: one.value for name, one in snapshot(p, "node/", "catalog/").items()}
    info = p.put("x", node=NodeId("a"))
    b = d.node("b", obedient=False)
    for number in range(1000):
        q = d.program(f"p{number}")
        ask = m.Ensure(
            rid=q.rid(), generation=info.generation, node=b.node, deadline_s=30.0
        )
        q.ask(ask)
        if number % 10 < 3:
            q.ask(m.CancelAsked(rid=q.rid(), asked=ask.rid))
        elif number % 10 == 3:
            q.lose_comm()
        elif number % 10 == 4:
            b.fail_next = m.Fault(kind="CapacityError", message="full")
            b.obey_all()
    busy = snapshot(p, "node/b/orders")["node/b/orders"]
    assert busy["queue"] == 1, "they join one move"
    b.obey_all()
    d.pass_time(35.0)
    for number in range(1000):
        q = d.programs[f"p{number}"]  # type: ignore[index]
        if q.connection:
            q.ask(m.CloseSession(rid=q.rid()))
    d.nodes[NodeId("a")].obedient = b.obedient = True
    p.destroy("x")
    d.pass_time(5.0)
    work = snapshot(p, "node/b/orders")["node/b/orders"]
    assert (work["queue"], work["inflight_bytes"]) == (0, 0)
    found = snapshot(p, "node/a/", "catalog/")
    now = {name: one.value for name, one in found.items()}
    now["catalog/counts"] = {**now["catalog/counts"], "nodes": 1}
    assert now == idle
