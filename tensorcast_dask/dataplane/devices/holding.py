"""Memory of a device that somebody uses, given back when nobody does any more.

Rules:

1. It is freed where it is this process's own, closed where another process owns it. The
   description that says to the owner that it is open (its tag) is closed after it.
2. It is given back once, when the last reference goes, whatever the device has come to.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING

from tensorcast_dask.dataplane.devices.base import Role
from tensorcast_dask.exceptions import TensorCastError

if TYPE_CHECKING:
    from tensorcast_dask.dataplane.devices.base import Memory
    from tensorcast_dask.dataplane.devices.device import Device

__all__ = ["Holding"]


class Holding:
    """Memory of a device in which tensors lie.

    Parameters
    ----------
    device : Device
        Whose it is.
    memory : Memory
        Allocated, opened or borrowed here.
    tag : int
        The description that says to the owner that we have it open; -1 for our own.
    """

    def __init__(self, device: Device, memory: Memory, *, tag: int = -1) -> None:
        self.device = device
        self.memory = memory
        self.shared = memory.role is Role.OPENED
        weakref.finalize(self, _give_back, device, memory, tag)


def _give_back(device: Device, memory: Memory, tag: int) -> None:
    with contextlib.suppress(TensorCastError):  # the device is closed, or has failed
        if memory.role is Role.OWNED:
            device.free(memory)
        else:
            device.close(memory)
    if tag >= 0:
        os.close(tag)
