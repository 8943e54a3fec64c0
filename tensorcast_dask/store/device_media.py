"""What keeps the bytes of the tiers `device` and `pinned`: the device process, by orders.

Rules:

1. Whatever a move reads or writes is leased until its order has ended, also when nobody waits
   for it any more.
2. What the sums of a replica do not fit is given up on the device, and said to be.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from tensorcast_dask.dataplane.segments import MemoryFile
from tensorcast_dask.exceptions import DeviceError, Gone, NotFound
from tensorcast_dask.store.core import now_s
from tensorcast_dask.store.device_copies import copied
from tensorcast_dask.store.device_target import DeviceTarget
from tensorcast_dask.store.media import wanted_of
from tensorcast_dask.store.state.replicas import Life
from tensorcast_dask.tensors.messages import Act, Tier

if TYPE_CHECKING:
    from tensorcast_dask.dataplane.transports.base import Context
    from tensorcast_dask.store.core import Core, Reading
    from tensorcast_dask.store.devices import Devices
    from tensorcast_dask.store.media import Landing, Medium
    from tensorcast_dask.store.records import Pulled
    from tensorcast_dask.store.state.replicas import Copy, Filling, Wanted
    from tensorcast_dask.tensors.ids import Generation
    from tensorcast_dask.tensors.messages import Location

__all__ = ["Pins", "Slabs", "media_of"]

_WITHIN_S: Final = 600.0


def media_of(devices: Devices, core: Core) -> dict[Tier, Medium]:
    """Make the media of a device's tiers."""
    return {Tier.DEVICE: Slabs(devices, core), Tier.PINNED: Pins(devices, core)}


class Slabs:
    """The medium of the tier `device`."""

    def __init__(self, devices: Devices, core: Core) -> None:
        self._devices = devices
        self._core = core

    def make(self, wanted: Wanted, filling: Filling, *, until_s: float) -> None:  # noqa: ARG002 - a medium's
        """Allocate a slab, where the copy did not get one that is there."""
        if not filling.make_bytes:
            return
        devices, segment = self._devices, filling.copy.segment
        with self._core.lock:
            self._core.shelf.make(segment, 0)
            order = devices.order(Act.ALLOCATE, segment, nbytes=filling.make_bytes)
            devices.allocated(segment, b"")
        made = devices.wait(order, until_s)
        devices.allocated(segment, made.handle)

    def save(self, generation: Generation, *, until_s: float) -> int:
        """Copy a replica from host memory to the device, verified on the way."""
        core, devices = self._core, self._devices
        with core.reading(generation, Tier.HOST) as held:
            replica = held.replica
            there = replica.copy(Tier.DEVICE)
            if there is not None and there.life is Life.COMMITTED:
                return replica.nbytes
            filling = core.reserve(
                wanted_of(replica, Tier.DEVICE, until_s), until_s=until_s
            )
            try:
                pin = replica.copy(Tier.PINNED)
                ready = pin is not None and pin.life is Life.COMMITTED
                order = devices.order(
                    Act.FILL,
                    filling.copy.segment,
                    nbytes=replica.nbytes,
                    sums=replica.sums,
                    fd=self._reader(held),
                    pinned=held.copy.segment if ready else 0,
                    uses=[(generation, filling.copy), (generation, held.copy)],
                )
                sums = devices.wait(order, until_s).sums
                core.commit(
                    generation,
                    Tier.DEVICE,
                    index=replica.index,
                    index_digest=replica.index_digest,
                    sums=replica.sums or sums,
                )
            except BaseException:
                core.abort(generation, Tier.DEVICE)
                raise
        return replica.nbytes

    def _reader(self, held: Reading) -> int:
        """Describe the bytes of a copy in host memory: its file, or a copy out of its slab."""
        assert held.file is not None, "store: host memory has files"
        if not self._core.table.tiers[Tier.HOST].in_slab(held.replica.nbytes):
            return held.file.read_description()
        with MemoryFile(held.replica.nbytes, name="tensorcast-staged") as file:
            os.pwrite(file.fd, held.view(), 0)
            return file.read_description()

    def restore(self, generation: Generation, *, until_s: float) -> int:
        """Copy a replica from the device into host memory, verified on the way."""
        core = self._core
        with core.reading(generation, Tier.DEVICE) as held:
            replica = held.replica
            filling = core.reserve(
                wanted_of(replica, Tier.HOST, until_s), until_s=until_s
            )
            try:
                if core.table.tiers[Tier.HOST].in_slab(replica.nbytes):
                    with self._copied(held, until_s) as file:
                        target = core.hold(generation, filling.copy)
                        try:
                            target.view()[:] = file.map_shared().view
                        finally:
                            core.release(target)
                else:
                    own = core.shelf.own(filling.copy.segment)
                    self._copy(held, own, until_s, into=filling.copy)
                core.commit(
                    generation,
                    Tier.HOST,
                    index=replica.index,
                    index_digest=replica.index_digest,
                    sums=replica.sums,
                )
            finally:
                core.abort(generation, Tier.HOST)
        return replica.nbytes

    def transient(self, generation: Generation) -> MemoryFile:
        """Copy a replica from the device into memory of nobody's tier."""
        with self._core.reading(generation, Tier.DEVICE) as held:
            return self._copied(held, now_s() + _WITHIN_S)

    def landing(self, wanted: Wanted) -> Landing:
        """Take chunks by a ring; nothing of them stays in host memory."""
        return DeviceTarget(self._core, self._devices, wanted)

    def nearby(
        self,
        wanted: Wanted,
        location: Location,
        *,
        source_generation: Generation,
        context: Context,
    ) -> Pulled | None:
        """Copy what another node, or a lender, has on this very device, there."""
        return copied(
            self._core,
            self._devices,
            wanted,
            location,
            source_generation=source_generation,
            context=context,
        )

    def _copied(self, held: Reading, until_s: float) -> MemoryFile:
        file = MemoryFile(held.replica.nbytes, name="tensorcast-read")
        try:
            self._copy(held, file, until_s)
        except BaseException:
            file.close()
            raise
        return file

    def _copy(
        self,
        held: Reading,
        file: MemoryFile,
        until_s: float,
        *,
        into: Copy | None = None,
    ) -> None:
        """Have a slab written to a file, that of the copy `into` where it is one's."""
        core, replica = self._core, held.replica
        fd = file.write_description()
        try:
            sums = self._devices.read(held, until_s, fd=fd, into=into)
        except DeviceError as error:  # to a reader the copy is gone; others may have it
            message = f"generation {replica.generation} is not to be had from the device: {error}"
            raise Gone(message, {"generation": replica.generation}) from error
        with core.lock:
            replica.sums = replica.sums or sums

    def sums(self, generation: Generation) -> bytes:
        """Read a copy on the device for its sums."""
        with self._core.reading(generation, Tier.DEVICE) as held:
            return self._devices.read(held, now_s() + _WITHIN_S)

    def keeps(self, segment: int) -> bool:
        """Keep a slab of the device process that is attached; others ended with theirs."""
        return self._devices.has(segment)

    def close(self, segment: int) -> None:
        """Free a slab; its tag goes first."""
        self._core.shelf.close(segment)
        self._devices.freed(segment)


