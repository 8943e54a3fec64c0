"""When does the kernel grant a write lease on a segment, and what does re-use save?

1. The store's description is re-opened through ``/proc/self/fd``, the first closed.
2. A lease must be refused for every way a stranger can still see the bytes, and be
   granted as soon as the last of them is gone; the probe must never wait.
3. What the lease does not see is listed too (duplicates of the store's own
   description): those are rules that the store must keep.
4. The life of ``create`` and ``commit``: a writable shared map gives way, at the same
   address, to a private map of a read-only description.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import resource
import signal
import socket
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.facts import linux
from benchmarks.facts.linux import MIB, PRIVATE, READ, SHARED, WRITE
from benchmarks.facts.report import show

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.facts.report import Row

SMALL = 4 * MIB
BIG = 1024 * MIB
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def granted(fd: int) -> str:
    return "granted" if linux.probe(fd) else "refused"


class Child:
    """A forked process that prepares something, says so, and waits to be told to end."""

    def __init__(self, prepare: Callable[[], object]) -> None:
        self._ready, ready = os.pipe()
        hold, self._hold = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._hold)
            try:
                kept = prepare()
                os.write(ready, b"1" if kept is not None else b"0")
                os.read(hold, 1)
            finally:
                os._exit(0)
        os.close(ready)
        os.close(hold)
        self.answer = os.read(self._ready, 1)

    def end(self) -> int:
        """Let it end; its wait status."""
        os.close(self._hold)
        os.close(self._ready)
        return os.waitpid(self.pid, 0)[1]


def reader_map(reader: int, *, also_fork: bool = False) -> int:
    """Map privately and close the descriptor; the map can be inherited by a child."""
    at = linux.map_file(reader, SMALL, prot=READ | WRITE, flags=PRIVATE)
    os.close(reader)
    if also_fork:
        if os.fork() > 0:
            linux.unmap(at, SMALL)
            os._exit(0)  # the parent is gone, only the forked child has the map
        time.sleep(0.3)
        os._exit(0)
    return at


def openers() -> list[Row]:
    """Every way to see a segment, and what the probe says before and after."""
    rows: list[Row] = []

    def case(name: str, during: str, after: str, expected: str) -> None:
        rows.append(
            {
                "who sees the segment": name,
                "lease": during,
                "once it is gone": after,
                "as wished": during == expected,
            }
        )

    plain = os.memfd_create("first", os.MFD_CLOEXEC)
    os.ftruncate(plain, SMALL)
    case("nobody, but memfd_create's own description", granted(plain), "-", "refused")
    os.close(plain)
    fd = linux.fresh_file(SMALL, seals=SIZE_SEALS)
    case("nobody (re-opened, size sealed)", granted(fd), "-", "granted")
    own = linux.map_file(fd, SMALL, prot=READ | WRITE, flags=SHARED)
    case("the store's own writable map", granted(fd), "-", "granted")
    linux.unmap(own, SMALL)

    with_fd = Child(lambda: linux.read_only(fd))
    during = granted(fd)
    with_fd.end()
    case("a reader's descriptor", during, granted(fd), "refused")

    mapped = Child(lambda: reader_map(linux.read_only(fd)))
    during = granted(fd)
    os.kill(mapped.pid, signal.SIGSTOP)
    os.waitpid(mapped.pid, os.WUNTRACED)
    begin = time.perf_counter()
    stopped = granted(fd)
    stopped_us = (time.perf_counter() - begin) * 1e6
    os.kill(mapped.pid, signal.SIGKILL)
    mapped.end()
    after = granted(fd)
    case("a reader's private map, descriptor closed", during, after, "refused")
    case(f"the same, SIGSTOP ({stopped_us:.0f} us)", stopped, after, "refused")

    reader_pid = os.fork()
    if reader_pid == 0:
        reader_map(linux.read_only(fd), also_fork=True)
    os.waitpid(reader_pid, 0)
    during = granted(fd)
    time.sleep(0.5)
    case("a forked child's map, parent gone", during, granted(fd), "refused")

    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    reader = linux.read_only(fd)
    fds = array.array("i", [reader])
    left.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    os.close(reader)
    during = granted(fd)
    left.close()
    right.close()
    case("a descriptor in flight (SCM_RIGHTS)", during, granted(fd), "refused")

    path = f"/proc/self/fd/{fd}"
    writer = os.open(path, os.O_RDWR)
    during = granted(fd)
    at = linux.map_file(writer, SMALL, prot=READ | WRITE, flags=SHARED)
    os.close(writer)
    map_only = granted(fd)
    linux.unmap(at, SMALL)
    case("a putting client's write description", during, granted(fd), "refused")
    case("its writable map, descriptor closed", map_only, granted(fd), "refused")

    same = os.dup(fd)
    case("a dup of the store's own description (RULE)", granted(fd), "-", "granted")
    os.close(same)
    forked = Child(lambda: 1)
    case("a forked store (RULE: it never forks)", granted(fd), "-", "granted")
    forked.end()
    os.close(fd)
    return rows


def lease_is_broken_by_open() -> dict[str, str]:
    """SIGIO ends a holder that does not ignore it; an opener waits or is refused."""
    found = {}
    for name, handler in (("default", signal.SIG_DFL), ("ignored", signal.SIG_IGN)):
        fd = linux.fresh_file(SMALL)

        def hold(fd: int = fd, handler: signal.Handlers = handler) -> int:
            signal.signal(signal.SIGIO, handler)
            own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            os.close(fd)
            fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            return own

        # The parent's own description would refuse the lease: hand the path over.
        holder = _holder(fd, hold)
        status = holder.end() if holder.answer == b"1" else -1
        found[name] = f"wait status {status}"
    return found


def _holder(fd: int, hold: Callable[[], int]) -> Child:
    path_fd = os.open(f"/proc/self/fd/{fd}", os.O_PATH)
    os.close(fd)

    def prepare() -> int:
        copy = os.open(f"/proc/self/fd/{path_fd}", os.O_RDWR)
        return hold(copy)

    child = Child(prepare)
    try:
        os.close(os.open(f"/proc/self/fd/{path_fd}", os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise
    os.close(path_fd)
    return child


def as_nobody() -> str:
    """The same life for a user without privileges."""
    if os.getuid() != 0:
        return "is that user already"
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = b"not tried"
        try:
            os.setgid(65534)
            os.setuid(65534)
            fd = linux.fresh_file(SMALL, seals=SIZE_SEALS)
            reader = linux.read_only(fd)
            refused = granted(fd)
            os.close(reader)
            said = f"re-open works, {refused}, then {granted(fd)}".encode()
        except OSError as error:
            said = repr(error).encode()
        finally:
            os.write(write, said)
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    said = os.read(read, 200)
    os.close(read)
    return said.decode()


def timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def warmth() -> list[Row]:
    """A fresh segment, the same one again, and plain memory beside it."""
    source = np.full(BIG, 3, dtype=np.uint8)
    warm = np.full(BIG, 1, dtype=np.uint8)
    memcpy = statistics.median(timed(lambda: np.copyto(warm, source)) for _ in range(5))
    rows: list[Row] = []

    def add(name: str, seconds: float) -> None:
        rows.append(
            {"1 GiB": name, "ms": seconds * 1e3, "memcpy ratio": memcpy / seconds}
        )

    add("memcpy into warm private memory", memcpy)
    fd = linux.fresh_file(BIG)
    at = linux.map_file(fd, BIG, prot=READ | WRITE)
    target = linux.array_at(at, BIG)
    add("map, fresh", timed(lambda: np.copyto(target, source)))
    add("map, warm", timed(lambda: np.copyto(target, source)))
    linux.unmap(at, BIG)
    at = linux.map_file(fd, BIG, prot=READ | WRITE)
    target = linux.array_at(at, BIG)
    add("warm file, a new map", timed(lambda: np.copyto(target, source)))
    linux.unmap(at, BIG)
    at = linux.map_file(fd, BIG, prot=READ | WRITE)
    seconds = timed(lambda: linux.advise(at, BIG, linux.POPULATE_WRITE))
    add("warm file, MADV_POPULATE_WRITE of a new map", seconds)
    linux.unmap(at, BIG)
    add("pwrite, warm", timed(lambda: write_all(fd, source)))
    os.close(fd)
    fd = linux.fresh_file(BIG)
    add("pwrite, fresh", timed(lambda: write_all(fd, source)))
    os.close(fd)
    fd = linux.fresh_file(BIG)
    add("fallocate, fresh", timed(lambda: os.posix_fallocate(fd, 0, BIG)))
    add("drop of the file", timed(lambda: os.close(fd)))
    return rows


def write_all(fd: int, source: np.ndarray) -> None:
    view, step = memoryview(source), 16 * MIB
    for at in range(0, len(view), step):
        os.pwrite(fd, view[at : at + step], at)


def commit() -> list[Row]:
    """Create, fill, drop the writable map, prove, and map privately at the address."""
    fd = linux.fresh_file(BIG, seals=SIZE_SEALS)
    writer = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    at = linux.map_file(writer, BIG, prot=READ | WRITE)
    tensor = linux.array_at(at, BIG)
    value = np.random.default_rng(0).integers(0, 255, BIG, dtype=np.uint8)
    tensor[:] = value
    drop_s = timed(lambda: linux.reserve(at, BIG))
    os.close(writer)
    proof = granted(fd)
    reader = linux.read_only(fd)
    map_s = timed(
        lambda: linux.map_file(reader, BIG, prot=READ | WRITE, flags=PRIVATE, at=at)
    )
    os.close(reader)
    read_s = timed(lambda: int(tensor.view(np.uint64).sum()))
    intact = bool(np.array_equal(tensor, value))
    tensor[0] ^= 0xFF
    private = os.pread(fd, 1, 0)[0] == value[0]
    rows: list[Row] = [
        {"commit of 1 GiB": "reservation over the writable map", "ms": drop_s * 1e3},
        {"commit of 1 GiB": f"probe: {proof}", "ms": ""},
        {"commit of 1 GiB": "private map at the same address", "ms": map_s * 1e3},
        {"commit of 1 GiB": f"first read (intact: {intact})", "ms": read_s * 1e3},
        {"commit of 1 GiB": f"a later write stays private: {private}", "ms": ""},
    ]
    linux.unmap(at, BIG)
    for name, prot, advice in (
        ("read of a new private map, as it comes", READ | WRITE, 0),
        ("MADV_POPULATE_READ of a new private map", READ | WRITE, linux.POPULATE_READ),
    ):
        reader = linux.read_only(fd)
        at = linux.map_file(reader, BIG, prot=prot, flags=PRIVATE)
        os.close(reader)
        tensor = linux.array_at(at, BIG)
        ready_s = timed(lambda: linux.advise(at, BIG, advice)) if advice else 0.0
        read_s = timed(lambda: int(tensor.view(np.uint64).sum()))
        rows.append({"commit of 1 GiB": name, "ms": (ready_s + read_s) * 1e3})
        if advice:
            rows.append({"commit of 1 GiB": "  of it the advice", "ms": ready_s * 1e3})
            read_s = timed(lambda: int(tensor.view(np.uint64).sum()))
            rows.append({"commit of 1 GiB": "read again, warm", "ms": read_s * 1e3})
        drop_s = timed(lambda: linux.unmap(at, BIG))
        rows.append({"commit of 1 GiB": "  munmap after", "ms": drop_s * 1e3})
    os.close(fd)
    return rows


def many(count: int = 10_000) -> list[Row]:
    """Ten thousand segments of one store and ten thousand maps of one reader."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    reached = f"RLIMIT_NOFILE {soft} raised to {hard}"
    fds: list[int] = []
    begin = time.perf_counter()
    try:
        for _ in range(count):
            fd = linux.fresh_file(2 * MIB, seals=SIZE_SEALS)
            os.pwrite(fd, b"1", 0)
            fds.append(fd)
    except OSError as error:
        reached = f"{len(fds)} then {error}"
    made_s = time.perf_counter() - begin
    begin = time.perf_counter()
    all_granted = all(linux.probe(fd) for fd in fds)
    probe_s = time.perf_counter() - begin
    begin = time.perf_counter()
    maps = []
    for fd in fds:
        reader = linux.read_only(fd)
        maps.append(linux.map_file(reader, 2 * MIB, prot=READ | WRITE, flags=PRIVATE))
        os.close(reader)
    map_s = time.perf_counter() - begin
    none = not any(linux.probe(fd) for fd in fds)
    for at in maps:
        linux.unmap(at, 2 * MIB)
    for fd in fds:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    each = 1e6 / len(fds)
    return [
        {"10,000 segments": f"made, us each ({reached})", "us": made_s * each},
        {
            "10,000 segments": f"probe (all granted: {all_granted})",
            "us": probe_s * each,
        },
        {
            "10,000 segments": f"re-open, map, close (then all refused: {none})",
            "us": map_s * each,
        },
        {
            "10,000 segments": f"vm.max_map_count {linux.sysctl('vm/max_map_count')}, "
            f"fs.nr_open {linux.sysctl('fs/nr_open')}",
            "us": "",
        },
    ]


def main() -> None:
    """Ask everything."""
    broken = lease_is_broken_by_open()
    nobody = as_nobody()
    show("segment_life", openers(), sigio=broken, non_root=nobody)
    show("segment_life.many", many())
    show("segment_life.warmth", warmth())
    show("segment_life.commit", commit())


if __name__ == "__main__":
    main()
