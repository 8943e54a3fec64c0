"""Segments that no replica uses: warm ones to be used again, and those that linger.

Rules:

1. A freed segment lingers (and is charged) until the kernel has proved that nobody else
   has it open or mapped; only then may it become warm.
2. A warm segment was proved to be ours alone and has gone to nobody since: it may be
   given out as it is.
3. Warm segments together stay within `limit_bytes`; the ones longest unused go first.
4. A segment is never larger than needed by more than a quarter, so that the warm pool does not
   turn a small replica into a large charge.
"""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["Pool"]


class Pool:
    """Free memory of one tier.

    Parameters
    ----------
    limit_bytes : int
        Most that is kept warm.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        #: Warm segments, the one longest unused first: number -> length.
        self._warm: dict[int, int] = {}
        #: The same, ascending by (length, number).
        self._by_size: list[tuple[int, int]] = []
        #: Freed, not yet proved to be ours alone: number -> length.
        self._lingering: dict[int, int] = {}
        self.warm_bytes = 0
        self.lingering_bytes = 0

    @property
    def lingering(self) -> tuple[int, ...]:
        """Numbers of the segments that wait for their last reader, oldest first."""
        return tuple(self._lingering)

    def free(self, segment: int, size_bytes: int) -> None:
        """Take a segment in that its replica gave up; it lingers until proved."""
        assert segment not in self._lingering, "store: a segment was freed twice"
        assert segment not in self._warm, "store: a warm segment was freed"
        self._lingering[segment] = size_bytes
        self.lingering_bytes += size_bytes

    def proved(self, segment: int) -> list[int]:
        """Nobody else has the segment: keep it warm; the segments to close for that."""
        size_bytes = self.forget(segment)
        if size_bytes > self.limit_bytes:
            return [segment]
        closing = []
        while self.warm_bytes + size_bytes > self.limit_bytes:
            closing.append(self._oldest())
        self._warm[segment] = size_bytes
        insort(self._by_size, (size_bytes, segment))
        self.warm_bytes += size_bytes
        return closing

    def forget(self, segment: int) -> int:
        """Strike a lingering segment out; its length."""
        size_bytes = self._lingering.pop(segment)
        self.lingering_bytes -= size_bytes
        return size_bytes

    def find(self, nbytes: int, *, exact: bool = False) -> int | None:
        """Return the length of the warm segment that `take` would give, or None."""
        at = bisect_left(self._by_size, (nbytes, 0))
        if at == len(self._by_size):
            return None
        size_bytes = self._by_size[at][0]
        most_bytes = nbytes if exact else nbytes + nbytes // 4
        return size_bytes if size_bytes <= most_bytes else None

    def take(self, nbytes: int, *, exact: bool = False) -> tuple[int, int] | None:
        """Give the warm segment out that fits best, as (number, length)."""
        size_bytes = self.find(nbytes, exact=exact)
        if size_bytes is None:
            return None
        segment = self._by_size[bisect_left(self._by_size, (nbytes, 0))][1]
        self._remove(segment)
        return segment, size_bytes

    def trim(self, need_bytes: int) -> list[int]:
        """Give up warm segments until `need_bytes` are free or none is left."""
        closing: list[int] = []
        freed_bytes = 0
        while self._warm and freed_bytes < need_bytes:
            freed_bytes += next(iter(self._warm.values()))
            closing.append(self._oldest())
        return closing

    def _oldest(self) -> int:
        segment = next(iter(self._warm))
        self._remove(segment)
        return segment

    def _remove(self, segment: int) -> None:
        size_bytes = self._warm.pop(segment)
        del self._by_size[bisect_left(self._by_size, (size_bytes, segment))]
        self.warm_bytes -= size_bytes
