"""Reading another process's memory, where the kernel allows it.

Rules:

1. Only `process_vm_readv`: no copy through a socket, no descriptor, no GIL. Whoever
   offers its memory (`allow_reader`) names who may read it.
2. The address is the peer's claim. A wrong one is a typed error, never a crash here.
3. A reader cannot know that the bytes did not change meanwhile: who lends memory keeps
   it still, or the sum tells.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.dataplane.memory import DEFAULT_THREADS, address, run_parallel
from tensorcast_dask.exceptions import OwnerGone, PeerLost, UnsupportedPlatform

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["allow_reader", "can_read", "read_process"]

_PIECE_BYTES: Final = 16 << 20
_PR_SET_PTRACER: Final = 0x59616D61


class _Range(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = [  # type: ignore[mutable-override]  # as ctypes wants it
        ("base", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
    ]


@lru_cache(maxsize=1)
def _call() -> Any:  # noqa: ANN401
    """Return the system call, declared; on first use, not at import."""
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    found = getattr(libc, "process_vm_readv", None)
    if found is None:
        message = (
            "this system cannot read another process's memory; bytes go over the socket"
        )
        raise UnsupportedPlatform(message)
    found.restype = ctypes.c_ssize_t
    found.argtypes = (
        ctypes.c_int,
        ctypes.POINTER(_Range),
        ctypes.c_ulong,
        ctypes.POINTER(_Range),
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
    return found


def allow_reader(pid: int) -> None:
    """Let process `pid` read this one's memory where Yama asks for it; else no effect."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def can_read(pid: int, at: int) -> bool:
    """Say whether one byte at `at` of process `pid` can be read."""
    try:
        read_process(pid, at, bytearray(1))
    except (PeerLost, OwnerGone, UnsupportedPlatform):
        return False
    return True


def read_process(
    pid: int,
    at: int,
    into: Any,  # noqa: ANN401
    *,
    threads: int = DEFAULT_THREADS,
) -> int:
    """Fill a writable buffer from address `at` of process `pid`; return its length.

    Raises
    ------
    OwnerGone
        When the process has ended.
    PeerLost
        When its memory is not readable there, or not to us.
    UnsupportedPlatform
        When this system has no such call.
    """
    call = _call()
    with address(into, writable=True) as (to, nbytes):

        def job(offset: int, length: int) -> Callable[[], object]:
            return lambda: _read(call, pid, at + offset, to + offset, length)

        run_parallel(
            [
                job(offset, min(_PIECE_BYTES, nbytes - offset))
                for offset in range(0, nbytes, _PIECE_BYTES)
            ],
            threads=threads,
        )
        return nbytes


def _read(call: Any, pid: int, at: int, to: int, nbytes: int) -> None:  # noqa: ANN401
    done = 0
    while done < nbytes:
        here = _Range(to + done, nbytes - done)
        there = _Range(at + done, nbytes - done)
        got = call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got <= 0:
            raise _failure(pid, ctypes.get_errno())
        done += got


def _failure(pid: int, code: int) -> PeerLost | OwnerGone:
    if code == errno.ESRCH:
        return OwnerGone(f"process {pid}, which owned the memory, has ended")
    reason = os.strerror(code) if code else "nothing could be read"
    return PeerLost(
        f"the memory of process {pid} cannot be read ({reason}); bytes must go over the socket",
        {"errno": code},
    )
