"""The copy engine: order, schedules, failures."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from tensorcast_dask.dataplane.devices.engine import Engine
from tensorcast_dask.exceptions import DeviceError, OwnerGone


def by_hand() -> Engine:
    return Engine(lambda ready: ready[0])


def test_what_is_queued_runs_in_the_order_of_its_stream() -> None:
    engine, ran = by_hand(), list[object]()
    for n in range(3):
        engine.submit(1, partial(ran.append, n))
    assert engine.ready() == (1,)
    for _ in range(3):
        engine.step(1)
    assert ran == [0, 1, 2]
    assert engine.ready() == ()


def test_a_piece_waits_for_what_it_follows() -> None:
    engine = by_hand()
    first = engine.submit(1, lambda: None)
    second = engine.submit(2, lambda: None, [first])
    assert engine.ready() == (1,)
    engine.step(1)
    assert engine.ready() == (2,)
    assert first.done()
    assert not second.done()
    assert second.wait(None)


def test_an_owner_that_is_gone_fails_one_copy_alone() -> None:
    engine = by_hand()

    def lost() -> None:
        message = "gone"
        raise OwnerGone(message)

    first, second = engine.submit(1, lost), engine.submit(1, lambda: None)
    assert second.wait(None)
    with pytest.raises(OwnerGone):
        first.done()


def test_any_other_error_is_the_end() -> None:
    engine, ran = by_hand(), list[object]()
    before = engine.submit(1, lambda: ran.append("before"))
    bad = engine.submit(1, lambda: 1 // 0)
    others = [engine.submit(n, lambda: ran.append("late")) for n in (1, 2)]
    engine.step(1)
    engine.step(1)
    assert before.done()
    for work in (bad, *others):
        with pytest.raises(DeviceError):
            work.wait(None)
    with pytest.raises(DeviceError):
        engine.submit(1, None)
    assert ran == ["before"]


def test_a_wait_has_an_end() -> None:
    engine, gate = Engine(), threading.Event()
    work = engine.submit(0, lambda: gate.wait(60))
    assert not work.wait(0.01)
    gate.set()
    assert work.wait(60)
    engine.end("the test is over")


def test_the_thread_takes_what_has_waited_longest() -> None:
    engine, ran, gate = Engine(), list[object](), threading.Event()
    engine.submit(5, lambda: gate.wait(60))
    for n, stream in enumerate([3, 1, 3, 2]):
        engine.submit(stream, partial(ran.append, n))
    last = engine.submit(5, None)
    gate.set()
    assert last.wait(60)
    assert ran == [0, 1, 2, 3]
    engine.end("the test is over")


def test_the_end_waits_for_the_piece_that_runs_and_drops_the_rest() -> None:
    engine, began, gate, ran = Engine(), threading.Event(), threading.Event(), []

    def slow() -> None:
        began.set()
        gate.wait(60)
        ran.append("whole")

    running, waiting = engine.submit(0, slow), engine.submit(0, lambda: ran.append("x"))
    assert began.wait(60)
    timer = threading.Timer(0.01, gate.set)
    timer.start()
    engine.end("the test is over")
    engine.end("again")
    timer.join()
    assert ran == ["whole"]
    assert running.done()
    with pytest.raises(DeviceError, match="the test is over"):
        waiting.done()
