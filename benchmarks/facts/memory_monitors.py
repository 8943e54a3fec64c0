"""What do Dask's two memory monitors do to a worker that maps more than its limit?

1. The worker's own monitor (pause, spill) and the nanny's (terminate) both judge the
   resident set, and mapped pages of a memory file count in it once they are touched.
2. A read of a private map leaves file pages: resident *and* shared. A write makes
   them anonymous: resident, not shared. So resident minus shared is what is ours.
3. Each mode is run on a fresh cluster of one worker with a nanny: nothing replaced,
   one of the monitors replaced, both replaced.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from typing import TYPE_CHECKING, Any

import dask
import distributed
import psutil
from distributed import Client, LocalCluster, Nanny, NannyPlugin, Worker, WorkerPlugin
from distributed.scheduler import KilledWorker

from benchmarks.facts.report import show

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.facts.report import Row

MIB = 1 << 20
LIMIT_BYTES = 512 * MIB
MAPPED_BYTES = 768 * MIB
MANAGED_BYTES = 24 * MIB
WATCHED_S = 1.5


def own_bytes(process: psutil.Process) -> int:
    """Resident bytes that no memory file backs: ``/proc/<pid>/statm``."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


class OwnMemoryOfWorker(WorkerPlugin):
    """Replace ``worker.monitor.get_process_memory`` on the instance."""

    name = "fact-own-memory-worker"

    def setup(self, worker: Worker) -> None:
        """Shadow the method: every reader of the figure goes through it."""
        monitor = worker.monitor

        def get_process_memory() -> int:
            memory = monitor.proc.memory_info()
            return int(memory.rss - memory.shared)

        monitor.get_process_memory = get_process_memory


class OwnMemoryOfNanny(NannyPlugin):
    """Let the nanny's check run only when resident minus shared is over the limit."""

    name = "fact-own-memory-nanny"

    def setup(self, nanny: Nanny) -> None:
        """Wrap the periodic callback: tornado reads its ``callback`` at every tick."""
        manager = nanny.memory_manager
        periodic = nanny.periodic_callbacks["memory_monitor"]
        judge = periodic.callback

        def check() -> None:
            process = nanny.process and nanny.process.process
            if process is None or process.pid is None:
                return
            try:
                memory = psutil.Process(process.pid).memory_info()
            except psutil.Error:
                return
            own = memory.rss - memory.shared
            if own > manager.memory_limit * manager.memory_terminate_fraction:
                judge()

        periodic.callback = check


def map_and_touch(*, write: bool) -> dict[str, Any]:
    """In the worker: map a full memory file privately, touch all of it, then watch."""
    worker = distributed.get_worker()
    fd = os.memfd_create("fact")
    block = b"\x01" * MIB
    for _ in range(MAPPED_BYTES // MIB):
        os.write(fd, block)
    size, kind, both = MAPPED_BYTES, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    private = mmap.mmap(fd, size, flags=kind, prot=both)
    os.close(fd)
    first = ctypes.addressof(ctypes.c_char.from_buffer(private))
    for at in range(0, size, mmap.PAGESIZE):
        if write:
            private[at] = 2
        elif private[at] != 1:
            raise AssertionError
    seen, stop = set(), time.monotonic() + WATCHED_S
    while time.monotonic() < stop:
        seen.add(worker.status.name)
        time.sleep(0.02)
    memory = psutil.Process().memory_info()
    return {
        "address": first,
        "statuses": "+".join(sorted(seen)),
        "rss_mib": memory.rss // MIB,
        "shared_mib": memory.shared // MIB,
        "spilled": len(getattr(worker.data, "slow", ())),
    }


def managed_value() -> bytes:
    """Something that Dask itself holds and may spill."""
    return b"\x00" * MANAGED_BYTES


def one(name: str, plugins: list[Any], *, write: bool) -> Row:
    """One cluster, one map."""
    row: dict[str, object] = {"override": name, "pages": "written" if write else "read"}
    with (
        LocalCluster(
            n_workers=1,
            threads_per_worker=2,
            memory_limit=LIMIT_BYTES,
            dashboard_address="127.0.0.1:0",
        ) as cluster,
        Client(cluster) as client,
    ):
        for plugin in plugins:
            client.register_plugin(plugin)
        kept = client.submit(managed_value, pure=False)
        kept.result()
        pid = client.submit(os.getpid, pure=False).result()
        try:
            held = client.submit(map_and_touch, write=write, pure=False).result(60)
        except KilledWorker:
            return row | {"outcome": "killed by the nanny"}
        again = client.submit(os.getpid, pure=False).result(60)
        outcome = "lives" if again == pid else "killed by the nanny"
        return row | {"outcome": outcome} | {k: held[k] for k in held if k != "address"}


def main() -> None:
    """Run the eight cells."""
    quick = {
        "distributed.worker.memory.monitor-interval": "50ms",
        "distributed.scheduler.allowed-failures": 0,
    }
    modes: dict[str, Callable[[], list[Any]]] = {
        "none": list,
        "worker": lambda: [OwnMemoryOfWorker()],
        "nanny": lambda: [OwnMemoryOfNanny()],
        "worker+nanny": lambda: [OwnMemoryOfWorker(), OwnMemoryOfNanny()],
    }
    with dask.config.set(quick):
        rows = [
            one(name, plugins(), write=write)
            for name, plugins in modes.items()
            for write in (False, True)
        ]
    show(
        "memory_monitors",
        rows,
        limit_mib=LIMIT_BYTES // MIB,
        mapped_mib=MAPPED_BYTES // MIB,
        distributed=distributed.__version__,
    )


if __name__ == "__main__":
    main()
