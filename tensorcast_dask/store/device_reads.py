"""Copies on this node's device, handed out to others.

Rules:

1. By handle to who has the same device, where the kernel proves who is left; over UCX to another node's device.
2. What a program may have changed is verified before it is handed out, and sums are known
   before a slab is shared or sent.
3. A connection over which a copy is sent is the device process's from the answer on. The thread
   here keeps its lease until that has ended, and closes it.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Final

from tensorcast_dask.dataplane.server import Peer, Reply
from tensorcast_dask.exceptions import InvalidArgument, NotFound
from tensorcast_dask.store.core import now_s
from tensorcast_dask.tensors.messages import (
    Act,
    ChunkMap,
    Open,
    Opened,
    SendSlab,
    Tier,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.store.core import Core, Reading
    from tensorcast_dask.store.devices import Devices

__all__ = ["DeviceReads"]

_KNOWN_WITHIN_S: Final = 30.0


class DeviceReads:
    """Hands copies on the device out.

    Parameters
    ----------
    core : Core
        The state.
    devices : Devices
        The device process.
    ucx : callable
        Whether bytes may go over UCX.
    """

    def __init__(self, core: Core, devices: Devices, ucx: Callable[[], bool]) -> None:
        self._core = core
        self._devices = devices
        self._ucx = ucx

    def open(self, request: Open, peer: Peer) -> Reply:
        """Hand a copy on the reader's device out.

        Raises
        ------
        NotFound, Gone, Mismatch, DeadlineExceeded, DeviceError
            When there is none, or what was shared was changed.
        """
        core = self._core
        if not self._devices.reaches(peer, request.device):
            message = f"device {request.device} is not shared at this node; read from host memory"
            raise NotFound(message, {"device": request.device})
        held = core.acquire(request.generation, Tier.DEVICE)
        handle = self._devices.slab(held.copy.segment)
        try:
            until_s = now_s() + request.deadline_s
            self._know(held, until_s, sums=request.share)
            held.copy.exposed = held.copy.exposed or request.share
            fd = core.shelf.own(held.copy.segment).read_description()
        except BaseException:
            core.release(held)
            raise
        answer = Opened(
            generation=request.generation,
            index=held.replica.index,
            nbytes=held.replica.nbytes,
            mapped=True,
            handle=handle,
        )
        return Reply(message=answer, fds=(fd,), done=lambda: core.release(held))

    def send(self, request: SendSlab, peer: Peer) -> Reply:
        """Have the device process send a copy (rule 3).

        Raises
        ------
        InvalidArgument
            When it has no UCX, or may not use it.
        NotFound, Gone, Mismatch, DeadlineExceeded, DeviceError
            As `open` does.
        """
        core = self._core
        if not (self._devices.lanes and self._ucx()):
            message = "the device of this node has no UCX, or may not use it; read from host memory"
            raise InvalidArgument(message)
        held = core.acquire(request.generation, Tier.DEVICE)
        try:
            self._know(held, now_s() + _KNOWN_WITHIN_S, sums=True)
        except BaseException:
            core.release(held)
            raise
        answer = ChunkMap(
            generation=request.generation,
            nbytes=held.replica.nbytes,
            chunk_bytes=core.settings.chunk_bytes,
            index=held.replica.index,
            sums=held.replica.sums,
        )
        return Reply(message=answer, done=lambda: self._sent(held, peer))

    def _sent(self, held: Reading, peer: Peer) -> None:
        """Hand the connection over, and wait until it is done with."""
        core, replica = self._core, held.replica
        try:
            order = self._devices.order(
                Act.SEND,
                held.copy.segment,
                fd=os.dup(peer.stream.fileno()),
                uses=[(replica.generation, held.copy)],
                nbytes=replica.nbytes,
                sums=replica.sums,
                generation=replica.generation,
                stall_s=core.settings.stall_s,
            )
            self._devices.wait(order, math.inf)
        finally:
            core.release(held)

    def _know(self, held: Reading, until_s: float, *, sums: bool) -> None:
        """Verify what others could have changed; learn the sums where they are needed (rule 2)."""
        copy, replica = held.copy, held.replica
        if copy.exposed or (sums and not replica.sums and replica.nbytes):
            alone = self._core.shelf.alone(copy.segment)
            found = self._devices.read(held, until_s)
            with self._core.lock:
                replica.sums = replica.sums or found
                copy.exposed = copy.exposed and not alone
