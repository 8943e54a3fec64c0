"""Functions that tests send to workers and schedulers, which import them from here."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from distributed import Scheduler, Worker, get_worker

from tests.kit.eventually import eventually

__all__ = [
    "hold_mapped",
    "keep_the_gil",
    "keep_the_gil_until",
    "keep_the_process",
    "memory_state",
    "note",
    "remove_all_workers",
    "spin",
    "wait_for",
]


def keep_the_gil(seconds: int) -> bool:
    """Be in a C call that keeps the GIL for so long."""
    ctypes.PyDLL(None).sleep(seconds)  # PyDLL, unlike CDLL, does not let go of it
    return True


def keep_the_process(seconds: float) -> None:
    """Keep the worker's process from ending for so long, whatever its worker does."""
    threading.Thread(target=time.sleep, args=(seconds,), daemon=False).start()


def keep_the_gil_until(fifo: str) -> bool:
    """Be in a C call that keeps the GIL until a byte comes through a named pipe."""
    fd = os.open(fifo, os.O_RDWR)
    try:
        return ctypes.PyDLL(None).read(fd, ctypes.create_string_buffer(1), 1) == 1
    finally:
        os.close(fd)


def spin(seconds: float) -> None:
    """Be busy in Python for so long."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        time.sleep(0.01)


async def remove_all_workers(dask_scheduler: Scheduler) -> None:
    """Have Dask believe that all workers are gone."""
    for address in list(dask_scheduler.workers):
        await dask_scheduler.remove_worker(address, stimulus_id="test", close=False)


def hold_mapped(artifacts: list[Any]) -> tuple[int, int, int]:
    """Map and read every page of artifacts, keep the maps.

    Returns
    -------
    tuple of int
        The sum of one byte a page, the resident bytes, and what the worker takes for its own.
    """
    kept = [one.tensor_dict(framework="numpy") for one in artifacts]
    total = sum(int(t[::4096].sum()) for held in kept for t in held.values())
    worker = get_worker()
    worker.kept = kept  # type: ignore[attr-defined]
    resident = psutil.Process().memory_info().rss
    return total, resident, worker.monitor.get_process_memory()


def memory_state(dask_worker: Worker) -> tuple[str, int, int, int]:
    """Status, pid, bytes spilled and memory limit of a worker."""
    manager = dask_worker.memory_manager
    spilled = getattr(manager.data, "spilled_total", None)
    on_disk = 0 if spilled is None else int(spilled.disk)
    return dask_worker.status.name, os.getpid(), on_disk, manager.memory_limit or 0


def note(path: str, word: str) -> str:
    """Add a word to a file."""
    with Path(path).open("a") as file:
        file.write(f"{word}\n")
    return word


def wait_for(path: str) -> str:
    """Wait until a file is there."""
    eventually(Path(path).exists, within_s=60, what=path)
    return path
