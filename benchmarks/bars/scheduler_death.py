"""kill -9 of the scheduler, restart on its journal, no worker back yet.

The clock starts when the scheduler's port answers again and ends when a new session
has read the whole artifact. Everything acknowledged must be there, in the same store.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tensorcast_dask as tc
from benchmarks import product
from benchmarks.harness import ROOT, absolute, emit
from benchmarks.sizes import Sizes, parse

SMALL = 20
LOST_MS = 1e6


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Deployment:
    """A scheduler and a worker as a user starts them, from the command line."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self.port = free_port()
        self.address = f"tcp://127.0.0.1:{self.port}"
        self._folder = folder
        self._env = os.environ | {
            "PYTHONPATH": str(ROOT),
            "TENSORCAST_JOURNAL": str(folder / "journal.db"),
            "TENSORCAST_NODE__HOST_MEMORY": sizes.node_memory,
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self.scheduler = self.start_scheduler()
        self._start(
            "worker",
            self.address,
            "--no-dashboard",
            "--nthreads=1",
            "--memory-limit=0",
            f"--local-directory={folder}",
        )

    def start_scheduler(self) -> subprocess.Popen[bytes]:
        """On the same port and the same journal each time."""
        return self._start(
            "scheduler",
            "--host=127.0.0.1",
            f"--port={self.port}",
            "--dashboard-address=127.0.0.1:0",
            "--preload=tensorcast_dask.deploy",
        )

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        log = (self._folder / f"{arguments[0]}-{len(self._processes)}.log").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "dask", *arguments],
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        self._processes.append(process)
        return process

    def worker_is_gone(self) -> bool:
        """The nanny ends when its scheduler died."""
        return self._processes[1].poll() is not None

    def answers(self) -> bool:
        """Whether the scheduler's port takes a connection."""
        with socket.socket() as sock:
            sock.settimeout(0.2)
            return sock.connect_ex(("127.0.0.1", self.port)) == 0

    def close(self) -> None:
        """End everything that was started here."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@contextlib.contextmanager
def deployment(sizes: Sizes) -> Iterator[Deployment]:
    """One, with a run directory and a journal of its own."""
    with (
        product.run_directory(),
        tempfile.TemporaryDirectory(dir=str(ROOT), prefix=".bench-") as folder,
    ):
        made = Deployment(Path(folder), sizes)
        try:
            yield made
        finally:
            made.close()


def until(condition: Any, within_s: float, what: str) -> None:
    """Poll."""
    stop = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > stop:
            msg = f"{what}: not within {within_s} s"
            raise TimeoutError(msg)
        time.sleep(0.005)


def fill(address: str, sizes: Sizes) -> None:
    """The big artifact and some small ones, all acknowledged."""
    with tc.connect(address) as cast:
        until(cast.workers, 30, "a worker with its store")
        cast.put(product.big_array(sizes.big_bytes), "bench/big")
        product.put_small(cast, SMALL)


def main(sizes: Sizes) -> None:
    """One line."""
    seen: list[dict[str, object]] = []
    with deployment(sizes) as made:
        until(made.answers, 30, "the scheduler's port")
        fill(made.address, sizes)

        def one_kill() -> float:
            stores = product.store_pids()
            os.kill(made.scheduler.pid, signal.SIGKILL)
            made.scheduler.wait()
            until(made.worker_is_gone, 60, "the end of the worker")
            made.scheduler = made.start_scheduler()
            until(made.answers, 30, "the scheduler's port")
            begin = time.perf_counter()
            with tc.connect(made.address) as cast:
                tensors = cast.artifact("bench/big").tensor_dict(framework="numpy")
                array = next(iter(tensors.values()))
                first = time.perf_counter() - begin
                whole = int(np.count_nonzero(array == 1))
                del array, tensors
                missing = [
                    at
                    for at in range(SMALL)
                    if not cast.exists(f"bench/small-{at:05d}")
                ]
            lost = whole != sizes.big_bytes or missing
            seen.append(
                {
                    "readable_ms": first * 1e3,
                    "missing": missing,
                    "bytes intact": whole == sizes.big_bytes,
                    "same store": product.store_pids() == stores,
                }
            )
            return LOST_MS if lost else first * 1e3

        emit(
            absolute(
                "kill -9 of the scheduler, readable after its port answers",
                one_kill,
                bar=2000,
                better="lower",
                unit="ms",
                times=sizes.kills,
                notes={"kills": seen, "a loss counts as": LOST_MS},
            )
        )


if __name__ == "__main__":
    main(parse())
