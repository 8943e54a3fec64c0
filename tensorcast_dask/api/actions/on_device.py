"""Reading artifacts onto a device: by handle where a node of this host has them there.

The order in which bytes are looked for:

1. a copy on that device at a node of this host, or memory there that its owner lends: opened by
   handle (`transports.cuda_ipc`) for as long as it is used;
2. for `share`, such a copy is made first (`Ensure`);
3. host memory, as any read finds it, copied to the device by this process.

Rules:

1. A result is private, by a copy on the device, unless the caller asked to share.
2. A shared result is marked as shared and is not written to by us; the node verifies the
   slab before it serves it on.
3. A view is read through host memory: a slab holds its base.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tensorcast_dask.api.actions import moves, names
from tensorcast_dask.api.connection.operation import Operation
from tensorcast_dask.dataplane import arrays
from tensorcast_dask.dataplane.arrays import (
    DeviceTensor,
    check_targets,
    fill_slab,
)
from tensorcast_dask.dataplane.channel import Credentials
from tensorcast_dask.dataplane.devices import Holding, SlabHandle
from tensorcast_dask.dataplane.transports.base import Context
from tensorcast_dask.dataplane.transports.cuda_ipc import open_ipc
from tensorcast_dask.exceptions import (
    AbsentError,
    CapacityError,
    DeadlineExceeded,
    DeviceError,
    InvalidArgument,
    Mismatch,
    OwnershipError,
    PeerLost,
    RequestError,
    WrongPeer,
)
from tensorcast_dask.tensors.messages import Location, Owner, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.api.connection.deadlines import Deadline
    from tensorcast_dask.dataplane.arrays import Source
    from tensorcast_dask.dataplane.devices import Device
    from tensorcast_dask.dataplane.devices.own import OwnDevice
    from tensorcast_dask.dataplane.framing import Frame
    from tensorcast_dask.dataplane.transports.cuda_ipc import IpcSource
    from tensorcast_dask.tensors.messages import ArtifactInfo, NodeCard, Reserved
    from tensorcast_dask.tensors.specs import Index

__all__ = [
    "OnDevice",
    "adopted",
    "bind",
    "copied",
    "device_of",
    "fill",
    "holders",
    "loaded",
    "put_device",
    "shared",
]

R = TypeVar("R")
_TRIED = 4
_UNREACHED = (DeviceError, OwnershipError, PeerLost, WrongPeer)


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A segment on a device of this process."""

    index: Index
    holding: Holding


def _reached(
    core: Core,
    info: ArtifactInfo,
    own: OwnDevice,
    limit: Deadline,
    cards: Sequence[NodeCard],
    use: Callable[[IpcSource], R],
    *,
    share: bool = False,
) -> R | None:
    """Use the first of some holders whose memory on the device can be had; None without one."""
    for card in cards:
        context = Context(
            credentials=Credentials(host=core.host),
            pool=core.stores.pool,
            until_s=time.monotonic() + limit.answer_within_s(),
            device=own.device,
            share=share,
            deadline_s=limit.left_s(),
        )
        where = Location(card=card, tier=Tier.DEVICE)
        with contextlib.closing(open_ipc(where, info.generation, context)) as source:
            try:
                source.open()
            except (AbsentError, DeadlineExceeded, Mismatch, *_UNREACHED):
                continue
            with contextlib.suppress(OwnershipError):  # its owner has ended meanwhile
                return use(source)
    return None


def _near(core: Core, info: ArtifactInfo) -> Sequence[NodeCard]:
    """Give the nodes of this host that may have it on a device."""
    hint = core.stores.place(info.generation)
    cards = core.stores.local()[:_TRIED]
    return sorted(cards, key=lambda card: hint is None or card.node != hint.node)


async def holders(
    core: Core, info: ArtifactInfo, limit: Deadline
) -> Sequence[NodeCard]:
    """Give who of this host may have it on a device: its nodes, or whoever lends it."""
    if info.owner is not Owner.CALLER:
        return _near(core, info)
    found = await names.locate(core, info.generation, limit)
    return [at.card for at in found if at.card.host == core.host]


def copied(
    core: Core,
    info: ArtifactInfo,
    own: OwnDevice,
    limit: Deadline,
    cards: Sequence[NodeCard],
) -> OnDevice | None:
    """Copy what a holder has into memory of our own on the device; None without one. Blocks."""

    def private(source: IpcSource) -> OnDevice:
        opened = source.open()
        index = core.stores.index(info.generation, opened.index)
        memory = own.device.allocate(max(1, opened.nbytes))
        holding = Holding(own.device, memory)
        source.read_ranges([(0, opened.nbytes)], memory.range(0, opened.nbytes))
        return OnDevice(index, holding)

    return None if info.view else _reached(core, info, own, limit, cards, private)


def loaded(own: OwnDevice, index: Index, content: Any) -> OnDevice:
    """Copy a segment from host memory into memory of our own on the device. Blocks."""
    memory = own.device.allocate(max(1, index.nbytes))
    holding = Holding(own.device, memory)
    own.load(memoryview(content)[: index.nbytes], memory.range(0, index.nbytes))
    return OnDevice(index, holding)


