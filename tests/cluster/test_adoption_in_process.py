"""Workers that share the program's process (`processes=False`), and their stores."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from distributed import Client, Scheduler
from distributed.core import Status

import tensorcast_dask as tc
from tensorcast_dask.tensors.messages import NodeCard
from tensorcast_dask.worker_plugin import context
from tests.kit.eventually import eventually, never
from tests.kit.local import local_cluster, stores_in

pytestmark = pytest.mark.timeout(240)  # for hangs, not for busy machines
SETTINGS = {"store": {"released-ttl": "3s"}}
SEPARATE = {**SETTINGS, "separate-hosts": True}


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("p") / "r"


def attended(run_dir: Path, count: int) -> list[NodeCard]:
    def there() -> list[NodeCard] | None:
        found = [card for card in stores_in(run_dir) if card.worker]
        return found if len(found) == count else None

    found = eventually(there, within_s=40, what=f"{count} attended stores")
    assert found is not None
    return found


def gone(client: Client) -> dict[str, set[str]]:
    """Nodes that the catalog gave up, by what it said."""
    told = [event for _, event in client.get_events("tensorcast")]
    return {
        topic: {one["node"] for one in told if one.get("topic") == topic}
        for topic in ("node_ended", "node_lapsed")
    }


def test_scaling_down_to_one_leaves_one_store(run_dir: Path) -> None:
    settings = {**SETTINGS, "lease": {"ttl": "1s"}}
    with local_cluster(run_dir, n_workers=3, settings=settings) as cluster:
        before = {card.node for card in attended(run_dir, 3)}
        with Client(cluster) as client:
            cluster.scale(1)
            (left,) = attended(run_dir, 1)
            eventually(lambda: len(stores_in(run_dir)) == 1, within_s=30)
            ended = before - {left.node}
            assert len(ended) == 2
            never(lambda: gone(client)["node_lapsed"] & ended, for_s=2)
            assert gone(client)["node_ended"] == ended


def test_a_worker_that_follows_another_in_the_same_process_adopts_its_store(
    run_dir: Path,
) -> None:
    with local_cluster(run_dir, n_workers=1, settings=SETTINGS) as cluster:
        (before,) = attended(run_dir, 1)
        cluster.scale(0)
        eventually(lambda: not cluster.workers, within_s=40)
        cluster.scale(1)
        eventually(
            lambda: attended(run_dir, 1)[0].incarnation > before.incarnation,
            within_s=40,
            what="the store is adopted again",
        )
        assert [card.node for card in stores_in(run_dir)] == [before.node]


def test_restarting_ends_workers_of_this_process_and_keeps_their_stores_for_the_next(
    run_dir: Path,
) -> None:
    """Dask starts no worker without a nanny again."""
    with local_cluster(run_dir, n_workers=2, settings=SETTINGS) as cluster:
        before = {card.node: card.incarnation for card in attended(run_dir, 2)}
        with Client(cluster) as client:
            client.restart(wait_for_workers=False)
        eventually(
            lambda: not any(card.worker for card in stores_in(run_dir)), within_s=40
        )
        never(lambda: {c.node for c in stores_in(run_dir)} != set(before), for_s=4)
        cluster.scale(3)  # Dask counts the two that are gone for some seconds yet
        heir = attended(run_dir, 1)[0]
        assert heir.incarnation == before[heir.node] + 1


def test_closing_the_cluster_leaves_no_store(run_dir: Path) -> None:
    with local_cluster(run_dir, n_workers=2, settings=SETTINGS):
        attended(run_dir, 2)
    assert stores_in(run_dir) == []


def test_a_store_that_dies_is_replaced_under_the_same_worker(
    run_dir: Path,
) -> None:
    with local_cluster(run_dir, n_workers=1, settings=SETTINGS):
        (before,) = attended(run_dir, 1)
        os.kill(before.pid, signal.SIGKILL)

        def replaced() -> bool:
            found = [card for card in stores_in(run_dir) if card.worker]
            return [card.node for card in found] not in ([], [before.node])

        eventually(replaced, within_s=40, what="another store")


def test_a_worker_on_its_way_out_does_not_take_a_store_that_another_left(
    run_dir: Path,
) -> None:
    with local_cluster(run_dir, n_workers=2, settings=SETTINGS) as cluster:
        cards = {card.name: card for card in attended(run_dir, 2)}
        leaving, closing = cluster.workers[0], cluster.workers[1]
        leaving.status = Status.closing_gracefully
        cluster.sync(closing.close)
        os.kill(cards["0"].pid, signal.SIGKILL)  # it looks for another now
        keeper = context.keeper_of(leaving)
        assert keeper is not None
        eventually(lambda: not keeper.card, within_s=20)
        left = cards["1"].node
        never(
            lambda: [c for c in stores_in(run_dir) if c.node == left and c.worker],
            for_s=1.0,
            what="the store that is let go has a worker",
        )


async def retire_and_keep(address: str, dask_scheduler: Scheduler) -> list[str]:
    """Drain a worker, keep it all the same, and ask whom adaptive scaling would take next."""
    await dask_scheduler.retire_workers(
        workers=[address], close_workers=False, remove=False, stimulus_id="test"
    )
    return list(dask_scheduler.workers_to_close(n=2, minimum=0))


def test_adaptive_scaling_spares_a_worker_whose_bytes_have_nowhere_to_go(
    run_dir: Path,
) -> None:
    settings = {**SEPARATE, "node": {"host-memory": "6MiB"}}
    with local_cluster(run_dir, n_workers=2, settings=settings) as cluster:
        attended(run_dir, 2)
        with Client(cluster) as client, tc.connect(client) as cast:
            eventually(lambda: len(cast.workers()) == 2, within_s=30)
            one, two = cast.workers()
            wanted = np.arange(4 << 20, dtype=np.uint8)
            kept = [cast.put(wanted, each.name, worker=each) for each in (one, two)]
            left = client.run_on_scheduler(retire_and_keep, one.address)
            assert left == [two.address]
            for artifact in kept:
                assert artifact.tensor(framework="numpy").tobytes() == wanted.tobytes()


def test_adaptive_scaling_loses_nothing(run_dir: Path) -> None:
    with local_cluster(run_dir, n_workers=3, settings=SEPARATE) as cluster:
        attended(run_dir, 3)
        with Client(cluster) as client, tc.connect(client) as cast:
            eventually(lambda: len(cast.workers()) == 3, within_s=30)
            wanted = {
                name: np.random.default_rng(seed).integers(0, 255, 3 << 20, np.uint8)
                for seed, name in enumerate("abc")
            }
            kept = {
                name: cast.put(wanted[name], name, worker=worker)
                for name, worker in zip("abc", cast.workers(), strict=True)
            }
            cluster.adapt(minimum=1, maximum=3, interval="50ms", wait_count=1)
            eventually(lambda: len(cast.workers()) == 1, within_s=30)
            for name, artifact in kept.items():
                got = artifact.tensor(framework="numpy")
                assert got.tobytes() == wanted[name].tobytes()


def test_a_worker_is_given_up_by_its_last_loss_alone(run_dir: Path) -> None:
    with tc.LocalCluster(
        1, processes=False, host_memory="32 MiB", settings={"run-dir": str(run_dir)}
    ) as cluster:
        ((address, about),) = cluster.scheduler_info["workers"].items()

        async def lose_and_find() -> asyncio.TimerHandle:
            cluster._update_worker_status("remove", address)
            cluster._update_worker_status("add", {"workers": {address: about}})
            return cluster._lost[about["name"]]

        first, last = cluster.sync(lose_and_find), cluster.sync(lose_and_find)
        assert (first.cancelled(), last.cancelled()) == (True, False)
        cluster.sync(lambda: _on_the_loop(last.cancel))
        cluster.sync(lambda: _on_the_loop(cluster._give_up, about["name"]))
        assert about["name"] in cluster.workers  # it is there


async def _on_the_loop(function: Callable[..., object], *args: object) -> None:
    function(*args)
