"""A store that a person started, and workers that come and go."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.kit.clusters import Cluster
from tests.kit.commands import Commands
from tests.kit.eventually import eventually

SETTINGS = {"NODE__HOST_MEMORY": "64MiB", "MEMORY__RESERVE_MIN": "1MiB"}


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


def test_the_next_worker_adopts_it_and_it_keeps_what_was_given(folder: Path) -> None:
    tensorcast = Commands(folder)
    with Cluster(folder, SETTINGS) as cluster:
        tensorcast.env = cluster.env
        cluster.start_scheduler()
        made = tensorcast.json(
            "store", "-d", "-s", cluster.address, "-m", "32 MiB", "-l", "unit=own"
        )
        cluster.start_worker(name="a", nanny=False)
        (state,) = cluster.wait_for_nodes(1, attended=1)
        assert state.card.node == made["node"]
        assert state.card.pid == made["pid"]
        assert state.card.labels == {"unit": "own"}
        assert state.uses["host"].capacity_bytes == 32 << 20  # type: ignore[index]


def test_it_outlives_its_worker_for_the_next_one(folder: Path) -> None:
    tensorcast = Commands(folder)
    with Cluster(folder, SETTINGS | {"STORE__RELEASED_TTL": "30s"}) as cluster:
        tensorcast.env = cluster.env
        cluster.start_scheduler()
        made = tensorcast.json("store", "-d", "-s", cluster.address)
        first = cluster.start_worker(name="a", nanny=False)
        (before,) = cluster.wait_for_nodes(1, attended=1)
        os.kill(first.pid, signal.SIGKILL)
        cluster.start_worker(name="b", nanny=False)

        def adopted() -> bool:
            (after,) = cluster.nodes()
            return (
                after.attended
                and after.card.node == made["node"]
                and after.card.incarnation > before.card.incarnation
            )

        eventually(adopted, within_s=30, what="the second worker has the store")
