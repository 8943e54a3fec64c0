"""Which way do 1 GiB of a client's array get into a segment fastest?

1. A *fresh* segment has no pages yet: whoever touches it first makes them.
2. A *recycled* one has them, but a client that maps it anew still faults on every
   4 KiB page; only the store may keep its map, since a client's map refuses the lease.
3. The store can therefore read the client's memory itself (``process_vm_readv``) into
   the map that it keeps.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.facts import linux
from benchmarks.facts.linux import MIB, READ, WRITE
from benchmarks.facts.report import show

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 1024 * MIB
ROUNDS = 7

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


class Range(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class Paths:
    """One source array, one child process with the same array, two threads."""

    def __init__(self) -> None:
        self.source = np.full(SIZE, 3, dtype=np.uint8)
        self.pool = ThreadPoolExecutor(2)
        told, tell = os.pipe()
        self._hold, self._let_go = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            os.close(self._let_go)
            array = np.full(SIZE, 7, dtype=np.uint8)
            os.write(tell, str(array.ctypes.data).encode())
            os.read(self._hold, 1)
            os._exit(0)
        self.remote = int(os.read(told, 32))

    def close(self) -> None:
        """End the child."""
        os.close(self._let_go)
        os.waitpid(self.child, 0)
        self.pool.shutdown()

    def split(self, threads: int, work: Callable[[int, int], object]) -> None:
        """Call ``work(low, high)`` on equal parts."""
        cuts = [SIZE * part // threads for part in range(threads + 1)]
        list(self.pool.map(work, cuts[:-1], cuts[1:]))

    def copy(self, target: np.ndarray, threads: int) -> None:
        """Numpy into an array."""
        self.split(threads, lambda a, b: np.copyto(target[a:b], self.source[a:b]))

    def pwrite(self, fd: int, threads: int, step: int = MIB) -> None:
        """By descriptor, no map."""
        view = memoryview(self.source)

        def part(low: int, high: int) -> None:
            for at in range(low, high, step):
                os.pwrite(fd, view[at : at + step], at)

        self.split(threads, part)

    def new_map(self, fd: int, threads: int, *, populate: bool) -> None:
        """Map, (populate), copy, unmap."""
        at = linux.map_file(fd, SIZE, prot=READ | WRITE)
        if populate:
            kind = linux.POPULATE_WRITE
            self.split(threads, lambda a, b: linux.advise(at + a, b - a, kind))
        self.copy(linux.array_at(at, SIZE), threads)
        linux.unmap(at, SIZE)

    def read_client(self, into: int, threads: int, step: int = 16 * MIB) -> None:
        """``process_vm_readv`` from the child, into a kept map."""

        def part(low: int, high: int) -> None:
            for at in range(low, high, step):
                size = min(step, high - at)
                here, there = Range(into + at, size), Range(self.remote + at, size)
                pointers = ctypes.byref(here), ctypes.byref(there)
                got = _libc.process_vm_readv(
                    self.child, pointers[0], 1, pointers[1], 1, 0
                )
                assert got == size, os.strerror(ctypes.get_errno())

        self.split(threads, part)


def main() -> None:
    """Interleave every path, seven rounds."""
    paths = Paths()
    private = np.full(SIZE, 1, dtype=np.uint8)
    warm = linux.fresh_file(SIZE)
    kept = linux.map_file(warm, SIZE, prot=READ | WRITE)
    kept_array = linux.array_at(kept, SIZE)
    paths.copy(kept_array, 2)

    def fresh(work: Callable[[int], object]) -> float:
        fd = linux.fresh_file(SIZE)
        seconds = timed(lambda: work(fd))
        os.close(fd)
        return seconds

    def timed(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    ways: dict[str, Callable[[], float]] = {
        "memcpy, 1 thread": lambda: timed(lambda: np.copyto(private, paths.source))
    }
    for n in (1, 2):
        ways |= {
            f"recycled: kept map, {n} thr": lambda n=n: timed(
                lambda: paths.copy(kept_array, n)
            ),
            f"recycled: new map, {n} thr": lambda n=n: timed(
                lambda: paths.new_map(warm, n, populate=False)
            ),
            f"recycled: new map populated, {n} thr": lambda n=n: timed(
                lambda: paths.new_map(warm, n, populate=True)
            ),
            f"recycled: pwrite, {n} thr": lambda n=n: timed(
                lambda: paths.pwrite(warm, n)
            ),
            f"recycled: store reads client, {n} thr": lambda n=n: timed(
                lambda: paths.read_client(kept, n)
            ),
            f"fresh: map, {n} thr": lambda n=n: fresh(
                lambda fd: paths.new_map(fd, n, populate=False)
            ),
            f"fresh: pwrite 1 MiB, {n} thr": lambda n=n: fresh(
                lambda fd: paths.pwrite(fd, n)
            ),
            f"fresh: pwrite 16 MiB, {n} thr": lambda n=n: fresh(
                lambda fd: paths.pwrite(fd, n, 16 * MIB)
            ),
        }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            times[name].append(way())
    paths.close()
    base = statistics.median(times["memcpy, 1 thread"])
    rows = []
    for name, each in times.items():
        middle = statistics.median(each)
        rows.append(
            {
                "1 GiB into a segment": name,
                "ms": middle * 1e3,
                "min": min(each) * 1e3,
                "max": max(each) * 1e3,
                "memcpy ratio": base / middle,
            }
        )
    linux.unmap(kept, SIZE)
    os.close(warm)
    show("put_paths", rows)


if __name__ == "__main__":
    main()
