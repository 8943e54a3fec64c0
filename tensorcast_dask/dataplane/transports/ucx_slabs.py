"""Chunks from a device's memory to another node's device, over a line of UCX: both ends.

Rules:

1. Both ends are processes that have their device open. Their stores have made the connection
   and proved who is who; its end is the end of the transfer, as in `ucx`.
2. UCX moves the bytes from memory to memory. Nothing of them passes through the host, unless
   by UCX's own choice of a lane; a line without a better lane than that is refused, unless it
   was asked for: chunks by way of the host's memory are faster then.
3. UCX proves nothing: a chunk counts when it was read back from the device and has the sum
   that the holder told. (A receive from a process that was killed meanwhile was seen to end
   well, with other bytes.) That is read by the host, and kept by nobody. What is wrong is the
   line's fault: the holder's bytes were verified, or will be when they come another way.
4. Only the chunk that was asked for is received into, while it is.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.dataplane import faults
from tensorcast_dask.dataplane.devices.staging import Ring, Terms, sums_of_range
from tensorcast_dask.dataplane.transports.base import next_rid
from tensorcast_dask.dataplane.transports.ucx_line import Line, Stretch
from tensorcast_dask.exceptions import PeerLost, WrongPeer
from tensorcast_dask.tensors.checksums import chunk_range
from tensorcast_dask.tensors.messages import (
    Chunk,
    ReadChunk,
    Refused,
    StoreReply,
    StoreRequest,
    UcxOpen,
    UcxOpened,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorcast_dask.dataplane.devices import Device, DeviceRange
    from tensorcast_dask.dataplane.framing import FrameStream
    from tensorcast_dask.tensors.ids import Generation

__all__ = ["SlabReceiver", "send_slab", "stretch_of"]

#: Lanes that reach a device's memory without the host, of those that UCX says it has for it.
_STRAIGHT: Final = {
    "host": ("rc", "dc", "cma", "shm"),
    "cuda": ("rc", "dc", "cuda_ipc"),
}
_RING_BUFFERS: Final = 2
_RING_PIECE_BYTES: Final = 2 << 20


def stretch_of(device: Device, place: DeviceRange) -> Stretch:
    """Name a range of a device as UCX is to see it."""
    array: Any = device.wrap(place)
    known = getattr(array, "__cuda_array_interface__", None)
    if known is not None:
        return Stretch(int(known["data"][0]), place.nbytes, "cuda")
    address, memory = array.ucx_memory
    return Stretch(address, place.nbytes, memory)


# ------------------------------------------------------------------ the holder's end
def send_slab(
    stream: FrameStream,
    device: Device,
    slab: DeviceRange,
    *,
    generation: Generation,
    chunk_bytes: int,
    sums: Sequence[int],
) -> None:
    """Send the chunks that are asked for, until the reader hangs up.

    Raises
    ------
    PeerLost, DeadlineExceeded
        When it does so in the middle of one, or stalls, or a lane fails.
    WrongPeer, InvalidArgument
        When it says what does not belong here.
    """
    opened = stream.receive(UcxOpen).message
    whole = stretch_of(device, slab)
    line = Line(device=whole.memory != "host")
    try:
        line.connect(opened.address)
        stream.send(UcxOpened(address=line.address, piece_bytes=line.piece_bytes))
        line.greet(first=False, control=stream, stall_s=stream.stall_s)
        while (chunk := _next_chunk(stream)) is not None:
            start, nbytes = chunk_range(chunk, slab.nbytes, chunk_bytes)
            answer = Chunk(
                generation=generation, chunk=chunk, sum=sums[chunk], nbytes=nbytes
            )
            stream.send(answer)
            line.send(Stretch(whole.address + start, nbytes, whole.memory))
            faults.point("ucx.sending", "device")
            line.drive(control=stream, stall_s=stream.stall_s)
    finally:
        line.close()


def _next_chunk(stream: FrameStream) -> int | None:
    """Hear which chunk is wanted next; None when the reader has hung up."""
    try:
        request: object = stream.receive(
            StoreRequest,  # type: ignore[arg-type]  # a union, decoded as one
            idle=True,
        ).message
    except PeerLost:
        return None
    if not isinstance(request, ReadChunk):
        message = (
            f"{stream.peer} asked a line between devices for {type(request).__name__}"
        )
        raise WrongPeer(message)
    return request.chunk


# ------------------------------------------------------------------ the reader's end
class SlabReceiver:
    """Receives chunks from a holder's device. For one thread.

    Parameters
    ----------
    stream : FrameStream
        The connection to the holder's device process.
    device : Device
        Where they go.
    generation : Generation
        What the holder calls them.
    chunk_bytes : int
        How they are cut.
    """

    def __init__(
        self,
        stream: FrameStream,
        device: Device,
        *,
        generation: Generation,
        chunk_bytes: int,
    ) -> None:
        self._stream = stream
        self._device = device
        self._generation = generation
        self._chunk_bytes = chunk_bytes
        self._line: Line | None = None
        self._ring: Ring | None = None

    @property
    def via(self) -> str:
        """How the bytes come, for `explain`: "ucx:cma:device"."""
        return "ucx" if self._line is None else f"{self._line.via}:device"

    def open(self, memory: str, *, any_lane: bool) -> None:
        """Make the line for memory of a kind.

        Raises
        ------
        PeerLost
            When the holder is gone, or has no lane that is worth it (rule 2).
        """
        stream = self._stream
        line = self._line = Line(device=memory != "host")
        stream.send(UcxOpen(rid=next_rid(), address=line.address))
        opened = stream.receive(UcxOpened).message
        line.piece_bytes = opened.piece_bytes
        line.connect(opened.address)
        if not (any_lane or set(line.lanes) & set(_STRAIGHT[memory])):
            lanes = ", ".join(line.lanes) or "none"
            message = f"UCX has no lane between these devices that leaves the host out, only {lanes}"
            raise PeerLost(message)
        line.greet(first=True, control=stream, stall_s=stream.stall_s)

    def fetch(self, chunk: int, place: DeviceRange, *, any_lane: bool) -> int:
        """Receive a chunk into its place on the device; its sum, which is right (rule 3).

        After an error the line is of no more use, and nothing is written to the place.

        Raises
        ------
        PeerLost, DeadlineExceeded, WrongPeer
            When it does not come.
        DeviceError
            When it cannot be read back.
        """
        stream, where = self._stream, stretch_of(self._device, place)
        if self._line is None:
            self.open(where.memory, any_lane=any_lane)
        line = self._line
        assert line is not None, "transports: a receiver has a line by now"
        request = ReadChunk(
            rid=next_rid(), generation=self._generation, chunk=chunk, ucx=True
        )
        stream.send(request)
        reply = self._reply()
        if (reply.chunk, reply.nbytes) != (chunk, place.nbytes):
            message = f"{stream.peer} sends {reply.nbytes} bytes of chunk {reply.chunk} where {place.nbytes} of {chunk} belong"
            raise WrongPeer(message)
        line.receive(where)
        line.drive(control=stream, stall_s=stream.stall_s)
        if self._ring is None:
            self._ring = Ring(
                self._device, buffers=_RING_BUFFERS, piece_bytes=_RING_PIECE_BYTES
            )
        (found,) = sums_of_range(
            self._ring, place, Terms(chunk_bytes=self._chunk_bytes)
        )
        if found != reply.sum:
            message = f"chunk {chunk} came damaged over UCX from {stream.peer}; it is taken another way"
            raise PeerLost(message)
        return found

    def _reply(self) -> Chunk:
        reply: object = self._stream.receive(
            StoreReply,  # type: ignore[arg-type]  # a union, decoded as one
        ).message
        if isinstance(reply, Refused):
            raise reply.fault.error()
        if not isinstance(reply, Chunk):
            message = f"{self._stream.peer} did not answer with a chunk"
            raise WrongPeer(message)
        return reply

    def close(self) -> None:
        """Let go of the line: on return UCX touches no memory. Idempotent."""
        with contextlib.ExitStack() as stack:
            if self._ring is not None:
                stack.callback(self._ring.close)
            if self._line is not None:
                stack.callback(self._line.close)
