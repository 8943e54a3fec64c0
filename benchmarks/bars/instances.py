"""Instances: calls against an echo, steps against Dask's tasks, lent memory against the kernel."""

from __future__ import annotations

import itertools
import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import dask
import numpy as np
from dask._task_spec import Task, TaskRef

import tensorcast_dask as tc
from benchmarks import product
from benchmarks.harness import emit, paired
from benchmarks.helpers import Helper
from benchmarks.raw import Wire, _connect, _into_map
from benchmarks.sizes import MIB, Sizes, parse
from tensorcast_dask.dataplane import memory
from tensorcast_dask.dataplane.remote import read_process

CALLS, LENGTH = 300, 50
RUNS = itertools.count()
WORD = bytes(64)


# -------------------------------------------------------------------- in the engine
def begin(state: dict[str, Any], name: str, node: str) -> None:
    """Attach, and offer a function that does nothing."""
    from tensorcast_dask.instance import attach

    instance = state["instance"] = attach(name, node=node)

    @instance.function
    def nothing(_: object = None) -> None:
        return None


def make(state: dict[str, Any], size: int) -> tuple[int, int]:
    """An array whose pages are there; give process and address."""
    array = state[f"array-{size}"] = np.full(size, 7, np.uint8)
    return os.getpid(), int(array.__array_interface__["data"][0])


def register(state: dict[str, Any], size: int, name: str) -> float:
    """Lend it, timed; it is released unless `name` says to keep it."""
    begin = time.perf_counter()
    lent = state["instance"].register({"x": state[f"array-{size}"]}, name)
    spent = (time.perf_counter() - begin) * 1e3
    if not name.endswith("/kept"):
        lent.release()
    return spent


def pin(_: dict[str, Any], cores: list[int]) -> None:
    """Keep all threads of this process on some cores."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


# -------------------------------------------------------------------- the references
def echo(_: dict[str, Any], path: str) -> None:
    """Answer what comes with itself, in this process's own threads."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def serve() -> None:
        while True:
            sock, _ = listener.accept()
            while word := sock.recv(4096):
                sock.sendall(word)

    threading.Thread(target=serve, daemon=True).start()


def echo_us(sock: socket.socket) -> float:
    """One round trip."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        sock.sendall(WORD)
        sock.recv(4096)
    return (time.perf_counter() - begin) / CALLS * 1e6


def call_us(handle: Any) -> float:
    """One call."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        handle.call("nothing")
    return (time.perf_counter() - begin) / CALLS * 1e6


def nothing(*_: object) -> None:
    """An empty task."""


def plan_ms(cast: Any) -> float:
    """A chain of calls, run as a plan."""
    plan = cast.plan(tc.context(key=f"bench-instance-{next(RUNS)}"))
    last: list[Any] = []
    for _ in range(LENGTH):
        last = [plan.on_instance("engine").call("nothing", after=last)]
    begin = time.perf_counter()
    assert plan.run().status == "done"
    return (time.perf_counter() - begin) / LENGTH * 1e3


def rpc_us(cast: Any) -> float:
    """One call, run as a plan that a store drives."""
    plan = cast.plan()
    plan.on_instance("engine").call("nothing")
    begin = time.perf_counter()
    assert plan.run(executor="rpc").status == "done"
    return (time.perf_counter() - begin) * 1e6


def way_us(cast: Any, handle: Any) -> float:
    """One call from here, and one request to the catalog."""
    begin = time.perf_counter()
    handle.call("nothing")
    cast.exists("nothing of that name")
    return (time.perf_counter() - begin) * 1e6


