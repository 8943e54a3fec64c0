"""Two clusters a module: nodes of one host, and nodes that are strangers to one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import tensorcast_dask as tc
from tests.kit.baseline import baseline
from tests.kit.eventually import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

PATHS = ("one host", "strangers")


@pytest.fixture(scope="module", params=PATHS)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tc.LocalCluster]:
    """Two nodes: memory is mapped on one host, bytes go over TCP between strangers."""
    run = tmp_path_factory.mktemp("run")
    run.chmod(0o700)
    with (
        pytest.MonkeyPatch.context() as patch,
        tc.LocalCluster(
            2,
            threads_per_worker=1,
            host_memory="256 MiB",
            separate_hosts=request.param == "strangers",
            settings={"run-dir": str(run)},
        ) as made,
    ):
        patch.setenv("TENSORCAST_RUN_DIR", str(run))
        yield made


@pytest.fixture
def cast(cluster: tc.LocalCluster) -> Iterator[tc.Session]:
    """A session; the cluster must end as it was."""
    with tc.connect(cluster) as session:
        eventually(lambda: len(session.workers()) == 2, within_s=60)
        with baseline(session):
            yield session
            for artifact in session.list(all_versions=True):
                session.destroy(artifact.id)
