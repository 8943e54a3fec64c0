from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tensorcast_dask.dataplane.maps import PrivateMap, SharedMap
from tensorcast_dask.dataplane.segments import MemoryFile, ignore_sigio, leases_work
from tensorcast_dask.exceptions import CapacityError

if TYPE_CHECKING:
    from collections.abc import Iterator

NBYTES = 1 << 20


@pytest.fixture
def file() -> Iterator[MemoryFile]:
    with MemoryFile(NBYTES) as made:
        yield made


def test_leases_prove_on_this_kernel() -> None:
    assert leases_work()


def test_the_size_is_sealed(file: MemoryFile) -> None:
    for nbytes in (0, NBYTES - 1, NBYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(file.fd, nbytes)
    writer = file.write_description()
    with pytest.raises(PermissionError):
        os.ftruncate(writer, NBYTES * 2)
    os.close(writer)


def test_the_descriptors_are_closed_on_exec(file: MemoryFile) -> None:
    fds = [file.fd, file.read_description(), file.write_description()]
    assert not any(os.get_inheritable(fd) for fd in fds)
    for fd in fds[1:]:
        os.close(fd)


def test_a_reader_cannot_write(file: MemoryFile) -> None:
    reader = file.read_description()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(reader, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(reader, NBYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(reader)


def test_nobody_else_is_the_answer_while_nobody_is(file: MemoryFile) -> None:
    assert file.sole_owner()
    file.map_shared()
    assert file.sole_owner(), "the owner's own map is its own description"


def test_a_readers_descriptor_refuses_the_proof(file: MemoryFile) -> None:
    reader = file.read_description()
    assert not file.sole_owner()
    os.close(reader)
    assert file.sole_owner()


def test_a_map_whose_descriptor_is_closed_refuses_the_proof(file: MemoryFile) -> None:
    held = PrivateMap(file.read_description(), NBYTES)
    assert not file.sole_owner()
    del held
    assert file.sole_owner()


def test_one_view_of_a_map_is_enough_to_refuse(file: MemoryFile) -> None:
    view = PrivateMap(file.read_description(), NBYTES).view[10:20]
    assert not file.sole_owner()
    view.release()
    assert file.sole_owner()


def test_a_writers_descriptor_and_map_refuse_the_proof(file: MemoryFile) -> None:
    writer = file.write_description()
    assert not file.sole_owner()
    held = SharedMap(writer, NBYTES, writable=True)
    os.close(writer)
    assert not file.sole_owner()
    held.view[:3] = b"abc"
    held.close()
    assert file.sole_owner()
    assert bytes(file.map_shared().view[:3]) == b"abc"


def test_a_descriptor_in_flight_refuses_the_proof(file: MemoryFile) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    reader = file.read_description()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [reader]))]
    here.sendmsg([b"x"], rights)
    os.close(reader)
    assert not file.sole_owner()
    here.close()
    there.close()  # the message is thrown away, and the descriptor with it
    assert file.sole_owner()


def test_a_childs_map_refuses_the_proof(file: MemoryFile) -> None:
    code = (
        "import mmap,os,sys;"
        f"m=mmap.mmap(0,{NBYTES},mmap.MAP_PRIVATE,mmap.PROT_READ);"
        "os.close(0);print('mapped',flush=True);os.read(2,1)"
    )
    reader = file.read_description()
    here, there = socket.socketpair()  # the child waits on it, and ends with us
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=reader,
        stdout=subprocess.PIPE,
        stderr=there.fileno(),
    )
    there.close()
    os.close(reader)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"mapped\n"
        assert not file.sole_owner()
    finally:
        here.close()
        child.communicate(timeout=30)
    assert file.sole_owner()


def test_a_duplicate_of_the_owners_description_is_invisible(file: MemoryFile) -> None:
    """Why rule 2 forbids sending or inheriting it."""
    twin = os.dup(file.fd)
    assert file.sole_owner()
    os.close(twin)


def test_the_lease_is_held_only_for_the_probe(file: MemoryFile) -> None:
    assert file.sole_owner()
    assert fcntl.fcntl(file.fd, fcntl.F_GETLEASE) == fcntl.F_UNLCK
    os.close(file.read_description())  # would wait for a held lease


