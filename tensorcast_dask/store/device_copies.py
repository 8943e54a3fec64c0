"""Copies on this node's device of what others have on the same device: made there.

Rules:

1. The holder is another node of this host, or a process that lends its memory by handle. The
   device process opens the handle, and closes it after the copy; a tag that came with it is
   open as long.
2. The host sees no byte, so nothing is verified on the way: the copy counts as one that
   others could have changed, and is verified before it is handed on.
3. Memory that its owner may change counts when its stamp is the same after the copy.
4. Lent memory is also read for who has not the device, with no help of its owner's interpreter.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from tensorcast_dask.dataplane.channel import Channel, Prefer
from tensorcast_dask.dataplane.segments import MemoryFile
from tensorcast_dask.dataplane.transports.base import next_rid
from tensorcast_dask.exceptions import DeviceError, Incomplete, NotFound, WrongPeer
from tensorcast_dask.store.core import now_s
from tensorcast_dask.store.records import Pulled, digest_of_index
from tensorcast_dask.store.sharing import anyone
from tensorcast_dask.tensors.devices import SLAB_SPAN
from tensorcast_dask.tensors.messages import (
    Act,
    ChunkMap,
    ChunkMapAsked,
    Open,
    Opened,
)

if TYPE_CHECKING:
    from tensorcast_dask.dataplane.framing import Frame
    from tensorcast_dask.dataplane.transports.base import Context
    from tensorcast_dask.store.core import Core
    from tensorcast_dask.store.devices import Devices
    from tensorcast_dask.store.state.replicas import Wanted
    from tensorcast_dask.tensors.ids import Generation
    from tensorcast_dask.tensors.messages import Lend, Location

__all__ = ["copied", "gathered"]

#: How often content that its owner changes meanwhile is copied before it is given up.
_STAMPS: Final = 10
_PAUSE_S: Final = 0.02
_GATHER_S: Final = 30.0


def copied(
    core: Core,
    devices: Devices,
    wanted: Wanted,
    location: Location,
    *,
    source_generation: Generation,
    context: Context,
) -> Pulled | None:
    """Copy a holder's memory on this device; None where it has none there.

    Raises
    ------
    TensorCastError
        When the holder or the device does not do it; nothing has changed.
    """
    with Channel.connect(
        anyone(location).card,
        credentials=context.credentials,
        prefer=Prefer.UNIX,
        until_s=context.until_s,
    ) as channel:
        for _ in range(_STAMPS):
            request = Open(
                rid=next_rid(),
                generation=source_generation,
                deadline_s=context.deadline_s,
                device=devices.device,
            )
            try:
                frame = channel.call(request, expect=Opened, until_s=context.until_s)
            except NotFound:
                return None
            try:
                return _copied(core, devices, wanted, frame, channel)
            except Incomplete:
                time.sleep(_PAUSE_S)
            finally:
                frame.close()
    message = f"the owner of {wanted.id!r} changes it all the time; read again later"
    raise Incomplete(message)


def _copied(
    core: Core,
    devices: Devices,
    wanted: Wanted,
    frame: Frame[Opened],
    channel: Channel,
) -> Pulled:
    opened, started_s = frame.message, now_s()
    until_s = wanted.deadline_s
    if opened.nbytes != wanted.nbytes:
        message = f"{channel.stream.peer} has {opened.nbytes} bytes of {wanted.id!r}, not {wanted.nbytes}"
        raise WrongPeer(message)
    asked = ChunkMapAsked(rid=next_rid(), generation=opened.generation)
    filling = core.reserve(wanted, until_s=until_s)
    try:
        order = devices.order(
            Act.COPY,
            filling.copy.segment,
            fd=frame.take_fd() if frame.fds else -1,
            uses=[(wanted.generation, filling.copy)],
            nbytes=wanted.nbytes,
            handles=(opened.handle,) if opened.handle else opened.slabs,
            spans=SLAB_SPAN.pack(0, 0, 0, wanted.nbytes)
            if opened.handle
            else opened.spans,
        )
        devices.wait(order, until_s)
        told = channel.call(asked, expect=ChunkMap, until_s=until_s).message
        if told.stamp != opened.stamp:
            message = f"the owner of {wanted.id!r} changed it while it was copied"
            raise Incomplete(message)  # noqa: TRY301 - undone below
        filling.copy.exposed = True
        core.commit(
            wanted.generation,
            wanted.tier,
            index=opened.index,
            index_digest=digest_of_index(opened.index),
            sums=told.sums,
            cut_bytes=told.chunk_bytes,
        )
    except BaseException:
        core.abort(wanted.generation, wanted.tier)
        raise
    return Pulled(
        moved_bytes=wanted.nbytes,
        via="ipc",
        sources=(channel.welcome.card.node,),
        shares=(wanted.nbytes,),
        seconds=now_s() - started_s,
    )


def gathered(devices: Devices, lend: Lend, start: int, room: memoryview) -> bool:
    """Read lent memory that lies on this node's device (rule 4); False where it does not.

    Raises
    ------
    OwnerGone
        When it went with its owner.
    DeadlineExceeded
        When the device does not do it.
    """
    if not devices.pid or devices.device != lend.device or not len(room):
        return False
    with MemoryFile(len(room), name="tensorcast-gathered") as file:
        try:
            order = devices.order(
                Act.GATHER,
                0,
                fd=file.write_description(),
                at=start,
                nbytes=len(room),
                handles=lend.slabs,
                spans=lend.slab_spans,
            )
            devices.wait(order, now_s() + _GATHER_S)
        except DeviceError:  # its owner has the device still
            return False
        room[:] = file.map_shared().view
    return True
