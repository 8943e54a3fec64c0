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

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

from tensorcast_dask.exceptions import InvalidArgument

__all__ = [
    "EVERYTHING",
    "FAMILIES",
    "Crossing",
    "Freshness",
    "Rate",
    "Reading",
    "Signal",
    "check_families",
    "ewma",
    "matches",
    "rounded",
]

Reading: TypeAlias = dict[str, str | int | float | bool | None]

EVERYTHING: Final = ("",)
#: With what a name begins.
FAMILIES: Final = (
    *("artifact/", "catalog/", "consumer/", "event/", "instance/", "link/"),
    *("node/", "plan/", "policy/", "quota/"),
)
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

    def older(self, seconds: float) -> Signal:
        """Give it as it is told so much later."""
        return msgspec.structs.replace(self, staleness=self.staleness + seconds)


def matches(name: str, prefixes: Iterable[str]) -> bool:
    """Whether a name begins with one of the prefixes."""
    return name.startswith(tuple(prefixes))


def check_families(prefixes: Iterable[str]) -> None:
    """Refuse a prefix with which no name can ever begin.

    Raises
    ------
    InvalidArgument
        Naming the families that there are.
    """
    for prefix in prefixes:
        if not any(f.startswith(prefix) or prefix.startswith(f) for f in FAMILIES):
            message = (
                f"no signal begins with {prefix!r}; there are {' '.join(FAMILIES)}"
            )
            raise InvalidArgument(message)


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


class Crossing:
    """When a number crosses a threshold: once, until it has come back.

    Parameters
    ----------
    above, below : float, optional
        One of them: what is crossed.
    clear : float, optional
        Where it counts as come back; by default the threshold itself. In between nothing changes
        (hysteresis).
    cooldown_s : float
        Least time between two crossings that count, of one signal.
    """

    def __init__(
        self,
        *,
        above: float | None = None,
        below: float | None = None,
        clear: float | None = None,
        cooldown_s: float = 0.0,
    ) -> None:
        if (above is None) is (below is None):
            message = "give either above= or below="
            raise InvalidArgument(message)
        threshold = above if above is not None else below
        assert threshold is not None, "signals: one of the two is there"
        self._sign = 1.0 if above is not None else -1.0
        self._over = self._sign * threshold
        self._clear = self._over if clear is None else self._sign * clear
        if self._clear > self._over:
            message = "clear= lies on the side of the threshold that is crossed to"
            raise InvalidArgument(message)
        self._cooldown_s = cooldown_s
        #: Signals that have crossed and not come back.
        self._crossed: dict[str, None] = {}
        self._counted_s: dict[str, float] = {}

    def see(self, name: str, value: float, now_s: float) -> bool:
        """Take a value; True when it has crossed, and that counts."""
        signed = self._sign * value
        if name in self._crossed:
            if signed < self._clear or (
                self._clear == self._over and signed <= self._clear
            ):
                del self._crossed[name]
            return False
        if signed <= self._over:
            return False
        if now_s - self._counted_s.get(name, -math.inf) < self._cooldown_s:
            return False  # it is looked at again: still over then, it counts
        self._crossed[name] = None
        self._counted_s[name] = now_s
        return True

    def gone(self, name: str) -> None:
        """Forget a signal that is away."""
        self._crossed.pop(name, None)
        self._counted_s.pop(name, None)
