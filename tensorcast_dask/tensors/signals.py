"""Signals: facts about the running system, in one envelope.

A name says of what: `FAMILY/SUBJECT`, such as `node/<node>/host` or `link/<source>/<node>`
(docs/signals.md lists them). The value is one reading: numbers that were true together.

Rules:

1. Every signal has a source, whose term (`epoch`) and last word (`as_of`) it carries. One
   whose source has not spoken in time is stale, and later away: never a number that nobody
   stands for.
2. Hosts do not share a clock: ages travel, and who receives a signal counts back from its
   own clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

__all__ = [
    "EVERYTHING",
    "Freshness",
    "Rate",
    "Reading",
    "Signal",
    "ewma",
    "matches",
    "rounded",
]

Reading: TypeAlias = dict[str, str | int | float | bool | None]

EVERYTHING: Final = ("",)
_LN2: Final = 0.6931471805599453


class Freshness(StrEnum):
    """Whether its source still stands for it."""

    FRESH = "fresh"
    STALE = "stale"


class Signal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fact.

    Attributes
    ----------
    name : str
        Of what.
    value : dict
        The reading.
    staleness : float
        Seconds from when it was true to when it was told.
    epoch : int
        The source's term: incarnation of a node, attachment of an instance, or epoch of the
        catalog.
    freshness : Freshness
        `fresh`, or `stale` when the source is late or gone.
    number : int
        Which change of the catalog's signals brought it; rises.
    as_of : float
        When it was true, on the clock of who reads it; set on receipt.
    """

    name: str
    value: Reading = {}
    staleness: float = 0.0
    epoch: int = 0
    freshness: Freshness = Freshness.FRESH
    number: int = 0
    as_of: float = 0.0

    def __getitem__(self, field: str) -> str | int | float | bool | None:
        return self.value[field]

    @property
    def fresh(self) -> bool:
        """Whether its source still stands for it."""
        return self.freshness is Freshness.FRESH

    def read_at(self, now: float) -> Signal:
        """Give it with `as_of` on the clock that shows `now`."""
        return msgspec.structs.replace(self, as_of=now - self.staleness)


def matches(name: str, prefixes: Iterable[str]) -> bool:
    """Whether a name begins with one of the prefixes."""
    return name.startswith(tuple(prefixes))


def ewma(before: float | None, value: float, alpha: float) -> float:
    """Smooth: `alpha` of the new value, the rest of what was before."""
    return value if before is None else alpha * value + (1.0 - alpha) * before


def rounded(value: float, digits: int = 3) -> float:
    """Keep so many significant digits: a number that only trembles is the same number."""
    return float(f"{value:.{digits - 1}e}")


class Rate:
    """How often something happens, in events a second, with a half-life.

    An event counts half after `half_life_s`; nothing has to be taken away again.
    """

    __slots__ = ("_at_s", "_half_life_s", "_weight")

    def __init__(self, half_life_s: float, now_s: float) -> None:
        self._half_life_s = half_life_s
        self._at_s = now_s
        self._weight = 0.0

    def add(self, count: float, now_s: float) -> None:
        """Count events."""
        self._weight = self._decayed(now_s) + count
        self._at_s = max(self._at_s, now_s)

    def at(self, now_s: float) -> float:
        """Events a second, as seen at `now_s`."""
        return self._decayed(now_s) * _LN2 / self._half_life_s

    def _decayed(self, now_s: float) -> float:
        passed_s = max(0.0, now_s - self._at_s)
        return float(self._weight * 0.5 ** (passed_s / self._half_life_s))
