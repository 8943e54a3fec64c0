"""Loopback TCP at 1 GiB: which call, how many connections, which congestion control?

1. The source is another process that holds the bytes in a memory file; it sends by
   ``sendall`` from its map or by ``sendfile``.
2. The destination is a *warm* memory file (its pages are there, its map is kept) or a
   *fresh* one. Bytes come by ``recv_into`` the map, by ``recv_into`` a small buffer and
   ``pwrite``, or by ``splice`` through a pipe.
3. ``xxh3`` of each chunk: in the receiving thread, or in one other thread.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import queue
import signal
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable

import numpy as np
import xxhash

from benchmarks.facts import linux
from benchmarks.facts.linux import MIB, READ, WRITE
from benchmarks.facts.report import show

SIZE = 1024 * MIB
ASK = struct.Struct("!QQB")
ROUNDS = 3
CONTROLS = ("reno", "cubic", "bbr")


def allowed() -> list[str]:
    """The congestion controls that this process may choose."""
    found = []
    for name in CONTROLS:
        with socket.socket() as sock:
            try:
                sock.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode()
                )
            except OSError:
                continue
            found.append(name)
    return found


class Source:
    """A child process that answers (offset, length, how) on each connection."""

    def __init__(self, control: str) -> None:
        self.control = control.encode()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_CONGESTION, self.control
        )
        self.port = self.listener.getsockname()[1]
        self.pid = os.fork()
        if self.pid == 0:
            self._serve()
        self.listener.close()

    def _serve(self) -> None:
        fd = linux.fresh_file(SIZE)
        at = linux.map_file(fd, SIZE, prot=READ | WRITE)
        array = linux.array_at(at, SIZE)
        array[:] = 5
        parent = os.getppid()
        self.listener.settimeout(1)
        while os.getppid() == parent:
            try:
                sock, _ = self.listener.accept()
            except TimeoutError:
                continue
            threading.Thread(
                target=self._answer, args=(sock, fd, array), daemon=True
            ).start()
        os._exit(0)

    @staticmethod
    def _answer(sock: socket.socket, fd: int, array: np.ndarray) -> None:
        view = memoryview(array)
        with sock:
            sock.settimeout(None)
            while ask := sock.recv(ASK.size, socket.MSG_WAITALL):
                offset, length, how = ASK.unpack(ask)
                if how == 0:
                    sock.sendall(view[offset : offset + length])
                while how == 1 and length:
                    sent = os.sendfile(sock.fileno(), fd, offset, length)
                    offset, length = offset + sent, length - sent

    def connect(self) -> socket.socket:
        """One more connection; the accepted end has its listener's control."""
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self.control)
        return sock

    def close(self) -> None:
        """End the child."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class Target:
    """A memory file and, where it is kept, its map."""

    def __init__(self) -> None:
        self.fd = linux.fresh_file(SIZE)
        self.at = linux.map_file(self.fd, SIZE, prot=READ | WRITE)
        self.array = linux.array_at(self.at, SIZE)

    def close(self) -> None:
        linux.unmap(self.at, SIZE)
        os.close(self.fd)


Receive = Callable[[socket.socket, Target, int, int, int], None]


def into_map(
    sock: socket.socket, target: Target, low: int, high: int, chunk: int
) -> None:
    view = memoryview(target.array)
    for at in range(low, high, chunk):
        part = view[at : min(at + chunk, high)]
        got = sock.recv_into(part, len(part), socket.MSG_WAITALL)
        while got < len(part):
            got += sock.recv_into(part[got:], len(part) - got, socket.MSG_WAITALL)


def as_it_comes(
    sock: socket.socket, target: Target, low: int, high: int, chunk: int
) -> None:
    view, at = memoryview(target.array), low
    while at < high:
        at += sock.recv_into(view[at : min(at + chunk, high)])


def by_buffer(
    sock: socket.socket, target: Target, low: int, high: int, chunk: int
) -> None:
    buffer = memoryview(bytearray(chunk))
    at = low
    while at < high:
        want = min(chunk, high - at)
        got = sock.recv_into(buffer[:want], want, socket.MSG_WAITALL)
        os.pwrite(target.fd, buffer[:got], at)
        at += got


def by_splice(
    sock: socket.socket, target: Target, low: int, high: int, chunk: int
) -> None:
    out, into = os.pipe()
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, MIB)
    at = low
    while at < high:
        moved = os.splice(sock.fileno(), into, min(chunk, high - at))
        while moved:
            wrote = os.splice(out, target.fd, moved, offset_dst=at)
            at, moved = at + wrote, moved - wrote
    os.close(out)
    os.close(into)


def verified_inline(
    sock: socket.socket, target: Target, low: int, high: int, chunk: int
) -> None:
    for at in range(low, high, chunk):
        into_map(sock, target, at, min(at + chunk, high), chunk)
        xxhash.xxh3_64_intdigest(target.array[at : min(at + chunk, high)])


def verified_aside(
    sock: socket.socket, target: Target, low: int, high: int, chunk: int
) -> None:
    work: queue.SimpleQueue[int] = queue.SimpleQueue()

    def verify() -> None:
        while (at := work.get()) >= 0:
            xxhash.xxh3_64_intdigest(target.array[at : min(at + chunk, high)])

    other = threading.Thread(target=verify)
    other.start()
    for at in range(low, high, chunk):
        into_map(sock, target, at, min(at + chunk, high), chunk)
        work.put(at)
    work.put(-1)
    other.join()


def verified_buffer(
    sock: socket.socket, target: Target, low: int, high: int, chunk: int
) -> None:
    buffer = memoryview(bytearray(chunk))
    for at in range(low, high, chunk):
        want = min(chunk, high - at)
        got = 0
        while got < want:
            got += sock.recv_into(buffer[got:want], want - got, socket.MSG_WAITALL)
        xxhash.xxh3_64_intdigest(buffer[:want])
        os.pwrite(target.fd, buffer[:want], at)


def pull(
    socks: list[socket.socket], target: Target, receive: Receive, how: int, chunk: int
) -> float:
    """All of it over all connections, an equal share each; seconds."""
    cuts = [SIZE * part // len(socks) for part in range(len(socks) + 1)]

    def one(sock: socket.socket, low: int, high: int) -> None:
        sock.sendall(ASK.pack(low, high - low, how))
        receive(sock, target, low, high, chunk)

    threads = [
        threading.Thread(target=one, args=part)
        for part in zip(socks, cuts[:-1], cuts[1:], strict=True)
    ]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def main() -> None:
    """The grid at 4 MiB a call; then the calls and chunk sizes at the best control."""
    controls = allowed()
    sources = {control: Source(control) for control in controls}
    left, right = np.full(SIZE, 1, np.uint8), np.full(SIZE, 2, np.uint8)
    warm = Target()
    warm.array[:] = 1
    memcpy: list[float] = []

    def memcpy_once() -> None:
        begin = time.perf_counter()
        np.copyto(left, right)
        memcpy.append(time.perf_counter() - begin)

    def once(
        control: str, count: int, receive: Receive, how: int, chunk: int, *, fresh: bool
    ) -> float:
        socks = [sources[control].connect() for _ in range(count)]
        target = Target() if fresh else warm
        seconds = pull(socks, target, receive, how, chunk)
        for sock in socks:
            sock.close()
        if fresh:
            target.close()
        return seconds

    def row(name: dict[str, object], times: list[float]) -> dict[str, object]:
        middle = statistics.median(times)
        base = statistics.median(memcpy)
        return name | {
            "ms": middle * 1e3,
            "GB/s": SIZE / middle / 1e9,
            "memcpy ratio": base / middle,
            "best ms": min(times) * 1e3,
        }

    receives = {"recv_into map": into_map, "buffer+pwrite": by_buffer}
    grid = list(
        itertools.product(
            controls, (1, 4), (False, True), receives, ("send", "sendfile")
        )
    )
    times: dict[object, list[float]] = {key: [] for key in grid}
    for _ in range(ROUNDS):
        memcpy_once()
        for key in grid:
            control, count, fresh, receive, sent_by = key
            how, chunk = int(sent_by == "sendfile"), 4 * MIB
            if receive == "buffer+pwrite":
                chunk = MIB
            times[key].append(
                once(control, count, receives[receive], how, chunk, fresh=fresh)
            )
    names = ("control", "connections", "fresh", "receive", "source")
    rows = [row(dict(zip(names, key, strict=True)), times[key]) for key in grid]
    show("tcp_destinations", rows, memcpy_ms=statistics.median(memcpy) * 1e3)

    calls: list[tuple[str, Receive, int, int, bool]] = [
        (name, receive, chunk, count, fresh)
        for name, receive, chunks in (
            ("MSG_WAITALL", into_map, (1, 4, 16, 64)),
            ("as it comes", as_it_comes, (4, 64)),
            ("buffer+pwrite", by_buffer, (0.25, 1, 4)),
            ("splice", by_splice, (1,)),
            ("verified, same thread", verified_inline, (1, 4, 16)),
            ("verified, another thread", verified_aside, (4, 16)),
            ("verified in the buffer, pwrite", verified_buffer, (1, 4)),
        )
        for chunk in (int(each * MIB) for each in chunks)
        for count, fresh in ((1, False), (4, False), (1, True))
    ]
    best = "reno" if "reno" in controls else controls[0]
    found: dict[object, list[float]] = {call: [] for call in calls}
    for _ in range(ROUNDS):
        memcpy_once()
        for call in calls:
            _, receive, chunk, count, fresh = call
            found[call].append(once(best, count, receive, 0, chunk, fresh=fresh))
    for source in sources.values():
        source.close()
    show(
        "tcp_destinations.calls",
        [
            row(
                {
                    "call": name,
                    "chunk MiB": chunk / MIB,
                    "connections": count,
                    "fresh": fresh,
                },
                found[name, receive, chunk, count, fresh],
            )
            for name, receive, chunk, count, fresh in calls
        ],
        control=best,
        memcpy_ms=statistics.median(memcpy) * 1e3,
    )
    warm.close()


if __name__ == "__main__":
    main()