async def shared(
    core: Core, info: ArtifactInfo, own: OwnDevice, limit: Deadline
) -> OnDevice:
    """Open the slab of a copy on this device, which is made where there is none.

    Raises
    ------
    InvalidArgument
        For a view: what could be shared is its base.
    CapacityError
        When no node has the device, or it has no room.
    """
    if info.view:
        message = f"{info.id!r} is a view and lies nowhere by itself; read it without share, or share its base"
        raise InvalidArgument(message)
    found = await core.in_thread(_share, core, info, own, limit)
    if found is not None:
        return found
    operation: Operation[Any] = Operation(core, "read", info.id)
    place = moves.Where(Tier.DEVICE, own.device.id.uuid)
    await moves.ensure(
        core, operation, info.generation, node="", where=place, why="read", limit=limit
    )
    found = await core.in_thread(_share, core, info, own, limit)
    if found is None:
        message = f"the copy of {info.id!r} on {own.device.id} cannot be opened by this process; read it without share"
        raise Mismatch(message)
    return found


def _share(
    core: Core, info: ArtifactInfo, own: OwnDevice, limit: Deadline
) -> OnDevice | None:
    def mapping(source: IpcSource) -> OnDevice:
        opened, holding = source.slab()
        return OnDevice(core.stores.index(info.generation, opened.index), holding)

    cards = _near(core, info)
    return _reached(core, info, own, limit, cards, mapping, share=True)


async def device_of(core: Core, device: str, limit: Deadline) -> str:
    """Name the device that `device=` means for a result: one of a node of this host.

    Raises
    ------
    CapacityError
        When no node of this host has one.
    InvalidArgument, UnsupportedPlatform, DeviceError
        As `moves.where` does.
    """
    place = moves.where(core, device)
    if place.device or place.tier is not Tier.DEVICE:
        return place.device
    rooms = [
        (use.capacity_bytes - use.used_bytes, use.device)
        for state in (await names.nodes(core, limit)).nodes
        for tier, use in state.uses.items()
        if tier is Tier.DEVICE and use.device and state.card.host == core.host
    ]
    if not rooms:
        message = "no node of this host has a device; name one (cuda:0), or set tensorcast.node.device-memory for the workers"
        raise CapacityError(message)
    return max(rooms)[1]


# -------------------------------------------------------------------- putting
def adopted(core: Core, sources: Sequence[Source]) -> Sequence[Source]:
    """Take arrays of CUDA as tensors on a device of this process, where it can open it."""
    try:
        return arrays.adopted(sources, lambda name: core.devices.open(name).device)
    except (RequestError, DeviceError):  # their library brings them to host memory
        return sources


def put_device(sources: Sequence[Source]) -> Device | None:
    """Give the device that all sources lie on; None where they do not lie on one."""
    devices = {
        value.device if isinstance(value := source.value, DeviceTensor) else None
        for source in sources
    }
    return devices.pop() if len(devices) == 1 else None


def fill(
    frame: Frame[Reserved], device: Device, index: Index, sources: Sequence[Source]
) -> None:
    """Fill a slab that a node has reserved, device to device. Blocks."""
    tag = frame.take_fd()
    try:
        memory = device.open(SlabHandle.decode(frame.message.handle))
        try:
            fill_slab(device, memory, index, sources)
        finally:
            device.close(memory)
    finally:
        os.close(tag)


# -------------------------------------------------------------------- binding
async def bind(
    core: Core, info: ArtifactInfo, targets: Mapping[str, Any], limit: Deadline
) -> bool:
    """Fill tensors of one device from a holder's; False, and nothing done, without one.

    Tensors of a library are filled where they lie, when its work on them is done.
    """
    first = next(iter(targets.values()), None)
    if info.view or not arrays.lies_on_device(first):
        return False
    found = await core.in_thread(_lying, core, targets)
    own = core.devices.opened(found[0].device) if found else None
    if own is None:
        return False
    cards = await holders(core, info, limit)

    def filled(source: IpcSource) -> bool:
        index = core.stores.index(info.generation, source.open().index)
        check_targets(index, targets)
        places = []
        for name, target in zip(targets, found, strict=True):
            at = index.position(name)
            if index.sizes[at]:
                places.append((index.offsets[at], index.sizes[at], target.place))
        source.read_places(places)
        return True

    done = await core.in_thread(_reached, core, info, own, limit, cards, filled)
    return bool(done)


def _lying(core: Core, targets: Mapping[str, Any]) -> list[DeviceTensor]:
    """Describe targets that all lie on one device of this process; none when they do not. Blocks."""
    sources = adopted(core, arrays.describe(targets))
    tensors = [s.value for s in sources if isinstance(s.value, DeviceTensor)]
    alone = len({id(tensor.device) for tensor in tensors}) == 1
    return tensors if alone and len(tensors) == len(targets) else []
