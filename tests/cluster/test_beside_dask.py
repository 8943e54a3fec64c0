"""What is beside Dask stays out of its hands: its memory managers, its data, its tasks' maps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from dask.sizeof import sizeof

import tensorcast_dask as tc
from tensorcast_dask.dataplane.maps import live_maps
from tensorcast_dask.exceptions import NotFound
from tensorcast_dask.worker_plugin import context
from tests.kit.eventually import eventually

pytestmark = pytest.mark.timeout(240)  # for hangs, not for busy machines
WANTED = np.random.default_rng(1).integers(0, 255, 2 << 20, np.uint8)


def in_process(run_dir: Path, n_workers: int, **settings: Any) -> tc.LocalCluster:
    return tc.LocalCluster(
        n_workers,
        processes=False,
        host_memory="32 MiB",
        separate_hosts=True,
        settings={"run-dir": str(run_dir), **settings},
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tc.LocalCluster]:
    with in_process(tmp_path_factory.mktemp("tc") / "r", 2) as made:
        yield made


@pytest.fixture
def cast(cluster: tc.LocalCluster) -> Iterator[tc.Session]:
    with tc.connect(cluster) as session:
        eventually(lambda: len(session.workers()) == 2, within_s=60)
        yield session
        for artifact in session.list(all_versions=True):
            session.destroy(artifact.id)


def hand_on(artifact: tc.Artifact) -> tc.Artifact:
    assert artifact.tensor(framework="numpy").tobytes() == WANTED.tobytes()
    return artifact


def make() -> np.ndarray:
    return WANTED


def test_copies_are_not_dasks_to_undo_and_its_workers_hold_handles_alone(
    cluster: tc.LocalCluster, cast: tc.Session
) -> None:
    client = cast.client
    artifact = cast.put(client.submit(make, pure=False), "x", replicas=2)
    assert len(artifact.locations()) == 2
    at = cast.workers()[0].address
    handle = client.submit(hand_on, artifact, workers=[at], pure=False)
    client.replicate([handle], n=2)
    assert len(client.who_has([handle])[handle.key]) == 2

    def reduced() -> bool:
        client.amm.run_once()
        return len(client.who_has([handle])[handle.key]) == 1

    eventually(reduced, within_s=60, what="Dask's manager has dropped its copy")
    assert len(artifact.locations()) == 2
    assert handle.result().tensor(framework="numpy").tobytes() == WANTED.tobytes()
    held = [one for w in cluster.workers.values() for one in w.data.values()]
    assert {type(one) for one in held} == {tc.Artifact}
    assert sum(map(sizeof, held)) < 10_000


def count_maps(name: str) -> int:
    before = live_maps()
    found = tc.artifact(name).tensor(framework="numpy")
    assert found.tobytes() == WANTED.tobytes()
    return live_maps() - before


def test_tasks_get_copies_while_a_worker_is_judged_by_what_it_maps(
    cluster: tc.LocalCluster, cast: tc.Session
) -> None:
    cast.put(WANTED, "y", replicas=2)
    shy = cluster.workers[0]
    keeper = context.keeper_of(shy)
    assert keeper is not None
    keeper.mapping = False
    try:
        cluster.sync(keeper.adopt_again)
        eventually(
            lambda: sorted(one.card.mapping for one in cast.nodes()) == [False, True],
            within_s=30,
        )
        maps = {
            worker.address: cast.client.submit(
                count_maps, "y", workers=[worker.address], pure=False
            ).result(60)
            for worker in cluster.workers.values()
        }
        assert maps == {shy.address: 0, cluster.workers[1].address: 1}
    finally:
        keeper.mapping = True
        cluster.sync(keeper.adopt_again)


@pytest.mark.parametrize("way", ["config", "environment", "argument"])
def test_a_role_is_seen_wherever_it_was_given(
    way: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roles, settings, config = ("gateway", "mine"), {}, {}
    if way == "config":
        config = {"tensorcast.node.roles": list(roles)}
    elif way == "environment":
        monkeypatch.setenv("TENSORCAST_NODE__ROLES", ", ".join(roles))
    else:
        settings = {"node": {"roles": list(roles)}}
    with (
        dask.config.set(config),
        in_process(tmp_path_factory.mktemp("tc") / "r", 1, **settings) as cluster,
        tc.connect(cluster) as cast,
    ):
        eventually(lambda: len(cast.workers()) == 1, within_s=60)
        (worker,) = cast.workers()
        assert worker.roles == roles
        plan = cast.plan(tc.context(ddl=60))
        step = plan.on_any(roles=["mine"]).submit(int)
        assert plan.run()[step].node == worker.node
        other = cast.plan(tc.context(ddl=60))
        other.on_any(roles=["basic"]).submit(int)
        with pytest.raises(NotFound, match="basic"):
            other.run()
