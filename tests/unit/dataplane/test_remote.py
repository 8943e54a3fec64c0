from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from tensorcast_dask.dataplane import memory, remote
from tensorcast_dask.exceptions import OwnerGone, PeerLost


@pytest.mark.parametrize("nbytes", [0, 1, (33 << 20) + 1])
def test_the_bytes_of_a_process_arrive(nbytes: int) -> None:
    data = bytearray(os.urandom(1 << 10) * (nbytes // 1024 + 1))[:nbytes]
    into = bytearray(nbytes)
    with memory.address(data) as (at, _):
        assert remote.read_process(os.getpid(), at, into) == nbytes
    assert into == data


def test_another_process_can_lend_its_memory() -> None:
    code = (
        "import ctypes,os,sys;"
        "from tensorcast_dask.dataplane.remote import allow_reader;"
        "allow_reader(os.getppid());"
        "b=ctypes.create_string_buffer(b'lent bytes');"
        "print(ctypes.addressof(b),flush=True);input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        at = int(child.stdout.readline())
        into = bytearray(10)
        remote.read_process(child.pid, at, into)
        assert into == b"lent bytes"
        assert remote.can_read(child.pid, at)
    finally:
        child.kill()
        child.communicate()
    with pytest.raises(OwnerGone):
        remote.read_process(child.pid, at, into)
    assert not remote.can_read(child.pid, at)


def test_an_address_that_is_none_is_a_typed_error() -> None:
    with pytest.raises(PeerLost):
        remote.read_process(os.getpid(), 4096, bytearray(10))


def test_memory_that_ends_early_is_a_typed_error() -> None:
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
    at = libc.mmap(None, 8192, 3, 0x22, -1, 0)
    libc.munmap(at + 4096, 4096)
    with pytest.raises(PeerLost):
        remote.read_process(os.getpid(), at, bytearray(8192))
    libc.munmap(at, 4096)
