"""How often each replica was read since the catalog was last told.

Rules:

1. Reads by programs count; copies for other nodes do not.
2. Memory is bounded: of more than `MAX_COUNTED` generations those that were read first since
   the last telling are counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tensorcast_dask.tensors.ids import Generation

__all__ = ["MAX_COUNTED", "MAX_TOLD", "Counts"]

MAX_COUNTED: Final = 4096
#: Most that one renewal tells: those that were read most.
MAX_TOLD: Final = 256


class Counts:
    """Reads that nobody was told of yet."""

    def __init__(self) -> None:
        self._reads: dict[Generation, int] = {}

    def read(self, generation: Generation) -> None:
        """Count one."""
        known = self._reads.get(generation, 0)
        if known or len(self._reads) < MAX_COUNTED:
            self._reads[generation] = known + 1

    def take(self) -> dict[Generation, int]:
        """Give what was counted, and begin anew."""
        found, self._reads = self._reads, {}
        if len(found) <= MAX_TOLD:
            return found
        most = sorted(found, key=lambda one: -found[one])[:MAX_TOLD]
        return {generation: found[generation] for generation in most}
