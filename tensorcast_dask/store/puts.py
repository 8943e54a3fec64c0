"""Puts: room, bytes, commit; in one message for what is small.

Rules:

1. A reservation belongs to the connection that made it. When that ends it is taken back:
   at once where its process is dead too, else (a pool closed an idle connection) when the
   process ends; over TCP, where no process can be watched, after `reservation_ttl_s`. In
   any case at its deadline. A repeat of the request takes it over.
2. Lengths and offsets are checked against the table before a byte is taken in.
3. An index is decoded before it is believed: it describes exactly the bytes reserved.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Final, assert_never

from tensorcast_dask.dataplane.memory import copy as copy_bytes
from tensorcast_dask.dataplane.remote import read_process
from tensorcast_dask.dataplane.server import Peer, Reply
from tensorcast_dask.exceptions import (
    InvalidArgument,
    Mismatch,
    NotFound,
    PeerLost,
    TensorCastError,
    UnsupportedPlatform,
)
from tensorcast_dask.store.core import Core, Reading, now_s
from tensorcast_dask.store.records import digest_of_index
from tensorcast_dask.store.repeats import once
from tensorcast_dask.store.state.replicas import Life, Wanted
from tensorcast_dask.tensors.checksums import encode_sums
from tensorcast_dask.tensors.messages import (
    Abort,
    Commit,
    Done,
    Fill,
    Reserve,
    Reserved,
    StoreReply,
    Tier,
    Write,
)
from tensorcast_dask.tensors.specs import Index

if TYPE_CHECKING:
    from tensorcast_dask.dataplane.framing import Payload
    from tensorcast_dask.store.devices import Devices
    from tensorcast_dask.store.state.replicas import Filling
    from tensorcast_dask.store.sums import Sums
    from tensorcast_dask.tensors.ids import Generation

__all__ = ["Puts"]

_DESCRIBED_KEPT: Final = 4096
_MOST_INLINE_BYTES: Final = 16 << 20


class Puts:
    """Carries the requests of who writes.

    Parameters
    ----------
    core : Core
        The state.
    sums : Sums
        Chunk sums.
    devices : Devices
        Knows the handles of slabs that callers fill.
    """

    def __init__(self, core: Core, sums: Sums, *, devices: Devices) -> None:
        self._core = core
        self._devices = devices
        self._sums = sums
        #: How many bytes indexes describe that were decoded before, by digest.
        self._described: dict[str, int] = {}

    def handle(
        self,
        request: Reserve | Write | Fill | Commit | Abort,
        payload: Payload,
        peer: Peer,
    ) -> Reply:
        """Carry one request out."""
        match request:
            case Reserve():
                return self._reserve(request, peer)
            case Write():
                return self._write(request, payload)
            case Fill():
                return self._fill(request, peer)
            case Abort():
                self._core.abort(request.generation, self._tier(request.generation))
                return Reply(message=Done())
            case Commit():
                data = _content(payload) if request.inline else bytearray()
                change = functools.partial(self._commit, request, data, peer)
                return once(self._core, request, change, extra=bytes(data))
            case _:
                assert_never(request)

    def _wanted(self, request: Reserve | Commit, peer: Peer, nbytes: int) -> Wanted:
        ttl_s = self._core.settings.reservation_ttl_s
        if isinstance(request, Reserve) and request.deadline_s > 0:
            ttl_s = request.deadline_s
        if request.generation <= 0 or nbytes < 0 or not request.id:
            message = "a reservation needs a generation, an id and a length; get them from the catalog"
            raise InvalidArgument(message)
        return Wanted(
            generation=request.generation,
            id=request.id,
            version=request.version,
            nbytes=nbytes,
            tier=self._wished(request, peer),
            owner=peer.number,
            deadline_s=now_s() + ttl_s,
            rid=request.rid,
            labels=request.labels,
        )

    def _wished(self, request: Reserve | Commit, peer: Peer) -> Tier:
        """Give the tier that a caller wants to fill.

        Raises
        ------
        NotFound
            When this node's device is another one, or cannot be shared.
        """
        if isinstance(request, Commit) or not request.device:
            return Tier.HOST
        if not self._devices.reaches(peer, request.device):
            message = f"device {request.device} cannot be filled at this node; put to host memory"
            raise NotFound(message, {"device": request.device})
        return Tier.DEVICE

    def _tier(self, generation: Generation) -> Tier:
        """Give the tier that is being filled by a caller."""
        fillings = self._core.table.fillings
        on_device = (generation, Tier.DEVICE) in fillings
        return Tier.DEVICE if on_device else Tier.HOST

    def _reserve(self, request: Reserve, peer: Peer) -> Reply:
        core = self._core
        wanted = self._wanted(request, peer, request.nbytes)
        filling = self._same(request, peer)
        if filling is None:
            filling = core.reserve(wanted, until_s=wanted.deadline_s)
        copy = filling.copy
        if copy.tier is Tier.DEVICE:
            return self._lend(request, filling)
        warm = not filling.make_bytes
        small = core.table.tiers[Tier.HOST].in_slab(request.nbytes)
        if small or not request.map or not peer.unix:
            answer = Reserved(generation=request.generation, mapped=False, warm=warm)
            return Reply(message=answer)
        try:
            fd, done = core.shelf.lend_writer(copy.segment)
        except TensorCastError:
            core.abort(request.generation, Tier.HOST)
            raise
        answer = Reserved(generation=request.generation, mapped=True, warm=warm)
        return Reply(message=answer, fds=(fd,), done=done)

    def _lend(self, request: Reserve, filling: Filling) -> Reply:
        """Let the caller open the slab that it fills; the tag says when it is done."""
        fd, done = self._core.shelf.lend_writer(filling.copy.segment)
        answer = Reserved(
            generation=request.generation,
            mapped=True,
            handle=self._devices.slab(filling.copy.segment),
        )
        return Reply(message=answer, fds=(fd,), done=done)

    def _same(self, request: Reserve, peer: Peer) -> Filling | None:
        """Find the reservation that this very request made before, if it did."""
        with self._core.lock:
            key = (request.generation, self._tier(request.generation))
            filling = self._core.table.fillings.get(key)
            if filling is None or not request.rid or filling.rid != request.rid:
                return None
            held = self._core.table.replicas[request.generation]
            if (held.nbytes, held.id) != (request.nbytes, request.id):
                message = (
                    f"request id {request.rid!r} reserved something else; mint a new id"
                )
                raise Mismatch(message)
            filling.owner, filling.orphan_pid = peer.number, 0
            return None if filling.copy.life is Life.DROPPING else filling

    def _write(self, request: Write, payload: Payload) -> Reply:
        core = self._core
        with core.lock:
            filling = core.table.filling(request.generation, Tier.HOST)
            held = core.hold(request.generation, filling.copy)
        try:
            end = request.offset + payload.nbytes
            if request.offset < 0 or end > held.replica.nbytes:
                message = f"bytes {request.offset} to {end} do not fit {held.replica.nbytes} reserved"
                raise InvalidArgument(message)
            nbytes = payload.nbytes
            self._take_in(held, filling, payload, request.offset)
            with core.lock:
                ends_s = now_s() + core.settings.reservation_ttl_s
                filling.deadline_s = max(filling.deadline_s, ends_s)
        finally:
            core.release(held)
        return Reply(message=Done(nbytes=nbytes))

    def _fill(self, request: Fill, peer: Peer) -> Reply:
        """Read the caller's memory into its reservation."""
        if not peer.unix:
            message = (
                "only over the unix socket is it known whose memory to read; use Write"
            )
            raise UnsupportedPlatform(message)
        core = self._core
        with core.lock:
            filling = core.table.filling(request.generation, Tier.HOST)
            held = core.hold(request.generation, filling.copy)
        try:
            spans = _checked_spans(request.spans, held.replica.nbytes)
            view = held.view()
            try:
                _read_spans(peer.pid, spans, view)
            except PeerLost as error:
                message = f"the kernel does not let the store read its caller: {error}"
                raise UnsupportedPlatform(message) from error
        finally:
            core.release(held)
        return Reply(message=Done(nbytes=sum(length for _, _, length in spans)))

    def _take_in(
        self, held: Reading, filling: Filling, payload: Payload, offset: int
    ) -> None:
        """Receive a payload into its place: a map where pages are, else by `pwrite`."""
        small = self._core.table.tiers[Tier.HOST].in_slab(held.replica.nbytes)
        if filling.make_bytes and not small:
            fd = self._core.shelf.own(held.copy.segment).fd
            payload.read_to_file(fd, offset)
        else:
            payload.read_into(held.view()[offset : offset + payload.nbytes])

    def _commit(self, request: Commit, data: bytearray, peer: Peer) -> StoreReply:
        if request.inline:
            return self._put_inline(request, data, peer)
        digest, described = self._describe(request.index)
        with self._core.lock:
            replica = self._core.table.replicas.get(request.generation)
            if replica is not None:
                _check_length(described, replica.nbytes)
        replica = self._core.commit(
            request.generation,
            self._tier(request.generation),
            index=request.index,
            index_digest=digest,
        )
        return Done(nbytes=replica.nbytes)

    def _describe(self, index: bytes) -> tuple[str, int]:
        """Return the digest of an index and how many bytes it describes.

        Raises
        ------
        CorruptFile
            When it is no index.
        """
        digest = digest_of_index(index)
        described = self._described.get(digest)
        if described is None:
            described = Index.decode(index).nbytes
            if len(self._described) >= _DESCRIBED_KEPT:
                self._described.clear()
            self._described[digest] = described
        return digest, described

    def _put_inline(self, request: Commit, data: bytearray, peer: Peer) -> StoreReply:
        core = self._core
        digest, described = self._describe(request.index)
        _check_length(described, len(data))
        wanted = self._wanted(request, peer, len(data))
        filling = core.reserve(wanted, until_s=wanted.deadline_s)
        try:
            held = core.hold(request.generation, filling.copy)
            try:
                copy_bytes(held.view(), data)
            finally:
                core.release(held)
            core.commit(
                request.generation,
                Tier.HOST,
                index=request.index,
                index_digest=digest,
                sums=encode_sums(self._sums.cut(data)),
            )
        except BaseException:
            core.abort(request.generation, Tier.HOST)
            raise
        return Done(nbytes=len(data))


