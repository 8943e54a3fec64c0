"""How long a caller waits.

Rules:

1. None means the documented default (setting `deadline.default`, 600 s), 0 means look once
   and do not wait, infinity means for ever. Negative numbers, NaN and what is no number
   are refused before anything is done.
2. A deadline is one instant. What is passed on is what is left of it, so that retries and
   hops never add time.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final

from tensorcast_dask.exceptions import DeadlineExceeded, InvalidArgument

__all__ = ["DEFAULT_S", "Deadline", "deadline"]

DEFAULT_S: Final = 600.0
#: How long an answer that waits for nothing may be on its way.
GRACE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Deadline:
    """One instant on this process's monotonic clock."""

    at_s: float
    #: The caller asked to look once.
    poll: bool = False

    def left_s(self) -> float:
        """Seconds that are left, never negative."""
        return max(0.0, self.at_s - time.monotonic())

    def answer_within_s(self) -> float:
        """How long to wait for a peer that was told `left_s`."""
        return self.left_s() + GRACE_S

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
    if math.isnan(seconds) or seconds < 0:
        message = (
            f"deadline must be 0 (look once), positive seconds or None, not {seconds}"
        )
        raise InvalidArgument(message)
    return Deadline(time.monotonic() + seconds, poll=seconds == 0)
