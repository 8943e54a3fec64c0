"""What an emulated device has given to whom: the arithmetic of its helper process.

Rules:

1. A slab has one owner, who allocated it, and openers, who each opened it at most once.
2. Freeing waits for openers: the room of a freed slab comes back with its last opener.
3. The end of an owner frees its slabs at once, whoever has them open: they are revoked. CUDA
   promises an opener nothing about them either.
4. The end of an opener releases what it had open.
5. `used_bytes` is the sum over all slabs whose room has not come back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tensorcast_dask.exceptions import CapacityError, OwnerGone

__all__ = ["Book"]


@dataclass(slots=True)
class _Slab:
    nbytes: int
    owner: int
    openers: set[int] = field(default_factory=set)
    freed: bool = False


class Book:
    """The slabs of one emulated device.

    Parameters
    ----------
    budget_bytes : int
        The memory of the device.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._slabs: dict[int, _Slab] = {}
        self._numbers = 0

    @property
    def slabs(self) -> tuple[int, ...]:
        """Numbers of the slabs whose room is taken."""
        return tuple(self._slabs)

    def allocate(self, client: int, nbytes: int) -> int:
        """Give a slab; its number, never given before.

        Raises
        ------
        CapacityError
            When it does not fit the budget.
        """
        free = self.budget_bytes - self.used_bytes
        if nbytes > free:
            message = f"no room for {nbytes} bytes on the emulated device: {free} of {self.budget_bytes} are free; evict, or raise tensorcast.device"
            raise CapacityError(
                message, {"tier": "device", "needed": nbytes, "free": free}
            )
        self._numbers += 1
        self._slabs[self._numbers] = _Slab(nbytes, client)
        self.used_bytes += nbytes
        return self._numbers

    def free(self, client: int, number: int) -> list[int]:
        """Free a slab; the numbers of those whose room came back."""
        slab = self._slabs.get(number)
        if slab is None or slab.owner != client or slab.freed:
            return []
        slab.freed = True
        return self._collect(number)

    def open(self, client: int, number: int) -> int:
        """Open a slab; its length.

        Raises
        ------
        OwnerGone
            When its owner freed it or has ended.
        """
        slab = self._slabs.get(number)
        if slab is None or slab.freed:
            message = (
                f"slab {number} of the emulated device was freed; ask for a new handle"
            )
            raise OwnerGone(message)
        slab.openers.add(client)
        return slab.nbytes

    def close(self, client: int, number: int) -> list[int]:
        """End what `open` began; the numbers of slabs whose room came back."""
        slab = self._slabs.get(number)
        if slab is None:
            return []
        slab.openers.discard(client)
        return self._collect(number)

    def leave(self, client: int) -> list[int]:
        """Note that a client has ended; the numbers of slabs that are no more."""
        gone: list[int] = []
        for number, slab in list(self._slabs.items()):
            slab.openers.discard(client)
            if slab.owner == client:
                self._drop(number)
                gone.append(number)
            else:
                gone += self._collect(number)
        return gone

    def _collect(self, number: int) -> list[int]:
        slab = self._slabs[number]
        if not slab.freed or slab.openers:
            return []
        self._drop(number)
        return [number]

    def _drop(self, number: int) -> None:
        self.used_bytes -= self._slabs.pop(number).nbytes
