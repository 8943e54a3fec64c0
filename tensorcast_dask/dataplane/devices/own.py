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
from tensorcast_dask.exceptions import DeviceError, InvalidArgument
from tensorcast_dask.tensors.devices import is_uuid, parse_device_name

if TYPE_CHECKING:
    from tensorcast_dask.dataplane.devices.device import Device
    from tensorcast_dask.tensors.devices import DeviceSpec

__all__ = ["OwnDevices", "let_go"]

_lock = threading.Lock()
_opened: dict[tuple[int, str, str], Device] = {}


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

    def open(self, name: str) -> Device:
        """Give a device, opened by this process once.

        Raises
        ------
        InvalidArgument, UnsupportedPlatform, DeviceError
            As `uuid` does, and when it cannot be used.
        """
        key = os.getpid(), self.uuid(name), self._run_dir
        with _lock:
            device = _opened.get(key)
            if device is None:
                device = open_device(key[1], self._spec, self._run_dir)
                _opened[key] = device
            return device


def let_go() -> None:
    """Close every device of this process, with all that it holds there. For tests."""
    with _lock:
        held = [device for (pid, _, _), device in _opened.items() if pid == os.getpid()]
        _opened.clear()
    for device in held:
        device.close()
