from __future__ import annotations

import msgspec
import pytest

from tensorcast_dask.scheduler_plugin.state.outcomes import (
    OutcomeRow,
    Outcomes,
    Standing,
    number_of,
)
from tensorcast_dask.tensors.ids import Generation, RequestId, SessionId, Version
from tensorcast_dask.tensors.messages import Destroyed, Publish, Wire

S = SessionId("s")


def rid(number: int) -> RequestId:
    return RequestId(f"s-{number}")


def request(number: int, generation: int = 1) -> Wire:
    return Publish(rid=rid(number), generation=Generation(generation))


def look(outcomes: Outcomes, number: int, generation: int = 1) -> Standing:
    digest = outcomes.digest_of(request(number, generation))
    return outcomes.look(S, rid(number), digest)[0]


@pytest.mark.parametrize(
    ("text", "number"), [("s-12", 12), ("12", 12), ("a7b", 0), ("", 0), ("s/9", 9)]
)
def test_the_number_of_a_request_id_is_at_its_end(text: str, number: int) -> None:
    assert number_of(RequestId(text)) == number


def test_a_request_is_new_then_running_then_answered() -> None:
    outcomes = Outcomes(per_session=8)
    assert look(outcomes, 1) is Standing.NEW
    assert look(outcomes, 1) is Standing.RUNNING
    outcomes.answered(S, rid(1), Destroyed(versions=()), durable=False)
    assert look(outcomes, 1) is Standing.ANSWERED


def test_another_payload_under_a_known_id_is_told_apart() -> None:
    outcomes = Outcomes(per_session=8)
    assert look(outcomes, 1, generation=1) is Standing.NEW
    assert look(outcomes, 1, generation=2) is Standing.OTHER


def test_settled_and_crowded_out_answers_are_forgotten_not_run_again() -> None:
    outcomes = Outcomes(per_session=4)
    for number in range(1, 9):
        look(outcomes, number)
        outcomes.answered(S, rid(number), None, durable=False)
    assert outcomes.counts() == (1, 4)
    assert look(outcomes, 2) is Standing.FORGOTTEN
    outcomes.settle(S, 8)
    assert look(outcomes, 7) is Standing.FORGOTTEN
    assert look(outcomes, 8) is Standing.ANSWERED


def test_a_request_that_runs_for_long_is_not_crowded_out() -> None:
    outcomes = Outcomes(per_session=2)
    look(outcomes, 1)
    for number in range(2, 9):
        look(outcomes, number)
        outcomes.answered(S, rid(number), None, durable=False)
    assert look(outcomes, 1) is Standing.RUNNING


def test_a_durable_answer_comes_back_from_its_row() -> None:
    outcomes = Outcomes(per_session=8)
    look(outcomes, 3)
    value = Destroyed(versions=(Version(4),))
    row = outcomes.answered(S, rid(3), value, durable=True)
    assert row is not None
    assert row.blob is not None
    again = Outcomes(per_session=8)
    again.recover(msgspec.msgpack.decode(row.blob, type=OutcomeRow))
    digest = again.digest_of(request(3))
    assert again.look(S, rid(3), digest) == (Standing.ANSWERED, value)
    (gone,) = again.forget(S)
    assert (gone.key, gone.blob) == (row.key, None)
    assert again.forget(S) == []


def test_a_request_refused_for_now_may_be_asked_again() -> None:
    outcomes = Outcomes(per_session=8)
    look(outcomes, 1)
    outcomes.unasked(S, rid(1))
    assert look(outcomes, 1) is Standing.NEW


def test_many_requests_that_run_push_no_answer_out() -> None:
    outcomes = Outcomes(per_session=2)
    for number in range(1, 9):
        look(outcomes, number)
    outcomes.answered(S, rid(1), None, durable=False)
    assert look(outcomes, 1) is Standing.ANSWERED
    assert {look(outcomes, number) for number in range(2, 9)} == {Standing.RUNNING}
    assert outcomes.counts() == (1, 8)
