"""Who reads what: heat of artifacts, and the version that each consumer has.

Rules:

1. A read is counted where it happens: by the store that opens the bytes (told with its next
   renewal), or here when a program without a store asks where they are.
2. Heat is a decaying rate: nothing is ever subtracted, so nothing can be forgotten to be.
3. A consumer is a node, or an instance that says with what it works. It is known by its
   newest reading only.
4. Memory is bounded: the artifact, or consumer, longest unheard of is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tensorcast_dask.tensors.ids import ArtifactId, Version
from tensorcast_dask.tensors.signals import Rate, rounded

__all__ = ["HALF_LIFE_S", "MAX_CONSUMERS", "MAX_HEATS", "Consumed", "Usage"]

HALF_LIFE_S: Final = 60.0
MAX_HEATS: Final = 4096
MAX_CONSUMERS: Final = 4096
#: Reads a second below this are none.
_COLD: Final = 1e-4


@dataclass(slots=True)
class Consumed:
    """What one consumer has of one artifact."""

    version: Version
    at_s: float
    epoch: int


class Usage:
    """Reads of artifacts."""

    def __init__(self) -> None:
        self._heats: OrderedDict[ArtifactId, Rate] = OrderedDict()
        self._consumers: OrderedDict[tuple[str, ArtifactId], Consumed] = OrderedDict()

    def __len__(self) -> int:
        return len(self._heats) + len(self._consumers)

    def read(self, name: ArtifactId, count: int, *, now_s: float) -> None:
        """Count reads of an artifact."""
        rate = self._heats.pop(name, None) or Rate(HALF_LIFE_S, now_s)
        self._heats[name] = rate
        if len(self._heats) > MAX_HEATS:
            self._heats.popitem(last=False)
        rate.add(count, now_s)

    def uses(
        self, who: str, name: ArtifactId, version: Version, *, now_s: float, epoch: int
    ) -> None:
        """Take note of the version that a consumer has."""
        self._consumers.pop((who, name), None)
        self._consumers[who, name] = Consumed(version, now_s, epoch)
        if len(self._consumers) > MAX_CONSUMERS:
            self._consumers.popitem(last=False)

    def heat(self, name: ArtifactId, *, now_s: float) -> float:
        """Give the reads a second, as of late."""
        rate = self._heats.get(name)
        found = 0.0 if rate is None else rate.at(now_s)
        return 0.0 if found < _COLD else rounded(found)

    def hottest(self, *, now_s: float) -> list[ArtifactId]:
        """List the artifacts that are read, the most read first."""
        found = [(-one.at(now_s), name) for name, one in self._heats.items()]
        return [name for rate, name in sorted(found) if -rate >= _COLD]

    def consumers(self) -> Iterator[tuple[str, ArtifactId, Consumed]]:
        """Go through consumers and what they have."""
        for (who, name), consumed in self._consumers.items():
            yield who, name, consumed

    def left(self, who: str) -> None:
        """Forget a consumer that is no more."""
        for key in [one for one in self._consumers if one[0] == who]:
            del self._consumers[key]

    def forget(self, name: ArtifactId) -> None:
        """Forget an artifact that is no more."""
        self._heats.pop(name, None)
        for key in [one for one in self._consumers if one[1] == name]:
            del self._consumers[key]
