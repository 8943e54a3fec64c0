"""Memory that a process lends to the cluster, served to whoever reads it: a node of kind `instance`.

Rules:

1. The lender stays the owner of its memory. What is served is what was there at one instant
   between two mutations, never torn: a stamp goes up with each mutation, and bytes are sent
   only when the stamp before and after their copy is the same.
2. The lease is the link to the catalog. It ends with the lender, or with its last tensor.
3. Sent bytes carry their sum.

The process may serve them by itself (`instance.register`), or its node's store does, which
reads them out of it (`store.lent`).
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from tensorcast_dask.dataplane import memory
from tensorcast_dask.dataplane.link import Link, LinkCallbacks
from tensorcast_dask.dataplane.server import Peer, Reply
from tensorcast_dask.exceptions import (
    Gone,
    Incomplete,
    InvalidArgument,
    NotFound,
    Unimplemented,
)
from tensorcast_dask.tensors.checksums import chunk_range, encode_sums
from tensorcast_dask.tensors.ids import Epoch
from tensorcast_dask.tensors.messages import (
    Chunk,
    ChunkMap,
    ChunkMapAsked,
    DoDrop,
    DoEnd,
    Inventory,
    NodeHello,
    NodeWelcome,
    Open,
    Opened,
    Ranges,
    ReadChunk,
    ReadRanges,
    Renew,
    ReplicaDropped,
    ReplicaReady,
    Role,
    State,
    StateAsked,
    SumsAsked,
    TaskDone,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.tensors.ids import Generation
    from tensorcast_dask.tensors.messages import (
        LinkTarget,
        NodeCard,
        ReplicaRecord,
        StoreRequest,
        ToNode,
    )

__all__ = ["Lending", "LentMemory"]

_RANGE: Final = struct.Struct("<QQ")
_ROOM: Final = "lending-room"


class LentMemory(Protocol):
    """One artifact version whose memory is its owner's."""

    @property
    def record(self) -> ReplicaRecord:
        """What the catalog is told of it."""
        ...

    def stamp(self) -> int:
        """Give the stamp of the content at rest; waits for the end of a mutation."""
        ...

    def part(self, start: int, room: memoryview) -> int:
        """Copy one consistent range of the segment into `room`; give its stamp."""
        ...

    def where(self) -> tuple[int, bytes]:
        """Say whose memory it is and where, for a reader that reads it itself; (0, b"") if none can."""
        ...

    def slabs(self, device: str) -> tuple[tuple[bytes, ...], bytes]:
        """Give handles of memory on a device and spans (`Opened.slabs`); none where it lies elsewhere."""
        ...


