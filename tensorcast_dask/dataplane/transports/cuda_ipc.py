"""Same device: the holder's memory there, opened by handle. Scheme `cuda_ipc`.

Devices of every kind have it; the scheme is called as people know it.

Rules:

1. Over the unix socket come handle, offset, length and generation, and a tag: a description
   that says to the holder, as long as it is open, that its memory is. No event crosses: the
   holder has waited for its own before it answers, the reader waits for its copies.
2. A slab is opened once a process and closed with the last that uses it (`Holding`, `Device`).
   In the process that exported it, it is the memory itself.
3. What is read is a copy. `slab` hands the mapping out, for as long as its holding lives.
4. Memory that its owner may change counts when its stamp is the same after the copy.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorcast_dask.dataplane.channel import Channel, Prefer
from tensorcast_dask.dataplane.devices import (
    DeviceRange,
    Holding,
    SlabHandle,
)
from tensorcast_dask.dataplane.fileranges import FileRange
from tensorcast_dask.dataplane.memory import flat, sum_of
from tensorcast_dask.dataplane.transports.base import (
    Arrived,
    Context,
    Expected,
    Work,
    next_rid,
    register,
)
from tensorcast_dask.exceptions import InvalidArgument, PeerLost, WrongPeer
from tensorcast_dask.tensors.checksums import chunk_range
from tensorcast_dask.tensors.devices import SLAB_SPAN
from tensorcast_dask.tensors.messages import (
    ChunkMap,
    ChunkMapAsked,
    Location,
    Open,
    Opened,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensorcast_dask.dataplane.devices import Device, Event, Memory
    from tensorcast_dask.tensors.ids import Generation
    from tensorcast_dask.tensors.messages import NodeCard

__all__ = ["IpcSource", "open_ipc"]


class _Piece(NamedTuple):
    """Bytes of the segment, and where they lie."""

    start: int
    place: DeviceRange


class IpcSource:
    """A holder's memory on a device that this process has open too."""

    scheme = "cuda_ipc"
    via = "ipc"

    def __init__(
        self, card: NodeCard, generation: Generation, context: Context
    ) -> None:
        assert context.device is not None, "transports: cuda_ipc is for a device"
        self.device: Device = context.device
        self._peer = card.name or str(card.node)
        self._generation = generation
        self._context = context
        self._expected = Expected()
        self._chunk_bytes = 0
        self._channel: Channel | None = None
        if context.pool is None:
            self._channel = Channel.connect(
                card,
                credentials=context.credentials,
                prefer=Prefer.UNIX,
                until_s=context.until_s,
            )
            self._ask: Callable[..., Any] = self._channel.call
        else:
            self._ask = partial(context.pool.call, card, prefer=Prefer.UNIX)
        self._opened: Opened | None = None
        self._holdings: list[Holding] = []
        self._pieces: list[_Piece] = []

    def open(self) -> Opened:
        """Ask the holder, once: it tells length, index, and which content it is."""
        if self._opened is not None:
            return self._opened
        request = Open(
            rid=next_rid(),
            generation=self._generation,
            deadline_s=self._context.deadline_s,
            device=self.device.id.uuid,
            share=self._context.share,
        )
        frame = self._ask(request, expect=Opened, until_s=self._context.until_s)
        opened: Opened = frame.message
        if opened.handle:
            memory, _ = self._enter(opened.handle, frame.take_fd())
            self._pieces = [_Piece(0, memory.range(0, opened.nbytes))]
        else:
            slabs = [self._enter(data) for data in opened.slabs]
            for start, number, offset, length in SLAB_SPAN.iter_unpack(opened.spans):
                memory, begin = slabs[number]
                place = memory.range(begin + offset, length)
                self._pieces.append(_Piece(start, place))
        self._opened = opened
        return opened

    def _enter(self, data: bytes, tag: int = -1) -> tuple[Memory, int]:
        """Open a handle, with the tag that goes with it; the memory, and where it begins there."""
        try:
            handle = SlabHandle.decode(data)
            memory = self.device.exported(handle)
            if memory is not None:
                return memory, 0
            memory = self.device.open(handle)
            self._holdings.append(Holding(self.device, memory, tag=tag))
            tag = -1
        finally:
            if tag >= 0:
                os.close(tag)
        return memory, handle.offset

    def slab(self) -> tuple[Opened, Holding]:
        """Hand the mapping out: it is closed with the last that keeps the holding.

        Raises
        ------
        WrongPeer
            When the bytes are not one slab of the holder's.
        """
        opened = self.open()
        if len(self._holdings) != 1 or not opened.handle:
            message = (
                f"{self._peer} has no slab of its own for generation {self._generation}"
            )
            raise WrongPeer(message)
        return opened, self._holdings[0]

    def chunk_map(self) -> ChunkMap:
        """See `Source`."""
        asked = ChunkMapAsked(rid=next_rid(), generation=self._generation)
        frame = self._ask(asked, expect=ChunkMap, until_s=self._context.until_s)
        found: ChunkMap = frame.message
        self._expected = Expected(found)
        self._chunk_bytes = found.chunk_bytes
        return found

    def read_chunk(self, chunk: int, into: Any) -> Arrived:  # noqa: ANN401
        """See `Source`; host memory only, which is where sums are made."""
        opened = self.open()
        if not self._chunk_bytes:
            self.chunk_map()
        start, nbytes = chunk_range(chunk, opened.nbytes, self._chunk_bytes)
        in_file = isinstance(into, FileRange)
        room = flat(bytearray(nbytes) if in_file else into)[:nbytes]
        self.read_ranges([(start, nbytes)], room)
        found = sum_of(room)
        if in_file:
            into.write(room)
        self._expected.check_sum(chunk, found, peer=self._peer)
        self._expected.check_stamp(opened.stamp, peer=self._peer)
        return Arrived(Work(chunk, into), nbytes, found, opened.stamp)

    def read_chunks(self, work: Callable[[], Work | None]) -> Iterator[Arrived]:
        """See `Source`."""
        while (item := work()) is not None:
            yield self.read_chunk(item.chunk, item.into)

    def read_ranges(self, ranges: list[tuple[int, int]], into: Any) -> int:  # noqa: ANN401
        """See `Source`; `into` may be a range of the device."""
        self.read_places(list(_parts(ranges, into)))
        return sum(length for _, length in ranges)

    def read_places(self, places: list[tuple[int, int, Any]]) -> None:
        """Fetch byte ranges (start, length), each to a place of its own.

        Raises
        ------
        Incomplete
            When the owner changed its memory meanwhile.
        """
        opened = self.open()
        events: list[Event] = []
        try:
            for start, length, into in places:
                if start + length > opened.nbytes:
                    message = f"range {start}+{length} is outside the segment of {opened.nbytes} bytes"
                    raise WrongPeer(message)
                events += self._copies(start, length, into)
        finally:
            for event in events:
                event.wait()
        if opened.slabs:  # rule 4
            self._expected = Expected(self.chunk_map())
            self._expected.check_stamp(opened.stamp, peer=self._peer)

    def _copies(self, start: int, length: int, into: Any) -> Iterator[Any]:  # noqa: ANN401
        for piece in self._pieces:
            low = max(start, piece.start)
            high = min(start + length, piece.start + piece.place.nbytes)
            if low < high:
                source = piece.place.memory.range(
                    piece.place.offset + low - piece.start, high - low
                )
                yield self.device.copy(_part(into, low - start, high - low), source)

    def take_fd(self) -> int | None:
        """See `Source`: there is no file."""
        return None

    def close(self) -> None:
        """See `Source`."""
        self._pieces, self._holdings = [], []
        if self._channel is not None:
            self._channel.close()


def _parts(ranges: list[tuple[int, int]], into: Any) -> Iterator[tuple[int, int, Any]]:  # noqa: ANN401
    at = 0
    for start, length in ranges:
        yield start, length, _part(into, at, length)
        at += length


def _part(into: Any, at: int, length: int) -> Any:  # noqa: ANN401
    if isinstance(into, DeviceRange):
        return into.memory.range(into.offset + at, length)
    return flat(into)[at : at + length]


def open_ipc(location: Location, generation: Generation, context: Context) -> IpcSource:
    """Open a source on a device.

    Raises
    ------
    InvalidArgument
        Without a device.
    PeerLost
        When the holder is not on this host, or its socket does not answer.
    """
    if context.device is None:
        message = "cuda_ipc is for a device that this process has open; use shm for host memory"
        raise InvalidArgument(message)
    card = location.card
    if context.credentials.host and card.host != context.credentials.host:
        message = (
            "the holder is on another host, where no handle of this one opens; use tcp"
        )
        raise PeerLost(message)
    return IpcSource(card, generation, context)


register("cuda_ipc", open_ipc)
