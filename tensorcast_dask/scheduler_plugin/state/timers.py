"""What has to happen at a time, kept in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

Act: TypeAlias = Callable[[], None]


@dataclass(slots=True)
class Timer:
    """One appointment."""

    at_s: float
    act: Act | None

    def cancel(self) -> None:
        """Forget it; it may be cancelled twice, or after it rang."""
        self.act = None


class Timers:
    """A heap of appointments; cancelled ones are dropped when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = 0

    def at(self, at_s: float, act: Act) -> Timer:
        """Make an appointment."""
        timer = Timer(at_s, act)
        self._count += 1
        heapq.heappush(self._heap, (at_s, self._count, timer))
        return timer

    def run_due(self, now_s: float) -> None:
        """Ring everything that is due; what is made meanwhile and due rings too."""
        while self._heap and self._heap[0][0] <= now_s:
            timer = heapq.heappop(self._heap)[2]
            if timer.act is not None:
                act, timer.act = timer.act, None
                act()

    def next_s(self) -> float | None:
        """When the next one is due."""
        while self._heap and self._heap[0][2].act is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
