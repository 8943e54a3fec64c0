"""The few system calls that the facts need and Python does not offer.

Python's ``mmap`` keeps a duplicate of the descriptor (until 3.13), which the kernel
counts as an opener for ever: a map without one is made by libc's ``mmap`` itself.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "MIB",
    "advise",
    "array_at",
    "fresh_file",
    "map_file",
    "probe",
    "protect",
    "read_only",
    "reserve",
    "unmap",
]

MIB = 1 << 20
SHARED, PRIVATE, FIXED = 0x01, 0x02, 0x10
ANONYMOUS, NORESERVE, POPULATE = 0x20, 0x4000, 0x8000
READ, WRITE = mmap.PROT_READ, mmap.PROT_WRITE
POPULATE_READ, POPULATE_WRITE, HUGEPAGE = 22, 23, 14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _checked(result: int | None) -> int:
    if result is None or result in (-1, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def map_file(
    fd: int, size: int, *, prot: int = READ, flags: int = SHARED, at: int = 0
) -> int:
    """Map a file without keeping its descriptor; the address."""
    fixed = FIXED if at else 0
    return _checked(_libc.mmap(at or None, size, prot, flags | fixed, fd, 0))


def reserve(at: int, size: int) -> int:
    """Put an empty reservation where a map was: nobody else can take the address."""
    flags = PRIVATE | ANONYMOUS | NORESERVE | FIXED
    return _checked(_libc.mmap(at, size, 0, flags, -1, 0))


def unmap(at: int, size: int) -> None:
    """Drop a map."""
    _checked(_libc.munmap(at, size))


def advise(at: int, size: int, advice: int) -> None:
    """``madvise``."""
    _checked(_libc.madvise(at, size, advice))


def protect(at: int, size: int, prot: int) -> None:
    """``mprotect``."""
    _checked(_libc.mprotect(at, size, prot))


def array_at(at: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a map as an array; valid while the map is."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(at))


def fresh_file(size: int, *, seals: int = 0) -> int:
    """A memory file whose only description is one re-opened through /proc.

    The description that ``memfd_create`` returns is not counted as a writer by the
    kernel, so with it every write lease is refused.
    """
    first = os.memfd_create("segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(first, size)
        if seals:
            fcntl.fcntl(first, fcntl.F_ADD_SEALS, seals)
        return os.open(f"/proc/self/fd/{first}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(first)


def read_only(fd: int) -> int:
    """A read-only description of its own, of the same file."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def probe(fd: int) -> bool:
    """Does the kernel say that nobody else has the file open or mapped?"""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def sysctl(path: str) -> str:
    """A value below /proc/sys, or a dash."""
    try:
        return Path("/proc/sys", path).read_text().strip()
    except OSError:
        return "-"
