"""What a device is to the code above it, and what each kind of device must be able to do.

Rules:

1. Nine verbs and no more: allocate, free, copy, export, open, close, event, wrap, list. The
   class `Device` has them for everybody and keeps the rules; a `Driver` has them for one
   kind and only does what it is told. No line above knows which driver is under it.
2. A copy is asked for, not done: until its event is done the source must stay as it is and
   nobody may believe the target. Events order every access; between processes order is
   made by messages that are sent after an event was waited for.
3. Copies of one stream run in order, those of two streams in any order, except after the
   events that they were told to follow (`after`). A stream is a number, made when first used.
4. Device memory has no address for host code. Its bytes are reached by `copy` alone.
5. A handle exposes its whole slab, and whoever opens it can write: one tenant a slab.
6. Importing this folder imports neither cupy nor torch and touches no device.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from tensorcast_dask.exceptions import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorcast_dask.tensors.devices import DeviceId

__all__ = [
    "ArrayMemory",
    "Copy",
    "DeviceRange",
    "Driver",
    "Exported",
    "HostMemory",
    "Listing",
    "Memory",
    "Role",
    "Side",
    "SlabHandle",
    "Ticket",
    "process_token",
]


class Role(StrEnum):
    """How this process came to some memory, and so how it is given up."""

    OWNED = "owned"  # allocated here; `free`
    OPENED = "opened"  # another process's slab; `close`
    PINNED = "pinned"  # host memory that is known to the device; `close`
    BORROWED = "borrowed"  # allocated here by an array library; `close`


class Memory:
    """One slab of a device, or one range of host memory that the device knows.

    Only `Device` makes and ends it.

    Parameters
    ----------
    device : DeviceId
        Whose it is.
    address : int
        Where it is to the driver; not to be followed by anybody else.
    nbytes : int
        Its length.
    role : Role
        How this process came to it.
    """

    __slots__ = ("__weakref__", "address", "device", "ended", "nbytes", "opens", "role")

    def __init__(self, device: DeviceId, address: int, nbytes: int, role: Role) -> None:
        self.device = device
        self.address = address
        self.nbytes = nbytes
        self.role = role
        #: True once it was freed or closed.
        self.ended = False
        #: How often it was opened and not yet closed.
        self.opens = 1

    def range(self, offset: int = 0, nbytes: int | None = None) -> DeviceRange:
        """Name a range of it; all from `offset` on when no length is given.

        Raises
        ------
        InvalidArgument
            When it lies outside.
        """
        if nbytes is None:
            nbytes = self.nbytes - offset
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            message = f"range of {nbytes} bytes at {offset} lies outside of {self.nbytes} bytes on {self.device}"
            raise InvalidArgument(message)
        return DeviceRange(self, offset, nbytes)

    def __repr__(self) -> str:
        state = "ended " if self.ended else ""
        return f"<{state}{self.role} memory of {self.device}, {self.nbytes} bytes>"


class DeviceRange(NamedTuple):
    """Bytes of a device, as source or target of a copy; made by `Memory.range`."""

    memory: Memory
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class HostMemory:
    """Host memory to be made known to a device (pinned), for `Device.open`.

    Attributes
    ----------
    buffer : object
        A writable contiguous buffer, such as a `SharedMap`'s. It is held until `close`.
    """

    buffer: Any


@dataclass(frozen=True, slots=True, eq=False)
class ArrayMemory:
    """Memory of the device that an array library of this process allocated, for `Device.open`.

    Attributes
    ----------
    address : int
        Where it is to the driver.
    nbytes : int
        Its length.
    keep : object
        What keeps it allocated: the array. It is held until `close`.
    """

    address: int
    nbytes: int
    keep: Any


class SlabHandle(msgspec.Struct, frozen=True, kw_only=True):
    """What another process needs to open a slab; bytes in a message.

    Attributes
    ----------
    device : str
        UUID of the device.
    exporter : str
        The process that exported it: there it cannot be opened.
    nbytes : int
        Length of what it opens: a slab, or all that a library allocated in one.
    data : bytes
        What the driver made.
    offset : int
        Where the memory that was exported begins in it.
    """

    device: str
    exporter: str
    nbytes: int
    data: bytes
    offset: int = 0

    def encode(self) -> bytes:
        """Return it as bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> SlabHandle:
        """Read what `encode` wrote.

        Raises
        ------
        InvalidArgument
            When it is no handle.
        """
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.DecodeError as error:
            message = f"these bytes are no handle of a slab ({error}); send what SlabHandle.encode gave"
            raise InvalidArgument(message) from error


