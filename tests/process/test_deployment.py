"""As an operator starts it: `dask scheduler --preload`, plain `dask worker`, TLS, memory."""

from __future__ import annotations

import os
from pathlib import Path

import dask.config
import numpy as np
import pytest
from distributed import Client
from distributed.security import Security

import tensorcast_dask as tc
from tensorcast_dask.deploy import about, install
from tensorcast_dask.exceptions import CatalogUnavailable, TensorCastError
from tensorcast_dask.tensors.messages import NodeCard
from tests.kit.clusters import Cluster, free_port
from tests.kit.curl import Curl
from tests.kit.eventually import eventually, never
from tests.kit.loops import on_loop

pytestmark = pytest.mark.timeout(240)  # for hangs, not for busy machines
SETTINGS = {
    "LEASE__TTL": "1s",
    "STORE__RELEASED_TTL": "2s",
    "NODE__HOST_MEMORY": "64MiB",
    "MEMORY__RESERVE_MIN": "1MiB",
}
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("d")


def test_a_preload_on_the_scheduler_is_all_that_plain_workers_need(
    folder: Path,
) -> None:
    with Cluster(folder, SETTINGS) as cluster:
        cluster.start_scheduler()
        cluster.start_worker(name="a", env={"TENSORCAST_NODE__LABELS": "zone=x"})
        cluster.start_worker(name="b", nanny=False)
        cluster.start_worker(nanny=False)
        nodes = cluster.wait_for_nodes(3, attended=3)
        by_name = {node.card.name: node.card for node in nodes}
        assert {"a", "b"} <= set(by_name)
        assert by_name["a"].labels == {"zone": "x"}
        assert by_name["b"].labels == {}
        assert all(card.mapping for card in by_name.values())
        assert [state.uses["host"].capacity_bytes for state in nodes] == [64 * MIB] * 3  # type: ignore[index]


def test_a_client_installs_what_a_preload_would_have(folder: Path) -> None:
    with Cluster(folder, SETTINGS, preload=False) as cluster:
        cluster.start_scheduler()
        cluster.start_worker(name="a")

        @on_loop
        async def by_a_client() -> None:
            async with Client(cluster.address, asynchronous=True) as client:
                await client.wait_for_workers(1)
                await install(client)

        by_a_client()
        (node,) = cluster.wait_for_nodes(1, attended=1)
        assert node.card.mapping
        cluster.start_worker(name="b")
        cluster.wait_for_nodes(2, attended=2)


def without_the_package(folder: Path) -> dict[str, str]:
    """Environment of a process that cannot import us, though we are installed for it."""
    hidden = folder / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'tensorcast_dask':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    return {"PYTHONPATH": str(hidden)}


@pytest.mark.parametrize("nanny", [True, False], ids=["nanny", "no-nanny"])
def test_a_worker_that_cannot_load_the_plugin_computes_on_and_says_why(
    folder: Path, nanny: bool
) -> None:
    with Cluster(folder, SETTINGS) as cluster:
        cluster.start_scheduler()
        cluster.start_worker(name="bare", nanny=nanny, env=without_the_package(folder))
        with Client(cluster.address) as client:
            assert client.submit(int, "1").result(timeout=30) == 1
            events = [event for _, event in client.get_events("tensorcast")]
            failed = [e for e in events if e.get("topic") == "worker_failed"]
            assert "No module named 'tensorcast_dask'" in failed[0]["why"]
        cluster.start_worker(name="whole", nanny=False)
        (node,) = cluster.wait_for_nodes(1, attended=1)
        assert node.card.name == "whole"


def test_a_scheduler_that_cannot_load_the_plugin_is_a_typed_error(folder: Path) -> None:
    with Cluster(folder, SETTINGS, preload=False) as cluster:
        cluster.start_scheduler(env=without_the_package(folder))

        @on_loop
        async def refused() -> None:
            async with Client(cluster.address, asynchronous=True) as client:
                assert await about(client) is None
                with pytest.raises(CatalogUnavailable, match="install tensorcast_dask"):
                    await install(client)

        refused()


def test_what_happens_is_told_on_a_topic_of_dask(folder: Path) -> None:
    with Cluster(folder, SETTINGS) as cluster:
        cluster.start_scheduler()
        cluster.start_worker(name="a", nanny=False)
        cluster.wait_for_nodes(1, attended=1)
        with Client(cluster.address) as client:
            topics = [event["topic"] for _, event in client.get_events("tensorcast")]
        assert {"node_joined", "worker_store"} <= set(topics)


