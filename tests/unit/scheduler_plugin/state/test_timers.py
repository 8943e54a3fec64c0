from __future__ import annotations

from tensorcast_dask.scheduler_plugin.state.timers import Timers


def test_appointments_ring_in_order_and_not_before_their_time() -> None:
    timers, rang = Timers(), list[str]()
    timers.at(2.0, lambda: rang.append("b"))
    timers.at(1.0, lambda: rang.append("a"))
    timers.at(2.0, lambda: rang.append("c"))
    assert timers.next_s() == 1.0
    timers.run_due(1.5)
    assert rang == ["a"]
    timers.run_due(2.0)
    assert rang == ["a", "b", "c"]
    assert timers.next_s() is None


def test_a_cancelled_appointment_neither_rings_nor_wakes_anybody() -> None:
    timers, rang = Timers(), list[str]()
    one = timers.at(1.0, lambda: rang.append("one"))
    one.cancel()
    one.cancel()
    assert timers.next_s() is None
    timers.run_due(5.0)
    assert rang == []


def test_what_is_made_while_it_rings_and_is_due_rings_too() -> None:
    timers, rang = Timers(), list[str]()

    def act() -> None:
        timers.at(1.0, lambda: rang.append("later"))

    timers.at(1.0, act)
    timers.run_due(1.0)
    assert rang == ["later"]
