"""What keeps the bytes of a tier that is not host memory.

Rules:

1. A move within a node goes between a medium and host memory: `save` copies out of it,
   `restore` into it. From a neighbour `nearby` brings bytes without host memory. Each puts its copy into the table, verified, and takes it back whole when it fails.
2. `close` is called under the store's lock and returns at once; all else may take its time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tensorcast_dask.store.state.replicas import Wanted

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.dataplane.fileranges import FileRange
    from tensorcast_dask.dataplane.segments import MemoryFile
    from tensorcast_dask.dataplane.transports.base import Context, Source
    from tensorcast_dask.store.records import Pulled
    from tensorcast_dask.store.state.replicas import Filling, Replica
    from tensorcast_dask.tensors.ids import Generation
    from tensorcast_dask.tensors.messages import Location, Tier

__all__ = ["Landing", "Medium", "wanted_of"]


class Landing(Protocol):
    """What takes the chunks of one pull."""

    #: Chunks that one lane may have under way; None: as many as is usual.
    depth: int | None

    def reserve(self, *, index: bytes, chunk_bytes: int, until_s: float) -> None:
        """Make room, once."""
        ...

    def place(self, chunk: int, length: int) -> memoryview | FileRange:
        """Return where a chunk is to be received."""
        ...

    def settle(self, chunk: int) -> None:
        """Take note that a chunk is there and verified."""
        ...

    def direct(self) -> Callable[[Location, Generation, Context], Source] | None:
        """Give what opens a source whose chunks come here without a place; None without one."""
        ...

    def give_up(self, chunk: int) -> None:
        """Take note that a chunk does not come to its place, and nobody writes there."""
        ...

    def end(self) -> None:
        """Let nobody wait in `place` any more."""
        ...

    def close(self) -> None:
        """Let go of what was not committed. Idempotent."""
        ...


class Medium(Protocol):
    """The bytes of one tier."""

    def make(self, wanted: Wanted, filling: Filling, *, until_s: float) -> None:
        """Make room for a copy that was reserved."""
        ...

    def save(self, generation: Generation, *, until_s: float) -> int:
        """Copy a replica from host memory to here; its length. One that is here is fine."""
        ...

    def restore(self, generation: Generation, *, until_s: float) -> int:
        """Copy a replica from here into host memory; its length."""
        ...

    def transient(self, generation: Generation) -> MemoryFile:
        """Copy a replica into memory of nobody's tier, for one reader who closes it."""
        ...

    def landing(self, wanted: Wanted) -> Landing | None:
        """Give what takes the chunks of a pull straight; None: they come by host memory."""
        ...

    def nearby(
        self,
        wanted: Wanted,
        location: Location,
        *,
        source_generation: Generation,
        context: Context,
    ) -> Pulled | None:
        """Copy what a holder of this host has, without host memory; None without such a way."""
        ...

    def sums(self, generation: Generation) -> bytes:
        """Read a copy that is here for its sums; b"" where they come with a restore."""
        ...

    def keeps(self, segment: int) -> bool:
        """Say whether what a freed segment had is still there, to be used again."""
        ...

    def close(self, segment: int) -> None:
        """Give back what a copy had; unknown segments are fine."""
        ...


def wanted_of(replica: Replica, tier: Tier, until_s: float) -> Wanted:
    """Ask for a further copy of a replica, for the store itself."""
    return Wanted(
        generation=replica.generation,
        id=replica.id,
        version=replica.version,
        nbytes=replica.nbytes,
        tier=tier,
        owner=0,
        deadline_s=until_s,
        labels=replica.labels,
        published=replica.published,
    )
