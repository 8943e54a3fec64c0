"""One cluster for the tests of a module: two nodes of one host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import tensorcast_dask as tc
from tests.kit.eventually import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tc.LocalCluster]:
    run: Path = tmp_path_factory.mktemp("run", numbered=True)
    run.chmod(0o700)
    with (
        pytest.MonkeyPatch.context() as patch,
        tc.LocalCluster(
            2,
            threads_per_worker=1,
            host_memory="512 MiB",
            disk=True,
            settings={"run-dir": str(run)},
        ) as made,
    ):
        patch.setenv("TENSORCAST_RUN_DIR", str(run))
        yield made


@pytest.fixture
def cast(cluster: tc.LocalCluster) -> Iterator[tc.Session]:
    with tc.connect(cluster) as session:
        eventually(lambda: len(session.workers()) == 2, within_s=20)
        yield session
        for artifact in session.list(all_versions=True):
            session.destroy(artifact.id)
