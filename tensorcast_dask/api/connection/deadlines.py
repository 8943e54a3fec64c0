"""How long a caller waits.

Rules:

1. None means the documented default (setting `deadline.default`, 600 s), 0 means look once
   and do not wait, infinity means for ever. Negative numbers, NaN and what is no number
   are refused before anything is done.
2. A deadline is one instant. What is passed on is what is left of it, so that retries and
   hops never add time.
3. So is the instant at which an answer is no longer waited for, a moment later: the hops of
   one call share that moment, they do not have one each.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from tensorcast_dask.exceptions import DeadlineExceeded, InvalidArgument

__all__ = ["DEFAULT_S", "Deadline", "deadline"]

DEFAULT_S: Final = 600.0
#: How long after its deadline a call still waits for answers that are on their way.
GRACE_S: Final = 2.0
#: For ever, as a number that every clock and socket takes.
MAX_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class Deadline:
    """One instant on this process's monotonic clock."""

    at_s: float
    #: The caller asked to look once.
    poll: bool = False
    #: When an answer is no longer waited for; None is `GRACE_S` after `at_s`.
    answer_at_s: float | None = None

    def left_s(self) -> float:
        """Seconds that are left, never negative."""
        return max(0.0, self.at_s - time.monotonic())

    def answer_within_s(self) -> float:
        """How long to wait for a peer that was told `left_s`, never negative."""
        return max(0.0, self._answer_at_s() - time.monotonic())

    def sooner(self, seconds: float) -> Deadline:
        """Give one that ends so long from now, with no moment after it, or with this one."""
        ends_s = time.monotonic() + seconds
        return Deadline(
            min(self.at_s, ends_s), self.poll, min(self._answer_at_s(), ends_s)
        )

    def look(self, seconds: float) -> Deadline:
        """Give one for a peer that is to answer at once or not, waited for so long."""
        now_s = time.monotonic()
        return Deadline(now_s, self.poll, min(self._answer_at_s(), now_s + seconds))

    def _answer_at_s(self) -> float:
        return self.at_s + GRACE_S if self.answer_at_s is None else self.answer_at_s

    def check(self, doing: str) -> None:
        """Raise when the instant has passed.

        Raises
        ------
        DeadlineExceeded
            Naming what was being done. A deadline of 0 is let through: it means one look.
        """
        if not self.poll and time.monotonic() >= self.at_s:
            message = (
                f"the deadline passed while {doing}; give it more time with deadline="
            )
            raise DeadlineExceeded(message)


def deadline(seconds: float | None, *, default_s: float = DEFAULT_S) -> Deadline:
    """Turn a caller's `deadline=` into an instant.

    Raises
    ------
    InvalidArgument
        When `seconds` is negative, NaN or no number.
    """
    if seconds is None:
        seconds = default_s
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        message = f"deadline must be seconds or None, not {type(seconds).__name__}"
        raise InvalidArgument(message)
    if seconds != seconds or seconds < 0:  # noqa: PLR0124 - NaN; an int need not fit a float
        message = (
            f"deadline must be 0 (look once), positive seconds or None, not {seconds}"
        )
        raise InvalidArgument(message)
    return Deadline(time.monotonic() + min(seconds, MAX_S), poll=seconds == 0)