def median_of(act: Any, times: int = 30) -> float:
    """The median of a few, since one is over in a moment."""
    return sorted(act() for _ in range(times))[times // 2]


def graph_ms(cast: Any) -> float:
    """The same chain of empty tasks."""
    run = next(RUNS)
    graph = {}
    for at in range(LENGTH):
        before = [TaskRef(f"empty-{run}-{at - 1}")] if at else []
        graph[f"empty-{run}-{at}"] = Task(f"empty-{run}-{at}", nothing, *before)
    begin = time.perf_counter()
    cast.client.get(graph, [f"empty-{run}-{LENGTH - 1}"])
    return (time.perf_counter() - begin) / LENGTH * 1e3


def read_gbs(cast: Any, name: str, size: int) -> float:
    """Read what is lent."""
    begin = time.perf_counter()
    found = cast.artifact(name).tensor(framework="numpy")
    spent = time.perf_counter() - begin
    assert found[-1] == 7
    return size / spent / 1e9


def readv_gbs(pid: int, address: int, size: int) -> float:
    """The kernel's own copy, with as many threads, into the same kind of memory."""
    begin = time.perf_counter()
    room = memory.private(size)
    read_process(pid, address, room)
    return size / (time.perf_counter() - begin) / 1e9


def wire_gbs(wire: Wire, control: str, count: int) -> float:
    """Raw sockets into fresh memory of this process."""
    size = wire.size
    socks = [_connect(wire._ports[control], control) for _ in range(count)]
    begin = time.perf_counter()
    room = memory.private(size)
    cuts = [size * part // count for part in range(count + 1)]
    threads = [
        threading.Thread(target=_into_map, args=(sock, (0, room), low, high))
        for sock, low, high in zip(socks, cuts[:-1], cuts[1:], strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.perf_counter() - begin
    for sock in socks:
        sock.close()
    return size / spent / 1e9


# -------------------------------------------------------------------- the lines
def calls(sizes: Sizes, engine: Helper, cast: Any) -> None:
    """A call, and a step.

    For the call, who calls and who answers share a core, those of the echo too: else it is the
    kernel's whim which pair has to wake a core that sleeps (40 us each way in a virtual machine).
    """
    cores = sorted(os.sched_getaffinity(0))
    with Helper("echo") as helper, tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "s")
        helper(echo, path)
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
        handle = cast.instance("engine")
        for one in (engine, helper):
            one(pin, cores[:1])
        os.sched_setaffinity(0, cores[:1])
        emit(
            paired(
                "a call of an instance on this host, against an echo over a unix socket",
                lambda: call_us(handle),
                lambda: echo_us(sock),
                unit="us",
                bar=3,
                better="lower",
                pairs=sizes.pairs,
            )
        )
        sock.close()
        os.sched_setaffinity(0, cores)
        engine(pin, cores)
        emit(
            paired(
                "an instance step of a plan by rpc, against a call and a bare request",
                lambda: median_of(lambda: rpc_us(cast)),
                lambda: median_of(lambda: way_us(cast, handle)),
                unit="us",
                bar=2,
                better="lower",
                pairs=sizes.pairs,
                warm=2,
            )
        )
    emit(
        paired(
            "an instance step of a plan by graph, against an empty Dask task",
            lambda: plan_ms(cast),
            lambda: graph_ms(cast),
            bar=1.2,
            better="lower",
            pairs=sizes.pairs,
            warm=2,
        )
    )


def lent(sizes: Sizes, engine: Helper, cast: Any) -> None:
    """Registering, and reading on this host."""
    big, small = sizes.big_bytes, sizes.small_bytes
    pid, address = engine(make, big)
    engine(make, small)
    numbers = itertools.count()
    emit(
        paired(
            f"register {big // MIB} MiB, against {small // MIB} MiB",
            lambda: float(engine(register, big, f"lent/big-{next(numbers)}")),
            lambda: float(engine(register, small, f"lent/small-{next(numbers)}")),
            bar=2,
            better="lower",
            pairs=sizes.pairs * 3,
            warm=3,
        )
    )
    engine(register, big, "lent/kept")
    emit(
        paired(
            f"read {big // MIB} MiB that another process lends, against process_vm_readv",
            lambda: read_gbs(cast, "lent/kept", big),
            lambda: readv_gbs(pid, address, big),
            unit="GB/s",
            bar=0.9,
            better="higher",
            pairs=sizes.pairs,
        )
    )


def far(sizes: Sizes, cluster: Any) -> None:
    """Reading from another host, over TCP."""
    big = sizes.big_bytes
    wire = Wire(big)
    with dask.config.set({"tensorcast.host": "elsewhere"}), tc.connect(cluster) as cast:
        ways = [(control, count) for control in wire._ports for count in (2, 4)]
        best = max(ways, key=lambda way: max(wire_gbs(wire, *way) for _ in range(2)))
        emit(
            paired(
                f"read {big // MIB} MiB that a process of another host lends, against raw sockets",
                lambda: read_gbs(cast, "lent/kept", big),
                lambda: wire_gbs(wire, *best),
                unit="GB/s",
                bar=0.9,
                better="higher",
                pairs=sizes.pairs,
                notes={"best": best},
            )
        )
    wire.close()


def main(sizes: Sizes) -> None:
    """Six lines."""
    with (
        product.cluster(sizes, n_workers=1) as cluster,
        product.session(cluster) as cast,
        Helper("engine") as engine,
    ):
        engine(begin, "engine", cast.workers()[0].node)
        calls(sizes, engine, cast)
        lent(sizes, engine, cast)
        far(sizes, cluster)


if __name__ == "__main__":
    main(parse())
