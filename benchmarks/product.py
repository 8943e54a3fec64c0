"""The product's side of every bench: a cluster of its own, sessions, and what it holds.

1. A bench has its own run directory, so the stores it starts are known by their cards
   and nothing of another cluster on this machine is touched.
2. Memory is counted by the kernel, never by the product: private anonymous bytes from
   ``/proc/<pid>/smaps_rollup``, memory files by inode over all descriptors of the stores.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import dask
import distributed  # its defaults are part of dask.config only from here on
import numpy as np

import tensorcast_dask as tc
from benchmarks.harness import ROOT
from benchmarks.sizes import MIB, Sizes

LOST_WORKER = f"{distributed.__name__}.deploy.lost-worker-timeout"

__all__ = [
    "ROOT",
    "PeakAnonymous",
    "anonymous_bytes",
    "attach",
    "cluster",
    "file_bytes",
    "session",
    "store_pids",
]


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """A short one: it holds sockets."""
    with tempfile.TemporaryDirectory(prefix="tcb", dir="/tmp") as name:
        Path(name).chmod(0o700)
        before = os.environ.get("TENSORCAST_RUN_DIR")
        os.environ["TENSORCAST_RUN_DIR"] = name
        try:
            yield Path(name)
        finally:
            end_stores()
            if before is None:
                del os.environ["TENSORCAST_RUN_DIR"]
            else:
                os.environ["TENSORCAST_RUN_DIR"] = before


@contextlib.contextmanager
def cluster(
    sizes: Sizes,
    *,
    n_workers: int = 2,
    separate_hosts: bool = False,
    warm_bytes: int | None = None,
    memory: str | None = None,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Any]:
    """A local cluster whose warm pool keeps what the bench says.

    Parameters
    ----------
    sizes : Sizes
        Gives the budget of a node.
    n_workers, separate_hosts
        As in ``LocalCluster``.
    warm_bytes : int, optional
        0: every segment is fresh. Default: room for one big artifact.
    memory : str, optional
        Budget of a node.
    more : dict, optional
        Further settings.
    **options
        For ``LocalCluster``.
    """
    keep = sizes.big_bytes + 64 * MIB if warm_bytes is None else warm_bytes
    settings: dict[str, Any] = {"segment": {"warm-bytes": keep}} | (more or {})
    with (
        # On a loaded machine a worker takes long to come back; Dask gives it up after 15 s.
        dask.config.set({LOST_WORKER: "300s"}),
        run_directory(),
        tc.LocalCluster(
            n_workers=n_workers,
            threads_per_worker=2,
            host_memory=memory or sizes.node_memory,
            separate_hosts=separate_hosts,
            settings=settings,
            dashboard_address="127.0.0.1:0",
            **options,
        ) as made,
    ):
        yield made


@contextlib.contextmanager
def session(target: Any) -> Iterator[Any]:
    """A synchronous session."""
    with tc.connect(target) as cast:
        yield cast


async def connect_async(address: str) -> Any:
    """A session on the running loop."""
    return await tc.connect(address, asynchronous=True)


async def close_async(cast: Any) -> None:
    """Its end."""
    await cast.close()


# ---------------------------------------------------------------- in helpers
def attach(state: dict[str, Any], address: str) -> None:
    """Connect this process."""
    state["cast"] = tc.connect(address)


def resolve(state: dict[str, Any], name: str) -> None:
    """Hold a handle."""
    state["handle"] = state["cast"].artifact(name)


def materialise(state: dict[str, Any], name: str) -> float:
    """Resolve, map, look at the last byte; seconds."""
    begin = time.perf_counter()
    tensors = state["cast"].artifact(name).tensor_dict(framework="numpy")
    last = next(iter(tensors.values()))[-1]
    spent = time.perf_counter() - begin
    assert last == 1
    return spent


def materialise_held(state: dict[str, Any]) -> float:
    """The same with the handle in hand, as Ray has a reference in hand."""
    begin = time.perf_counter()
    tensors = state["handle"].tensor_dict(framework="numpy")
    last = next(iter(tensors.values()))[-1]
    spent = time.perf_counter() - begin
    assert last == 1
    return spent


# ---------------------------------------------------------------- counting
def cards() -> list[dict[str, Any]]:
    """The cards of all stores of this bench's run directory."""
    found = []
    for path in Path(os.environ["TENSORCAST_RUN_DIR"]).glob("*/*/*.json"):
        with contextlib.suppress(OSError, ValueError):
            card = json.loads(path.read_text())
            if isinstance(card, dict) and card.get("pid"):
                found.append(card)
    return found


def store_pids() -> list[int]:
    """The store processes of this bench that live."""
    return sorted(
        {card["pid"] for card in cards() if Path(f"/proc/{card['pid']}").exists()}
    )


def end_stores(within_s: float = 5.0) -> None:
    """End what is left in this bench's own run directory; a clean end leaves nothing."""
    stop = time.monotonic() + within_s
    while store_pids() and time.monotonic() < stop:
        time.sleep(0.05)
    for pid in store_pids():
        print(f"a store was left: {pid}", file=sys.stderr)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def anonymous_bytes(pids: list[int]) -> int:
    """Private anonymous memory of processes."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    total += int(line.split()[1]) << 10
    return total


def file_bytes(pids: list[int]) -> int:
    """Bytes of memory files that processes hold open, each inode once."""
    files = {}
    for pid in pids:
        for fd in _descriptors(pid):
            with contextlib.suppress(OSError):
                if "memfd:" in str(fd.readlink()):
                    at = fd.stat()
                    files[at.st_dev, at.st_ino] = at.st_blocks * 512
    return sum(files.values())


def segment_of(size: int) -> str:
    """Where a process finds the memory file of the one artifact of this size."""
    for pid in store_pids():
        for fd in _descriptors(pid):
            with contextlib.suppress(OSError):
                if "memfd:" in str(fd.readlink()) and fd.stat().st_size >= size:
                    return str(fd)
    message = f"no store holds {size} bytes in one file"
    raise LookupError(message)


def descriptors(pids: list[int]) -> int:
    """Open descriptors of processes."""
    return sum(len(_descriptors(pid)) for pid in pids)


def _descriptors(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []


class PeakAnonymous:
    """The most anonymous memory that processes had while a block ran, above its start."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._stop = threading.Event()
        self.grown = 0

    def __enter__(self) -> Self:
        self._start = anonymous_bytes(self._pids)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self._look()

    def _look(self) -> None:
        self.grown = max(self.grown, anonymous_bytes(self._pids) - self._start)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()


def put_small(cast: Any, count: int) -> None:
    """Some artifacts that a resolve can ask for."""
    value = np.zeros(64, dtype=np.uint8)
    for at in range(count):
        cast.put(value, f"bench/small-{at:05d}")


def big_array(size: int, value: int = 1) -> np.ndarray:
    """Pages that are there."""
    return np.full(size, value, dtype=np.uint8)


def one_node(cast: Any, at: int = 0) -> Any:
    """The nodes in order of their names."""
    return cast.workers()[at]


def on_loop_of(dask_worker: Any = None, dask_scheduler: Any = None) -> Any:
    """Whichever Dask server a function was sent to."""
    return dask_worker or dask_scheduler
