"""What a device process is told at its start, and the orders that it asks its store for."""

from __future__ import annotations

from enum import StrEnum

from tensorcast_dask.tensors.ids import Generation, RequestId
from tensorcast_dask.tensors.messages.shared import Fault, Message, NodeCard, Wire

__all__ = [
    "Act",
    "AttachDevice",
    "DeviceOrder",
    "DeviceStart",
    "DeviceTold",
    "NextOrder",
    "OrderEnded",
    "OrderOver",
]


class Act(StrEnum):
    """What a device process is asked to do."""

    WAIT = "wait"  # nothing is to be done: ask again
    ALLOCATE = "allocate"  # make a slab; the outcome has its handle
    FREE = "free"
    FILL = "fill"  # memory file -> slab
    SAVE = "save"  # slab -> memory file
    CHECK = "check"  # read a slab, for its sums
    PIN = "pin"  # register a memory file with the device
    UNPIN = "unpin"
    COPY = "copy"  # memory of others on this device -> slab
    GATHER = "gather"  # a range of such memory -> memory file
    SEND = (
        "send"  # slab -> another node's device, over the connection that comes with it
    )
    RECEIVE = "receive"  # one chunk from there -> slab
    HANG_UP = "hang up"  # end such a line

    @property
    def beside(self) -> bool:
        """Whether others are carried out meanwhile: it waits for another node."""
        return self in (Act.SEND, Act.RECEIVE)


class AttachDevice(Message, frozen=True, kw_only=True):
    """A device process offers its device. Answer: `Done`; AlreadyExists when another one does."""

    rid: RequestId
    #: UUID of the device, and what people call it there.
    device: str
    name: str
    #: What the store may take of it.
    capacity_bytes: int
    #: Lengths of slabs are multiples of this.
    grain_bytes: int
    #: Whether other processes can open its slabs.
    shares: bool
    #: Lanes that its UCX has, as in `NodeCard.ucx`; () where it is off or not installed.
    ucx: tuple[str, ...] = ()


class OrderEnded(Wire, frozen=True, kw_only=True):
    """How an order went."""

    number: int
    fault: Fault | None = None
    handle: bytes = b""
    #: xxh3_64 of each chunk that went by, little-endian.
    sums: bytes = b""
    #: How the bytes came from another node: "ucx:cma".
    via: str = ""


class NextOrder(Message, frozen=True, kw_only=True):
    """Report one order and take the next. Answer: `DeviceOrder`, to wait after a while."""

    rid: RequestId
    ended: OrderEnded | None = None


class OrderOver(Message, frozen=True, kw_only=True):
    """An order that was carried out beside the others (`Act.beside`) is over. Answer: `Done`.

    It comes over another connection of the same process than `NextOrder`.
    """

    rid: RequestId
    ended: OrderEnded


class DeviceOrder(Message, frozen=True, kw_only=True):
    """One thing to do, with a description of the memory file, or socket, that it concerns.

    Orders are carried out one after the other, but for those that wait for another node.
    """

    number: int
    act: Act
    segment: int = 0
    nbytes: int = 0
    chunk_bytes: int = 0
    #: What the chunks must hash to; b"" where it is not known.
    sums: bytes = b""
    #: Where in the slab a fill begins.
    at: int = 0
    #: The host segment of a fill that is pinned already, or a ring (below 0), and where in it.
    pinned: int = 0
    pinned_at: int = 0
    #: Of a copy, and of what is gathered: what is opened, and spans as in `Opened.slabs`.
    handles: tuple[bytes, ...] = ()
    spans: bytes = b""
    #: Of a chunk: the line that it comes over, and what the holder calls its bytes. The first
    #: order of a line brings the connection.
    line: int = 0
    generation: Generation = Generation(0)
    #: Take UCX also where it has no better lane than TCP.
    any_lane: bool = False
    #: The longest silence of the other node.
    stall_s: float = 0.0


class DeviceStart(Wire, frozen=True, kw_only=True):
    """What a device process is told."""

    card: NodeCard
    #: The setting `device`, in words; where its emulated devices are.
    devices: str
    run_dir: str
    #: Which of the devices: its number here; -1 = that of `turn`, modulo how many there are.
    ordinal: int = -1
    turn: int = 0
    #: Bytes that the store may take, or a share below 1.
    memory: float
    #: Whether UCX may be used: it is loaded at the start.
    ucx: bool = False


class DeviceTold(Wire, frozen=True, kw_only=True):
    """What it says of itself: that it is attached, or why it is not."""

    pid: int = 0
    device: str = ""
    name: str = ""
    capacity_bytes: int = 0
    fault: Fault | None = None