def test_a_store_is_detached_from_everything_of_its_starter(folder: Path) -> None:
    with Cluster(folder, SETTINGS) as cluster:
        cluster.start_scheduler()
        worker = cluster.start_worker(name="a", nanny=False)
        (card,) = cluster.wait_for_stores(1)
        assert os.getsid(card.pid) == card.pid
        opened = [
            str(path.readlink())
            for path in Path(f"/proc/{card.pid}/fd").iterdir()
            if path.is_symlink()
        ]
        assert str(worker.log) not in opened
        secret = {b"token", b"TENSORCAST_TOKEN"}
        words = Path(f"/proc/{card.pid}/cmdline").read_bytes()
        assert not any(word in words for word in secret)

        def oom_score(pid: int) -> int:
            return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

        # The worker raises its own once it has adopted the store.
        eventually(lambda: oom_score(worker.pid) > oom_score(card.pid), within_s=20)
        modules = Path(f"/proc/{card.pid}/maps").read_text()
        assert "numpy" not in modules
        assert "torch" not in modules


# ------------------------------------------------------------------ TLS
def certificates(folder: Path) -> dict[str, str]:
    security = Security.temporary()
    texts = {
        "ca-file": security.tls_ca_file,
        "cert": security.tls_scheduler_cert,
        "key": security.tls_scheduler_key,
    }
    paths = {}
    for name, text in texts.items():
        path = folder / f"{name}.pem"
        path.write_text(text)
        paths[name] = str(path)
    return paths


def test_with_dasks_security_links_data_ports_and_gateways_are_encrypted(
    folder: Path,
) -> None:
    with Cluster(folder, SETTINGS, tls=certificates(folder)) as cluster:
        cluster.start_scheduler()
        port = free_port()
        cluster.start_worker(name="a", env={"TENSORCAST_NODE__HTTP_PORTS": str(port)})
        (node,) = cluster.wait_for_nodes(1, attended=1)
        assert node.card.tls
        with pytest.raises(TensorCastError):
            _say_hello_in_plain(node.card)
        (token,) = cluster.run_dir.glob("*/http.token")
        curl = Curl(f"https://127.0.0.1:{port}", token.read_text().strip(), folder)
        # The gateway begins a moment after the node can be used.
        retried = ("-k", "--retry", "9", "--retry-connrefused", "--retry-delay", "1")
        (shown,) = curl("/v1/nodes", *retried, token=True).json["nodes"]
        assert shown["name"] == "a"


def test_with_tls_bytes_go_between_hosts_and_to_a_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETTINGS | {"SEPARATE_HOSTS": "true"}
    with Cluster(folder, settings, tls=certificates(folder)) as cluster:
        monkeypatch.setenv("TENSORCAST_RUN_DIR", str(cluster.run_dir))
        cluster.start_scheduler()
        for name in ("a", "b"):
            cluster.start_worker(name=name, nanny=False)
        cluster.wait_for_nodes(2, attended=2)
        tls = "distributed.comm.tls"
        files = {f"{tls}.client.{key}": cluster.tls[key] for key in ("cert", "key")}
        files[f"{tls}.ca-file"] = cluster.tls["ca-file"]
        # As Dask's configuration has them, without `security=`.
        with (
            dask.config.set(files),
            tc.connect(cluster.address) as cast,
        ):
            a, b = cast.workers()
            wanted = np.random.default_rng(1).integers(0, 255, 9 << 20, np.uint8)
            artifact = cast.put(wanted, "x", worker=a)
            cast.replicate(artifact, b)
            assert len(cast.locations(artifact)) == 2
            assert artifact.tensor(framework="numpy").tobytes() == wanted.tobytes()


def test_a_store_waits_for_the_new_certificates_of_an_adoption(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler is restarted with certificates that the stores of before do not know."""
    paths = certificates(folder)
    with Cluster(folder, SETTINGS, tls=paths) as cluster:
        monkeypatch.setenv("TENSORCAST_RUN_DIR", str(cluster.run_dir))
        cluster.start_scheduler()
        worker = cluster.start_worker(name="a", nanny=False)
        (before,) = cluster.wait_for_nodes(1, attended=1)
        wanted = np.random.default_rng(1).integers(0, 255, 3 << 20, np.uint8)
        with tc.connect(cluster.address, security=cluster.security()) as cast:
            cast.put(wanted, "x")
        cluster.scheduler.kill()
        worker.end()
        assert certificates(folder) == paths  # new ones, under the same names
        cluster.start_scheduler()
        cluster.wait_for_nodes(0)
        never(cluster.nodes, for_s=2)
        (card,) = cluster.stores()
        assert (card.node, card.worker) == (before.card.node, "")
        cluster.start_worker(name="b", nanny=False)
        (after,) = cluster.wait_for_nodes(1, attended=1)
        assert after.card.node == card.node
        with tc.connect(cluster.address, security=cluster.security()) as cast:
            got = cast.artifact("x").tensor(framework="numpy")
            assert got.tobytes() == wanted.tobytes()


def _say_hello_in_plain(card: NodeCard) -> None:
    import msgspec

    from tensorcast_dask.dataplane.channel import Channel, Credentials, Prefer

    plain = msgspec.structs.replace(card, tls=False)
    credentials = Credentials(token=b"x" * 32, stall_s=3.0)
    Channel.connect(plain, credentials=credentials, prefer=Prefer.TCP)
