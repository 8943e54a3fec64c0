"""The simulator's own parts: what it promises to whoever builds on it."""

from __future__ import annotations

import random
from functools import partial

from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import Generation
from tests.kit.sim_faults import CALM, Faults
from tests.kit.sim_network import Network
from tests.kit.sim_timeline import Life, Process, Signal, Timeline, brief


def test_acts_of_one_instant_run_in_the_order_of_their_making() -> None:
    time = Timeline()
    ran: list[object] = []
    for number in range(5):
        time.after(1.0, partial(ran.append, number))
    time.after(0.5, lambda: ran.append("first"))
    time.run(time.now_s + 2.0)
    assert ran == ["first", 0, 1, 2, 3, 4]


def test_a_process_waits_for_time_and_signals_and_ends_with_its_life() -> None:
    time, signal = Timeline(), Signal()
    ran: list[object] = []
    life = Life("p")

    def process() -> Process:
        yield 1.0
        ran.append((yield signal, 1.0))
        ran.append((yield signal))
        yield 5.0
        ran.append("after its end")

    ended = time.spawn(life, process())
    time.run(time.now_s + 2.5)
    assert ran == [False]
    signal.fire()
    time.run(time.now_s + 0.1)
    assert ran == [False, True]
    life.alive = False
    time.run(time.now_s + 10.0)
    assert ran == [False, True]
    assert not ended.fired


def hear(got: list[int], message: m.Wire) -> None:
    assert isinstance(message, m.TaskSeen)
    got.append(message.task)


def test_a_connection_keeps_its_order_and_delivers_a_prefix() -> None:
    for seed in range(50):
        time = Timeline()
        faults = Faults(delay=0.5, delay_s=2.0)
        network = Network(time, random.Random(seed), faults)
        one, two = network.connect(("a", "one"), ("b", "two"))
        got: list[int] = []
        two.on_message = partial(hear, got)
        for task in range(20):
            one.send(m.TaskSeen(task=task))
            time.run(time.now_s + 0.1)
            if task == 15:
                network.break_one(one.connection)
        time.run(time.now_s + 30.0)
        assert got == list(range(len(got)))
        assert len(got) <= 16
        assert not one.open
        assert not two.open


def test_what_meets_a_long_silence_breaks_the_connection_and_a_short_one_waits() -> (
    None
):
    for silence_s, arrives in ((3.0, True), (60.0, False)):
        time = Timeline()
        network = Network(time, random.Random(0), CALM)
        one, two = network.connect(("a", "one"), ("b", "two"))
        got: list[object] = []
        two.on_message = got.append
        network.cut("a", "b", silence_s)
        one.send(m.TaskSeen(task=1))
        time.run(time.now_s + 15.0)
        assert bool(got) is arrives
        assert one.open is arrives


def test_a_line_of_the_trace_says_what_is_not_usual() -> None:
    assert brief(m.DoDrop(task=7, generation=Generation(3), final=True)) == (
        "DoDrop(task=7, generation=3, final=True)"
    )
