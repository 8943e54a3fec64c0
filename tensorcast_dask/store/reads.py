"""Reads: whole replicas, chunks, ranges.

Rules:

1. A read holds a use lease from before its first byte until after its last: what is sent
   cannot be freed, recycled or moved meanwhile, however slow the reader.
2. What is large is mapped on this host, sent straight from its file to another one; what
   is small is copied out of its slab.
3. What lies on disk or a device is brought into memory; where memory has no room it is read for this
   connection alone, and stays where it is.
4. A replica that is being received is served by chunks, as far as they are verified.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Final, assert_never

import xxhash

from tensorcast_dask.dataplane import faults
from tensorcast_dask.dataplane.server import Peer, Reply
from tensorcast_dask.exceptions import (
    CapacityError,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
)
from tensorcast_dask.store.core import Core, Reading, now_s
from tensorcast_dask.tensors.checksums import chunk_range
from tensorcast_dask.tensors.messages import (
    Chunk,
    ChunkMap,
    Open,
    Opened,
    Ranges,
    ReadChunk,
    ReadRanges,
    Tier,
)

if TYPE_CHECKING:
    from tensorcast_dask.store.device_reads import DeviceReads
    from tensorcast_dask.store.movers import Movers
    from tensorcast_dask.store.sums import Sums
    from tensorcast_dask.tensors.ids import Generation

__all__ = ["Reads"]

_BORROWED: Final = "borrowed"
_RANGE: Final = struct.Struct("<QQ")
#: Ranges of less, on average, are copied together before they are sent.
_SHORT_BYTES: Final = 4096


class Reads:
    """Carries the requests of who reads.

    Parameters
    ----------
    core : Core
        The state.
    sums : Sums
        Chunk sums.
    movers : Movers
        Brings what lies in another tier of this node into memory.
    devices : DeviceReads
        Hands copies on a device out.
    """

    def __init__(
        self, core: Core, *, sums: Sums, movers: Movers, devices: DeviceReads
    ) -> None:
        self._core = core
        self._devices = devices
        self._sums = sums
        self._movers = movers

    def _acquire(
        self, generation: Generation, deadline_s: float, peer: Peer
    ) -> Reading:
        """Take a lease on a copy in memory; bring it there first where it must be."""
        core = self._core
        held = core.acquire(generation)
        if held.file is not None:
            return held
        try:
            if deadline_s <= 0:
                message = (
                    f"{held.replica.id!r} lies in {held.copy.tier} of this node, and the "
                    "reader does not wait; read it with a deadline"
                )
                raise DeadlineExceeded(message)  # noqa: TRY301 - released below
            self._movers.restore(generation, now_s() + deadline_s)
            restored = core.acquire(generation, Tier.HOST)
        except (CapacityError, NotFound):  # no room, or others needed it at once
            return self._borrow(held, peer)
        except BaseException:
            core.release(held)
            raise
        core.release(held)
        return restored

    def _borrow(self, held: Reading, peer: Peer) -> Reading:
        """Read from disk for this connection alone: memory has no room for a copy.

        The connection keeps what it borrowed last, for the chunks that follow.
        """
        kept: Reading | None = peer.notes.get(_BORROWED)
        if kept is None or kept.replica is not held.replica:
            self.give_back(peer)
            try:
                file = self._movers.borrow(held.replica.generation)
            except BaseException:
                self._core.release(held)
                raise
            peer.notes[_BORROWED] = Reading(held.replica, held.copy, file)
        return Reading(held.replica, held.copy, peer.notes[_BORROWED].file)

    @staticmethod
    def give_back(peer: Peer) -> None:
        """Close what a connection had borrowed."""
        kept: Reading | None = peer.notes.pop(_BORROWED, None)
        if kept is not None and kept.file is not None:
            kept.file.close()

    def handle(self, request: Open | ReadChunk | ReadRanges, peer: Peer) -> Reply:
        """Carry one request out."""
        match request:
            case Open():
                return self._open(request, peer)
            case ReadChunk():
                return self._read_chunk(request, peer)
            case ReadRanges():
                return self._read_ranges(request, peer)
            case _:
                assert_never(request)

    def _open(self, request: Open, peer: Peer) -> Reply:
        if request.device:
            return self._devices.open(request, peer)
        held = self._acquire(request.generation, request.deadline_s, peer)
        replica = held.replica
        with self._core.lock:
            self._core.counts.read(request.generation)
        small = self._core.table.tiers[Tier.HOST].in_slab(replica.nbytes)
        mapped = request.map and peer.unix and not small
        answer = Opened(
            generation=request.generation,
            index=replica.index,
            nbytes=replica.nbytes,
            mapped=mapped,
        )

        def done() -> None:
            self._core.release(held)
            self.give_back(peer)  # the reader has a description, or the bytes

        try:
            if mapped:
                assert held.file is not None, "store: the host tier is memory"
                fd = held.file.read_description()
                return Reply(message=answer, fds=(fd,), done=done)
            if small or held.file is None or peer.unix:
                return Reply(message=answer, payload=held.view(), done=done)
            file = (held.file.fd, 0, replica.nbytes)
            return Reply(message=answer, payload_file=file, done=done)
        except BaseException:
            done()
            raise

    def sums(self, generation: Generation, peer: Peer) -> None:
        """See to it that the chunk sums of a replica are known, where it is in memory."""
        deadline_s = self._core.settings.stall_s
        self._core.release(self._acquire(generation, deadline_s, peer))
        self._sums.of(generation)

    def chunk_map(self, generation: Generation) -> ChunkMap:
        """Say what can be had of a generation now, and what it hashes to."""
        core = self._core
        with core.lock:
            filling = core.table.fillings.get((generation, Tier.HOST))
            replica = core.table.replicas.get(generation)
            if replica is None or not replica.committed:
                if filling is None or filling.have is None or replica is None:
                    core.table.find(generation)
                assert replica is not None, "store: find() lets only replicas pass"
                assert filling is not None, (
                    "store: find() lets only committed ones pass"
                )
                return ChunkMap(
                    generation=generation,
                    nbytes=replica.nbytes,
                    chunk_bytes=filling.chunk_bytes,
                    index=replica.index,
                    have=bytes(filling.have or b""),
                    sums=replica.sums,
                )
            return ChunkMap(
                generation=generation,
                nbytes=replica.nbytes,
                chunk_bytes=core.settings.chunk_bytes,
                index=replica.index,
                sums=replica.sums,
            )

    def _read_chunk(self, request: ReadChunk, peer: Peer) -> Reply:
        held, chunk_bytes = self._hold_chunk(request, peer)
        done = functools.partial(self._core.release, held)
        try:
            faults.point("copy.chunk", detail=held.replica.id)
            start, length = chunk_range(request.chunk, held.replica.nbytes, chunk_bytes)
            digest = self._sums.one(held, request.chunk, chunk_bytes)
            answer = Chunk(
                generation=request.generation, chunk=request.chunk, sum=digest
            )
            small = self._core.table.tiers[Tier.HOST].in_slab(held.replica.nbytes)
            by_file = not small and not peer.unix and not request.ucx
            if held.file is not None and by_file:
                file = (held.file.fd, start, length)
                return Reply(message=answer, payload_file=file, done=done)
            payload = held.view()[start : start + length]
            return Reply(message=answer, payload=payload, done=done)
        except BaseException:
            done()
            raise

    def _hold_chunk(self, request: ReadChunk, peer: Peer) -> tuple[Reading, int]:
        core = self._core
        with core.lock:
            filling = core.table.fillings.get((request.generation, Tier.HOST))
            have = None if filling is None else filling.have
            if filling is not None and have is not None and request.chunk >= 0:
                at, bit = request.chunk >> 3, request.chunk & 7
                if at < len(have) and have[at] >> bit & 1:
                    held = core.hold(request.generation, filling.copy)
                    return held, filling.chunk_bytes
        deadline_s = core.settings.stall_s
        held = self._acquire(request.generation, deadline_s, peer)
        return held, core.settings.chunk_bytes

    def _read_ranges(self, request: ReadRanges, peer: Peer) -> Reply:
        if len(request.ranges) % _RANGE.size:
            message = "ranges are pairs of u64: offset, length"
            raise InvalidArgument(message)
        held = self._acquire(request.generation, self._core.settings.stall_s, peer)
        done = functools.partial(self._core.release, held)
        try:
            faults.point("copy.chunk", detail=held.replica.id)
            parts = _cut(held.view(), request.ranges)
            total = xxhash.xxh3_64()
            for part in parts:
                total.update(part)
            answer = Ranges(generation=request.generation, sum=total.intdigest())
            return Reply(message=answer, payload=parts, done=done)
        except BaseException:
            done()
            raise


def _cut(whole: memoryview, ranges: bytes) -> list[memoryview]:
    """Give the ranges; many short ones gathered, since each view costs more than its bytes."""
    pairs = list(_RANGE.iter_unpack(ranges))
    for offset, length in pairs:
        if offset + length > whole.nbytes:
            message = f"bytes {offset} to {offset + length} are not in a segment of {whole.nbytes}"
            raise InvalidArgument(message)
    if sum(length for _, length in pairs) >= _SHORT_BYTES * len(pairs):
        return [whole[offset : offset + length] for offset, length in pairs]
    gathered = bytearray()
    for offset, length in pairs:
        gathered += whole[offset : offset + length]
    return [memoryview(gathered)]
