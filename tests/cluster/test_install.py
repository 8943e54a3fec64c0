"""From a Dask cluster to nodes in the catalog, whichever way the plugins come in."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import dask.config
import numpy as np
import pytest
from distributed import Client, Worker

import tensorcast_dask as tc
from tensorcast_dask.deploy import about, install
from tensorcast_dask.tensors.messages import Nodes, NodesAsked, Tier
from tensorcast_dask.worker_plugin.plugin import WORKER_PLUGIN_NAME, NodePlugin
from tests.kit.clusters import RawSession
from tests.kit.eventually import eventually_async
from tests.kit.local import local_cluster, stores_in
from tests.kit.loops import on_loop

pytestmark = pytest.mark.timeout(240)  # for hangs, not for busy machines


async def nodes_of(address: str) -> list[str]:
    async with RawSession(address) as session:
        nodes = (await session.ask(NodesAsked(rid=session.rid()), Nodes)).nodes
        return [node.card.name for node in nodes if node.attended]


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tc") / "r"


@pytest.mark.parametrize("processes", [False, True])
def test_each_worker_gets_a_store_and_each_store_a_place_in_the_catalog(
    run_dir: Path, processes: bool
) -> None:
    with local_cluster(run_dir, n_workers=2, processes=processes) as cluster:

        async def see() -> None:
            # At once: a worker has started when its node can be used.
            assert await nodes_of(cluster.scheduler_address) == ["0", "1"]

        asyncio.run(see()) if processes else cluster.sync(see)
        assert len(stores_in(run_dir)) == 2


def test_four_clients_install_while_workers_come_and_go(run_dir: Path) -> None:
    with local_cluster(run_dir, n_workers=1, processes=True, install=False) as cluster:

        @on_loop
        async def all_at_once() -> None:
            address = cluster.scheduler_address
            clients = [await Client(address, asynchronous=True) for _ in range(4)]
            try:
                for wanted in (4, 2, 4):
                    cluster.scale(wanted)
                    if wanted == 2:
                        await put_some(clients[0])
                    await asyncio.gather(*(install(client) for client in clients))
                    await eventually_async(
                        partial(has_workers, clients[0], wanted), within_s=30
                    )

                async def each_is_set_up_once() -> bool:
                    states = await states_of(clients[0])
                    return len(states) == 4 and all(
                        state["adoptions"] == 1 and not state["failure"]
                        for state in states.values()
                    )

                await eventually_async(each_is_set_up_once, within_s=40)
                told = await about(clients[0])
                assert told is not None
                assert told["ready"]
                await find_them(clients[1])
            finally:
                for client in clients:
                    await client.close()

        all_at_once()


async def put_some(client: Client) -> None:
    """Put more artifacts than there are nodes, so that some lie on those that will go."""
    async with await tc.connect(client) as cast:
        for number in range(8):
            await cast.put(np.full(200_000, number), f"kept/{number}")


async def find_them(client: Client) -> None:
    """Read all of them again, wherever they went."""
    async with await tc.connect(client) as cast:
        for number in range(8):
            kept = await cast.artifact(f"kept/{number}")
            assert (await kept.tensor(framework="numpy") == number).all()


def test_installing_again_keeps_what_is_there(run_dir: Path) -> None:
    with local_cluster(run_dir) as cluster, Client(cluster) as client:
        with tc.connect(client) as cast:
            cast.put(np.arange(10), "kept")
        before = client.sync(about, client)
        client.sync(install, client)
        client.sync(install, client, {"lease": {"ttl": "1s"}})
        after = client.sync(about, client)
        assert after["cluster"] == before["cluster"]
        (state,) = client.sync(states_of, client).values()
        assert state["adoptions"] == 1
        with tc.connect(client) as cast:
            kept = cast.artifact("kept").tensor(framework="numpy")
            assert kept.tolist() == list(range(10))


async def has_workers(client: Client, count: int) -> bool:
    assert client.scheduler is not None
    return len((await client.scheduler.identity(n_workers=-1))["workers"]) == count


async def states_of(client: Client) -> dict[str, dict[str, object]]:
    async def state(dask_worker: Worker) -> dict[str, object]:
        plugin = dask_worker.plugins[WORKER_PLUGIN_NAME]
        assert isinstance(plugin, NodePlugin)
        return await plugin.tell_state()

    return await client.run(state)


def test_a_worker_whose_store_cannot_start_computes_on_and_says_why(
    run_dir: Path,
) -> None:
    too_long = run_dir / ("x" * 90)  # for the path of a unix socket
    run_dir.mkdir()
    with (
        local_cluster(too_long) as cluster,
        Client(cluster) as client,
    ):
        assert client.submit(int, "1").result() == 1
        (state,) = client.sync(states_of, client).values()
        assert state["node"] == ""
        assert "no store could be started" in str(state["why"])
        assert cluster.sync(nodes_of, cluster.scheduler_address) == []


def test_a_cluster_of_ours_keeps_the_users_own_settings(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAST_RUN_DIR", str(run_dir))
    section = {"lease": {"ttl": "2s"}, "node": {"labels": {"zone": "x"}}}
    with (
        dask.config.set(tensorcast=section),
        tc.LocalCluster(1, processes=False, host_memory="64 MiB") as cluster,
        tc.connect(cluster) as cast,
    ):
        (node,) = cast.nodes()
        assert node.card.labels == {"zone": "x"}
        assert node.uses[Tier.HOST].capacity_bytes == 64 << 20
        assert 0 < node.lease_left_s <= 2