@dataclass(frozen=True, slots=True)
class Listing:
    """What a device has, and what this process has of it.

    Attributes
    ----------
    total_bytes, free_bytes : int
        Of the device, whoever uses it.
    owned_bytes : int
        Allocated here; what array libraries allocated is theirs to count.
    opened_bytes : int
        Of others, opened here; each slab once.
    pinned_bytes : int
        Host memory that this process made known to the device.
    in_flight : int
        Copies asked for here that are not known to be done.
    """

    total_bytes: int
    free_bytes: int
    owned_bytes: int
    opened_bytes: int
    pinned_bytes: int
    in_flight: int


# ------------------------------------------------------------------ for drivers
class Ticket(Protocol):
    """What a driver gives for a copy or an event."""

    def done(self) -> bool:
        """Say whether it has run; raises what went wrong."""
        ...

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it has run; False when the time was too short. Raises what went wrong."""
        ...


class Side(NamedTuple):
    """One side of a copy."""

    on_device: bool
    address: int


class Copy(NamedTuple):
    """A copy for a driver: checked, both sides held in place until it is done."""

    target: Side
    source: Side
    nbytes: int
    stream: int
    after: Sequence[Any]


class Exported(NamedTuple):
    """What a driver gives for an address: what opens its allocation, and where it lies there."""

    data: bytes
    offset: int
    nbytes: int


class Driver(Protocol):
    """One device through one library. `Device` has checked every argument.

    Errors are of three kinds: CapacityError and OwnerGone, after which the device goes on;
    DeviceError, after which it does not; UnsupportedPlatform and Unimplemented for what
    cannot be had here at all.
    """

    id: DeviceId
    #: Array libraries that make arrays over its memory: what `wrap` gives is known to them.
    libraries: tuple[str, ...]

    def allocate(self, nbytes: int) -> int:
        """Make a slab that can be exported alone; its address."""
        ...

    def free(self, address: int) -> None:
        """Give a slab back; nothing uses it here."""
        ...

    def copy(self, copy: Copy) -> Ticket:
        """Queue a copy on its stream."""
        ...

    def export(self, address: int) -> Exported:
        """Make a handle of what an address lies in, the same each time.

        UnsupportedPlatform where the allocator's memory has none; it names the setting.
        """
        ...

    def open(self, what: bytes | tuple[int, int]) -> int:
        """Open a handle of another process, or make host memory (address, length) known."""
        ...

    def close(self, address: int | None) -> None:
        """End what `open` gave, or all of the device; that never raises."""
        ...

    def event(self, stream: int, after: Sequence[Any]) -> Ticket:
        """Queue a mark on a stream."""
        ...

    def wrap(self, memory: Memory, offset: int, nbytes: int, keep: object) -> object:
        """Make the library's array of bytes over a range; it keeps `memory` and `keep` alive."""
        ...

    def list(self) -> tuple[int, int]:
        """Total and free bytes of the device."""
        ...


_token: tuple[int, str] = (0, "")


def process_token() -> str:
    """Name this process among all that may open a handle; a forked child has another."""
    global _token  # noqa: PLW0603  # one process, one name
    if _token[0] != os.getpid():
        _token = os.getpid(), secrets.token_hex(8)
    return _token[1]
