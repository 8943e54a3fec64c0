"""Virtual time: a queue of acts, processes that wait in it, and what was traced.

Rules:

1. Acts run in order of time, those of one instant in the order in which they were made.
2. A process is a generator. It yields seconds, or a `Signal`, or a (`Signal`, seconds) of
   patience; the value of the yield is True when the signal fired.
3. A process belongs to a `Life`. When that is over it is never resumed.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

__all__ = ["Life", "Process", "Signal", "Timeline", "brief"]

_LONG = ("index", "index_digest", "card", "uses", "value", "labels", "content_digest")


def brief(what: object) -> str:
    """Show a message on one line: its kind, and the fields that say something."""
    if isinstance(what, tuple | list):
        return "[" + ", ".join(map(brief, what)) + "]"
    if not isinstance(what, msgspec.Struct):
        return str(what)[:120]
    defaults = dict(
        zip(
            reversed(what.__struct_fields__),
            reversed(what.__struct_defaults__),
            strict=False,
        )
    )
    said = [
        f"{name}={brief(value)}"
        for name in what.__struct_fields__
        if (value := getattr(what, name)) != defaults.get(name, msgspec.UNSET)
        and name not in _LONG
    ]
    return f"{type(what).__name__}({', '.join(said)})"


@dataclass(eq=False)
class Life:
    """Something that can die: a process of the operating system."""

    name: str
    alive: bool = True


@dataclass(eq=False)
class Signal:
    """Happens once."""

    fired: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def fire(self) -> None:
        """Wake who waits, once."""
        self.fired = True
        waiting, self.waiting = self.waiting, []
        for wake in waiting:
            wake()


Wait: TypeAlias = "float | Signal | tuple[Signal, float]"
Process: TypeAlias = Generator[Wait, bool, None]


class Timeline:
    """The clock and everything that will happen.

    Attributes
    ----------
    now_s : float
        The one true time; nodes see it through clocks of their own.
    trace : deque
        The last events, for who must find out what went wrong.
    """

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.trace: deque[tuple[float, str, object]] = deque(maxlen=400)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def note(self, who: str, what: object) -> None:
        """Add a line to the trace; it is formatted only if it is ever printed."""
        self.trace.append((self.now_s, who, what))

    def story(self, lines: int = 30) -> str:
        """Give the end of the trace."""
        return "\n".join(
            f"{at_s - 1000.0:9.4f}  {who:<12} {brief(what)}"
            for at_s, who, what in list(self.trace)[-lines:]
        )

    # -------------------------------------------------------------- acts
    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do something later."""
        self.at(self.now_s + delay_s, act)

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        """Do something at a time; what is past is done now."""
        heapq.heappush(self._queue, (max(at_s, self.now_s), next(self._order), act))

    def run(self, until_s: float) -> None:
        """Let time pass."""
        while self._queue and self._queue[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._queue)
            act()
        self.now_s = until_s

    # -------------------------------------------------------------- processes
    def spawn(self, life: Life, process: Process) -> Signal:
        """Run a process; the signal fires when it has ended."""
        ended = Signal()
        self._resume(life, process, ended, value=None)
        return ended

    def _resume(
        self, life: Life, process: Process, ended: Signal, *, value: bool | None
    ) -> None:
        if not life.alive:
            return
        try:
            wait = next(process) if value is None else process.send(value)
        except StopIteration:
            ended.fire()
            return
        if isinstance(wait, int | float):
            self.after(wait, lambda: self._resume(life, process, ended, value=False))
        elif isinstance(wait, Signal):
            self._await(life, process, ended, wait, None)
        else:
            self._await(life, process, ended, *wait)

    def _await(
        self,
        life: Life,
        process: Process,
        ended: Signal,
        signal: Signal,
        patience_s: float | None,
    ) -> None:
        done = False

        def wake(value: bool) -> None:
            nonlocal done
            if not done:
                done = True
                self._resume(life, process, ended, value=value)

        if signal.fired:
            self.after(0.0, lambda: wake(True))
            return
        signal.waiting.append(lambda: self.after(0.0, lambda: wake(True)))
        if patience_s is not None:
            self.after(patience_s, lambda: wake(False))