class Pins:
    """The medium of the tier `pinned`: host memory that the device process registered."""

    def __init__(self, devices: Devices, core: Core) -> None:
        self._devices = devices
        self._core = core

    def make(self, wanted: Wanted, filling: Filling, *, until_s: float) -> None:
        """Register the memory file of the copy that is marked."""
        core, copy = self._core, filling.copy
        order = self._devices.order(
            Act.PIN,
            copy.segment,
            nbytes=wanted.nbytes,
            fd=core.shelf.own(copy.segment).write_description(),
            uses=[(wanted.generation, copy)],
        )
        self._devices.wait(order, until_s)

    def save(self, generation: Generation, *, until_s: float) -> int:
        """Pin a replica in host memory where it is."""
        core = self._core
        with core.reading(generation, Tier.HOST) as held:
            replica = held.replica
            there = replica.copy(Tier.PINNED)
            if there is None or there.life is not Life.COMMITTED:
                core.reserve(wanted_of(replica, Tier.PINNED, until_s), until_s=until_s)
                core.commit(
                    generation,
                    Tier.PINNED,
                    index=replica.index,
                    index_digest=replica.index_digest,
                    sums=replica.sums,
                )
        return 0

    def restore(self, generation: Generation, *, until_s: float) -> int:  # noqa: ARG002 - a medium's
        """Return at once: what is pinned is in host memory."""
        return self._core.table.find(generation).nbytes

    def transient(self, generation: Generation) -> MemoryFile:
        """Refuse: what is pinned is in host memory and is read there."""
        message = f"generation {generation} is in host memory; read it there"
        raise NotFound(message)

    def landing(self, wanted: Wanted) -> None:
        """Leave it to host memory."""

    def nearby(self, wanted: Wanted, location: Location, **_: object) -> None:
        """Leave it to host memory."""

    def sums(self, generation: Generation) -> bytes:
        """Give what is known; host memory is summed where it is."""
        return self._core.table.find(generation).sums

    def keeps(self, segment: int) -> bool:  # noqa: ARG002 - a medium's
        """Keep nothing pinned that no replica has."""
        return False

    def close(self, segment: int) -> None:
        """Have the memory unregistered; until then the kernel says that it is in use."""
        with self._core.lock:
            if self._devices.pid:
                self._devices.order(Act.UNPIN, segment)
