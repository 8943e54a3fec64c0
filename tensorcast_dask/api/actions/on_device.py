"""Reading artifacts onto a device: by handle where a node of this host has them there.

The order in which bytes are looked for:

1. a copy on that device at a node of this host: its slab, opened for as long as it is used;
2. for `share`, such a copy is made first (`Ensure`);
3. host memory, as any read finds it, copied to the device by this process.

Rules:

1. A result is private, by a copy on the device, unless the caller asked to share.
2. A shared result is marked as shared and is not written to by us; the node verifies the
   slab before it serves it on.
3. A view is read through host memory: a slab holds its base.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorcast_dask.api.actions import moves, names
from tensorcast_dask.api.connection.operation import Operation
from tensorcast_dask.dataplane.arrays import (
    DeviceTensor,
    Holding,
    check_targets,
    fill_slab,
)
from tensorcast_dask.dataplane.devices import SlabHandle
from tensorcast_dask.exceptions import (
    AbsentError,
    CapacityError,
    DeadlineExceeded,
    DeviceError,
    InvalidArgument,
    Mismatch,
    OwnershipError,
    PeerLost,
    WrongPeer,
)
from tensorcast_dask.tensors.messages import Open, Opened, Tier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.api.connection.deadlines import Deadline
    from tensorcast_dask.dataplane.arrays import Source
    from tensorcast_dask.dataplane.devices import Device
    from tensorcast_dask.dataplane.devices.own import OwnDevice
    from tensorcast_dask.dataplane.framing import Frame
    from tensorcast_dask.tensors.messages import ArtifactInfo, NodeCard, Reserved
    from tensorcast_dask.tensors.specs import Index

__all__ = [
    "OnDevice",
    "bind",
    "copied",
    "device_of",
    "fill",
    "loaded",
    "open_slab",
    "put_device",
    "shared",
]

_TRIED = 4
_UNREACHED = (DeviceError, OwnershipError, PeerLost, WrongPeer)


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A segment on a device of this process."""

    index: Index
    holding: Holding


def open_slab(
    core: Core, info: ArtifactInfo, own: OwnDevice, limit: Deadline, *, share: bool
) -> OnDevice | None:
    """Open the slab of a copy at a node of this host; None when none has one. Blocks."""
    hint = core.stores.place(info.generation)
    cards = core.stores.local()[:_TRIED]
    cards.sort(key=lambda card: hint is None or card.node != hint.node)
    for card in cards:
        try:
            return _open_at(core, card, info, own, limit, share=share)
        except (AbsentError, DeadlineExceeded, Mismatch, *_UNREACHED):
            continue
    return None


def _open_at(
    core: Core,
    card: NodeCard,
    info: ArtifactInfo,
    own: OwnDevice,
    limit: Deadline,
    *,
    share: bool,
) -> OnDevice:
    device = own.device
    request = Open(
        rid=core.link.next_rid(),
        generation=info.generation,
        deadline_s=limit.left_s(),
        device=device.id.uuid,
        share=share,
    )
    frame = core.stores.ask(card, request, Opened, limit)
    opened, tag = frame.message, frame.take_fd()
    try:
        memory = device.open(SlabHandle.decode(opened.handle))
    except BaseException:
        os.close(tag)
        raise
    index = core.stores.index(info.generation, opened.index)
    return OnDevice(index, Holding(device, memory, tag=tag))


def copied(
    core: Core, info: ArtifactInfo, own: OwnDevice, limit: Deadline
) -> OnDevice | None:
    """Copy a slab into memory of our own on the device; None without one. Blocks."""
    found = None if info.view else open_slab(core, info, own, limit, share=False)
    if found is None:
        return None
    try:
        return _private(own, found)
    except OwnershipError:  # the device process ended meanwhile
        return None


def _private(own: OwnDevice, found: OnDevice) -> OnDevice:
    device, nbytes = own.device, found.index.nbytes
    memory = device.allocate(max(1, nbytes))
    holding = Holding(device, memory)
    if nbytes:
        source = found.holding.memory.range(0, nbytes)
        device.copy(memory.range(0, nbytes), source).wait()
    return OnDevice(found.index, holding)


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
    return open_slab(core, info, own, limit, share=True)


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
def bind(
    core: Core, info: ArtifactInfo, targets: Mapping[str, Any], limit: Deadline
) -> bool:
    """Fill tensors of one device from a slab of it; False, and nothing done, without one."""
    found = [value for value in targets.values() if isinstance(value, DeviceTensor)]
    own = core.devices.opened(found[0].device) if found else None
    if own is None or len(found) < len(targets) or info.view:
        return False
    if any(value.device is not own.device for value in found):
        return False
    slab = open_slab(core, info, own, limit, share=False)
    if slab is None:
        return False
    check_targets(slab.index, targets)
    events = []
    for name, target in targets.items():
        at = slab.index.position(name)
        offset, nbytes = slab.index.offsets[at], slab.index.sizes[at]
        if nbytes:
            source = slab.holding.memory.range(offset, nbytes)
            events.append(own.device.copy(target.place, source))
    for event in events:
        event.wait()
    return True
