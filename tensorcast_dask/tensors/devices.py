"""Names of devices, and the setting that chooses their kind.

Rules:

1. A device is named by its UUID wherever the name is kept; the ordinal is for people, and
   differs between processes (CUDA_VISIBLE_DEVICES).
2. A family is what people write (`cuda`, `emulated`); a kind is the backend that drives it
   (`cupy` and `torch` both drive `cuda`).
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import Final

from tensorcast_dask.tensors.quantities import parse_bytes

__all__ = [
    "FAMILIES",
    "SLAB_SPAN",
    "DeviceId",
    "DeviceSpec",
    "is_uuid",
    "parse_device_name",
    "parse_devices",
]

#: Kind of backend -> family of devices.
FAMILIES: Final = {"cupy": "cuda", "torch": "cuda", "emulated": "emulated"}
#: Of lent memory: place in the segment, which handle, place in its memory, length.
SLAB_SPAN: Final = struct.Struct("<QQQQ")
_EMULATED: Final = re.compile(r"emulated:(\d+)x(.+?)(:pool)?")
_NAME: Final = re.compile(r"(cuda|emulated)(?::(\d+))?")
_MAX_EMULATED: Final = 64


@dataclass(frozen=True, slots=True)
class DeviceId:
    """One device. Equal ids are one device, whatever ordinal a process knows it by.

    Attributes
    ----------
    uuid : str
        Its name for ever, as the driver gives it.
    family : str
        `cuda` or `emulated`.
    ordinal : int
        Its number in the process that asked.
    """

    uuid: str
    family: str = field(compare=False)
    ordinal: int = field(compare=False)

    def __str__(self) -> str:
        return f"{self.family}:{self.ordinal}"


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What the setting `device` says.

    Attributes
    ----------
    kind : str
        `cupy`, `torch` or `emulated`; "" takes the CUDA backend that is installed.
    count : int
        How many emulated devices there are.
    nbytes : int
        The memory of each of them.
    pool : bool
        Whether what a process allocates on them comes from a pool, which no handle opens.
    """

    kind: str = ""
    count: int = 0
    nbytes: int = 0
    pool: bool = False

    def __str__(self) -> str:
        pool = ":pool" if self.pool else ""
        return f"emulated:{self.count}x{self.nbytes}{pool}" if self.count else self.kind


def parse_devices(value: object) -> DeviceSpec:
    """Read the setting `device`: null, `cupy`, `torch` or `emulated:<count>x<bytes>[:pool]`.

    Raises
    ------
    ValueError
        When it is none of these.
    """
    text = "" if value is None else str(value).strip()
    if text in {"", "cupy", "torch"}:
        return DeviceSpec(text)
    found = _EMULATED.fullmatch(text)
    if found is None:
        message = f'takes "cupy", "torch" or a number of emulated devices such as "emulated:2x1GiB", not {value!r}'
        raise ValueError(message)
    count, nbytes = int(found[1]), parse_bytes(found[2])
    if not 1 <= count <= _MAX_EMULATED or nbytes < 1:
        message = (
            f"takes 1 to {_MAX_EMULATED} emulated devices with memory, not {value!r}"
        )
        raise ValueError(message)
    return DeviceSpec("emulated", count, nbytes, pool=found[3] is not None)


def is_uuid(name: str) -> bool:
    """Say whether a device is named by its UUID."""
    return name.startswith(("EMU-", "GPU-", "MIG-"))


def parse_device_name(name: str) -> tuple[str, int]:
    """Read `cuda:0`, `emulated:1` or a family alone, which means its device 0.

    Raises
    ------
    ValueError
        When it is no such name.
    """
    found = _NAME.fullmatch(name.strip())
    if found is None:
        message = f'takes a device such as "cuda:0" or "emulated:0", not {name!r}'
        raise ValueError(message)
    return found[1], int(found[2] or 0)
