"""What all open browsers look at: made once a tick, whoever asks, and not at all when nobody does.

Rules:

1. What two browsers ask for alike is made and packed once a tick.
2. A look through all artifacts is done in slices of `SLICE_S` with the loop free in between; until
   it is over the page says how far it is. It is done anew only after the catalog has changed, and
   takes at most a tenth of the time.
3. With no browser open no timer runs, and nothing is kept for long.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from tensorcast_dask.dashboard.data.events import Words, events
from tensorcast_dask.dashboard.data.memory import Page, memory
from tensorcast_dask.dashboard.data.placement import Place, placement
from tensorcast_dask.dashboard.data.plans import Chosen, plans
from tensorcast_dask.dashboard.data.search import Search, Wanted
from tensorcast_dask.dashboard.data.story import Subject, story
from tensorcast_dask.dashboard.data.transfers import Now, transfers
from tensorcast_dask.scheduler_plugin.state.catalog import Catalog
from tensorcast_dask.scheduler_plugin.state.events import CatalogSettings, Recovered
from tensorcast_dask.tensors.ids import ClusterId, Epoch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.dashboard.data.shared import Told

__all__ = ["EVERY_S", "PAGES", "Asked", "Board", "Seen"]

#: The pages in the order of their navigation; `story` is reached from them.
PAGES: Final = ("placement", "memory", "transfers", "plans", "events")
#: How often a page is made anew.
EVERY_S: Final = 1.0
#: How long the loop is held by one slice of a search, and by the first look of a new one.
SLICE_S: Final = 0.004
FIRST_S: Final = 0.03
#: Artifacts that are looked at between two looks at the clock.
STRIDE: Final = 64
PAUSE_S: Final = 0.04
#: What nobody has asked for so long is forgotten.
INTEREST_S: Final = 5.0
#: A search is done again after this, also when nothing seems to have changed: heat decays.
STALE_S: Final = 15.0
MOST_SEARCHES: Final = 32

_CLOSING: Final = {
    "head": "",
    "empty": "The catalog of this cluster is closing, or has not begun yet.",
}

Asked: TypeAlias = Place | Page | Now | Chosen | Words | Subject


@dataclass(slots=True, frozen=True)
class Seen:
    """One page as it is now.

    Attributes
    ----------
    told : Told
        What it shows.
    parts : dict
        The same as JSON, by part: a browser is sent those that changed.
    """

    told: Told
    parts: dict[str, str]


@dataclass(slots=True)
class _Kept:
    """What is known of one wish."""

    shown: Search
    asked_s: float
    #: The one that is under way.
    running: Search | None = None
    #: The catalog's last change when it began.
    seq: tuple[int, int] = (0, 0)
    over_s: float = 0.0
    cost_s: float = 0.0


class Board:
    """All pages of one scheduler.

    Parameters
    ----------
    catalog : callable
        Gives the catalog of now; None while there is none.
    now : callable
        The clock that the catalog is handed.
    """

    def __init__(
        self,
        catalog: Callable[[], Catalog | None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog = catalog
        self._now = now
        self._zero_s = time.time() - now()  # noqa: TID251 - shown to people
        #: What is shown while there is none: a catalog with nothing in it.
        self._none = Catalog(
            CatalogSettings(), Recovered(cluster=ClusterId(""), epoch=Epoch(1))
        )
        self._of: Catalog = self._none
        self._tick = -1
        self._seen: dict[Asked, Seen] = {}
        self._searches: dict[Wanted, _Kept] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is under way (rule 3)."""
        return self._timer is None

    def see(self, asked: Asked) -> Seen:
        """Give a page as it is now."""
        now_s = self._now()
        there = self._catalog()
        catalog = there or self._none
        if catalog is not self._of:
            self._of = catalog
            self._seen, self._searches = {}, {}
        if (tick := int(now_s / EVERY_S)) != self._tick:
            self._tick, self._seen = tick, {}
        seen = self._seen.get(asked)
        if seen is None:
            told = self._make(catalog, asked)
            if there is None:
                told = msgspec.structs.replace(told, texts=told.texts | _CLOSING)
            seen = self._seen[asked] = Seen(told, _packed(told))
        return seen

    def close(self) -> None:
        """Stop what is under way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._seen, self._searches = {}, {}

    def _make(self, catalog: Catalog, asked: Asked) -> Told:
        match asked:
            case Place():
                return placement(catalog, self._search(catalog, asked.wanted), asked)
            case Page():
                return memory(catalog, asked)
            case Now():
                return transfers(catalog)
            case Chosen():
                return plans(catalog, asked)
            case Words():
                return events(catalog, asked, zero_s=self._zero_s)
            case Subject():
                return story(catalog, asked, zero_s=self._zero_s)

    # ------------------------------------------------------------ searches
    def _search(self, catalog: Catalog, wanted: Wanted) -> Search:
        now_s = self._now()
        kept = self._searches.get(wanted)
        if kept is None:
            if len(self._searches) >= MOST_SEARCHES:
                oldest = min(
                    self._searches, key=lambda one: self._searches[one].asked_s
                )
                del self._searches[oldest]
            search = Search(catalog, wanted)
            kept = self._searches[wanted] = _Kept(search, now_s, search)
            kept.seq = _changes(catalog)
            self._advance(kept, FIRST_S)
        kept.asked_s = now_s
        if kept.running is None and self._is_due(catalog, kept, now_s):
            kept.running = Search(catalog, wanted)
            kept.seq, kept.cost_s = _changes(catalog), 0.0
            self._advance(kept, SLICE_S)
        if kept.running is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PAUSE_S, self._turn)
        return kept.shown

    def _is_due(self, catalog: Catalog, kept: _Kept, now_s: float) -> bool:
        passed_s = now_s - kept.over_s
        if passed_s < max(EVERY_S, 9 * kept.cost_s):
            return False
        return passed_s > STALE_S or kept.seq != _changes(catalog)

    def _advance(self, kept: _Kept, within_s: float) -> None:
        """Go on with a search for so long."""
        search = kept.running
        assert search is not None, "board: went on with nothing"
        begun_s = self._now()
        while not search.advance(STRIDE):
            if self._now() - begun_s > within_s:
                break
        now_s = self._now()
        kept.cost_s += now_s - begun_s
        if search.over:
            kept.shown, kept.running, kept.over_s = search, None, now_s

    def _turn(self) -> None:
        """Give each search that is wanted a slice; the loop is free in between."""
        self._timer = None
        now_s = self._now()
        left = False
        for wanted, kept in list(self._searches.items()):
            if now_s - kept.asked_s > INTEREST_S:
                del self._searches[wanted]
            elif kept.running is not None:
                self._advance(kept, SLICE_S)
                left = left or kept.running is not None
        if left:
            self._timer = asyncio.get_running_loop().call_later(PAUSE_S, self._turn)


def _changes(catalog: Catalog) -> tuple[int, int]:
    """Give what rises with each change of what a search looks at."""
    return catalog.outbox.seq, catalog.observed.signals.number


def _packed(told: Told) -> dict[str, str]:
    pack = msgspec.json.encode
    return {
        **{f"columns/{name}": pack(one).decode() for name, one in told.columns.items()},
        "texts": pack(told.texts).decode(),
        "counts": pack(told.counts).decode(),
    }
