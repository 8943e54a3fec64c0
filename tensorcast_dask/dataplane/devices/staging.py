"""Bytes between host memory, or a file, and a device: through a ring of pinned buffers.

Rules:

1. A *chunk* is what a sum is of; a *piece* is what a buffer of the ring holds. While one
   piece is copied on the device's stream, the next is copied and summed on the host.
2. No chunk is reported before all its copies are done and its sum is known and, where one is
   expected, equal. What was not reported is of no meaning at the target.
3. Memory is bounded by the ring: two to four buffers, made and pinned once. A ring moves one
   thing at a time.
4. A move is an iterator: it goes as far as it is asked to, and closing it gives it up. However
   it ends, no copy is under way afterwards that uses the ring, the source or the target.
5. Host memory that the device knows already (pinned by its owner) is not copied on the host:
   the ring's places only bound how many of its pieces are under way.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from tensorcast_dask.dataplane import memory
from tensorcast_dask.dataplane.devices.base import DeviceRange, HostMemory
from tensorcast_dask.dataplane.fileranges import FileRange, write_all
from tensorcast_dask.exceptions import (
    CapacityError,
    FileChanged,
    InvalidArgument,
    Mismatch,
    TensorCastError,
)
from tensorcast_dask.tensors.checksums import DEFAULT_CHUNK_BYTES, check_chunk_bytes

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from tensorcast_dask.dataplane.devices.device import Device, Event

__all__ = ["Moved", "Ring", "Terms", "sums_of_range", "to_device", "to_host"]

DEFAULT_PIECE_BYTES: Final = 4 << 20
_BUFFERS: Final = 3


class Moved(NamedTuple):
    """A chunk that has arrived and is verified."""

    chunk: int
    offset: int
    nbytes: int
    sum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a move is to go; the same for both ways.

    Attributes
    ----------
    chunk_bytes : int
        What a sum is of.
    sums : sequence of int
        The sum that each chunk must have; none are checked where it is empty.
    stream : int
        The stream of the copies.
    pinned : bool
        Whether the host's side is a buffer that its owner pinned on the device.
    """

    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    sums: Sequence[int] = ()
    stream: int = 0
    pinned: bool = False


class Ring:
    """Pinned host buffers for the moves of one device.

    Parameters
    ----------
    device : Device
        That knows the buffers.
    buffers : int
        How many, from 2 to 4.
    piece_bytes : int
        Length of each; below a few MiB what a piece costs in Python shows.
    """

    def __init__(
        self,
        device: Device,
        *,
        buffers: int = _BUFFERS,
        piece_bytes: int = DEFAULT_PIECE_BYTES,
    ) -> None:
        if not 2 <= buffers <= 4:
            message = f"a ring takes 2 to 4 buffers, not {buffers}"
            raise InvalidArgument(message)
        check_chunk_bytes(piece_bytes)
        self.device = device
        self.piece_bytes = piece_bytes
        self.busy = threading.Lock()
        self._memory = memory.private(buffers * piece_bytes)
        self._pinned = device.open(HostMemory(self._memory))
        self.buffers = [
            self._memory[at : at + piece_bytes]
            for at in range(0, buffers * piece_bytes, piece_bytes)
        ]

    def close(self) -> None:
        """Let the buffers go; the move under way comes to its end first. Idempotent."""
        with self.busy:
            if self.buffers:
                self.buffers = []
                with contextlib.suppress(TensorCastError):
                    self.device.close(self._pinned)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def to_device(
    ring: Ring,
    source: Any,  # noqa: ANN401
    target: DeviceRange,
    terms: Terms | None = None,
) -> Generator[Moved]:
    """Move bytes of the host to a device; yields each chunk once it is there.

    Parameters
    ----------
    ring : Ring
        Of the target's device.
    source : buffer or FileRange
        As long as the target; it must stay as it is until the move has ended.
    target : DeviceRange
        Where they go.
    terms : Terms, optional
        How.

    Yields
    ------
    Moved
        One for each chunk, in order.

    Raises
    ------
    Mismatch
        When a chunk is not what its sum says.
    FileChanged
        When the file is shorter than told.
    CapacityError
        When the ring moves something else.
    DeviceError, OwnerGone
        When the device or the target's owner has failed.
    """
    return _Move(ring, target, source, terms or Terms()).to_device()


def to_host(
    ring: Ring,
    source: DeviceRange,
    target: Any,  # noqa: ANN401
    terms: Terms | None = None,
) -> Generator[Moved]:
    """Move bytes of a device to the host; yields each chunk once it is there.

    The parameters are those of `to_device`, with source and target exchanged; errors too.
    """
    return _Move(ring, source, target, terms or Terms()).to_host()


def sums_of_range(
    ring: Ring, source: DeviceRange, terms: Terms | None = None
) -> list[int]:
    """Read bytes of a device for the sums of their chunks, and keep none of them.

    Parameters and errors are those of `to_host`.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        file = FileRange(nowhere, 0, source.nbytes)
        return [chunk.sum for chunk in to_host(ring, source, file, terms)]
    finally:
        os.close(nowhere)


class _Piece(NamedTuple):
    """A piece under way: its place at the move's sides, and whose end it is."""

    at: int
    nbytes: int
    chunk: int
    #: The last of its chunk.
    ends: bool


