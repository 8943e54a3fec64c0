"""Room for small artifacts inside slabs: which byte ranges of which slab are taken.

Rules:

1. First fit with coalescing, in grains of 64 bytes: no size class, so nothing is lost
   to rounding but the last grain.
2. A slab is named by its segment number; numbers are given by the caller, bytes are
   never touched here.
3. Free ranges of a slab never touch each other (they would be one) and, with the taken
   ranges, cover the slab exactly once.
4. A slab without a taken range is given back at once (`release` says so).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Final, NamedTuple

__all__ = ["GRAIN_BYTES", "Slab", "Slabs", "Slot", "grains"]

GRAIN_BYTES: Final = 64


def grains(nbytes: int) -> int:
    """Round a length up to what a slot takes; an empty artifact takes one grain."""
    return max(1, -(-nbytes // GRAIN_BYTES)) * GRAIN_BYTES


class Slot(NamedTuple):
    """A taken range of a slab."""

    segment: int
    offset: int
    size_bytes: int


@dataclass(slots=True)
class Slab:
    """One slab: its free ranges, sorted by offset."""

    segment: int
    size_bytes: int
    #: Offsets of the free ranges, ascending; `lengths` has the length of each.
    offsets: list[int] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    free_bytes: int = 0
    #: No free range is longer than this; it may overstate, never understate.
    longest_bytes: int = 0

    def take(self, need_bytes: int) -> int | None:
        """Take the first free range that is long enough; its offset, or None."""
        longest = 0
        for at, offset in enumerate(self.offsets):
            length = self.lengths[offset]
            if length >= need_bytes:
                self._cut(at, need_bytes)
                return offset
            longest = max(longest, length)
        self.longest_bytes = longest
        return None

    def has_room(self, need_bytes: int) -> bool:
        """Say whether `take` would find room."""
        if self.longest_bytes < need_bytes:
            return False
        for offset in self.offsets:
            if self.lengths[offset] >= need_bytes:
                return True
        self.longest_bytes = max(self.lengths.values(), default=0)
        return False

    def _cut(self, at: int, need_bytes: int) -> None:
        offset = self.offsets[at]
        left = self.lengths.pop(offset) - need_bytes
        if left:
            self.offsets[at] = offset + need_bytes
            self.lengths[offset + need_bytes] = left
        else:
            del self.offsets[at]
        self.free_bytes -= need_bytes

    def give(self, offset: int, size_bytes: int) -> None:
        """Give a taken range back and join it with its neighbours."""
        self.free_bytes += size_bytes
        at = bisect_left(self.offsets, offset)
        if at < len(self.offsets) and self.offsets[at] == offset + size_bytes:
            size_bytes += self.lengths.pop(self.offsets.pop(at))
        if at and self.offsets[at - 1] + self.lengths[self.offsets[at - 1]] == offset:
            offset = self.offsets[at - 1]
            size_bytes += self.lengths[offset]
        else:
            insort(self.offsets, offset)
        self.lengths[offset] = size_bytes
        self.longest_bytes = max(self.longest_bytes, size_bytes)


class Slabs:
    """The slabs of one tier.

    Parameters
    ----------
    slab_bytes : int
        Length of each slab.
    """

    def __init__(self, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self._slabs: dict[int, Slab] = {}
        #: Slot bytes that are taken, over all slabs.
        self.taken_bytes = 0

    def __contains__(self, segment: int) -> bool:
        return segment in self._slabs

    @property
    def segments(self) -> tuple[int, ...]:
        """Segment numbers of the slabs, oldest first."""
        return tuple(self._slabs)

    @property
    def free_bytes(self) -> int:
        """Bytes of slabs that no slot takes."""
        return len(self._slabs) * self.slab_bytes - self.taken_bytes

    def add(self, segment: int) -> None:
        """Take a segment of `slab_bytes` in as a slab."""
        assert segment not in self._slabs, "store: a segment became a slab twice"
        self._slabs[segment] = Slab(
            segment=segment,
            size_bytes=self.slab_bytes,
            offsets=[0],
            lengths={0: self.slab_bytes},
            free_bytes=self.slab_bytes,
            longest_bytes=self.slab_bytes,
        )

    def can_take(self, nbytes: int) -> bool:
        """Say whether a slab has room; it corrects what the slabs believe of themselves."""
        need_bytes = grains(nbytes)
        return any(slab.has_room(need_bytes) for slab in self._slabs.values())

    def take(self, nbytes: int) -> Slot | None:
        """Find room for `nbytes`, or None when a slab must be added first."""
        need_bytes = grains(nbytes)
        assert need_bytes <= self.slab_bytes, "store: too large for a slab"
        for slab in self._slabs.values():
            if slab.longest_bytes < need_bytes:
                continue
            offset = slab.take(need_bytes)
            if offset is not None:
                self.taken_bytes += need_bytes
                return Slot(slab.segment, offset, need_bytes)
        return None

    def release(self, slot: Slot) -> bool:
        """Give a slot back; True when its slab is empty and is a slab no longer."""
        slab = self._slabs[slot.segment]
        slab.give(slot.offset, slot.size_bytes)
        self.taken_bytes -= slot.size_bytes
        if slab.free_bytes < slab.size_bytes:
            return False
        del self._slabs[slot.segment]
        return True

    def check(self) -> None:
        """Assert rule 3 for every slab."""
        for slab in self._slabs.values():
            end = -1
            for offset in slab.offsets:
                assert offset > end, "store: free ranges of a slab touch"
                end = offset + slab.lengths[offset]
                assert slab.lengths[offset] <= slab.longest_bytes
            assert end <= slab.size_bytes
            assert sum(slab.lengths.values()) == slab.free_bytes
        total = sum(slab.size_bytes - slab.free_bytes for slab in self._slabs.values())
        assert total == self.taken_bytes
