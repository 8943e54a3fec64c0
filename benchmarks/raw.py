"""The plain operations that the product is set beside: memcpy, memory files, sockets.

Each is the best that a few lines of Python can do on this machine; where there are
several ways the fastest is found by trying them first.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.facts import linux
from benchmarks.facts.linux import MIB, READ, WRITE
from benchmarks.helpers import Helper

__all__ = ["Burners", "Memcpy", "Segments", "Wire", "allowed_controls"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
ASK = struct.Struct("!QQB")


def filled(size: int, value: int) -> Bytes:
    """An array whose pages are there."""
    return np.full(size, value, dtype=np.uint8)


class Memcpy:
    """One-thread copy between two warm private arrays."""

    def __init__(self, size: int) -> None:
        self._from, self._into = filled(size, 1), filled(size, 2)
        self.size = size

    def seconds(self) -> float:
        """Once."""
        begin = time.perf_counter()
        np.copyto(self._into, self._from)
        return time.perf_counter() - begin

    def gigabytes_s(self) -> float:
        """Once."""
        return self.size / self.seconds() / 1e9


class Segments:
    """Numpy-into-map and ``pwrite``, with 1 and 2 threads, into a memory file.

    A *fresh* file has no pages; a *recycled* one has them, and is mapped anew each time as
    a client of another process has to.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.source = filled(size, 3)
        self._pool = ThreadPoolExecutor(2)
        self._recycled = linux.fresh_file(size)
        self._pwrite(self._recycled, 1, MIB)
        self.ways: dict[str, Callable[[int], None]] = {
            "map, 1 thread": lambda fd: self._map(fd, 1),
            "map, 2 threads": lambda fd: self._map(fd, 2),
            "pwrite 1 MiB, 1 thread": lambda fd: self._pwrite(fd, 1, MIB),
            "pwrite 1 MiB, 2 threads": lambda fd: self._pwrite(fd, 2, MIB),
            "pwrite 16 MiB, 2 threads": lambda fd: self._pwrite(fd, 2, 16 * MIB),
        }

    def seconds(self, way: str, *, fresh: bool) -> float:
        """Fill one segment one way."""
        fd = linux.fresh_file(self.size) if fresh else self._recycled
        begin = time.perf_counter()
        self.ways[way](fd)
        spent = time.perf_counter() - begin
        if fresh:
            os.close(fd)
        return spent

    def best(self, *, fresh: bool, rounds: int = 3) -> tuple[str, dict[str, float]]:
        """The fastest way here, and the median ms of each."""
        found = {
            way: statistics.median(
                self.seconds(way, fresh=fresh) for _ in range(rounds)
            )
            for way in self.ways
        }
        return min(found, key=found.__getitem__), {
            way: round(value * 1e3, 1) for way, value in found.items()
        }

    def close(self) -> None:
        """Give the memory back."""
        os.close(self._recycled)
        self._pool.shutdown()

    def _parts(self, threads: int, work: Callable[[int, int], object]) -> None:
        cuts = [self.size * part // threads for part in range(threads + 1)]
        if threads == 1:
            work(0, self.size)
        else:
            list(self._pool.map(work, cuts[:-1], cuts[1:]))

    def _map(self, fd: int, threads: int) -> None:
        at = linux.map_file(fd, self.size, prot=READ | WRITE)
        into = linux.array_at(at, self.size)
        self._parts(threads, lambda a, b: np.copyto(into[a:b], self.source[a:b]))
        linux.unmap(at, self.size)

    def _pwrite(self, fd: int, threads: int, step: int) -> None:
        view = self.source.data

        def part(low: int, high: int) -> None:
            for at in range(low, high, step):
                os.pwrite(fd, view[at : min(at + step, high)], at)

        self._parts(threads, part)


def allowed_controls() -> list[str]:
    """The congestion controls that this process may choose."""
    found = []
    for name in ("reno", "cubic", "bbr"):
        with socket.socket() as sock:
            try:
                sock.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode()
                )
            except OSError:
                continue
            found.append(name)
    return found


