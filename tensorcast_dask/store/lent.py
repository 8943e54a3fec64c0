"""Memory of an attached instance, read out of it by this store.

Rules:

1. It is read by `process_vm_readv`, so that the engine's interpreter need not run. Where the
   kernel does not allow it, or where a tensor is not as it is stored, the instance is asked.
2. Bytes count only when the instance lives after they were read: a pid that was given to
   another process meanwhile shows nothing.
3. What is read while the stamp changes is read again.
4. What lies on a device is handed out by handle to who has the device too. Anybody else gets what
   this node's device process reads of it, where it has the device; else the instance is asked.
"""

from __future__ import annotations

import bisect
import struct
import threading
from typing import TYPE_CHECKING, Final

from tensorcast_dask.dataplane.remote import read_process
from tensorcast_dask.exceptions import (
    Incomplete,
    InvalidArgument,
    OwnerGone,
    PeerLost,
    UnsupportedPlatform,
)
from tensorcast_dask.tensors.messages import Owner, ReplicaRecord, Tier
from tensorcast_dask.tensors.specs import Index

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensorcast_dask.dataplane.hosts import PidWatch
    from tensorcast_dask.tensors.messages import Lend

__all__ = ["RemoteMemory", "record_of_lent"]

_SPAN: Final = struct.Struct("<QQQ")
#: How long a reader is kept waiting for the end of a mutation.
_FENCE_WAIT_S: Final = 5.0


def record_of_lent(lend: Lend) -> ReplicaRecord:
    """Describe lent memory to the catalog.

    Raises
    ------
    CorruptFile
        When it comes with no index.
    """
    index = Index.decode(lend.index)
    return ReplicaRecord(
        generation=lend.generation,
        id=lend.id,
        version=lend.version,
        tier=Tier.DEVICE if lend.device else Tier.HOST,
        nbytes=index.nbytes,
        index_digest=index.digest(),
        labels=lend.labels,
        owner=Owner.CALLER,
        index=lend.index,
    )


class RemoteMemory:
    """One lent artifact version: see `dataplane.lending.LentMemory`.

    Parameters
    ----------
    lend : Lend
        What the instance said.
    watch : PidWatch
        Its process.
    ask : callable
        Asks the instance for bytes: (generation, offset, room).
    gather : callable, optional
        Reads memory on this node's device: (lend, offset, room); False where it cannot.
    """

    def __init__(
        self,
        lend: Lend,
        watch: PidWatch,
        ask: Callable[[int, int, memoryview], None],
        gather: Callable[[Lend, int, memoryview], bool] | None = None,
    ) -> None:
        self.record = record_of_lent(lend)
        self._packed = lend.spans
        self._spans = _checked(lend.spans, self.record.nbytes)
        self._starts = [offset for offset, _, _ in self._spans]
        self._watch = watch
        self._ask = ask
        #: Whether `process_vm_readv` gives all of it.
        self._direct = lend.whole and not lend.device
        self._lend = lend
        self._gather = gather if lend.device else None
        self._changed = threading.Condition()
        self._stamp = 0

    def where(self) -> tuple[int, bytes]:
        """See `LentMemory`."""
        return (self._watch.pid, self._packed) if self._direct else (0, b"")

    def slabs(self, device: str) -> tuple[tuple[bytes, ...], bytes]:
        """See `LentMemory`."""
        lend = self._lend
        return (lend.slabs, lend.slab_spans) if lend.device == device else ((), b"")

    def mutating(self, stamp: int) -> None:
        """Take the owner's word on its content."""
        with self._changed:
            self._stamp = stamp
            self._changed.notify_all()

    def stamp(self) -> int:
        """Give the stamp of the content at rest.

        Raises
        ------
        Incomplete
            When the owner stays inside the fence.
        OwnerGone
            When it is no more.
        """
        self._check_alive()
        with self._changed:
            if not self._changed.wait_for(lambda: self._stamp % 2 == 0, _FENCE_WAIT_S):
                message = f"the owner of {self.record.id!r} is changing it; read again"
                raise Incomplete(message)
            return self._stamp

    def part(self, start: int, room: memoryview) -> int:
        """Copy one consistent range; give its stamp."""
        while True:
            stamp = self.stamp()
            self._read(start, room)
            self._check_alive()
            if stamp == self._stamp:
                return stamp

    def _read(self, start: int, room: memoryview) -> None:
        if self._direct:
            try:
                for address, piece in self._pieces(start, room):
                    if address:
                        read_process(self._watch.pid, address, piece, threads=1)
                    else:
                        piece[:] = bytes(len(piece))
            except (PeerLost, UnsupportedPlatform):
                self._check_alive()
                self._direct = False  # rule 1; it will not change its mind
            else:
                return
        if self._gather is None or not self._gather(self._lend, start, room):
            self._ask(self.record.generation, start, room)

    def _pieces(self, start: int, room: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Cut a range into what lies somewhere, and gaps (address 0)."""
        at, end = start, start + len(room)
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        for offset, address, length in self._spans[first:]:
            low, high = max(at, offset), min(end, offset + length)
            if offset >= end:
                break
            if high <= low:
                continue
            if low > at:
                yield 0, room[at - start : low - start]
            yield address + low - offset, room[low - start : high - start]
            at = high
        if at < end:
            yield 0, room[at - start :]

    def _check_alive(self) -> None:
        if self._watch.is_gone():
            message = f"the process that lent {self.record.id!r} has ended"
            raise OwnerGone(message)


def _checked(packed: bytes, nbytes: int) -> list[tuple[int, int, int]]:
    if len(packed) % _SPAN.size:
        message = f"spans are triples of 8 bytes each, not {len(packed)} bytes"
        raise InvalidArgument(message)
    spans: list[tuple[int, int, int]] = list(_SPAN.iter_unpack(packed))
    end = 0
    for offset, address, length in spans:
        if offset < end or offset + length > nbytes or not address:
            message = f"bytes {offset} to {offset + length} overlap, or do not fit {nbytes} lent"
            raise InvalidArgument(message)
        end = offset + length
    return spans
