"""Signals: what is true now, what changed since, what happened.

Rules:

1. What is told is read from the truth (`readings`) when somebody looks, and compared with what
   was read last: a change has a number. With nobody looking this costs nothing.
2. A watcher asks for one frame after the other (`SignalsAsked`). The catalog keeps no queue
   for it: whoever is slow gets the newest values, and is told what is away.
3. Looking costs at most a twentieth of the time: the more there is to read, the less often it
   is read for watchers. A question without a wait always reads.
4. A cursor of another epoch, or one that is too old, gets all that there is (`whole`).
5. Everything is bounded: signals, events, history, watchers. Those of a session that is gone
   are gone with it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from tensorcast_dask.exceptions import CapacityError, CatalogUnavailable
from tensorcast_dask.scheduler_plugin.state.checks import check_count, check_seconds
from tensorcast_dask.scheduler_plugin.state.events import Emit
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.operations import Caller
from tensorcast_dask.scheduler_plugin.state.readings import Readings, Told
from tensorcast_dask.tensors.ids import RequestId, SessionId
from tensorcast_dask.tensors.messages import (
    HistoryAsked,
    SignalFrame,
    SignalHistory,
    SignalsAsked,
)
from tensorcast_dask.tensors.signals import Freshness, Reading, Signal, matches

__all__ = ["EVENT", "MAX_EVENTS", "MAX_WATCHERS", "Signals"]

MAX_SIGNALS: Final = 8192
MAX_EVENTS: Final = 1024
MAX_KINDS: Final = 128
MAX_GONE: Final = 4096
MAX_WATCHERS: Final = 1024
MAX_PREFIXES: Final = 64
HISTORY: Final = 120
#: Longest wait of one question; who waits longer asks again.
MAX_WAIT_S: Final = 30.0
MIN_EVERY_S: Final = 0.02
#: Reading one signal is taken to cost 20 us: times 20 it is a twentieth of the time.
_PACE_S: Final = 0.0004
#: What nobody has asked for so long is read no more, unless it has a history.
_INTEREST_S: Final = 60.0
#: Families whose readings are kept as they arrive: these have a history.
_ARRIVING: Final = ("node/", "link/", "instance/")
#: How often all of those are looked through, while they arrive.
_SWEEP_S: Final = 60.0
#: What depends on the journal.
_DURABLE: Final = ("artifact/", "consumer/", "plan/", "event/", "quota/")

EVENT: Final = "event/"
_EVENT_NAMES: Final = {"committed": "created", "node_lapsed": "lease_expired"}


@dataclass(slots=True, eq=False)
class _Entry:
    """One signal as it was read last."""

    told: Told
    number: int
    history: deque[tuple[float, Reading]] | None

    def signal(self, now_s: float) -> Signal:
        told = self.told
        return Signal(
            name=told.name,
            value=told.value,
            staleness=round(max(0.0, now_s - told.as_of_s), 6),
            epoch=told.epoch,
            freshness=Freshness.FRESH if told.fresh else Freshness.STALE,
            number=self.number,
        )


@dataclass(slots=True, eq=False)
class _Watcher:
    """A question that waits."""

    caller: Caller
    ask: SignalsAsked
    every_s: float
    until_s: float


class Signals:
    """All signals, and who watches them."""

    def __init__(self, ground: Ground, readings: Readings) -> None:
        self._outbox = ground.outbox
        self._timers = ground.timers
        self._numbers = ground.names.numbers
        self._readings = readings
        #: Oldest change first.
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._gone: deque[tuple[int, str]] = deque(maxlen=MAX_GONE)
        self._events: deque[tuple[float, Signal]] = deque(maxlen=MAX_EVENTS)
        #: How often each kind of event happened since the scheduler started.
        self.counts: Counter[str] = Counter()
        self.number = 1  # 0 is the cursor of who knows nothing
        #: Cursors below were told of what is not known any more.
        self._floor = 0
        self._watchers: dict[RequestId, _Watcher] = {}
        #: Until when a prefix is looked at for watchers.
        self._interest: dict[str, float] = {}
        self._read_s = 0.0
        self._rest_s = 0.0
        self._swept_s = 0.0
        #: When what runs tell of is read again.
        self._again_s = 0.0

    def __len__(self) -> int:
        return len(self._watchers)

    @property
    def events(self) -> Iterator[tuple[float, Signal]]:
        """The events that are kept with when they happened, newest first."""
        return reversed(self._events)

    @property
    def kept(self) -> int:
        """How many signals are held."""
        return len(self._entries)

    # ------------------------------------------------------------ in
    def happened(self, emit: Emit) -> None:
        """Take an event."""
        self.number += 1
        kind = _EVENT_NAMES.get(emit.topic, emit.topic)
        self.counts[
            kind if kind in self.counts or len(self.counts) < MAX_KINDS else "other"
        ] += 1
        signal = Signal(
            name=EVENT + kind,
            value=dict(emit.facts),
            epoch=self._numbers.epoch,
            number=self.number,
        )
        self._events.append((self._outbox.now_s, signal))

    def arrived(self, readings: Iterable[Told]) -> None:
        """Keep what a source has just said."""
        for told in readings:
            self._note(told)
        now_s = self._outbox.now_s
        if now_s - self._swept_s > _SWEEP_S:
            self._swept_s = now_s
            self._read(_ARRIVING)

    # ------------------------------------------------------------ questions
    def asked(self, caller: Caller, ask: SignalsAsked) -> None:
        """Tell what changed, now or when something has.

        Raises
        ------
        CapacityError
            When too many watch.
        """
        check_count(ask.limit, least=1, most=1 << 62, what="limit")
        check_count(len(ask.prefixes), least=1, most=MAX_PREFIXES, what="prefixes")
        wait_s = min(check_seconds(ask.wait_s, what="wait_s"), MAX_WAIT_S)
        after_s = min(check_seconds(ask.after_s, what="after_s"), MAX_WAIT_S)
        now_s = self._outbox.now_s
        if not wait_s:
            self._read(ask.prefixes)
            self._tell(caller, ask, self._frame(ask))
            return
        if len(self._watchers) >= MAX_WATCHERS:
            message = (
                f"{MAX_WATCHERS} watch signals already; watch fewer, or less often"
            )
            raise CapacityError(message)
        every_s = max(MIN_EVERY_S, check_seconds(ask.every_s, what="every_s"))
        for prefix in ask.prefixes:
            self._interest[prefix] = now_s + _INTEREST_S
        watcher = _Watcher(caller, ask, every_s, now_s + after_s + wait_s)
        self._watchers[caller.rid] = watcher
        self._timers.at(now_s + after_s, lambda: self._look(watcher))

    def cancel(self, rid: RequestId) -> bool:
        """Let a watcher go, with an empty frame; False when it does not wait."""
        watcher = self._watchers.pop(rid, None)
        if watcher is not None:
            frame = SignalFrame(epoch=watcher.ask.epoch, number=watcher.ask.since)
            self._tell(watcher.caller, watcher.ask, frame)
        return watcher is not None

    def session_lost(self, session: SessionId) -> None:
        """Forget the watchers of a session: should it come back, they ask again."""
        for rid, watcher in list(self._watchers.items()):
            if watcher.caller.session == session:
                del self._watchers[rid]

    def history(self, caller: Caller, ask: HistoryAsked) -> None:
        """Tell the last readings of a signal, or the events of a name."""
        seconds = check_seconds(ask.seconds, what="seconds")
        now_s = self._outbox.now_s
        points: list[tuple[float, Reading]]
        if ask.name.startswith(EVENT):
            points = [
                (at_s, one.value) for at_s, one in self._events if one.name == ask.name
            ]
        else:
            self._read((ask.name,))
            entry = self._entries.get(ask.name)
            kept = () if entry is None else entry.history or ()
            points = list(kept)
            if entry is not None and not kept:
                points = [(entry.told.as_of_s, entry.told.value)]
        told = tuple(
            (round(max(0.0, now_s - at_s), 6), value)
            for at_s, value in points
            if now_s - at_s <= seconds
        )
        self._outbox.reply(caller.session, caller.rid, SignalHistory(points=told))

    def look_again(self, prefixes: tuple[str, ...], *, at_once: bool = False) -> None:
        """Read what begins so, if that was not done a moment ago; always the same prefixes."""
        now_s = self._outbox.now_s
        if at_once or now_s >= self._again_s:
            count = self._read(prefixes)
            self._again_s = now_s + max(MIN_EVERY_S, _PACE_S * count)

    def changes(
        self, since: int, prefixes: tuple[str, ...], limit: int
    ) -> list[Signal]:
        """Give the signals that changed since a number, and events, oldest first."""
        ask = SignalsAsked(
            rid=RequestId(""),
            prefixes=prefixes,
            epoch=self._numbers.epoch,
            since=max(since, 1),
            limit=limit,
        )
        frame = self._frame(ask)
        found = [o for o in (*frame.changed, *frame.events) if o.number > since]
        return sorted(found, key=lambda one: one.number)[-limit:]

    # ------------------------------------------------------------ watching
    def _look(self, watcher: _Watcher) -> None:
        if self._watchers.get(watcher.caller.rid) is not watcher:
            return
        now_s = self._outbox.now_s
        if now_s - self._read_s >= self._rest_s:
            self._read_for_all()
        frame = self._frame(watcher.ask)
        told = frame.changed or frame.gone or frame.events or frame.whole
        if told or now_s >= watcher.until_s:
            del self._watchers[watcher.caller.rid]
            self._tell(watcher.caller, watcher.ask, frame)
        else:
            at_s = min(now_s + watcher.every_s, watcher.until_s)
            self._timers.at(at_s, lambda: self._look(watcher))

    def _read_for_all(self) -> None:
        """Read what anybody watches, once for all of them (rule 3)."""
        now_s = self._outbox.now_s
        lost = [one for one, until_s in self._interest.items() if until_s < now_s]
        for prefix in lost:
            del self._interest[prefix]
        if lost:
            self._forget_unwatched()
        count = self._read(tuple(self._interest)) if self._interest else 0
        self._read_s = now_s
        self._rest_s = max(MIN_EVERY_S, _PACE_S * count)

    def _forget_unwatched(self) -> None:
        wanted = (*self._interest, *_ARRIVING)
        for name in [one for one in self._entries if not matches(one, wanted)]:
            del self._entries[name]
            self._floor = self.number

    def _tell(self, caller: Caller, ask: SignalsAsked, frame: SignalFrame) -> None:
        shown = any(
            one.startswith(family) or family.startswith(one)
            for family in _DURABLE
            for one in ask.prefixes
        )
        after = self._outbox.firm if shown else 0
        if self._outbox.stalled and after > self._outbox.durable:
            message = (
                f"the journal cannot write ({self._outbox.stalled}), and these signals "
                "show what waits for it; ask for node/, link/ or instance/ alone"
            )
            raise CatalogUnavailable(message)
        self._outbox.reply(caller.session, caller.rid, frame, after=after)

    # ------------------------------------------------------------ the table
    def _read(self, prefixes: tuple[str, ...]) -> int:
        """Read what begins so; note what changed and what is away."""
        seen: dict[str, None] = {}
        for told in self._readings.of(prefixes):
            seen[told.name] = None
            self._note(told)
        away = [
            one
            for one in self._entries
            if one not in seen
            and matches(one, prefixes)
            and not self._readings.has(one)
        ]
        for name in away:
            self.number += 1
            del self._entries[name]
            if len(self._gone) == MAX_GONE:
                self._floor = max(self._floor, self._gone[0][0])
            self._gone.append((self.number, name))
        return len(seen)

    def _note(self, told: Told) -> None:
        entry = self._entries.get(told.name)
        if entry is None:
            self._add(told)
        elif _same(entry.told, told):
            entry.told = told
        else:
            self._change(entry, told)

    def _add(self, told: Told) -> None:
        if len(self._entries) >= MAX_SIGNALS:
            self._forget_unwatched()
        if len(self._entries) >= MAX_SIGNALS:
            return
        self.number += 1
        history: deque[tuple[float, Reading]] | None = None
        if told.name.startswith(_ARRIVING):
            history = deque([(told.as_of_s, told.value)], maxlen=HISTORY)
        self._entries[told.name] = _Entry(told, self.number, history)

    def _change(self, entry: _Entry, told: Told) -> None:
        self.number += 1
        if entry.history is not None and told.value != entry.told.value:
            entry.history.append((told.as_of_s, told.value))
        entry.told, entry.number = told, self.number
        self._entries.move_to_end(told.name)

    def _frame(self, ask: SignalsAsked) -> SignalFrame:
        epoch, now_s = self._numbers.epoch, self._outbox.now_s
        whole = (
            ask.epoch != epoch
            or not ask.since
            or ask.since < self._floor
            or ask.since > self.number
        )
        changed: list[Signal] = []
        for name, entry in reversed(self._entries.items()):
            if not whole and entry.number <= ask.since:
                break
            if matches(name, ask.prefixes):
                changed.append(entry.signal(now_s))
        gone: list[str] = []
        if not whole:
            for number, name in reversed(self._gone):
                if number <= ask.since:
                    break
                if name not in self._entries and matches(name, ask.prefixes):
                    gone.append(name)
        events, missed = self._news(ask)
        changed.reverse()
        return SignalFrame(
            epoch=epoch,
            number=self.number,
            whole=whole,
            changed=tuple(changed[: ask.limit] if whole else changed),
            gone=tuple(dict.fromkeys(gone)),
            events=events,
            missed=missed,
            more=whole and len(changed) > ask.limit,
        )

    def _news(self, ask: SignalsAsked) -> tuple[tuple[Signal, ...], bool]:
        """Events after a cursor; a question without one gets those that are kept."""
        if not any(EVENT.startswith(p) or p.startswith(EVENT) for p in ask.prefixes):
            return (), False
        since = ask.since if ask.epoch == self._numbers.epoch else 0
        if ask.wait_s and not ask.epoch:
            return (), False  # a watch begins: it is told what happens from now on
        now_s = self._outbox.now_s
        found: list[Signal] = []
        for at_s, one in reversed(self._events):
            if one.number <= since:
                break
            if matches(one.name, ask.prefixes):
                found.append(one.older(round(max(0.0, now_s - at_s), 6)))
        full = len(self._events) == MAX_EVENTS
        missed = full and 0 < since < self._events[0][1].number - 1
        found.reverse()
        return tuple(found[-ask.limit :]), missed


def _same(before: Told, now: Told) -> bool:
    return (
        before.value == now.value
        and before.fresh == now.fresh
        and before.epoch == now.epoch
    )
