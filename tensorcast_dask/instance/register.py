"""Memory that a process lends to the cluster: served by a thread of its own.

Rules:

1. The process stays the owner of its memory. What is served is a copy of what was there at
   one instant between two mutations, never a torn one: a stamp goes up with each mutation,
   and bytes are sent only when the stamp before and after their copy is the same.
2. The lease is the link to the catalog, renewed by a thread that no user code holds up but
   by holding the GIL. It ends when the process ends, or when the last tensor is released.
3. The tensors are kept alive until they are released.
4. Sent bytes carry their sum. With `verify`, memory that changed outside the fence is found
   by comparing with the sums of the registration, and refused as Mismatch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import threading
import uuid
from typing import TYPE_CHECKING, Final

from tensorcast_dask.dataplane import arrays, auth, hosts, memory
from tensorcast_dask.dataplane.link import Link, LinkCallbacks
from tensorcast_dask.dataplane.server import Peer, Reply, Server
from tensorcast_dask.exceptions import (
    Gone,
    Incomplete,
    InvalidArgument,
    LeaseExpired,
    Mismatch,
    Unimplemented,
)
from tensorcast_dask.tensors.checksums import chunk_range, encode_sums
from tensorcast_dask.tensors.ids import Epoch, Incarnation, NodeId
from tensorcast_dask.tensors.messages import (
    Chunk,
    ChunkMap,
    ChunkMapAsked,
    DoDrop,
    DoEnd,
    Inventory,
    LinkTarget,
    NodeCard,
    NodeHello,
    NodeWelcome,
    Open,
    Opened,
    Owner,
    Ranges,
    ReadChunk,
    ReadRanges,
    Renew,
    ReplicaDropped,
    ReplicaReady,
    ReplicaRecord,
    Role,
    State,
    StateAsked,
    SumsAsked,
    TaskDone,
    Tier,
    Welcome,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tensorcast_dask.dataplane.arrays import Source
    from tensorcast_dask.dataplane.framing import Payload
    from tensorcast_dask.tensors.ids import ArtifactId, Generation, HostId, Version
    from tensorcast_dask.tensors.messages import SessionOpen, StoreRequest, ToNode
    from tensorcast_dask.tensors.specs import Index

__all__ = ["Lender", "Registration"]

_RANGE: Final = struct.Struct("<QQ")
#: How long a reader is kept waiting for the end of a mutation.
_FENCE_WAIT_S: Final = 5.0


class Registration:
    """One artifact version whose memory is this process's."""

    def __init__(
        self,
        lender: Lender,
        record: ReplicaRecord,
        index: Index,
        sources: Sequence[Source],
        *,
        verify: bool,
    ) -> None:
        self._lender = lender
        self.record = record
        self.index = index
        self._content = arrays.RangeReader(sources, index)
        self._changed = threading.Condition()
        #: Even: at rest. Odd: the owner is inside `mutate`.
        self._stamp = 0
        #: How many fences are open.
        self._inside = 0
        self._sums = self._content_sums() if verify else None

    @contextlib.contextmanager
    def mutate(self) -> Iterator[None]:
        """Fence: the owner may write inside the block.

        Raises
        ------
        LeaseExpired
            When it was released.
        """
        with self._changed:
            if self._lender.find(self.record.generation) is not self:
                message = f"{self.record.id!r} is no longer registered"
                raise LeaseExpired(message)
            # Fences of one owner overlap and nest: what is at rest begins where the last one ends.
            self._inside += 1
            if self._inside == 1:
                self._stamp += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                if not self._inside:
                    if self._sums is not None:
                        self._sums = self._content_sums()
                    self._stamp += 1
                    self._changed.notify_all()

    def stamp(self) -> int:
        """Give the stamp of the content at rest; waits for the end of a mutation.

        Raises
        ------
        Incomplete
            When the owner stays inside the fence.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._stamp % 2 == 0, _FENCE_WAIT_S):
                message = f"the owner of {self.record.id!r} is changing it; read again"
                raise Incomplete(message)
            return self._stamp

    def part(self, start: int, nbytes: int) -> tuple[memoryview, int]:
        """One consistent copy of a byte range of the segment, and its stamp.

        Raises
        ------
        Mismatch
            With `verify`: when the memory was changed outside the fence. Only whole chunks
            can be told.
        """
        while True:
            stamp = self.stamp()
            copy = self._content.read(start, nbytes).data
            if stamp == self._stamp:
                self._check(start, copy)
                return copy, stamp

    def _check(self, start: int, copy: memoryview) -> None:
        step = self._lender.chunk_bytes
        if self._sums is None or start % step or not copy:
            return
        sums = tuple(memory.sums_of(copy, step, threads=1))
        whole = (
            len(copy) // step if start + len(copy) < self.index.nbytes else len(sums)
        )
        first = start // step
        if sums[:whole] != self._sums[first : first + whole]:
            message = (
                f"{self.record.id!r} was changed outside `with artifact.mutate():`; "
                "its owner must register it again"
            )
            raise Mismatch(message)

    def _content_sums(self) -> tuple[int, ...]:
        copy = self._content.read(0, self.index.nbytes)
        return tuple(memory.sums_of(copy.data, self._lender.chunk_bytes, threads=1))

    def close(self) -> None:
        """Stop lending; readers get Gone. Idempotent."""
        self._lender.forget(self.record.generation)


class Lender:
    """Serves the registered memory of this process.

    Parameters
    ----------
    greeting : SessionOpen
        Where to link, and with which secrets.
    host : HostId
        This process's host.
    data_host : str
        Interface of the data port.
    """

    def __init__(
        self, greeting: SessionOpen, *, host: HostId, data_host: str = "127.0.0.1"
    ) -> None:
        self._greeting = greeting
        self._lock = threading.Lock()
        self._lent: dict[Generation, Registration] = {}
        self.chunk_bytes = greeting.chunk_bytes
        self._epoch = greeting.epoch
        node = NodeId(uuid.uuid4().hex)
        self._server = Server(self, welcome=self._welcome, token=lambda: greeting.token)
        self._folder = hosts.run_directory() / f"lend-{node[:12]}"
        self._folder.mkdir(mode=0o700)
        path = hosts.socket_path(self._folder)
        self._server.listen_unix(path)
        tls = auth.server_tls(greeting.tls) if greeting.tls is not None else None
        port = self._server.listen_tcp(data_host, tls=tls)
        self._server.start()
        self.card = NodeCard(
            node=node,
            incarnation=Incarnation(1),
            host=host,
            socket=path,
            data_host=data_host,
            data_port=port,
            name=f"instance-{os.getpid()}",
            pid=os.getpid(),
            pid_start=hosts.process_start(os.getpid()),
            roles=(),
            kind="instance",
            tls=tls is not None,
        )
        self._up = threading.Event()
        self._link = Link(
            LinkCallbacks(
                hello=self._hello,
                on_up=self._on_up,
                on_message=self._on_message,
                on_down=lambda _: self._up.clear(),
                renew=lambda seq: Renew(seq=seq),
            ),
            target=LinkTarget(
                host=greeting.link_host,
                port=greeting.link_port,
                cluster=greeting.cluster,
                token=greeting.token,
                epoch=greeting.epoch,
                tls=greeting.tls,
            ),
            role=Role.INSTANCE,
        )
        self._link.start()
        if not self._up.wait(10.0):
            self.close()
            message = "the scheduler plugin did not take this process as an instance; try again"
            raise LeaseExpired(message)

    # ------------------------------------------------------------ lending
    def lend(
        self,
        *,
        generation: Generation,
        id: ArtifactId,  # noqa: A002 - the field's word
        version: Version,
        index: Index,
        sources: Sequence[Source],
        labels: dict[str, str],
        verify: bool,
    ) -> Registration:
        """Begin to serve one artifact version and tell the catalog."""
        record = ReplicaRecord(
            generation=generation,
            id=id,
            version=version,
            tier=Tier.HOST,
            nbytes=index.nbytes,
            index_digest=index.digest(),
            labels=labels,
            owner=Owner.CALLER,
            index=index.encode(),
        )
        registration = Registration(self, record, index, sources, verify=verify)
        with self._lock:
            self._lent[generation] = registration
        self._link.send(ReplicaReady(record=record))
        return registration

    def find(self, generation: Generation) -> Registration | None:
        """Give the registration of a generation, while it is lent."""
        return self._lent.get(generation)

    def forget(self, generation: Generation) -> None:
        """Stop serving a generation."""
        with self._lock:
            known = self._lent.pop(generation, None)
        if known is not None:
            self._link.send(
                ReplicaDropped(
                    generation=generation, tier=Tier.HOST, why="released by its owner"
                )
            )

    def close(self) -> None:
        """Stop serving everything. Idempotent."""
        for generation in list(self._lent):
            self.forget(generation)
        self._link.stop(within_s=2.0)
        self._server.stop(within_s=2.0)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------ the catalog
    def _hello(self) -> NodeHello:
        return NodeHello(
            card=self.card,
            cluster=self._greeting.cluster,
            epoch=Epoch(self._epoch),
            counter=max(self._lent, default=0),
        )

    def _on_up(self, welcome: NodeWelcome) -> list[Inventory]:
        self._epoch = welcome.epoch
        self._up.set()
        with self._lock:
            records = tuple(known.record for known in self._lent.values())
        return [Inventory(replicas=records)]

    def _on_message(self, message: ToNode) -> None:
        match message:
            case DoDrop():
                self.forget(message.generation)
                self._link.send(TaskDone(task=message.task))
            case DoEnd():
                for generation in list(self._lent):
                    self.forget(generation)
            case _:
                pass  # a lender pulls, loads and saves nothing

    # ------------------------------------------------------------ readers
    def _welcome(self) -> Welcome:
        return Welcome(
            card=self.card,
            cluster=self._greeting.cluster,
            epoch=Epoch(self._epoch),
            chunk_bytes=self.chunk_bytes,
            small_bytes=0,
        )

    def closed(self, peer: Peer) -> None:
        """Forget a reader: nothing is kept for it."""

    def handle(self, request: StoreRequest, payload: Payload, peer: Peer) -> Reply:  # noqa: ARG002
        """Answer one request of a reader."""
        match request:
            case Open():
                known = self._known(request.generation)
                content, _ = known.part(0, known.index.nbytes)
                opened = Opened(
                    generation=request.generation,
                    index=known.record.index,
                    nbytes=known.index.nbytes,
                    mapped=False,
                )
                return Reply(message=opened, payload=content)
            case ChunkMapAsked() | SumsAsked():
                return Reply(message=self._chunk_map(request))
            case ReadChunk():
                return self._chunk(request)
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

    def _known(self, generation: Generation) -> Registration:
        known = self._lent.get(generation)
        if known is None:
            message = "its owner has released it"
            raise Gone(message)
        return known

    def _chunk_map(self, request: ChunkMapAsked | SumsAsked) -> ChunkMap:
        known = self._known(request.generation)
        sums = b""
        if isinstance(request, SumsAsked):
            content, stamp = known.part(0, known.index.nbytes)
            sums = encode_sums(memory.sums_of(content, self.chunk_bytes, threads=1))
        else:
            stamp = known.stamp()
        return ChunkMap(
            generation=request.generation,
            nbytes=known.index.nbytes,
            chunk_bytes=self.chunk_bytes,
            index=known.record.index,
            sums=sums,
            stamp=stamp,
        )

    def _chunk(self, request: ReadChunk) -> Reply:
        known = self._known(request.generation)
        part, stamp = known.part(
            *chunk_range(request.chunk, known.index.nbytes, self.chunk_bytes)
        )
        chunk = Chunk(
            generation=request.generation,
            chunk=request.chunk,
            sum=memory.sum_of(part),
            stamp=stamp,
        )
        return Reply(message=chunk, payload=part)

    def _ranges(self, request: ReadRanges) -> Reply:
        known = self._known(request.generation)
        parts = bytearray()
        stamps = set()
        for offset, nbytes in _RANGE.iter_unpack(request.ranges):
            if offset + nbytes > known.index.nbytes:
                message = (
                    f"range {offset}+{nbytes} is outside of {known.index.nbytes} bytes"
                )
                raise InvalidArgument(message)
            part, stamp = known.part(offset, nbytes)
            parts += part
            stamps.add(stamp)
        if len(stamps) > 1:
            message = f"{known.record.id!r} was changed while it was read; read again"
            raise Incomplete(message)
        stamp = stamps.pop() if stamps else known.stamp()
        answer = Ranges(
            generation=request.generation, sum=memory.sum_of(parts), stamp=stamp
        )
        return Reply(message=answer, payload=parts)
