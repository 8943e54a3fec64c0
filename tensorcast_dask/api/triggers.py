"""Triggers: a plan is run, or a function called, when a signal crosses a threshold.

Rules:

1. A trigger belongs to its session and ends with it. What it has begun goes on.
2. One crossing is one call, with hysteresis and cooldown for each signal by itself; what a
   stale signal says crosses nothing.
3. A plan that the function gives, without a key of its own, is run under one that names the
   trigger, the signal and its change: programs that see the crossing in the same change run it once.
4. An error of the function is kept (`error`) and ends the trigger: nothing fires again on what
   nobody understands.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol

from tensorcast_dask.exceptions import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.tensors.signals import Crossing, Signal

__all__ = ["Trigger", "Watched"]


class Watched(Protocol):
    """What is used of a watch.

    Attributes
    ----------
    current : dict of str to Signal
        All that is watched.
    closed : bool
        It ends.
    """

    current: dict[str, Signal]
    closed: bool

    async def look(self) -> Any:
        """Wait for the next changes, or for a while; None at the end."""

    def close(self) -> Any:
        """End it."""


class Trigger:
    """A trigger that is set. Made by `Session.signals.trigger`.

    Attributes
    ----------
    fired : list of Signal
        The signals that crossed, as they were then; the last hundred.
    runs : list of PlanRun
        Of the plans that were given; the last hundred.
    error : Exception or None
        What ended it.
    """

    def __init__(
        self,
        core: Any,
        name: str,
        watch: Watched,
        field: str,
        crossing: Crossing,
        act: Callable[[Signal], Any],
    ) -> None:
        self._core = core
        self.name = name
        self._watch = watch
        self._field = field
        self._crossing = crossing
        self._act = act
        self._task: asyncio.Task[None] | None = None
        self.fired: list[Signal] = []
        self.runs: list[Any] = []
        self.error: Exception | None = None

    @property
    def active(self) -> bool:
        """Whether it still watches."""
        return self._task is not None and not self._task.done()

    async def start(self) -> Trigger:
        """Begin to watch; what `Session.signals.trigger` does."""
        self._task = asyncio.create_task(self._run(), name=f"tensorcast-{self.name}")
        return self

    def close(self) -> Any:
        """Watch no more."""
        return self._watch.close()

    async def _run(self) -> None:
        try:
            while (changes := await self._watch.look()) is not None:
                for name in changes.gone:
                    self._crossing.gone(name)
                for signal in list(self._watch.current.values()):
                    await self._look(signal)
        except Exception as error:  # noqa: BLE001 - rule 4
            self.error = error
            self._watch.closed = True

    async def _look(self, signal: Signal) -> None:
        value = signal.value.get(self._field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        if not signal.fresh:
            return
        if self._crossing.see(signal.name, float(value), time.monotonic()):
            self.fired = [*self.fired[-99:], signal]
            given = await self._core.in_thread(self._act, signal)
            if given is not None:
                await self._submit(given, signal)

    async def _submit(self, plan: Any, signal: Signal) -> None:
        if not callable(getattr(plan, "submit", None)) or not hasattr(plan, "key"):
            message = f"a trigger's function gives a plan or None, not {plan!r}"
            raise InvalidArgument(message)
        if not plan.context.key:
            plan.key = f"{self.name}-{signal.name}-{signal.epoch:x}-{signal.number:x}"
        run = (await plan._submit(None, "graph"))._offer()  # noqa: SLF001 - one floor
        self.runs = [*self.runs[-99:], run]

    def __repr__(self) -> str:
        state = "active" if self.active else "ended"
        return f"<Trigger {self.name!r} {state}, fired {len(self.fired)} times>"
