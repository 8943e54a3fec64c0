"""How long to wait before something that failed is tried again.

Rules:

1. Each failure in a row doubles the pause, up to a most.
2. What lived for a while clears the record.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Tries"]

FIRST_S: Final = 1.0
MOST_S: Final = 60.0
STEADY_S: Final = 60.0


class Tries:
    """The record of one thing that is kept alive."""

    def __init__(self) -> None:
        self.failures = 0

    def failed(self) -> float:
        """Note a failure; the pause before the next attempt."""
        pause_s = min(FIRST_S * 2.0**self.failures, MOST_S)
        self.failures += 1
        return pause_s

    def lived(self, seconds: float) -> None:
        """Note for how long it lived."""
        if seconds >= STEADY_S:
            self.failures = 0