@pytest.mark.skipif(os.getuid() != 0, reason="already without privileges")
def test_the_proof_needs_no_privilege() -> None:
    code = (
        "import os;"
        "from tensorcast_dask.dataplane.segments import leases_work;"
        "os.setgid(65534);os.setuid(65534);print(leases_work())"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, timeout=30
    )
    assert child.stdout == b"True\n", child.stderr


def test_threads_may_probe_at_once(file: MemoryFile) -> None:
    found: list[bool] = []

    def probe() -> None:
        found.extend(file.sole_owner() for _ in range(2000))

    threads = [threading.Thread(target=probe) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [True] * 6000


def test_opening_during_a_probe_does_no_harm_even_without_ignoring_sigio() -> None:
    code = """if True:
        import os, threading, time
        from tensorcast_dask.dataplane.segments import MemoryFile
        file = MemoryFile(4096)
        until_s = time.monotonic() + 0.5
        def probe():
            while time.monotonic() < until_s:
                file.sole_owner()
        def read():
            while time.monotonic() < until_s:
                os.close(file.read_description())
        threads = [threading.Thread(target=work) for work in (probe, read, read)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(file.sole_owner())
        """
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, timeout=30
    )
    assert child.stdout == b"True\n", child.returncode


def test_sigio_is_ignored() -> None:
    code = (
        "import os,signal;"
        "from tensorcast_dask.dataplane.segments import ignore_sigio;"
        "ignore_sigio();os.kill(os.getpid(),signal.SIGIO);print('alive')"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, timeout=30
    )
    assert child.stdout == b"alive\n"


def test_ignoring_sigio_twice_is_fine() -> None:
    before = signal.getsignal(signal.SIGIO)
    try:
        ignore_sigio()
        ignore_sigio()
        assert signal.getsignal(signal.SIGIO) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGIO, before)


def test_pages_are_made_when_asked_for(file: MemoryFile) -> None:
    assert file.allocated_bytes() == 0
    file.prefault(0, NBYTES // 2)
    assert file.allocated_bytes() == NBYTES // 2
    file.map_shared().view[:3] = b"abc"
    file.prefault(0, NBYTES)
    assert file.allocated_bytes() == NBYTES
    assert bytes(file.map_shared().view[:4]) == b"abc\0"
    file.prefault(5, 0)


def test_pages_outside_the_file_are_refused(file: MemoryFile) -> None:
    with pytest.raises(CapacityError):
        file.prefault(0, NBYTES + 1)


def test_the_pages_outlive_the_owner_in_a_readers_map() -> None:
    with MemoryFile(NBYTES) as file:
        file.map_shared().view[:5] = b"bytes"
        held = PrivateMap(file.read_description(), NBYTES)
    assert bytes(held.view[:5]) == b"bytes"


def test_the_owners_map_ends_with_its_last_view(file: MemoryFile) -> None:
    view = file.map_shared().view
    file.unmap()
    view[:3] = b"abc"  # still there
    del view
    assert bytes(file.map_shared().view[:3]) == b"abc"


def test_a_frozen_file_is_written_by_nobody_ever(file: MemoryFile) -> None:
    """The fallback for systems without leases."""
    writer = file.write_description()
    held = SharedMap(writer, NBYTES, writable=True)
    held.view[:3] = b"abc"
    assert not file.freeze(), "a writable map is left"
    held.close()
    assert file.freeze()
    assert file.frozen
    with pytest.raises(PermissionError):
        os.pwrite(writer, b"x", 0)
    with pytest.raises(PermissionError):
        SharedMap(writer, NBYTES, writable=True)
    os.close(writer)
    assert bytes(file.map_shared().view[:3]) == b"abc"
    assert bytes(PrivateMap(file.read_description(), NBYTES).view[:3]) == b"abc"


def test_closing_twice_is_fine() -> None:
    file = MemoryFile(10)
    file.close()
    assert file.closed
    file.close()


def test_an_empty_segment_is_one_too() -> None:
    with MemoryFile(0) as file:
        assert file.sole_owner()
        assert bytes(file.map_shared().view) == b""
        held = PrivateMap(file.read_description(), 0)
        assert bytes(held.view) == b""
        assert file.sole_owner(), "an empty map holds nothing"


def test_no_descriptor_left_is_a_capacity_error(file: MemoryFile) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        with pytest.raises(CapacityError, match="RLIMIT_NOFILE") as caught:
            MemoryFile(10)
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.EMFILE
        with pytest.raises(CapacityError):
            file.read_description()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)
    MemoryFile(10).close()
