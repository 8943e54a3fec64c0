"""What was acknowledged is read again, whoever was killed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from distributed import Client, Future

import tensorcast_dask as tc
from tensorcast_dask.exceptions import DataLost
from tests.kit.clusters import Cluster
from tests.kit.eventually import eventually, never
from tests.kit.tasks import keep_the_gil_until

pytestmark = pytest.mark.timeout(240)  # for hangs, not for busy machines
RELEASED_S = 3.0
SETTINGS = {
    "LEASE__TTL": "1s",
    "STORE__RELEASED_TTL": f"{RELEASED_S}s",
    "STORE__ORPHAN_TTL": "60s",
    "NODE__HOST_MEMORY": "128MiB",
    "MEMORY__RESERVE_MIN": "1MiB",
}
Start = Callable[..., Cluster]


@pytest.fixture
def start(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Start:
    """Start a cluster whose run directory is this process's too."""

    def make(**settings: str) -> Cluster:
        cluster = Cluster(tmp_path_factory.mktemp("b"), SETTINGS | settings)
        monkeypatch.setenv("TENSORCAST_RUN_DIR", str(cluster.run_dir))
        cluster.start_scheduler()
        return cluster

    return make


def big(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, 4 << 20, np.uint8)


def small(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((16, 17))


def same(artifact: tc.Artifact, wanted: np.ndarray) -> bool:
    got = artifact.tensor(framework="numpy")
    return got.dtype == wanted.dtype and got.tobytes() == wanted.tobytes()


def test_no_read_fails_while_the_worker_of_the_only_node_is_killed(
    start: Start,
) -> None:
    with start() as cluster:
        nanny = cluster.start_worker(name="a")
        cluster.wait_for_nodes(1, attended=1)
        with tc.connect(cluster.address) as cast:
            artifacts = {n: cast.put(big(n), f"x/{n}") for n in range(3)}
            (before,) = cluster.stores()
            cluster.wait_for_workers(1)
            os.kill(nanny.worker_pid(), signal.SIGKILL)

            def adopted() -> bool:
                assert all(same(art, big(n)) for n, art in artifacts.items())
                (card,) = cluster.stores()
                return card.incarnation > before.incarnation and bool(card.worker)

            eventually(adopted, within_s=30, what="the store is adopted again")
            assert all(same(art, big(n)) for n, art in artifacts.items())


@pytest.mark.parametrize("journal", ["temporary", ":memory:"])
def test_after_a_killed_scheduler_everything_is_read_before_any_worker_is_back(
    start: Start, journal: str
) -> None:
    with start(JOURNAL=journal) as cluster:
        worker = cluster.start_worker(name="a")
        cluster.wait_for_nodes(1, attended=1)
        with tc.connect(cluster.address) as cast:
            cast.put(big(1), "big")
            cast.put(small(1), "small").publish()
        cluster.scheduler.kill()
        worker.end()
        cluster.start_scheduler()
        cluster.wait_for_nodes(1, attended=0)
        with tc.connect(cluster.address) as cast:
            eventually(lambda: cast.exists("big"), within_s=10)
            assert same(cast.artifact("big"), big(1))
            assert same(cast.latest("small"), small(1))
            cluster.start_worker(name="a")
            cluster.wait_for_nodes(1, attended=1)
            assert same(cast.put(big(2), "again"), big(2))


def test_a_planned_restart_on_a_journal_file_keeps_stores_and_artifacts(
    start: Start, tmp_path: Path
) -> None:
    with start(JOURNAL=str(tmp_path / "j.duckdb")) as cluster:
        worker = cluster.start_worker(name="a")
        cluster.wait_for_nodes(1, attended=1)
        with tc.connect(cluster.address) as cast:
            cast.put(big(1), "big")
        (before,) = cluster.stores()
        cluster.scheduler.kill(signal.SIGINT)
        cluster.scheduler.wait()
        worker.end()
        assert [card.node for card in cluster.stores()] == [before.node]
        cluster.start_scheduler()
        cluster.start_worker(name="a")
        cluster.wait_for_nodes(1, attended=1)
        assert [card.node for card in cluster.stores()] == [before.node]
        with tc.connect(cluster.address) as cast:
            assert same(cast.artifact("big"), big(1))


def test_a_restarted_worker_is_not_credited_with_what_died_with_its_store(
    start: Start,
) -> None:
    with start() as cluster:
        nanny = cluster.start_worker(name="a")
        cluster.wait_for_nodes(1, attended=1)
        with tc.connect(cluster.address) as cast:
            lost = cast.put(big(1), "lost")
            (before,) = cluster.stores()
            cluster.wait_for_workers(1)
            os.kill(before.pid, signal.SIGKILL)
            os.kill(nanny.worker_pid(), signal.SIGKILL)
            eventually(
                lambda: before.node not in {n.card.node for n in cluster.nodes()},
                within_s=20,
            )
            nodes = cluster.wait_for_nodes(1, attended=1)
            assert nodes[0].card.name == "a"
            with pytest.raises(DataLost):
                cast.artifact("lost").tensor(framework="numpy", deadline=5)
            with pytest.raises(DataLost):
                cast.locations(lost)
            assert same(cast.put(big(2), "new"), big(2))


def test_retiring_a_worker_loses_nothing(start: Start) -> None:
    with start(SEPARATE_HOSTS="true") as cluster:
        for name in ("a", "b"):
            cluster.start_worker(name=name)
        cluster.wait_for_nodes(2, attended=2)
        with tc.connect(cluster.address) as cast, Client(cluster.address) as client:
            a, _ = cast.workers()
            artifacts = [cast.put(big(n), f"x/{n}", worker=a) for n in range(4)]
            artifacts.append(cast.put(small(9), "s", worker=a))
            client.retire_workers(names=["a"])
            cluster.wait_for_nodes(1, attended=1)
            for n, artifact in enumerate(artifacts[:4]):
                assert same(artifact, big(n))
            assert same(artifacts[4], small(9))


@pytest.mark.parametrize("count", [1, 2])
def test_a_scheduler_that_lost_all_it_had_is_the_cluster_of_the_stores_it_finds(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
) -> None:
    """Journal, id and token lay on a host of their own, which is made anew."""
    folder = tmp_path_factory.mktemp("b")
    elsewhere = folder / "s"
    of_its_own = {"TENSORCAST_RUN_DIR": str(elsewhere)}
    with Cluster(folder, SETTINGS | {"SEPARATE_HOSTS": "true"}) as cluster:
        monkeypatch.setenv("TENSORCAST_RUN_DIR", str(cluster.run_dir))
        cluster.start_scheduler(of_its_own)
        names = [f"w{n}" for n in range(count)]
        for name in names:
            cluster.start_worker(name=name, nanny=False)
        cluster.wait_for_nodes(count, attended=count)
        with tc.connect(cluster.address) as cast:
            for worker in cast.workers():
                cast.put(big(1), f"of/{worker.name}", worker=worker).publish()
        before = {card.node for card in cluster.stores()}
        for process in cluster.processes:
            process.end()
        shutil.rmtree(elsewhere)
        cluster.start_scheduler(of_its_own)
        with tc.connect(cluster.address) as early:  # it has the id that is given up
            for name in names:
                cluster.start_worker(name=name, nanny=False)
            cluster.wait_for_nodes(count, attended=count)
            assert {card.node for card in cluster.stores()} == before
            for name in names:
                eventually(
                    lambda name=name: early.exists(f"of/{name}"),  # type: ignore[misc]
                    within_s=20,
                )
                assert same(early.latest(f"of/{name}"), big(1))
            assert early.put(small(1), "new").version == 1


def test_a_retired_workers_bytes_that_fit_nowhere_stay_readable(start: Start) -> None:
    room = {"NODE__HOST_MEMORY": "6MiB", "SEPARATE_HOSTS": "true"}
    with start(**room) as cluster:
        for name in ("a", "b"):
            cluster.start_worker(name=name)
        cluster.wait_for_nodes(2, attended=2)
        with tc.connect(cluster.address) as cast, Client(cluster.address) as client:
            a, b = cast.workers()
            alone = cast.put(big(1), "a/alone", worker=a)
            cast.put(big(2), "b/alone", worker=b)
            client.retire_workers(names=["a"])
            cluster.wait_for_nodes(2, attended=1)
            never(lambda: len(cluster.stores()) != 2, for_s=RELEASED_S + 1)
            assert same(alone, big(1))


def test_bytes_move_while_every_worker_is_in_a_call_that_keeps_the_gil(
    start: Start, tmp_path: Path
) -> None:
    fifos = [str(tmp_path / name) for name in ("a", "b")]
    for fifo in fifos:
        os.mkfifo(fifo)
    with start(SEPARATE_HOSTS="true") as cluster:
        for name in ("a", "b"):
            cluster.start_worker(name=name)
        cluster.wait_for_nodes(2, attended=2)
        with tc.connect(cluster.address) as cast, Client(cluster.address) as client:
            a, b = cast.workers()
            busy = client.map(keep_the_gil_until, fifos, pure=False)
            waiting = [os.open(fifo, os.O_RDWR) for fifo in fifos]
            eventually(lambda: all_run(client, busy), within_s=20)
            artifact = cast.put(big(1), "x", worker=a)
            cast.replicate(artifact, b)
            assert same(artifact, big(1))
            assert not any(future.done() for future in busy)
            for fd in waiting:
                os.write(fd, b"x")
                os.close(fd)
            assert client.gather(busy) == [True, True]
            assert len(cast.workers()) == 2


def all_run(client: Client, futures: list[Future]) -> bool:
    """Whether every task runs, each on a worker of its own."""
    running = client.processing()
    return sum(map(len, running.values())) == len(futures) == len(running)
