from __future__ import annotations

from tensorcast_dask.instance.state.calls import Calls
from tensorcast_dask.tensors.messages import Call, CallEnded


def call(number: int, key: str = "", **more: object) -> Call:
    given = {"function": "f", "args": b"a", "deadline_s": 10.0} | more
    return Call(number=number, key=key, **given)  # type: ignore[arg-type]


def kind(ended: CallEnded | None) -> str:
    assert ended is not None
    assert ended.fault is not None
    return ended.fault.kind


def test_calls_are_taken_in_their_order() -> None:
    calls = Calls()
    for number in (4, 2, 9):
        calls.asked(call(number), now_s=0.0)
    taken = [calls.next(now_s=0.0) for _ in range(4)]
    assert [one and one.number for one in taken] == [4, 2, 9, None]


def test_a_call_that_was_dropped_or_came_too_late_does_not_begin() -> None:
    calls = Calls()
    calls.asked(call(1), now_s=0.0)
    calls.asked(call(2, deadline_s=5.0), now_s=0.0)
    calls.asked(call(3, deadline_s=5.5), now_s=0.0)
    calls.dropped(1)
    calls.dropped(7)  # has begun, or was never here
    assert calls.next(now_s=5.0) == call(3, deadline_s=5.5)
    assert len(calls) == 0


def test_calls_of_a_node_that_is_gone_are_forgotten() -> None:
    calls = Calls()
    calls.asked(call(1), now_s=0.0)
    calls.forget_waiting()
    assert calls.next(now_s=0.0) is None


def test_a_repeat_gets_the_first_outcome_under_its_own_number() -> None:
    calls = Calls()
    assert calls.known(call(1, "k")) is None
    calls.ended(call(1, "k"), CallEnded(number=1, value=b"v"))
    assert calls.known(call(8, "k")) == CallEnded(number=8, value=b"v")


def test_calls_without_a_key_are_carried_out_each_time() -> None:
    calls = Calls()
    calls.ended(call(1), CallEnded(number=1, value=b"v"))
    assert calls.known(call(2)) is None


def test_a_key_is_one_calls_only() -> None:
    calls = Calls()
    calls.ended(call(1, "k"), CallEnded(number=1))
    assert kind(calls.known(call(2, "k", function="g"))) == "Mismatch"
    assert kind(calls.known(call(2, "k", args=b"b"))) == "Mismatch"


def test_an_outcome_that_was_given_up_is_unknown_and_never_carried_out_again() -> None:
    calls = Calls(keep=2, keep_bytes=100)
    for at in range(4):
        calls.ended(call(at, f"k{at}"), CallEnded(number=at))
    assert kind(calls.known(call(9, "k0"))) == "Unknown"
    assert calls.known(call(9, "k3")) == CallEnded(number=9)
    calls.ended(call(5, "big"), CallEnded(number=5, value=bytes(101)))
    assert kind(calls.known(call(9, "big"))) == "Unknown"
    assert kind(calls.known(call(9, "k3"))) == "Unknown"


def test_keys_are_bounded_too() -> None:
    calls = Calls(keep=1)
    for at in range(20):
        calls.ended(call(at, f"k{at}"), CallEnded(number=at))
    assert calls.known(call(0, "k0")) is None
    assert kind(calls.known(call(0, "k5"))) == "Unknown"


def test_half_an_update_holds_up_what_waited_already_but_not_what_mends_it() -> None:
    calls = Calls()
    done = call(1, "k")
    calls.ended(done, CallEnded(number=1, value=b"v"))
    calls.poisoned = "w3"
    assert kind(calls.known(call(2))) == "Poisoned"
    assert kind(calls.known(call(3, "other"))) == "Poisoned"
    assert calls.known(call(4, function="transform_into")) is None
    assert calls.known(call(5, "k")) == CallEnded(number=5, value=b"v")
    calls.poisoned = ""
    assert calls.known(call(6, "other")) is None  # it was not carried out