class Wire:
    """A raw-socket loop: another process sends a memory file, this one receives.

    Unverified, unframed, without a protocol: what the sockets give.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._sender = Helper("raw-sender")
        self._ports = self._sender(_serve_file, size, allowed_controls())
        self._warm = linux.fresh_file(size)
        self._at = linux.map_file(self._warm, size, prot=READ | WRITE)
        linux.array_at(self._at, size)[:] = 1
        self.ways = [
            (control, count, receive)
            for control in self._ports
            for count in (1, 4)
            for receive in ("map", "pwrite")
        ]

    @property
    def sender_pid(self) -> int:
        """The other process."""
        return self._sender.pid

    def seconds(self, way: tuple[str, int, str], *, fresh: bool) -> float:
        """Receive everything one way."""
        control, count, receive = way
        socks = [_connect(self._ports[control], control) for _ in range(count)]
        fd = linux.fresh_file(self.size) if fresh else self._warm
        begin = time.perf_counter()
        at = self._at
        if fresh and receive == "map":
            at = linux.map_file(fd, self.size, prot=READ | WRITE)
        cuts = [self.size * part // count for part in range(count + 1)]
        target = (fd, linux.array_at(at, self.size).data)
        work = _into_map if receive == "map" else _by_pwrite
        threads = [
            threading.Thread(target=work, args=(sock, target, low, high))
            for sock, low, high in zip(socks, cuts[:-1], cuts[1:], strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        spent = time.perf_counter() - begin
        for sock in socks:
            sock.close()
        if fresh:
            if receive == "map":
                linux.unmap(at, self.size)
            os.close(fd)
        return spent

    def best(
        self, *, fresh: bool, rounds: int = 3
    ) -> tuple[tuple[str, int, str], dict[str, float]]:
        """The fastest way here, and the median ms of each."""
        found = {
            way: statistics.median(
                self.seconds(way, fresh=fresh) for _ in range(rounds)
            )
            for way in self.ways
        }
        shown = {f"{a} x{n} {r}": round(v * 1e3, 1) for (a, n, r), v in found.items()}
        return min(found, key=found.__getitem__), shown

    def close(self) -> None:
        """End the sender, give the memory back."""
        self._sender.close()
        linux.unmap(self._at, self.size)
        os.close(self._warm)


def _connect(port: int, control: str) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
    return sock


def _into_map(
    sock: socket.socket, target: tuple[int, memoryview], low: int, high: int
) -> None:
    sock.sendall(ASK.pack(low, high - low, 1))
    at, view = low, target[1]
    while at < high:
        at += sock.recv_into(view[at : min(at + 4 * MIB, high)])


def _by_pwrite(
    sock: socket.socket, target: tuple[int, memoryview], low: int, high: int
) -> None:
    sock.sendall(ASK.pack(low, high - low, 1))
    buffer, at = memoryview(bytearray(MIB)), low
    while at < high:
        want = min(MIB, high - at)
        got = sock.recv_into(buffer[:want], want, socket.MSG_WAITALL)
        at += os.pwrite(target[0], buffer[:got], at)


def _serve_file(
    state: dict[str, Any], size: int, controls: list[str]
) -> dict[str, int]:
    """In the sender: a memory file, and a listener for each congestion control."""
    fd = state["fd"] = linux.fresh_file(size)
    block = bytes(range(256)) * (MIB // 256)
    for at in range(0, size, MIB):
        os.pwrite(fd, block[: min(MIB, size - at)], at)
    ports = {}
    for control in controls:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
        ports[control] = listener.getsockname()[1]
        threading.Thread(target=_accept, args=(listener, fd), daemon=True).start()
    return ports


def _accept(listener: socket.socket, fd: int) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_send, args=(sock, fd), daemon=True).start()


def _send(sock: socket.socket, fd: int) -> None:
    with sock:
        while ask := sock.recv(ASK.size, socket.MSG_WAITALL):
            offset, length, _ = ASK.unpack(ask)
            while length:
                sent = os.sendfile(sock.fileno(), fd, offset, length)
                offset, length = offset + sent, length - sent


class Burners:
    """Unrelated processes that burn a core each between `start` and `stop`."""

    def __init__(self, count: int = 2) -> None:
        self._helpers = [Helper("burner") for _ in range(count)]
        self._flag = Path(tempfile.mkdtemp(prefix="tcburn")) / "burn"

    def start(self) -> None:
        """Begin."""
        self._flag.touch()
        for helper in self._helpers:
            helper.start(_burn, str(self._flag))

    def stop(self) -> None:
        """Until they have stopped."""
        self._flag.unlink()
        for helper in self._helpers:
            helper.result()

    def close(self) -> None:
        """End them."""
        for helper in self._helpers:
            helper.close()
        self._flag.parent.rmdir()


def _burn(_: dict[str, Any], flag: str) -> None:
    while Path(flag).exists():
        for _turn in range(100):
            sum(range(10_000))
