"""Where pulled chunks land on a device: there, or in a ring of host memory that it knows.

Rules:

1. A chunk is received into a place of the ring, verified there, copied to its place in the
   slab, and reported then. So a pull takes no more host memory than the ring, which is made
   for the first such chunk. What comes from device to device (`DeviceLine`) needs none.
2. A place belongs to one chunk until that was copied, or given up by who fetched it. Who finds
   no place waits, and holds none meanwhile: a lane has one chunk under way at a time.
3. Nothing is served on before the whole is there: a slab is not read in parts.
4. The ring outlives every order that reads it.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Final

from tensorcast_dask.dataplane.segments import MemoryFile
from tensorcast_dask.exceptions import DeviceError, PeerLost
from tensorcast_dask.store.device_lines import DeviceLine
from tensorcast_dask.tensors.checksums import chunk_count
from tensorcast_dask.tensors.messages import Act, Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.dataplane.transports.base import Context, Source
    from tensorcast_dask.store.core import Core
    from tensorcast_dask.store.devices import Devices
    from tensorcast_dask.store.state.replicas import Filling, Wanted
    from tensorcast_dask.tensors.ids import Generation
    from tensorcast_dask.tensors.messages import Location

__all__ = ["DeviceTarget"]

_PLACES: Final = 4
_rings = itertools.count(1)


class DeviceTarget:
    """The slab that one pull fills.

    Parameters
    ----------
    core : Core
        The state.
    devices : Devices
        Gives orders to the device process.
    wanted : Wanted
        What is pulled.
    """

    #: Chunks that one lane may have under way (rule 2).
    depth: int | None = 1

    def __init__(self, core: Core, devices: Devices, wanted: Wanted) -> None:
        self._core = core
        self._devices = devices
        self._wanted = wanted
        self._filling: Filling | None = None
        self._ring: MemoryFile | None = None
        #: Under which the device process knows the ring.
        self._number = 0
        self._chunk_bytes = 0
        self._until_s = 0.0
        #: Whether the device knows the ring; the lock is held while it is made.
        self._known = False
        self._making = threading.Lock()
        self._changed = threading.Condition()
        self._places: dict[int, int] = {}
        self._free: list[int] = []
        self._ended = False

    def reserve(self, *, index: bytes, chunk_bytes: int, until_s: float) -> None:
        """Make room on the device, once."""
        if self._filling is not None:
            return
        core = self._core
        filling = core.reserve(self._wanted, until_s=until_s)
        self._filling = filling
        with core.lock:
            core.table.replicas[self._wanted.generation].index = index
        self._chunk_bytes, self._until_s = chunk_bytes, until_s
        places = min(_PLACES, chunk_count(self._wanted.nbytes, chunk_bytes))
        self._free = list(range(places))

    def direct(self) -> Callable[[Location, Generation, Context], Source] | None:
        """Give what opens a line from a holder's device, where ours has UCX."""
        return self._line if self._devices.lanes else None

    def _line(
        self, location: Location, generation: Generation, context: Context
    ) -> Source:
        filling = self._filling
        assert filling is not None, "store: chunks come after the reservation"
        return DeviceLine(
            self._devices,
            (self._wanted.generation, filling.copy),
            chunk_bytes=self._chunk_bytes,
            location=location,
            generation=generation,
            context=context,
        )

    def _ring_made(self) -> MemoryFile:
        with self._making:
            if self._ring is None:
                devices = self._devices
                length = len(self._free) * self._chunk_bytes
                self._core.room.check_machine(Tier.HOST, length)
                ring = self._ring = MemoryFile(length, name="tensorcast-ring")
                self._number = -next(_rings)  # segments are numbered above 0
                fd = ring.write_description()
                order = devices.order(Act.PIN, self._number, nbytes=length, fd=fd)
                devices.wait(order, self._until_s)
                self._known = True
            if not self._known:
                message = "the device did not take the ring of this pull"
                raise DeviceError(message)
            return self._ring

    def place(self, chunk: int, length: int) -> memoryview:
        """Return where a chunk is to be received; waits for room in the ring.

        Raises
        ------
        PeerLost
            When the pull ends meanwhile.
        CapacityError, DeviceError, DeadlineExceeded
            When the ring cannot be made.
        """
        ring = self._ring_made()
        with self._changed:
            while chunk not in self._places:
                if self._ended:
                    message = "the pull has ended"
                    raise PeerLost(message)
                if self._free:
                    self._places[chunk] = self._free.pop(0)
                else:
                    self._changed.wait()
            start = self._places[chunk] * self._chunk_bytes
        return ring.map_shared().view[start : start + length]

    def settle(self, chunk: int) -> None:
        """Have a chunk that is there and verified copied to the slab; then its place is free.

        One that came straight to the slab has no place.

        Raises
        ------
        DeviceError, DeadlineExceeded
            When the device does not do it.
        """
        if chunk not in self._places:
            return
        filling = self._filling
        assert filling is not None, "store: chunks come after the reservation"
        at = chunk * self._chunk_bytes
        order = self._devices.order(
            Act.FILL,
            filling.copy.segment,
            at=at,
            nbytes=min(self._chunk_bytes, self._wanted.nbytes - at),
            pinned=self._number,
            pinned_at=self._places[chunk] * self._chunk_bytes,
            uses=[(self._wanted.generation, filling.copy)],
        )
        self._devices.wait(order, self._until_s)
        self.give_up(chunk)

    def give_up(self, chunk: int) -> None:
        """Take the place of a chunk back: nobody writes there any more."""
        with self._changed:
            place = self._places.pop(chunk, None)
            if place is not None:
                self._free.append(place)
                self._changed.notify_all()

    def end(self) -> None:
        """Let nobody wait for room any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let ring and slab go, and what was not committed with them. Idempotent."""
        ring, self._ring = self._ring, None
        if ring is not None:
            with self._core.lock:
                if self._devices.pid:  # after the orders that read it (rule 4)
                    self._devices.order(Act.UNPIN, self._number)
            ring.close()
        if self._filling is not None:
            self._core.abort(self._wanted.generation, self._wanted.tier)
