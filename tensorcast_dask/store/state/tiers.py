"""The tiers of a node as data, and what each of them holds.

Rules:

1. A tier is a row: adding one adds a `TierRow`, not a branch. Rows are ordered nearest
   first; a read takes the first of its tiers that has the bytes.
2. Bytes are counted by unique storage: a segment once, whoever shares it; a replica that
   shares the memory of another node of the host counts in `shared_bytes` alone.
3. `held_bytes` is all that the tier takes from its capacity: used, reserved, free parts of
   slabs, warm and lingering segments.
4. A tier that lies *over* another has no bytes of its own: a copy there is a mark on the
   copy below (pinned host memory), shares its segment, backs nothing, and goes with it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from tensorcast_dask.store.state.pool import Pool
from tensorcast_dask.store.state.slabs import Slabs
from tensorcast_dask.tensors.messages import Tier

if TYPE_CHECKING:
    from tensorcast_dask.tensors.ids import Generation

__all__ = ["FROM_HOST", "PAGE_BYTES", "TierRow", "TierStock", "page_rounded"]

PAGE_BYTES = 4096
#: In which order who wants bytes in host memory takes a copy.
FROM_HOST = (Tier.HOST, Tier.DEVICE, Tier.DISK)


def page_rounded(nbytes: int, grain_bytes: int = PAGE_BYTES) -> int:
    """Round up to whole pages, or grains; an empty replica takes one."""
    return max(1, -(-nbytes // grain_bytes)) * grain_bytes


class TierRow(msgspec.Struct, frozen=True, kw_only=True):
    """What the table must know of one tier."""

    tier: Tier
    capacity_bytes: int
    #: Others may hold its segments: freed ones are proved to be ours alone, then kept warm.
    proof: bool = True
    #: Its segments are memory of this machine: bounded by what that has, and read in place.
    charges: bool = True
    #: It is a mark on copies of that tier (rule 4).
    over: Tier | None = None
    #: Lengths of segments are multiples of this.
    grain_bytes: int = PAGE_BYTES
    #: UUID of the device that it is on, or known to.
    device: str = ""
    #: Where replicas go when this tier is full; None = nowhere.
    spill: Tier | None = None
    #: Artifacts below this share slabs; 0 = each has a segment.
    own_segment_bytes: int = 0
    slab_bytes: int = 0
    #: Most that freed segments may keep.
    warm_bytes: int = 0

    def lost(self) -> TierRow:
        """Describe the tier while its device is lost: it holds nothing more."""
        return msgspec.structs.replace(
            self, capacity_bytes=0, warm_bytes=0, spill=None, device=""
        )


class TierStock:
    """What one tier holds."""

    def __init__(self, row: TierRow) -> None:
        self.row = row
        self.slabs = Slabs(row.slab_bytes)
        self.pool = Pool(row.warm_bytes)
        #: Committed (and dropping) copies, by unique storage.
        self.used_bytes = 0
        self.reserved_bytes = 0
        self.shared_bytes = 0
        self.replicas = 0
        #: Committed copies that may go: spare, or with another copy on this node.
        #: The one longest unused first; the value is what its going frees.
        self.loose: OrderedDict[Generation, int] = OrderedDict()
        self.loose_bytes = 0

    @property
    def held_bytes(self) -> int:
        """All that is taken of the capacity (rule 3)."""
        return (
            self.used_bytes
            + self.reserved_bytes
            + self.slabs.free_bytes
            + self.pool.warm_bytes
            + self.pool.lingering_bytes
        )

    def in_slab(self, nbytes: int) -> bool:
        """Say whether an artifact of this length shares a slab."""
        return nbytes < self.row.own_segment_bytes

    def need_bytes(self, nbytes: int) -> int:
        """Return how much memory must be made first to reserve `nbytes`; often 0."""
        if self.in_slab(nbytes):
            if self.slabs.can_take(nbytes):
                return 0
            warm = self.pool.find(self.row.slab_bytes, exact=True)
            return 0 if warm else self.row.slab_bytes
        size_bytes = self.rounded(nbytes)
        return 0 if self.pool.find(size_bytes) else size_bytes

    def rounded(self, nbytes: int) -> int:
        """Return what a segment of its own takes of the tier."""
        return page_rounded(nbytes, self.row.grain_bytes)

    def set_loose(self, generation: Generation, frees_bytes: int) -> None:
        """Enter or strike (0) a generation in `loose`; entering makes it the newest."""
        self.loose_bytes -= self.loose.pop(generation, 0)
        if frees_bytes:
            self.loose[generation] = frees_bytes
            self.loose_bytes += frees_bytes
