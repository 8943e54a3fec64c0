"""Memory files: one sealed memfd for each large segment, and proofs that nobody else has it.

Rules:

1. The creating process keeps exactly one description of the file, opened anew through
   `/proc/self/fd`; the one that `memfd_create` gave is closed at once, since the kernel
   counts it as nobody's and would refuse every lease while it is open.
2. That description never leaves the process: a duplicate of it (fork, SCM_RIGHTS, dup)
   is invisible to the lease. Others get descriptions of their own
   (`write_description`, `read_description`).
3. A write lease is granted only when no other description exists anywhere: no open file,
   no map whose file was closed, no descriptor in flight. It is held only for the probe.
4. The kernel tells the holder of a lease that somebody waits for it by SIGIO, which ends
   a process that does not expect it. Each probe asks for SIGURG in its place, which is
   ignored by default; a store ignores SIGIO besides (`ignore_sigio`).
5. Size is sealed at creation. Pages are made by the caller's will (`prefault`), which has
   done the admission: the kernel does not guard (it would call the OOM killer).
6. Where leases are not granted at all (`leases_work`), a file is frozen by the write
   seal, which is for ever: such a file is never used again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import threading
from typing import TYPE_CHECKING, Final, Self

from tensorcast_dask.dataplane.maps import SharedMap
from tensorcast_dask.exceptions import CapacityError, UnsupportedPlatform

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MemoryFile", "ignore_sigio", "leases_work", "reopen"]

_FULL: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EFBIG)
_F_ADD_SEALS: Final = 1033
_F_SETSIG: Final = 10
_SEAL_SHRINK: Final = 2
_SEAL_GROW: Final = 4
_SEAL_WRITE: Final = 8


def ignore_sigio() -> None:
    """Ignore SIGIO in this process; call it once, from the main thread."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)


def reopen(fd: int, flags: int) -> int:
    """Open the file behind `fd` again: a description of its own."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


class MemoryFile:
    """One segment's memory, held by the process that made it.

    Parameters
    ----------
    nbytes : int
        Length; it cannot change. Zero is fine.
    name : str
        What `/proc/<pid>/maps` shows.

    Raises
    ------
    CapacityError
        When the process has no descriptor left, or the kernel no memory for the file.
    UnsupportedPlatform
        When this system has no sealable memory files.
    """

    __slots__ = ("_fd", "_lock", "_map", "frozen", "name", "nbytes")

    def __init__(self, nbytes: int, *, name: str = "tensorcast") -> None:
        self.nbytes = nbytes
        self.name = name
        #: True once the write seal is on: nobody can ever write again.
        self.frozen = False
        self._lock = threading.Lock()
        self._map: SharedMap | None = None
        self._fd = _make(nbytes, name)

    @property
    def fd(self) -> int:
        """The only description of the creator; it must not be sent or inherited."""
        assert self._fd >= 0, "segments: the memory file is closed"
        return self._fd

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._fd < 0

    @property
    def mapped(self) -> bool:
        """Whether the creator has it mapped now."""
        return self._map is not None

    def write_description(self) -> int:
        """Open a writable description for somebody who fills the segment."""
        return _reopen_or_refuse(self.fd, os.O_RDWR)

    def read_description(self) -> int:
        """Open a read-only description for a reader."""
        return _reopen_or_refuse(self.fd, os.O_RDONLY)

    def prefault(self, offset: int, length: int) -> None:
        """Make the pages of a range, zeroed where they are new; existing bytes stay.

        Raises
        ------
        CapacityError
            When the kernel has no room (a limit on shared memory).
        """
        if length <= 0:
            return
        try:
            os.posix_fallocate(self.fd, offset, length)
        except OSError as error:
            message = f"no memory for {length} bytes of a segment ({error}); lower tensorcast.node.host_memory"
            raise CapacityError(message, {"nbytes": length}) from error

    def allocated_bytes(self) -> int:
        """How many bytes of pages exist now."""
        return os.fstat(self.fd).st_blocks * 512

    def sole_owner(self) -> bool:
        """Say whether nobody else, anywhere, has this file open, mapped or in flight.

        An open by another thread of this process at the same instant makes it False too.
        """
        with self._lock:  # two probes at once would end each other's lease
            fd = self.fd
            try:
                # Each time: the kernel forgets it when a lease ends.
                fcntl.fcntl(fd, _F_SETSIG, signal.SIGURG)
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            except OSError:
                return False
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            return True

    def freeze(self) -> bool:
        """Seal against writing for ever; False while a writable map is left anywhere.

        The creator's own map is let go for it, so no view of it may be in use. Only for
        systems without leases.
        """
        self.unmap()
        try:
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEAL_WRITE)
        except OSError:
            return False
        self.frozen = True
        return True

    def map_shared(self) -> SharedMap:
        """Map the file for the creator itself, once; the same map is returned again."""
        with self._lock:
            if self._map is None:
                self._map = SharedMap(self.fd, self.nbytes, writable=not self.frozen)
            return self._map

    def unmap(self) -> None:
        """Let the creator's map go; it ends with the last view that is in use."""
        with self._lock:
            self._map = None

    def close(self) -> None:
        """Let the file go; its pages live until the last reader's map ends. Idempotent."""
        self.unmap()
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _make(nbytes: int, name: str) -> int:
    if not hasattr(os, "memfd_create"):
        message = "this system has no memory files (memfd); stores run on Linux only"
        raise UnsupportedPlatform(message)
    with _refused_politely():
        first = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(first, nbytes)
            fcntl.fcntl(first, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
            return reopen(first, os.O_RDWR)
        finally:
            os.close(first)


def _reopen_or_refuse(fd: int, flags: int) -> int:
    with _refused_politely():
        return reopen(fd, flags)


@contextlib.contextmanager
def _refused_politely() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            message = f"no memory file can be opened ({error}); raise RLIMIT_NOFILE or destroy artifacts"
            raise CapacityError(message) from error
        message = f"memory files do not work here ({error}); a store needs Linux with /proc mounted"
        raise UnsupportedPlatform(message) from error


_leases: bool | None = None


def leases_work() -> bool:
    """Say whether this kernel's write leases prove what rule 3 claims; tried once."""
    global _leases  # noqa: PLW0603  # one kernel, one answer
    if _leases is None:
        _leases = _try_leases()
    return _leases


def _try_leases() -> bool:
    with MemoryFile(4096, name="tensorcast-probe") as file:
        alone = file.sole_owner()
        reader = file.read_description()
        seen = not file.sole_owner()
        os.close(reader)
        writer = file.write_description()
        seen = seen and not file.sole_owner()
        other = SharedMap(writer, 4096, writable=True)
        os.close(writer)
        seen = seen and not file.sole_owner()
        other.close()
        return alone and seen and file.sole_owner()
