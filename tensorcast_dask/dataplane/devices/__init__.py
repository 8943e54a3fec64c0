"""Memory of GPUs, and of emulated ones, behind nine verbs.

`open_device` gives a `Device`; `base` says what a driver must do, `device` keeps the rules
for every kind, `staging` moves bytes between a device and the host.
"""

from __future__ import annotations

from tensorcast_dask.dataplane.devices.base import (
    ArrayMemory,
    DeviceRange,
    HostMemory,
    Listing,
    Memory,
    Role,
    SlabHandle,
)
from tensorcast_dask.dataplane.devices.device import Device, Event
from tensorcast_dask.dataplane.devices.holding import Holding
from tensorcast_dask.dataplane.devices.registry import find_devices, open_device

__all__ = [
    "ArrayMemory",
    "Device",
    "DeviceRange",
    "Event",
    "Holding",
    "HostMemory",
    "Listing",
    "Memory",
    "Role",
    "SlabHandle",
    "find_devices",
    "open_device",
]
