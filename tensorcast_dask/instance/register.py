"""Memory that a process lends to the cluster and serves by threads of its own.

Used by a program's session, which may run where no node is. A process that is attached to a
node leaves the serving to the store (`instance.attach`).

Rules:

1. The rules of `dataplane.lending`; the link is renewed by a thread that no user code holds
   up but by holding the GIL.
2. The tensors are kept alive until they are released.
3. With `verify`, memory that changed outside the fence is found by comparing with the sums of
   the registration, and refused as Mismatch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import uuid
from typing import TYPE_CHECKING, Final

from tensorcast_dask.dataplane import arrays, auth, hosts, memory
from tensorcast_dask.dataplane.lending import Lending
from tensorcast_dask.dataplane.server import Peer, Reply, Server
from tensorcast_dask.exceptions import Incomplete, LeaseExpired, Mismatch
from tensorcast_dask.tensors.ids import Epoch, Incarnation, NodeId
from tensorcast_dask.tensors.messages import (
    LinkTarget,
    NodeCard,
    Owner,
    ReplicaRecord,
    Tier,
    Welcome,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tensorcast_dask.dataplane.arrays import LentSlabs, Source
    from tensorcast_dask.dataplane.framing import Payload
    from tensorcast_dask.tensors.ids import ArtifactId, Generation, HostId, Version
    from tensorcast_dask.tensors.messages import SessionOpen, StoreRequest
    from tensorcast_dask.tensors.specs import Index

__all__ = ["Lender", "Registration"]

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
        slabs: LentSlabs | None = None,
        settle: Callable[[], None] | None = None,
    ) -> None:
        self._lender = lender
        self._slabs = slabs
        self._settle = settle or (lambda: None)
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
                    self._settle()
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

    def part(self, start: int, room: memoryview) -> int:
        """Copy one consistent range of the segment; give its stamp.

        Raises
        ------
        Mismatch
            With `verify`: when the memory was changed outside the fence. Only whole chunks
            can be told.
        """
        while True:
            stamp = self.stamp()
            self._content.read_into(start, room)
            if stamp == self._stamp:
                self._check(start, room)
                return stamp

    def where(self) -> tuple[int, bytes]:
        """See `LentMemory`: it is served from here alone."""
        return 0, b""

    def slabs(self, device: str) -> tuple[tuple[bytes, ...], bytes]:
        """See `LentMemory`."""
        lent = self._slabs
        if lent is None or lent.device != device:
            return (), b""
        return lent.handles, lent.spans

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
        copy = memory.private(self.index.nbytes)
        self._content.read_into(0, copy)
        return tuple(memory.sums_of(copy, self._lender.chunk_bytes, threads=1))

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
        self.chunk_bytes = greeting.chunk_bytes
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
        target = LinkTarget(
            host=greeting.link_host,
            port=greeting.link_port,
            cluster=greeting.cluster,
            token=greeting.token,
            epoch=greeting.epoch,
            tls=greeting.tls,
        )
        self._lending = Lending(
            self.card, target, chunk_bytes=self.chunk_bytes, on_end=lambda *_: None
        )
        if not self._lending.wait_up(10.0):
            self.close()
            message = "the scheduler plugin did not take this process as an instance; try again"
            raise LeaseExpired(message)

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
        slabs: LentSlabs | None = None,
        settle: Callable[[], None] | None = None,
    ) -> Registration:
        """Begin to serve one artifact version and tell the catalog."""
        record = ReplicaRecord(
            generation=generation,
            id=id,
            version=version,
            tier=Tier.HOST if slabs is None else Tier.DEVICE,
            nbytes=index.nbytes,
            index_digest=index.digest(),
            labels=labels,
            owner=Owner.CALLER,
            index=index.encode(),
        )
        registration = Registration(
            self,
            record,
            index,
            sources,
            verify=verify,
            slabs=slabs,
            settle=settle,
        )
        self._lending.lend(registration)
        return registration

    def find(self, generation: Generation) -> object:
        """Give the registration of a generation, while it is lent."""
        return self._lending.find(generation)

    def forget(self, generation: Generation) -> None:
        """Stop serving a generation."""
        self._lending.forget(generation)

    def close(self) -> None:
        """Stop serving everything. Idempotent."""
        self._lending.close()
        self._server.stop(within_s=2.0)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------ readers
    def _welcome(self) -> Welcome:
        return Welcome(
            card=self.card,
            cluster=self._greeting.cluster,
            epoch=Epoch(self._lending.epoch),
            chunk_bytes=self.chunk_bytes,
            small_bytes=0,
        )

    def closed(self, peer: Peer) -> None:
        """Forget a reader: nothing is kept for it."""

    def handle(self, request: StoreRequest, payload: Payload, peer: Peer) -> Reply:  # noqa: ARG002
        """Answer one request of a reader."""
        return self._lending.handle(request, peer)