class Lending:
    """A node of kind `instance`: its link to the catalog, and answers to its readers.

    Parameters
    ----------
    card : NodeCard
        Who lends.
    target : LinkTarget
        Where the catalog is.
    chunk_bytes : int
        How content is cut.
    on_end : callable
        Told of each generation that the catalog ends.
    """

    def __init__(
        self,
        card: NodeCard,
        target: LinkTarget,
        *,
        chunk_bytes: int,
        on_end: Callable[[Generation, str], None],
    ) -> None:
        self.card = card
        self.chunk_bytes = chunk_bytes
        self._target = target
        self._on_end = on_end
        self._lock = threading.Lock()
        self._lent: dict[Generation, LentMemory] = {}
        self.epoch = target.epoch
        self._up = threading.Event()
        self._link = Link(
            LinkCallbacks(
                hello=self._hello,
                on_up=self._on_up,
                on_message=self._on_message,
                on_down=lambda _: self._up.clear(),
                renew=lambda seq: Renew(seq=seq),
            ),
            target=target,
            role=Role.INSTANCE,
        )
        self._link.start()

    def wait_up(self, within_s: float) -> bool:
        """Wait until the catalog listens; whether it does."""
        return self._up.wait(within_s)

    def aim(self, target: LinkTarget) -> None:
        """Link to another catalog, where it is another one."""
        same = msgspec.structs.replace(target, epoch=self._target.epoch)
        if same != self._target:
            self._target = target
            self._link.aim(target)

    # ------------------------------------------------------------ lending
    def lend(self, lent: LentMemory) -> None:
        """Begin to serve and tell the catalog."""
        with self._lock:
            self._lent[lent.record.generation] = lent
        self._link.send(ReplicaReady(record=lent.record))

    def find(self, generation: Generation) -> LentMemory | None:
        """Give what is lent under a generation."""
        return self._lent.get(generation)

    @property
    def generations(self) -> tuple[Generation, ...]:
        """What is lent now."""
        return tuple(self._lent)

    def forget(
        self, generation: Generation, why: str = "released by its owner"
    ) -> None:
        """Stop serving a generation."""
        with self._lock:
            known = self._lent.pop(generation, None)
        if known is not None:
            tier = known.record.tier
            dropped = ReplicaDropped(generation=generation, tier=tier, why=why)
            self._link.send(dropped)

    def close(self, why: str = "released by its owner") -> None:
        """Stop serving everything. Idempotent."""
        for generation in self.generations:
            self.forget(generation, why)
        self._link.stop(within_s=2.0)

    # ------------------------------------------------------------ the catalog
    def _hello(self) -> NodeHello:
        return NodeHello(
            card=self.card,
            cluster=self._target.cluster,
            epoch=Epoch(self.epoch),
            counter=max(self._lent, default=0),
        )

    def _on_up(self, welcome: NodeWelcome) -> list[Inventory]:
        self.epoch = welcome.epoch
        self._up.set()
        with self._lock:
            records = tuple(known.record for known in self._lent.values())
        return [Inventory(replicas=records)]

    def _on_message(self, message: ToNode) -> None:
        match message:
            case DoDrop():
                self._end(message.generation, message.why or "destroyed")
                self._link.send(TaskDone(task=message.task))
            case DoEnd():
                for generation in self.generations:
                    self._end(generation, message.why)
            case _:
                pass  # a lender pulls, loads and saves nothing

    def _end(self, generation: Generation, why: str) -> None:
        self.forget(generation)
        self._on_end(generation, why)

    # ------------------------------------------------------------ readers
    def handle(self, request: StoreRequest, peer: Peer) -> Reply:
        """Answer one request of a reader."""
        match request:
            case Open():
                return self._open(request, peer)
            case ChunkMapAsked() | SumsAsked():
                return Reply(message=self._chunk_map(request))
            case ReadChunk():
                return self._chunk(request, peer)
            case ReadRanges():
                return self._ranges(request)
            case StateAsked():
                text = f'{{"lent": {len(self._lent)}}}'.encode()
                return Reply(message=State(json=text))
            case _:
                message = (
                    f"a registering process does not offer {type(request).__name__}"
                )
                raise Unimplemented(message)

    def _known(self, generation: Generation) -> LentMemory:
        known = self._lent.get(generation)
        if known is None:
            message = "its owner has released it"
            raise Gone(message)
        return known

    def _open(self, request: Open, peer: Peer) -> Reply:
        known = self._known(request.generation)
        record = known.record
        slabs: tuple[bytes, ...] = ()
        pid, spans = known.where() if request.lent else (0, b"")
        if request.device:
            slabs, spans = known.slabs(request.device) if peer.unix else ((), b"")
            if not slabs:
                message = f"{record.id!r} is not lent on device {request.device}; read it through host memory"
                raise NotFound(message, {"device": request.device})
        stamp = known.stamp()
        opened = Opened(
            generation=request.generation,
            index=record.index,
            nbytes=record.nbytes,
            mapped=False,
            pid=pid,
            spans=spans,
            stamp=stamp,
            slabs=slabs,
        )
        if pid or slabs:
            return Reply(message=opened)
        content = bytearray(record.nbytes)
        known.part(0, memoryview(content))
        return Reply(message=opened, payload=content)

    def _chunk_map(self, request: ChunkMapAsked | SumsAsked) -> ChunkMap:
        known = self._known(request.generation)
        record = known.record
        sums = b""
        if isinstance(request, SumsAsked):
            content = memory.private(record.nbytes)
            stamp = known.part(0, content)
            sums = encode_sums(memory.sums_of(content, self.chunk_bytes, threads=1))
        else:
            stamp = known.stamp()
        return ChunkMap(
            generation=request.generation,
            nbytes=record.nbytes,
            chunk_bytes=self.chunk_bytes,
            index=record.index,
            sums=sums,
            stamp=stamp,
        )

    def _chunk(self, request: ReadChunk, peer: Peer) -> Reply:
        known = self._known(request.generation)
        start, nbytes = chunk_range(
            request.chunk, known.record.nbytes, self.chunk_bytes
        )
        part = _room(peer, nbytes, self.chunk_bytes)
        stamp = known.part(start, part)
        chunk = Chunk(
            generation=request.generation,
            chunk=request.chunk,
            sum=memory.sum_of(part),
            stamp=stamp,
        )
        return Reply(message=chunk, payload=part)

    def _ranges(self, request: ReadRanges) -> Reply:
        known = self._known(request.generation)
        ranges = list(_RANGE.iter_unpack(request.ranges))
        parts = memoryview(bytearray(sum(nbytes for _, nbytes in ranges)))
        stamps, at = set(), 0
        for offset, nbytes in ranges:
            if offset + nbytes > known.record.nbytes:
                message = (
                    f"range {offset}+{nbytes} is outside of {known.record.nbytes} bytes"
                )
                raise InvalidArgument(message)
            stamps.add(known.part(offset, parts[at : at + nbytes]))
            at += nbytes
        if len(stamps) > 1:
            message = f"{known.record.id!r} was changed while it was read; read again"
            raise Incomplete(message)
        stamp = stamps.pop() if stamps else known.stamp()
        answer = Ranges(
            generation=request.generation, sum=memory.sum_of(parts), stamp=stamp
        )
        return Reply(message=answer, payload=parts)


def _room(peer: Peer, nbytes: int, most: int) -> memoryview:
    """Give memory of the connection's own, whose pages are there from the second chunk on."""
    kept: Any = peer.notes.get(_ROOM)
    if kept is None:
        kept = peer.notes[_ROOM] = memoryview(bytearray(most))
    view: memoryview = kept[:nbytes]
    return view
