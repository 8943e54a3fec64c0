"""The memory behind segment numbers: files of our own, and those lent by another node.

Rules:

1. The table names segments by number; this shelf alone knows the files. Each takes one
   descriptor; beyond the limit a new one is refused, before the process has none left
   to accept a connection with.
2. A lent file is another node's memory, held by a read-only description; it is read and
   handed on like our own, never written, probed or recycled.
3. Files are closed by a thread of their own: giving a gigabyte back takes the kernel a
   tenth of a second, which nobody who holds the store's lock can wait for. `settle` waits.
4. A description that is on its way to a writer is counted until our own end of it is
   closed (`lend_writer`): the writer may be done with it before the thread that sent it
   is, and whoever freezes waits for that thread (`sent`), not for the writer.
5. Maps are made when they are used, kept for slabs and for segments in use, and counted
   by nobody: page tables are all that they cost.
"""

from __future__ import annotations

import logging
import os
import queue
import resource
import threading
from collections import Counter
from typing import TYPE_CHECKING, Final, TypeAlias

from tensorcast_dask.dataplane.maps import SharedMap
from tensorcast_dask.dataplane.segments import MemoryFile, leases_work, reopen
from tensorcast_dask.exceptions import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LentFile", "Shelf", "raise_descriptor_limit"]

logger = logging.getLogger(__name__)

#: Descriptors that segments leave to connections, logs and files.
_SPARE_DESCRIPTORS: Final = 256

# Sending takes a moment; past this the peer reads nothing, and is the writer that is left.
_SENDS_S: Final = 12.0


def raise_descriptor_limit() -> int:
    """Raise the soft limit of descriptors to the hard one; the limit then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 20
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return most if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class LentFile:
    """Memory of another node of this host, as a read-only description of it."""

    __slots__ = ("_lock", "_map", "fd", "nbytes")

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._map: SharedMap | None = None

    def read_description(self) -> int:
        """Open a description for a reader."""
        return reopen(self.fd, os.O_RDONLY)

    @property
    def mapped(self) -> bool:
        """Whether this process has it mapped now."""
        return self._map is not None

    def map_shared(self) -> SharedMap:
        """Map it for ourselves, read-only."""
        with self._lock:
            if self._map is None:
                self._map = SharedMap(self.fd, self.nbytes, writable=False)
            return self._map

    def close(self) -> None:
        """Let it go. Idempotent."""
        with self._lock:
            held, self._map = self._map, None
            fd, self.fd = self.fd, -1
        if held is not None:
            held.close()
        if fd >= 0:
            os.close(fd)


File: TypeAlias = MemoryFile | LentFile


class Shelf:
    """Files by segment number.

    Parameters
    ----------
    max_descriptors : int
        Most files; 0 = what the process may have, less some for other uses.
    """

    def __init__(self, *, max_descriptors: int = 0) -> None:
        limit = raise_descriptor_limit()
        self._most = max_descriptors or max(16, limit - _SPARE_DESCRIPTORS)
        self._files: dict[int, File] = {}
        self.leases = leases_work()
        self._sending: Counter[int] = Counter()
        self._sent = threading.Condition()
        self._closing: queue.Queue[File | None] = queue.Queue()
        threading.Thread(
            target=self._run_closer, name="tensorcast-closer", daemon=True
        ).start()

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, segment: int) -> bool:
        return segment in self._files

    def make(self, segment: int, nbytes: int) -> MemoryFile:
        """Make a memory file; its pages are not there yet.

        Raises
        ------
        CapacityError
            When there is no descriptor left for it.
        """
        self._check_room()
        file = self._files[segment] = MemoryFile(nbytes, name=f"tensorcast-{segment}")
        return file

    def lend(self, segment: int, fd: int, nbytes: int) -> None:
        """Take another node's memory in; the descriptor is ours from here on."""
        try:
            self._check_room()
        except CapacityError:
            os.close(fd)
            raise
        self._files[segment] = LentFile(fd, nbytes)

    def _check_room(self) -> None:
        if len(self._files) < self._most:
            return
        message = (
            f"this node has {self._most} segments, all that its descriptors allow; "
            "destroy artifacts, or raise RLIMIT_NOFILE and tensorcast.store.max-descriptors"
        )
        raise CapacityError(
            message, {"what": "descriptors", "needed": 1, "free": 0, "tier": "host"}
        )

    def get(self, segment: int) -> File:
        """Return the file of a segment that the table holds."""
        return self._files[segment]

    def own(self, segment: int) -> MemoryFile:
        """Return the file of a segment that is ours."""
        file = self._files[segment]
        assert isinstance(file, MemoryFile), "store: a lent segment is not ours"
        return file

    def lend_writer(self, segment: int) -> tuple[int, Callable[[], None]]:
        """Open a description to write through, for a peer.

        Returns
        -------
        int, callable
            The descriptor, and what to call once it is sent and closed here.
        """
        with self._sent:
            fd = self.own(segment).write_description()
            self._sending[segment] += 1

        def done() -> None:
            with self._sent:
                self._sending[segment] -= 1
                if not self._sending[segment]:
                    del self._sending[segment]
                    self._sent.notify_all()

        return fd, done

    def sent(self, segment: int) -> bool:
        """Wait until no description of it is on its way; not under the store's lock.

        False after the time that a send may take to a peer that does not read.
        """
        with self._sent:
            return self._sent.wait_for(
                lambda: segment not in self._sending, timeout=_SENDS_S
            )

    def alone(self, segment: int) -> bool:
        """Say whether nobody else has the segment; never where leases do not work."""
        return self.leases and self.own(segment).sole_owner()

    def mapped(self, segment: int) -> bool:
        """Say whether somebody else has the segment; False where it cannot be known."""
        return self.leases and not self.own(segment).sole_owner()

    def freeze(self, segment: int) -> bool:
        """See to it that no writer is left: proved, or sealed where it cannot be."""
        file = self.own(segment)
        return file.sole_owner() if self.leases else file.freeze()

    def close(self, segment: int) -> None:
        """Have a file closed; its memory goes with its last reader."""
        file = self._files.pop(segment, None)
        if file is not None:
            self._closing.put(file)

    def settle(self) -> None:
        """Wait until what was to be closed is; not under the store's lock."""
        self._closing.join()

    def end(self) -> None:
        """Close what was to be closed, and nothing more."""
        self._closing.put(None)
        self.settle()

    def _run_closer(self) -> None:
        while True:
            file = self._closing.get()
            try:
                if file is None:
                    return
                file.close()
            except Exception:
                logger.exception("a segment cannot be closed")
            finally:
                self._closing.task_done()
