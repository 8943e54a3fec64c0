"""Ways to holders that nobody uses now, kept for the next pull.

Rules:

1. What is given here is whole and at rest; before it is lent it is asked whether it still is.
2. `tick` closes what has lain here for `idle_s`, and what is of no use any more. At most
   `most` are kept: the oldest goes. `close` ends all, and what is given later.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["Idle"]

_IDLE_S: Final = 60.0
_MOST: Final = 64


class _Way(Protocol):
    @property
    def usable(self) -> bool:
        """Whether it is whole, and its peer there."""
        ...

    def close(self) -> None:
        """Close it. Idempotent."""
        ...


W = TypeVar("W", bound=_Way)


class _Kept(NamedTuple, Generic[W]):
    key: Hashable
    way: W
    since_s: float


class Idle(Generic[W]):
    """What lies here, the oldest first.

    Parameters
    ----------
    idle_s : float
        How long a way is kept.
    most : int
        How many are kept.
    """

    def __init__(self, *, idle_s: float = _IDLE_S, most: int = _MOST) -> None:
        self._idle_s = idle_s
        self._most = most
        self._lock = threading.Lock()
        self._kept: deque[_Kept[W]] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._kept)

    def give(self, key: Hashable, way: W) -> None:
        """Keep a way that is at rest."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._kept.append(_Kept(key, way, time.monotonic()))
            over = len(self._kept) - self._most
            gone = [self._kept.popleft().way for _ in range(over)]
        for old in (*gone, way) if closed else gone:
            old.close()

    def take(self, key: Hashable) -> W | None:
        """Lend a way that is still of use, the one that was used last."""
        while (found := self._newest(key)) is not None:
            if found.usable:
                return found
            found.close()
        return None

    def _newest(self, key: Hashable) -> W | None:
        with self._lock:
            for kept in reversed(self._kept):
                if kept.key == key:
                    self._kept.remove(kept)
                    return kept.way
        return None

    def tick(self) -> None:
        """Close what nobody will use any more."""
        before_s = time.monotonic() - self._idle_s
        with self._lock:
            gone = [k for k in self._kept if k.since_s < before_s or not k.way.usable]
            for kept in gone:
                self._kept.remove(kept)
        for kept in gone:
            kept.way.close()

    def close(self) -> None:
        """Close all, and from now on all that comes. Idempotent."""
        with self._lock:
            self._closed = True
            gone, self._kept = self._kept, deque()
        for kept in gone:
            kept.way.close()
