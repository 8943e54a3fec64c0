"""Waiting for something to become true, with a bound.

Rules:

1. A test never sleeps and hopes: it names a condition and the longest time it may take.
2. The bound is generous, since it is only ever reached by a failure.
3. The predicate's own `AssertionError` counts as "not yet" and is shown at the end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

__all__ = ["eventually", "eventually_async", "never"]

T = TypeVar("T")

_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05


def eventually(predicate: Callable[[], T], *, within_s: float, what: str = "") -> T:
    """Return the first true value of `predicate`.

    Raises
    ------
    AssertionError
        When it is still false after `within_s` seconds.
    """
    deadline_s = time.monotonic() + within_s
    pause_s = _FIRST_PAUSE_S
    last: object = None
    while True:
        try:
            value = predicate()
        except AssertionError as error:
            last = error
        else:
            if value:
                return value
            last = value
        if time.monotonic() >= deadline_s:
            raise AssertionError(_message(predicate, within_s, what, last))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


@overload
async def eventually_async(
    predicate: Callable[[], Awaitable[T]], *, within_s: float, what: str = ""
) -> T: ...


@overload
async def eventually_async(
    predicate: Callable[[], T], *, within_s: float, what: str = ""
) -> T: ...


async def eventually_async(
    predicate: Callable[[], T | Awaitable[T]], *, within_s: float, what: str = ""
) -> T:
    """Like `eventually`, on an event loop; the predicate may be a coroutine function."""
    deadline_s = time.monotonic() + within_s
    pause_s = _FIRST_PAUSE_S
    last: object = None
    while True:
        try:
            answer = predicate()
            value = await answer if isinstance(answer, Awaitable) else answer
        except AssertionError as error:
            last = error
        else:
            if value:
                return value
            last = value
        if time.monotonic() >= deadline_s:
            raise AssertionError(_message(predicate, within_s, what, last))
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def never(predicate: Callable[[], object], *, for_s: float, what: str = "") -> None:
    """Watch `predicate` for `for_s` seconds and fail as soon as it is true."""
    deadline_s = time.monotonic() + for_s
    while time.monotonic() < deadline_s:
        value = predicate()
        assert not value, f"{what or predicate!r} became true: {value!r}"
        time.sleep(_LONGEST_PAUSE_S)


def _message(
    predicate: Callable[[], object], within_s: float, what: str, last: object
) -> str:
    return f"{what or predicate!r} not true within {within_s} s; last seen: {last!r}"
