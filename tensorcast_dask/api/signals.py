"""Signals for a program: what is true now, what changes, what was.

Rules:

1. A watch asks for one frame after the other. Nothing runs between two of them, nothing is
   queued here or at the scheduler: whoever is slow gets the newest values.
2. A watch that is closed ends its iteration, also one that waits in another thread or task.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Final, Self

from tensorcast_dask.api.connection.deadlines import deadline
from tensorcast_dask.api.triggers import Trigger
from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.notebook.cards import signals_card
from tensorcast_dask.tensors.messages import (
    HistoryAsked,
    SignalFrame,
    SignalHistory,
    SignalsAsked,
)
from tensorcast_dask.tensors.signals import (
    EVERYTHING,
    Crossing,
    Reading,
    Signal,
    check_families,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.tensors.ids import RequestId

__all__ = ["Changes", "SignalBook", "Snapshot", "Watch"]

#: How long one question waits at the catalog.
_WAIT_S: Final = 20.0
#: How much longer its answer may take.
_SLACK_S: Final = 40.0
_ALL: Final = 1 << 20
FOREVER_S: Final = 1e9


class Snapshot(dict[str, Signal]):
    """Signals by name, as they were at one instant.

    Attributes
    ----------
    events : list of Signal
        The last events, where they were asked for (`event/`), oldest first.
    more : bool
        There are more than were asked for: ask with a longer prefix.
    """

    def __init__(self, frame: SignalFrame) -> None:
        now = _wall()
        super().__init__((one.name, one.read_at(now)) for one in frame.changed)
        self.events = [one.read_at(now) for one in frame.events]
        self.more = frame.more

    def _repr_html_(self) -> str:
        return signals_card("signals", self.values(), events=self.events)


class Changes:
    """What changed since the last ones.

    Attributes
    ----------
    changed : dict of str to Signal
        New values; the first of a watch has all that there is.
    gone : tuple of str
        Signals that are away.
    events : list of Signal
        What happened, each told once, oldest first.
    missed : bool
        Events were forgotten before they could be told: this program was too slow.
    """

    def __init__(self, frame: SignalFrame, gone: tuple[str, ...]) -> None:
        now = _wall()
        self.changed = {one.name: one.read_at(now) for one in frame.changed}
        self.gone = gone
        self.events = [one.read_at(now) for one in frame.events]
        self.missed = frame.missed

    def __bool__(self) -> bool:
        return bool(self.changed or self.gone or self.events or self.missed)

    def __repr__(self) -> str:
        parts = f"{len(self.changed)} changed, {len(self.gone)} gone"
        return f"<Changes {parts}, {len(self.events)} events>"

    def _repr_html_(self) -> str:
        title = f"what changed; {len(self.gone)} gone"
        return signals_card(title, self.changed.values(), events=self.events)


class Watch:
    """An iterator of `Changes`, plain and asynchronous. Made by `Session.signals.watch`.

    Attributes
    ----------
    current : dict of str to Signal
        All that is watched, as far as it was told.
    """

    def __init__(
        self, core: Core, prefixes: tuple[str, ...], every_s: float, within_s: float
    ) -> None:
        self._core = core
        self._prefixes = prefixes
        self._every_s = every_s
        self._until_s = time.monotonic() + within_s
        self._epoch = self._since = 0
        self._told_s = -math.inf
        self._asked: RequestId | None = None
        self.closed = False
        self.current: dict[str, Signal] = {}

    # ------------------------------------------------------------ iterating
    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Changes:
        changes: Changes | None = None
        if not self.closed:
            changes = self._core.call(self.following)
        if changes is None:
            raise StopIteration
        return changes

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Changes:
        changes: Changes | None = None
        if not self.closed:
            changes = await self._core.bridge(self.following)
        if changes is None:
            raise StopAsyncIteration
        return changes

    async def following(self) -> Changes | None:
        """Wait for the next ones, on the session's loop; None at the end."""
        return await self._follow(patient=True)

    async def look(self) -> Changes | None:
        """Wait for the next ones, or for a while: then there are none in it."""
        return await self._follow(patient=False)

    async def _follow(self, *, patient: bool) -> Changes | None:
        while not self.closed:
            now_s = time.monotonic()
            left_s = self._until_s - now_s
            if left_s <= 0:
                self.closed = True
                break
            begins = not self._epoch
            changes = self._take(await self._ask(now_s, left_s))
            if (changes or begins or not patient) and not self.closed:
                return changes
        return None

    async def _ask(self, now_s: float, left_s: float) -> SignalFrame:
        after_s = max(0.0, self._told_s + self._every_s - now_s)
        request = SignalsAsked(
            rid=self._core.link.next_rid(),
            prefixes=self._prefixes,
            epoch=self._epoch,
            since=self._since,
            after_s=min(after_s, left_s),
            wait_s=min(_WAIT_S, max(left_s - after_s, 0.001)),
            every_s=self._every_s,
            limit=_ALL,
        )
        self._asked = request.rid
        limit = deadline(after_s + _WAIT_S + _SLACK_S)
        try:
            return await self._core.ask(request, SignalFrame, limit)
        finally:
            self._asked = None

    def _take(self, frame: SignalFrame) -> Changes:
        self._told_s = time.monotonic()
        gone = frame.gone
        if frame.whole:
            there = {one.name for one in frame.changed}
            gone = tuple(name for name in self.current if name not in there)
        self._epoch, self._since = frame.epoch, frame.number
        changes = Changes(frame, gone)
        self.current.update(changes.changed)
        for name in gone:
            self.current.pop(name, None)
        return changes

    # ------------------------------------------------------------ ending
    def close(self) -> Any:
        """End the iteration; may be called twice, and from another thread or task."""
        self.closed = True
        return self._core.bridge(self._close)

    async def _close(self) -> None:
        if self._asked is not None:
            await self._core.link.cancel(self._asked)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Watch {', '.join(self._prefixes) or 'everything'}>"


