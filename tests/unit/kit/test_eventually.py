"""Bounded waiting: it returns at once, waits, gives up, and says what it saw."""

from __future__ import annotations

import asyncio

import pytest

from tests.kit.eventually import eventually, eventually_async, never


def test_a_true_condition_is_returned_as_the_value_that_made_it_true() -> None:
    assert eventually(lambda: [7], within_s=5) == [7]


def test_a_condition_that_becomes_true_is_waited_for() -> None:
    answers = iter([0, None, "", "there"])
    assert eventually(lambda: next(answers), within_s=5) == "there"


def test_a_failed_assertion_counts_as_not_yet() -> None:
    answers = iter([1, 2, 3])

    def third() -> bool:
        assert next(answers) == 3
        return True

    assert eventually(third, within_s=5)


def test_giving_up_names_the_condition_and_what_was_last_seen() -> None:
    with pytest.raises(AssertionError, match=r"the store is up.*last seen: 0"):
        eventually(lambda: 0, within_s=0, what="the store is up")


def test_other_errors_end_the_wait_at_once() -> None:
    def broken() -> bool:
        raise KeyError("name")

    with pytest.raises(KeyError):
        eventually(broken, within_s=5)


def test_a_coroutine_may_be_the_condition() -> None:
    answers = iter([False, True])

    async def ready() -> bool:
        return next(answers)

    assert asyncio.run(eventually_async(ready, within_s=5)) is True


def test_what_must_never_be_true_fails_when_it_is() -> None:
    never(lambda: False, for_s=0.01)
    with pytest.raises(AssertionError, match="a lease was lost"):
        never(lambda: True, for_s=1, what="a lease was lost")
