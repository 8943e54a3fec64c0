"""Which devices there are and how one is opened: kinds of drivers by name, loaded when asked.

Rules:

1. A kind is a name and a module with `find` and `open_driver`; nothing of it is imported
   before a device of it is asked for.
2. What is missing is said, with what to install: UnsupportedPlatform, before anything is
   opened.
3. A driver is opened by the process that uses it, after its last fork.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Final, Protocol, cast

from tensorcast_dask.dataplane.devices.device import Device
from tensorcast_dask.exceptions import (
    DeviceError,
    InvalidArgument,
    UnsupportedPlatform,
)
from tensorcast_dask.tensors.devices import FAMILIES, is_uuid, parse_device_name

if TYPE_CHECKING:
    from tensorcast_dask.dataplane.devices.base import Driver
    from tensorcast_dask.tensors.devices import DeviceId, DeviceSpec

__all__ = ["Kind", "find_devices", "kinds", "open_device", "register"]


class Kind(Protocol):
    """The module of one kind."""

    def find(self, spec: DeviceSpec, run_dir: str = "") -> tuple[DeviceId, ...]:
        """Return the devices that can be opened here; UnsupportedPlatform when none can."""
        ...

    def open_driver(
        self, device: DeviceId, spec: DeviceSpec, run_dir: str = ""
    ) -> Driver:
        """Open one of them."""
        ...


_modules: dict[str, str] = {
    "cupy": "tensorcast_dask.dataplane.devices.cupy_backend",
    "torch": "tensorcast_dask.dataplane.devices.torch_backend",
    "emulated": "tensorcast_dask.dataplane.devices.emulated",
}
_CUDA: Final = ("cupy", "torch")


def register(kind: str, module: str) -> None:
    """Make a kind known by the name of its module; a later one replaces it."""
    _modules[kind] = module


def kinds() -> tuple[str, ...]:
    """Return the kinds that are known here."""
    return tuple(_modules)


def find_devices(
    spec: DeviceSpec, run_dir: str = "", *, family: str = ""
) -> tuple[DeviceId, ...]:
    """Return the devices that the setting `device` means.

    Parameters
    ----------
    spec : DeviceSpec
        The setting.
    run_dir : str
        The run directory, whose processes share emulated devices.
    family : str
        What somebody asked for, `cuda` or `emulated`; "" takes what the setting means.

    Raises
    ------
    UnsupportedPlatform
        When there is none, or the setting means another family; it says what is missing.
    """
    if family:
        _check_family(family, spec)
    return _module(spec.kind or _installed()).find(spec, run_dir)


def open_device(name: str, spec: DeviceSpec, run_dir: str = "") -> Device:
    """Open a device in this process.

    Parameters
    ----------
    name : str
        `cuda:0`, `emulated:1`, or a UUID.
    spec : DeviceSpec
        The setting `device`.
    run_dir : str
        The run directory.

    Raises
    ------
    UnsupportedPlatform
        When a library or the driver is missing, or the setting means another family.
    DeviceError
        When there is no such device.
    InvalidArgument
        When it is no name of a device.
    """
    _check_family(name, spec)
    module = _module(spec.kind or _installed())
    found = module.find(spec, run_dir)
    for device in found:
        if name == device.uuid or _same(name, device):
            return Device(module.open_driver(device, spec, run_dir))
    there = ", ".join(f"{device} ({device.uuid})" for device in found)
    message = f"there is no device {name}; there are {there}"
    raise DeviceError(message)


def _same(name: str, device: DeviceId) -> bool:
    try:
        return parse_device_name(name) == (device.family, device.ordinal)
    except ValueError:
        return False


def _check_family(name: str, spec: DeviceSpec) -> None:
    """Refuse a device of a family that the setting does not mean."""
    if is_uuid(name):
        family = "emulated" if name.startswith("EMU-") else "cuda"
    else:
        try:
            family, _ = parse_device_name(name)
        except ValueError as error:
            message = f"open_device {error}"
            raise InvalidArgument(message) from error
    if family == FAMILIES.get(spec.kind, spec.kind or "cuda"):
        return
    if family == "emulated":
        message = f"there is no {name}: no emulated devices are configured; set tensorcast.device (TENSORCAST_DEVICE) to emulated:1x1GiB"
    else:
        message = f"there is no {name}: tensorcast.device names {spec.kind} devices; unset it to use CUDA"
    raise UnsupportedPlatform(message)


def _installed() -> str:
    """Return the CUDA library to use: the first that is installed."""
    for kind in _CUDA:
        if importlib.util.find_spec(kind) is not None:
            return kind
    message = "no library for CUDA devices is installed: install cupy (pip install cupy-cuda12x), or torch with CUDA"
    raise UnsupportedPlatform(message)


def _module(kind: str) -> Kind:
    return cast("Kind", importlib.import_module(_modules[kind]))