def _content(payload: Payload) -> bytearray:
    if payload.nbytes > _MOST_INLINE_BYTES:
        message = (
            f"{payload.nbytes} bytes are too many for one message (at most "
            f"{_MOST_INLINE_BYTES}); reserve room for them"
        )
        raise InvalidArgument(message)
    return payload.read()


def _check_length(described: int, nbytes: int) -> None:
    if described != nbytes:
        message = f"the index describes {described} bytes, {nbytes} were reserved"
        raise Mismatch(message)


_SPAN: Final = struct.Struct("<QQQ")


def _checked_spans(packed: bytes, nbytes: int) -> list[tuple[int, int, int]]:
    """Unpack (offset, address, length) triples that ascend, lie apart and fit."""
    if len(packed) % _SPAN.size:
        message = f"spans are triples of 8 bytes each, not {len(packed)} bytes"
        raise InvalidArgument(message)
    spans: list[tuple[int, int, int]] = list(_SPAN.iter_unpack(packed))
    end = 0
    for offset, _, length in spans:
        if offset < end or offset + length > nbytes:
            message = f"bytes {offset} to {offset + length} overlap, or do not fit {nbytes} reserved"
            raise InvalidArgument(message)
        end = offset + length
    return spans


def _read_spans(pid: int, spans: list[tuple[int, int, int]], view: memoryview) -> None:
    """Read each span, and clear what lies between: a used segment holds old bytes."""
    at = 0
    for offset, address, length in (*spans, (len(view), 0, 0)):
        if offset > at:
            view[at:offset] = bytes(offset - at)
        if length:
            read_process(pid, address, view[offset : offset + length])
        at = offset + length