class SignalBook:
    """The signals of a session's cluster."""

    def __init__(self, session: Any) -> None:
        self._core: Core = session._core  # noqa: SLF001 - the book's own session

    def __repr__(self) -> str:
        return "<signals: snapshot(), watch(), history(), trigger()>"

    def snapshot(self, prefix: str | Iterable[str] = "", *, limit: int = 1000) -> Any:
        """Read the signals whose names begin with `prefix`, or with one of several.

        Returns
        -------
        Snapshot
            By name.
        """
        prefixes = _prefixes(prefix)

        async def work() -> Snapshot:
            request = SignalsAsked(
                rid=self._core.link.next_rid(), prefixes=prefixes, limit=limit
            )
            limit_s = self._core.deadline(None)
            return Snapshot(await self._core.ask(request, SignalFrame, limit_s))

        return self._core.bridge(work)

    def watch(
        self,
        prefix: str | Iterable[str] = "",
        *,
        every: float = 0.1,
        seconds: float | None = None,
    ) -> Watch:
        """Iterate over what changes: `for changes in watch`, or `async for`.

        Parameters
        ----------
        prefix : str or iterable of str
            What is watched; `event/` for what happens.
        every : float
            Least seconds between two `Changes`; values in between are passed over, events are
            not.
        seconds : float, optional
            When it ends; None when it is closed.
        """
        every_s = _seconds(every, "every")
        within_s = FOREVER_S if seconds is None else _seconds(seconds, "seconds")
        return Watch(self._core, _prefixes(prefix), every_s, within_s)

    def history(self, name: str, *, seconds: float = FOREVER_S) -> Any:
        """Read the last values of one signal, or the last events of one name.

        Kept are the last 120 readings of each node, link and instance, and 1,024 events.

        Returns
        -------
        list of tuple of float and dict
            When (seconds of the epoch, on this program's clock) and the reading, oldest first.
        """
        within_s = _seconds(seconds, "seconds")

        async def work() -> list[tuple[float, Reading]]:
            request = HistoryAsked(
                rid=self._core.link.next_rid(), name=name, seconds=within_s
            )
            limit = self._core.deadline(None)
            found = await self._core.ask(request, SignalHistory, limit)
            now = _wall()
            return [(now - ago_s, value) for ago_s, value in found.points]

        return self._core.bridge(work)

    def trigger(
        self,
        prefix: str | Iterable[str],
        field: str,
        act: Callable[[Signal], Any],
        *,
        above: float | None = None,
        below: float | None = None,
        clear: float | None = None,
        cooldown: float = 60.0,
        every: float = 1.0,
        name: str = "trigger",
    ) -> Any:
        """Call a function, or run the plan that it gives, when a number crosses a threshold.

        Parameters
        ----------
        prefix : str or iterable of str
            Which signals are looked at, each for itself.
        field : str
            Which of their numbers.
        act : callable
            Given the signal, in a thread; it may give a plan, which is submitted.
        above, below : float, optional
            The threshold; one of them.
        clear : float, optional
            Where the number counts as come back; by default at the threshold.
        cooldown : float
            Least seconds between two crossings of one signal.
        every : float
            How often is looked, in seconds.
        name : str
            For keys and people.

        Returns
        -------
        Trigger
        """
        given: object = act
        if not callable(given):
            message = f"a trigger calls a function of the signal, not {act!r}"
            raise InvalidArgument(message)
        crossing = Crossing(
            above=above,
            below=below,
            clear=clear,
            cooldown_s=_seconds(cooldown, "cooldown"),
        )
        watch = self.watch(prefix, every=every)
        trigger = Trigger(self._core, name, watch, field, crossing, act)
        return self._core.bridge(trigger.start)


def _prefixes(given: object) -> tuple[str, ...]:
    if isinstance(given, str):
        given = (given,)
    found = tuple(given) if isinstance(given, list | tuple | set) else ()
    if not found or not all(isinstance(one, str) for one in found):
        message = f"a prefix is text, or a list of texts, not {given!r}"
        raise InvalidArgument(message)
    check_families(found)
    return EVERYTHING if "" in found else found


def _seconds(given: object, name: str) -> float:
    plain = isinstance(given, int | float) and not isinstance(given, bool)
    if not plain or not 0 <= given <= FOREVER_S:  # type: ignore[operator]
        message = f"{name} must be seconds, 0 or more, not {given!r}"
        raise InvalidArgument(message)
    return float(given)  # type: ignore[arg-type]


def _wall() -> float:
    return time.time()  # noqa: TID251 - for people, and to compare with their own clocks
