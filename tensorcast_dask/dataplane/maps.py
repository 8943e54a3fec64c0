"""Maps of memory files, made through libc: Python's own `mmap` keeps a descriptor.

Rules:

1. A map keeps no descriptor open. What the caller passes in it may close at once.
2. A reader's map is private: its in-place edits are its own, the file never changes.
3. A `PrivateMap`'s memory lives as long as anything refers to its `buffer` (numpy's and
   torch's `frombuffer` do): the ctypes array at its address carries the finaliser.
4. Finalisers only unmap this process's own range, so they are right in a forked child,
   and they do not run at interpreter exit, where an array may still be read.
5. Every map is refused with CapacityError before `vm.max_map_count` is reached: beyond
   it the allocator of the whole process fails.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import weakref
from functools import lru_cache
from pathlib import Path
from typing import Final

from tensorcast_dask.dataplane.memory import flat
from tensorcast_dask.exceptions import CapacityError, UnsupportedPlatform

__all__ = ["PrivateMap", "SharedMap", "WritableMap", "get_ready", "live_maps"]

_FAILED: Final = ctypes.c_void_p(-1).value
_PROT_NONE: Final = 0
_PROT_READ: Final = 1
_PROT_RW: Final = 3
_MAP_SHARED: Final = 1
_MAP_PRIVATE: Final = 2
_MAP_FIXED: Final = 0x10
_MAP_ANONYMOUS: Final = 0x20
_MAP_NORESERVE: Final = 0x4000
_POPULATE_READ: Final = 22
_POPULATE_WRITE: Final = 23


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    """Return the C library with the calls declared; on first use, not at import."""
    if sys.platform != "linux":
        message = "memory is mapped on Linux only; read over TCP, which copies"
        raise UnsupportedPlatform(message)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


#: Addresses of maps made here and still alive -> length.
_live: dict[int, int] = {}
_made = 0


def live_maps() -> int:
    """How many maps of this module are alive in this process."""
    return len(_live)


def _limit() -> int:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 65530


def _count() -> int:
    with Path("/proc/self/maps").open("rb") as file:
        return sum(1 for _ in file)


def _check_room() -> None:
    """Refuse when nine tenths of the allowed maps exist; looked at every 256th time."""
    global _made  # noqa: PLW0603
    _made += 1
    if len(_live) > 1024 and _made % 256 == 0 and _count() > _limit() * 9 // 10:
        message = f"this process has {_count()} memory maps of {_limit()} allowed (vm.max_map_count); drop results, or raise it"
        raise CapacityError(message)


def _map(nbytes: int, prot: int, flags: int, fd: int, *, at: int = 0) -> int:
    if not at:
        _check_room()
    found: int | None = _libc().mmap(
        at or None, nbytes, prot, flags | (_MAP_FIXED if at else 0), fd, 0
    )
    if found == _FAILED or found is None:
        code = ctypes.get_errno()
        if code == errno.ENOMEM:
            message = f"no map of {nbytes} bytes can be made (memory limit, or vm.max_map_count {_limit()}); drop results"
            raise CapacityError(message, {"nbytes": nbytes})
        raise OSError(code, os.strerror(code), "mmap")
    _live[found] = nbytes
    return found


def _unmap(at: int, nbytes: int) -> None:
    if _live.pop(at, None) is not None:
        _libc().munmap(at, nbytes)


def _array_at(at: int, nbytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    kind = ctypes.c_ubyte * nbytes
    return kind.from_address(at) if nbytes else kind()


class _Map:
    """What all maps share: an address, a length, an array there."""

    __slots__ = ("_array", "_finalizer", "address", "nbytes", "pid")

    def __init__(self, nbytes: int, prot: int, flags: int, fd: int) -> None:
        self.nbytes = nbytes
        #: The process that made the map. After a fork the child has a copy of its own.
        self.pid = os.getpid()
        self.address = _map(nbytes, prot, flags, fd) if nbytes else 0
        self._array = _array_at(self.address, nbytes)
        self._finalizer = weakref.finalize(self._array, _unmap, self.address, nbytes)
        self._finalizer.atexit = False

    @property
    def buffer(self) -> memoryview:
        """The bytes, writable as far as the map is, for `frombuffer` of an array library.

        The map lives as long as anything that was made on it.
        """
        return flat(self._array)

    @property
    def view(self) -> memoryview:
        """The same as `buffer`."""
        return flat(self._array)

    def populate(self, *, write: bool = False) -> bool:
        """Bring all pages in now, without the GIL; False where the kernel cannot."""
        if not self.nbytes:
            return True
        advice = _POPULATE_WRITE if write else _POPULATE_READ
        return bool(_libc().madvise(self.address, self.nbytes, advice) == 0)


class PrivateMap(_Map):
    """A reader's own copy-on-write view of a segment.

    Parameters
    ----------
    fd : int
        A read-only description.
    nbytes : int
        Length of the segment.
    close_fd : bool
        Close `fd` right after, also when the map fails.
    """

    __slots__ = ()

    def __init__(self, fd: int, nbytes: int, *, close_fd: bool = True) -> None:
        try:
            super().__init__(nbytes, _PROT_RW, _MAP_PRIVATE | _MAP_NORESERVE, fd)
        finally:
            if close_fd:
                os.close(fd)


def get_ready() -> None:
    """Make one map and let it go: the first of a process takes a tenth of a millisecond more.

    Raises
    ------
    UnsupportedPlatform
        Where nothing is mapped.
    """
    _libc()
    PrivateMap(os.memfd_create("tensorcast-ready", os.MFD_CLOEXEC), 1)


class SharedMap(_Map):
    """The segment itself, for the process that owns or fills it.

    `close` unmaps at once: whoever calls it knows that no view is in use.
    """

    __slots__ = ()

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        super().__init__(nbytes, _PROT_RW if writable else _PROT_READ, _MAP_SHARED, fd)

    def close(self) -> None:
        """Unmap now. Idempotent."""
        self._finalizer()


class WritableMap(_Map):
    """A producer's map of a segment that it fills, later its private view of the result.

    The addresses stay the same through its life, so that arrays made on `buffer` stay
    valid::

        filling --(reserve)--> reserved --(attach_private)--> private
                                   |
                                   +----(abandon)--> anonymous memory, the producer's own

    Between `reserve` and the next step nothing may touch the memory. That instant is
    what lets the kernel prove that no writer is left.
    """

    __slots__ = ("state",)

    def __init__(self, fd: int, nbytes: int, *, close_fd: bool = True) -> None:
        #: filling | reserved | private | abandoned
        self.state = "filling"
        try:
            super().__init__(nbytes, _PROT_RW, _MAP_SHARED, fd)
        finally:
            if close_fd:
                os.close(fd)

    def reserve(self) -> None:
        """Give the file up and keep the addresses."""
        assert self.state == "filling", f"maps: reserve a map that is {self.state}"
        self._replace(
            _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, "reserved"
        )

    def attach_private(self, read_fd: int, *, close_fd: bool = True) -> None:
        """Put a private map of the committed segment in place of the reservation."""
        assert self.state == "reserved", f"maps: attach to a map that is {self.state}"
        try:
            self._replace(_PROT_RW, _MAP_PRIVATE | _MAP_NORESERVE, read_fd, "private")
        finally:
            if close_fd:
                os.close(read_fd)

    def abandon(self) -> None:
        """Put empty memory of the producer's own there, so that a stray access is harmless."""
        if self.state in ("filling", "reserved"):
            self._replace(
                _PROT_RW,
                _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE,
                -1,
                "abandoned",
            )

    def _replace(self, prot: int, flags: int, fd: int, state: str) -> None:
        if self.nbytes:
            _map(self.nbytes, prot, flags, fd, at=self.address)
        self.state = state
