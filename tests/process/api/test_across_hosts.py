"""Nodes that are strangers to one another: every byte between them goes over TCP."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.exceptions import DataLost, OwnerGone, PeerLost
from tests.kit.eventually import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.process


@pytest.fixture
def cast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tc.Session]:
    run = tmp_path_factory.mktemp("run")
    run.chmod(0o700)
    settings = {"run-dir": str(run), "lease": {"ttl": "1s"}}
    with (
        tc.LocalCluster(
            3,
            threads_per_worker=1,
            host_memory="256 MiB",
            separate_hosts=True,
            settings=settings,
        ) as cluster,
        tc.connect(cluster) as session,
    ):
        eventually(lambda: len(session.workers()) == 3, within_s=30)
        yield session


def tensors(seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "w": rng.standard_normal((2048, 1024)).astype(np.float32),
        "b": np.arange(7),
    }


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return list(left) == list(right) and all(
        left[k].dtype == right[k].dtype and left[k].tobytes() == right[k].tobytes()
        for k in left
    )


def holders(artifact: tc.Artifact) -> set[str]:
    return {place.card.node for place in artifact.locations()}


def store_pid(cast: tc.Session, node: str) -> int:
    return next(state.card.pid for state in cast.nodes() if state.card.node == node)


def kill_node(cast: tc.Session, node: str) -> None:
    worker = next(worker for worker in cast.workers() if worker.node == node)
    store = store_pid(cast, node)
    (pid,) = cast.client.run(os.getpid, workers=[worker.address]).values()
    os.kill(store, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)


def test_bytes_cross_hosts_verified_and_a_view_moves_only_its_own(
    cast: tc.Session,
) -> None:
    artifact = cast.put(tensors(), "far")
    assert same(artifact.tensor_dict(framework="numpy"), tensors())
    (holder,) = holders(artifact)
    target = next(worker for worker in cast.workers() if worker.node != holder)
    moved = artifact.replicate(target).result()
    assert moved.via == "tcp"
    assert moved.moved_bytes == artifact.nbytes
    assert holders(artifact) == {holder, target.node}
    view = artifact.view({"w": tc.s_[3:9, ::3]})
    assert np.array_equal(view.tensor(framework="numpy"), tensors()["w"][3:9, ::3])


def test_replicas_are_put_on_that_many_hosts_and_any_but_one_may_die(
    cast: tc.Session,
) -> None:
    artifact = cast.put(tensors(), "two", replicas=2)
    assert artifact.degraded == ""
    first, second = holders(artifact)
    kill_node(cast, first)
    assert same(artifact.tensor_dict(framework="numpy"), tensors())
    eventually(lambda: holders(artifact) == {second}, within_s=10)


def test_more_replicas_than_hosts_is_degraded_and_says_so(cast: tc.Session) -> None:
    artifact = cast.put(tensors(), "five", replicas=5)
    assert "3" in artifact.degraded
    assert len(holders(artifact)) == 3


def test_the_death_of_the_last_holder_is_data_lost_and_the_id_can_be_used_again(
    cast: tc.Session,
) -> None:
    artifact = cast.put(tensors(), "once")
    (holder,) = holders(artifact)
    kill_node(cast, holder)
    with pytest.raises((DataLost, PeerLost)):
        artifact.tensor_dict(deadline=8)
    with pytest.raises(DataLost, match="once"):
        artifact.tensor_dict(deadline=8)
    cast.destroy("once")
    again = cast.put(tensors(2), "once")
    assert same(again.tensor_dict(framework="numpy"), tensors(2))


def test_migrate_frees_the_source_and_a_dead_target_leaves_it(cast: tc.Session) -> None:
    artifact = cast.put(tensors(), "moves")
    (holder,) = holders(artifact)
    first, second = (worker for worker in cast.workers() if worker.node != holder)
    cast.migrate(artifact, holder, first)
    assert holders(artifact) == {first.node}
    cast.migrate(artifact, first, first)
    kill_node(cast, second.node)
    with pytest.raises(PeerLost):
        cast.migrate(artifact, first, second.node, deadline=5)
    assert holders(artifact) == {first.node}
    assert same(artifact.tensor_dict(framework="numpy"), tensors())


def lend(name: str) -> int:
    artifact = tc.register({"x": np.full(300_000, 5.0)}, name)
    return artifact.generation


def test_a_task_lends_its_memory_until_its_process_ends(cast: tc.Session) -> None:
    worker = cast.workers()[0]
    generation = cast.client.submit(
        lend, "lent/by-task", workers=[worker.address]
    ).result(20)
    artifact = cast.artifact("lent/by-task")
    assert artifact.generation == generation
    assert (artifact.tensor(framework="numpy") == 5).all()
    system = cast.publish("lent/by-task").result()
    (pid,) = cast.client.run(os.getpid, workers=[worker.address]).values()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises((OwnerGone, PeerLost)):
        artifact.tensor_dict(deadline=10)
    eventually(lambda: not _lives(artifact), within_s=10)
    assert (system.tensor(framework="numpy") == 5).all()


def _lives(artifact: tc.Artifact) -> bool:
    try:
        artifact.tensor_dict(deadline=1)
    except OwnerGone:
        return False
    except PeerLost:
        return True
    return True
