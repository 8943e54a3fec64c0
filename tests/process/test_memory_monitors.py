"""Dask's memory managers and our bytes: what is mapped is nobody's memory twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from distributed import Client

import tensorcast_dask as tc
from tests.kit.local import local_cluster
from tests.kit.tasks import hold_mapped, memory_state, spin

MIB = 1 << 20
pytestmark = pytest.mark.timeout(240)  # for hangs, not for busy machines


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("m") / "r"


def test_a_task_maps_more_than_its_workers_limit_and_the_worker_lives_on(
    run_dir: Path,
) -> None:
    options = {
        "processes": True,
        "memory_limit": "512 MiB",
        "settings": {"node": {"host-memory": "832 MiB"}},
    }
    with (
        local_cluster(run_dir, **options) as cluster,  # type: ignore[arg-type]
        Client(cluster) as client,
        tc.connect(client) as cast,
    ):
        before = client.run(memory_state)
        artifacts = [
            cast.put(np.full(256 * MIB, number, np.uint8), f"big/{number}")
            for number in (1, 2, 3)
        ]
        own_data = client.submit(np.ones, 8 * MIB, pure=False)
        total, resident, counted = client.submit(hold_mapped, artifacts).result(60)
        assert total == (1 + 2 + 3) * 256 * MIB // 4096
        assert resident > 700 * MIB
        assert counted < 256 * MIB
        # Both monitors look ten times a second: give each several chances to misjudge.
        client.submit(spin, 1.5, pure=False).result(30)
        assert client.run(memory_state) == before
        assert own_data.result().nbytes == 64 * MIB
        (told,) = client.scheduler_info()["workers"].values()
        assert told["metrics"]["memory"] < 256 * MIB
