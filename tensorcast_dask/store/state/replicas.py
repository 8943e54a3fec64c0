"""The nouns of the segment table: replicas, their copies in tiers, and what fills them.

Rules:

1. A replica is keyed by its generation. It has at most one copy in each tier.
2. A copy lives once: reserved -> filling -> committed -> dropping, forward only. From
   every state it may go to dropping; a dropping copy is freed when its last lease ends.
3. These are the records of the table (`table.Table` alone changes them). There may be a
   hundred thousand, so they are slotted and hold no containers of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from tensorcast_dask.tensors.ids import RequestId

if TYPE_CHECKING:
    from tensorcast_dask.tensors.ids import ArtifactId, Generation, Version
    from tensorcast_dask.tensors.messages import Tier

__all__ = ["Copy", "Filling", "Freed", "Life", "Replica", "Wanted"]


_NO_RID: Final = RequestId("")


class Life(IntEnum):
    """Where a copy is in its life."""

    RESERVED = 0  # admitted; its memory is being made
    FILLING = 1  # somebody writes
    COMMITTED = 2  # frozen, readable
    DROPPING = 3  # given up; waits for its leases


@dataclass(slots=True, eq=False)
class Copy:
    """The bytes of a replica in one tier."""

    tier: Tier
    segment: int
    offset: int
    #: What it takes of the tier, by unique storage; 0 where the memory is another node's.
    size_bytes: int
    shared: bool = False
    #: It is a mark on this replica's copy in the tier below (`TierRow.over`).
    mark: bool = False
    #: Others have it open who could write: it is verified before it is served on.
    exposed: bool = False
    life: Life = Life.RESERVED
    #: True from commit on, also while dropping: counted as used, not as reserved.
    filled: bool = False
    #: Reads and moves that are under way.
    leases: int = 0


@dataclass(slots=True, eq=False)
class Replica:
    """One artifact version as this node holds it."""

    generation: Generation
    id: ArtifactId
    version: Version
    nbytes: int
    labels: dict[str, str]
    copies: tuple[Copy, ...] = ()
    index: bytes = b""
    index_digest: str = ""
    #: xxh3_64 of each chunk, little-endian; b"" until known.
    sums: bytes = b""
    published: bool = False
    #: The catalog said that other hosts hold it: it may be asked for.
    spare: bool = False

    def copy(self, tier: Tier) -> Copy | None:
        """Return the copy in a tier."""
        for copy in self.copies:
            if copy.tier is tier:
                return copy
        return None

    @property
    def committed(self) -> bool:
        """Say whether any copy can be read."""
        return any(copy.life is Life.COMMITTED for copy in self.copies)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a reservation asks for."""

    generation: Generation
    id: ArtifactId
    version: Version
    nbytes: int
    tier: Tier
    #: Who fills: the number of a connection, or 0 for this store itself.
    owner: int
    #: When the reservation ends by itself, on the store's clock.
    deadline_s: float
    rid: RequestId = _NO_RID
    labels: dict[str, str]
    published: bool = False
    #: The memory is another node's: nothing is charged.
    shared: bool = False


@dataclass(slots=True, eq=False)
class Filling:
    """Who fills a copy, until when, and what has arrived."""

    copy: Copy
    owner: int
    deadline_s: float
    rid: RequestId
    #: Its connection ended; the process that may still come back.
    orphan_pid: int = 0
    #: The memory must be made by the shell: how much, 0 when it is there.
    make_bytes: int = 0
    #: Chunks that arrived and were verified, one bit each; they can be served on.
    have: bytearray | None = None
    #: How `have` is cut.
    chunk_bytes: int = 0


class Freed(NamedTuple):
    """A segment that no replica uses any more."""

    tier: Tier
    segment: int
    size_bytes: int
    #: True: it lingers until proved ours alone. False: close it (file, other's memory).
    probe: bool