class _Move:
    """One move, either way."""

    def __init__(
        self,
        ring: Ring,
        there: DeviceRange,
        here: Any,  # noqa: ANN401
        terms: Terms,
    ) -> None:
        check_chunk_bytes(terms.chunk_bytes)
        self._ring = ring
        self._there = there
        self._terms = terms
        #: The host's side: a flat view, or a range of a file.
        self._here = here if isinstance(here, FileRange) else memory.flat(here)
        if self._here.nbytes != there.nbytes:
            message = f"a move between {self._here.nbytes} bytes of the host and {there.nbytes} of the device"
            raise InvalidArgument(message)
        self._under_way: deque[tuple[Event, _Piece, memoryview]] = deque()
        self._digest = memory.new_digest()

    def to_device(self) -> Generator[Moved]:
        """Move to the device."""
        with self._going():
            sums: dict[int, int] = {}
            for turn, piece in enumerate(self._pieces()):
                if len(self._under_way) == len(self._ring.buffers):
                    yield from self._arrived(sums)
                place = self._place(turn, piece)
                self._fill(place, piece)
                self._digest.update(place)
                if piece.ends:
                    sums[piece.chunk] = self._sum(piece)
                self._copy(self._device_part(piece), place, piece, place)
            while self._under_way:
                yield from self._arrived(sums)

    def _arrived(self, sums: dict[int, int]) -> Iterator[Moved]:
        """Wait for the oldest piece; the chunk that it ends."""
        event, piece, _ = self._under_way[0]
        event.wait()
        self._under_way.popleft()
        if piece.ends:
            yield self._moved(piece, sums.pop(piece.chunk))

    def to_host(self) -> Generator[Moved]:
        """Move from the device."""
        with self._going():
            for turn, piece in enumerate(self._pieces()):
                if len(self._under_way) == len(self._ring.buffers):
                    yield from self._landed()
                place = self._place(turn, piece)
                self._copy(place, self._device_part(piece), piece, place)
            while self._under_way:
                yield from self._landed()

    def _landed(self) -> Iterator[Moved]:
        """Wait for the oldest piece and put it where it belongs; the chunk that it ends."""
        event, piece, place = self._under_way[0]
        event.wait()
        self._under_way.popleft()
        self._digest.update(place)
        self._empty(place, piece)
        if piece.ends:
            yield self._moved(piece, self._sum(piece))

    # -------------------------------------------------------------- the order of things
    @contextlib.contextmanager
    def _going(self) -> Iterator[None]:
        if not self._ring.busy.acquire(blocking=False):
            message = "the staging ring moves something else; make another one, or wait"
            raise CapacityError(message)
        try:
            yield
        finally:
            for event, _, _ in self._under_way:
                with contextlib.suppress(TensorCastError):
                    event.wait()
            self._under_way.clear()
            self._ring.busy.release()

    def _pieces(self) -> Iterator[_Piece]:
        """Cut the move into pieces that never cross the end of a chunk."""
        nbytes, chunk_bytes = self._there.nbytes, self._terms.chunk_bytes
        for start in range(0, nbytes, chunk_bytes):
            end = min(start + chunk_bytes, nbytes)
            for at in range(start, end, self._ring.piece_bytes):
                length = min(self._ring.piece_bytes, end - at)
                yield _Piece(at, length, start // chunk_bytes, at + length == end)

    def _copy(
        self,
        target: DeviceRange | memoryview,
        source: DeviceRange | memoryview,
        piece: _Piece,
        place: memoryview,
    ) -> None:
        event = self._ring.device.copy(target, source, stream=self._terms.stream)
        self._under_way.append((event, piece, place))

    # -------------------------------------------------------------- both sides
    def _device_part(self, piece: _Piece) -> DeviceRange:
        return self._there.memory.range(self._there.offset + piece.at, piece.nbytes)

    def _place(self, turn: int, piece: _Piece) -> memoryview:
        """Return the host memory that the device copies from or to."""
        if self._terms.pinned:
            assert isinstance(self._here, memoryview), "staging: a file is not pinned"
            return self._here[piece.at : piece.at + piece.nbytes]
        return self._ring.buffers[turn % len(self._ring.buffers)][: piece.nbytes]

    def _fill(self, place: memoryview, piece: _Piece) -> None:
        if isinstance(self._here, FileRange):
            _read(self._here, piece.at, place)
        elif not self._terms.pinned:
            memory.copy(
                place, self._here[piece.at : piece.at + piece.nbytes], threads=1
            )

    def _empty(self, place: memoryview, piece: _Piece) -> None:
        if isinstance(self._here, FileRange):
            write_all(self._here.fd, place, self._here.offset + piece.at)
        elif not self._terms.pinned:
            memory.copy(
                self._here[piece.at : piece.at + piece.nbytes], place, threads=1
            )

    # -------------------------------------------------------------- sums
    def _sum(self, piece: _Piece) -> int:
        """Finish the sum of a chunk and check it."""
        found, self._digest = self._digest.intdigest(), memory.new_digest()
        sums = self._terms.sums
        if sums and sums[piece.chunk] != found:
            message = f"chunk {piece.chunk} is damaged: its sum is {found:016x}, not {sums[piece.chunk]:016x}; read another replica"
            raise Mismatch(message, {"chunk": piece.chunk, "damaged": True})
        return found

    def _moved(self, piece: _Piece, found: int) -> Moved:
        start = piece.chunk * self._terms.chunk_bytes
        return Moved(piece.chunk, start, piece.at + piece.nbytes - start, found)


def _read(file: FileRange, at: int, into: memoryview) -> None:
    done = 0
    while done < len(into):
        got = os.preadv(file.fd, [into[done:]], file.offset + at + done)
        if not got:
            message = f"the file ends at byte {file.offset + at + done}, before the range that was to be moved; read it again"
            raise FileChanged(message)
        done += got
