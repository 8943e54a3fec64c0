"""A cluster of real processes in which a test may arm fault points, at any time and in any of them.

Rules:

1. What is armed is disarmed by the end of the block that armed it.
2. A rule is for one process where it says `[pid:...]`; else for whichever comes there.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tensorcast_dask as tc
from tensorcast_dask.dataplane import faults
from tests.kit.eventually import eventually

__all__ = [
    "Faults",
    "faulty_cluster",
    "holders",
    "kill_node",
    "others",
    "stopped",
    "store_pid",
    "whole",
]


class Faults:
    """The fault file of a cluster, and the log of what was hit."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "faults"
        self.log = folder / "faults.log"

    @contextlib.contextmanager
    def armed(self, spec: str) -> Iterator[None]:
        """Have a spec armed for the length of a block; the log begins anew."""
        self.log.unlink(missing_ok=True)
        faults.write_spec(self.path, spec)
        try:
            yield
        finally:
            self.disarm()

    def disarm(self) -> None:
        """End what is armed; whoever is paused goes on."""
        faults.write_spec(self.path, "")

    def hits(self, name: str) -> list[faults.Hit]:
        """Give what happened at a point since the spec was armed, oldest first."""
        return [hit for hit in faults.read_log(self.log) if hit.name == name]

    def wait(self, name: str, *, count: int = 1, within_s: float = 30.0) -> None:
        """Wait until a point was hit so often."""
        eventually(
            lambda: len(self.hits(name)) >= count,
            within_s=within_s,
            what=f"{name} is reached {count} times",
        )


@contextlib.contextmanager
def faulty_cluster(
    run: Path, n_workers: int, **options: Any
) -> Iterator[tuple[tc.LocalCluster, Faults]]:
    """Start a cluster whose stores look at a fault file."""
    run.chmod(0o700)
    faults_of = Faults(run)
    settings = {"run-dir": str(run), **options.pop("settings", {})}
    options = {"threads_per_worker": 1, "host_memory": "256 MiB", **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(faults.ENV_FILE, str(faults_of.path))
        patch.setenv(faults.ENV_LOG, str(faults_of.log))
        patch.setenv("TENSORCAST_RUN_DIR", str(run))
        with tc.LocalCluster(n_workers, settings=settings, **options) as cluster:
            yield cluster, faults_of


# ---------------------------------------------------------------- nodes
def holders(artifact: tc.Artifact) -> list[str]:
    """Nodes that hold an artifact."""
    return [place.card.node for place in artifact.locations()]


def others(session: tc.Session, artifact: tc.Artifact) -> list[Any]:
    """Workers beside which it is not."""
    held = holders(artifact)
    return [worker for worker in session.workers() if worker.node not in held]


def store_pid(session: tc.Session, node: str) -> int:
    """Pid of a node's store."""
    pids = {state.card.node: state.card.pid for state in session.nodes()}
    return pids[node]


def kill_node(session: tc.Session, node: str) -> None:
    """Kill a store and its worker; the nanny starts another worker, with a new node."""
    worker = next(worker for worker in session.workers() if worker.node == node)
    store = store_pid(session, node)
    (pid,) = session.client.run(os.getpid, workers=[worker.address]).values()
    os.kill(store, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Hold a process with SIGSTOP for the length of a block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def whole(session: tc.Session, count: int) -> None:
    """Wait until so many nodes have workers, and no dead one is listed."""

    def there() -> bool:
        return len(session.workers()) == len(session.nodes()) == count

    eventually(there, within_s=60, what=f"{count} nodes with workers")
