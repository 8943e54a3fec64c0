"""A LocalCluster with our plugins, in a run directory of the test's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask.config
from distributed import LocalCluster

from tensorcast_dask.dataplane import hosts
from tensorcast_dask.deploy import scheduler_plugin
from tensorcast_dask.tensors.messages import NodeCard
from tests.kit.eventually import eventually

__all__ = ["local_cluster", "stores_in"]


@contextmanager
def local_cluster(
    run_dir: Path,
    *,
    n_workers: int = 1,
    processes: bool = False,
    settings: dict[str, Any] | None = None,
    install: bool = True,
    **options: Any,
) -> Iterator[LocalCluster]:
    """Start a LocalCluster; it is closed, and its stores are gone, at the end."""
    defaults: dict[str, Any] = {
        "n_workers": n_workers,
        "processes": processes,
        "threads_per_worker": 1,
        "memory_limit": "1 GiB",
        "dashboard_address": "127.0.0.1:0",
        "host": "127.0.0.1" if processes else None,
        "local_directory": str(run_dir.parent / "dask"),
    }
    section = {
        "run-dir": str(run_dir),
        "node": {"host-memory": "64 MiB"},
        "memory": {"reserve-min": "1 MiB"},
        **(settings or {}),
    }
    before = os.environ.get("TENSORCAST_RUN_DIR")
    os.environ["TENSORCAST_RUN_DIR"] = str(run_dir)
    try:
        with (
            dask.config.set(tensorcast=section),
            LocalCluster(**(defaults | options)) as cluster,
        ):
            if install:
                plugin = scheduler_plugin()
                cluster.sync(
                    cluster.scheduler.register_scheduler_plugin,
                    plugin,
                    idempotent=True,
                )
            yield cluster
    finally:
        if before is None:
            del os.environ["TENSORCAST_RUN_DIR"]
        else:
            os.environ["TENSORCAST_RUN_DIR"] = before
    eventually(lambda: not stores_in(run_dir), within_s=10, what="no store left")


def stores_in(run_dir: Path) -> list[NodeCard]:
    """Give the cards of the stores that live under a run directory."""
    if not run_dir.is_dir():
        return []
    folders = [path for path in run_dir.iterdir() if path.is_dir()]
    return [card for folder in folders for card in hosts.cards(folder)]
