"""The devices of this process: found by name, opened once, kept until the process ends.

Rules:

1. A device is opened when something first needs its bytes, never by looking a name up
   (which starts the driver where it is CUDA's, and touches nothing where it is emulated).
2. It is the process's, not a session's: tensors on it outlive whatever they came from.
3. A child of a fork has none of its parent's and opens its own.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from tensorcast_dask.dataplane.devices.registry import find_devices, open_device
from tensorcast_dask.dataplane.devices.staging import (
    DEFAULT_PIECE_BYTES,
    Ring,
    to_device,
)
from tensorcast_dask.exceptions import DeviceError, InvalidArgument
from tensorcast_dask.tensors.devices import is_uuid, parse_device_name

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tensorcast_dask.dataplane.devices.base import DeviceRange
    from tensorcast_dask.dataplane.devices.device import Device
    from tensorcast_dask.tensors.devices import DeviceSpec

__all__ = ["OwnDevice", "OwnDevices", "let_go"]

_lock = threading.Lock()
_opened: dict[tuple[int, str, str], OwnDevice] = {}


class OwnDevice:
    """A device of this process, and its staging ring.

    Parameters
    ----------
    device : Device
        Opened here.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._ring: Ring | None = None

    def load(self, data: Buffer, place: DeviceRange) -> None:
        """Copy host memory to the device; it is there when this returns."""
        if not place.nbytes:
            return
        if place.nbytes <= DEFAULT_PIECE_BYTES:
            self.device.copy(place, data).wait()
            return
        with self._lock:
            if self._ring is None:
                self._ring = Ring(self.device)
            for _ in to_device(self._ring, data, place):
                pass

    def close(self) -> None:
        """Close the device, with all that this process holds there."""
        with self._lock:
            if self._ring is not None:
                self._ring.close()
        self.device.close()


class OwnDevices:
    """What the settings of a session say of devices.

    Parameters
    ----------
    spec : DeviceSpec
        The setting `device`.
    run_dir : str
        The run directory, whose processes share emulated devices.
    """

    def __init__(self, spec: DeviceSpec, run_dir: str = "") -> None:
        self._spec = spec
        self._run_dir = run_dir

    def uuid(self, name: str) -> str:
        """Give the UUID of a device that this process knows by `name`.

        Raises
        ------
        InvalidArgument
            When it is no name of a device.
        UnsupportedPlatform
            When a library or the driver is missing here; it says which.
        DeviceError
            When there is no such device.
        """
        if is_uuid(name):
            return name
        try:
            family, ordinal = parse_device_name(name)
        except ValueError as error:
            message = f"device {error}"
            raise InvalidArgument(message) from error
        found = find_devices(self._spec, self._run_dir, family=family)
        for device in found:
            if device.ordinal == ordinal:
                return device.uuid
        there = ", ".join(f"{device} ({device.uuid})" for device in found)
        message = f"there is no device {name}; there are {there}"
        raise DeviceError(message)

    @staticmethod
    def opened(device: Device) -> OwnDevice | None:
        """Give what this process keeps of a device that it has open."""
        with _lock:
            return next((o for o in _opened.values() if o.device is device), None)

    def open(self, name: str) -> OwnDevice:
        """Give a device, opened by this process once.

        Raises
        ------
        InvalidArgument, UnsupportedPlatform, DeviceError
            As `uuid` does, and when it cannot be used.
        """
        key = os.getpid(), self.uuid(name), self._run_dir
        with _lock:
            found = _opened.get(key)
            if found is None:
                device = open_device(key[1], self._spec, self._run_dir)
                found = _opened[key] = OwnDevice(device)
            return found


def let_go() -> None:
    """Close every device of this process, with all that it holds there. For tests."""
    with _lock:
        held = [found for (pid, _, _), found in _opened.items() if pid == os.getpid()]
        _opened.clear()
    for found in held:
        found.close()
