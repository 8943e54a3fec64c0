"""Finding a scheduler, or being told soon why there is none."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import dask.config
import numpy as np
import pytest
from distributed import Client

import tensorcast_dask as tc
from tensorcast_dask.exceptions import CatalogUnavailable, InvalidArgument, OwnerGone
from tests.kit.clusters import free_port
from tests.kit.eventually import eventually
from tests.kit.local import local_cluster, stores_in
from tests.kit.loops import on_loop

UNKNOWN = "tcp://no-such-host.invalid:8786"


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tc") / "r"


@on_loop
async def dial_on_a_loop(address: str) -> None:
    await tc.connect(address, asynchronous=True)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAST_SESSION__REFUSED_TIMEOUT", "100ms")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("dial", [tc.connect, dial_on_a_loop])
def test_a_port_where_nothing_listens_and_a_host_that_nobody_knows_are_told_apart(
    dial: Callable[[str], object],
) -> None:
    refused = f"tcp://127.0.0.1:{free_port()}"
    for address, why in ((refused, "connection refused"), (UNKNOWN, "unknown host")):
        with pytest.raises(CatalogUnavailable, match=why) as caught:
            dial(address)
        assert address in caught.value.message
        assert caught.value.data["why"] == why


@pytest.mark.parametrize("dial", [tc.connect, dial_on_a_loop])
def test_tls_without_certificates_is_refused_by_what_to_give(
    dial: Callable[[str], object],
) -> None:
    with pytest.raises(InvalidArgument, match=r"certificates.*security="):
        dial(f"tls://127.0.0.1:{free_port()}")


@pytest.mark.usefixtures("impatient")
def test_without_a_target_the_cluster_is_the_one_that_the_environment_names(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAST_RUN_DIR", str(run_dir))
    monkeypatch.delenv("TENSORCAST_SCHEDULER", raising=False)
    with (
        dask.config.set({"scheduler-address": None}),
        pytest.raises(InvalidArgument, match="tensorcast up"),
    ):
        tc.connect()
    ours, dasks = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    with dask.config.set({"scheduler-address": dasks}):
        with pytest.raises(CatalogUnavailable, match=dasks):
            tc.connect()
        monkeypatch.setenv("TENSORCAST_SCHEDULER", ours)
        with pytest.raises(CatalogUnavailable, match=ours):
            tc.connect()


class Impostor:
    """Something that listens and is no Dask scheduler."""

    def __init__(self, said: bytes) -> None:
        self._said = said
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._held.append(sock)
                sock.sendall(self._said)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # ends accept
        self._thread.join(10)
        for sock in [self._listener, *self._held]:
            sock.close()


@on_loop
async def dial_briefly_on_a_loop(address: str) -> None:
    await tc.connect(address, asynchronous=True, deadline=1)


def dial_briefly(address: str) -> None:
    tc.connect(address, deadline=1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("dial", [dial_briefly, dial_briefly_on_a_loop])
@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "no answer"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no scheduler"),
        (b"\1\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0?", "no scheduler"),
    ],
    ids=["silent", "http", "noise"],
)
def test_what_listens_and_is_no_scheduler_is_told_within_the_deadline(
    dial: Callable[[str], object], said: bytes, why: str
) -> None:
    with contextlib.closing(Impostor(said)) as impostor:
        began_s = time.monotonic()
        with pytest.raises(CatalogUnavailable, match="no Dask scheduler") as refused:
            dial(impostor.address)
        assert refused.value.data["why"] == why
        assert "()" not in refused.value.message
        assert time.monotonic() - began_s < 20


def test_arguments_of_a_local_cluster_win_over_the_environment(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAST_RUN_DIR", str(run_dir.with_name("other")))
    monkeypatch.setenv("TENSORCAST_NODE__HOST_MEMORY", "32 MiB")
    monkeypatch.setenv("TENSORCAST_DEADLINE__DEFAULT", "7s")
    monkeypatch.setenv("TENSORCAST_LEASE__TTL", "4s")
    with (
        dask.config.set({"tensorcast.node.host-memory": "16 MiB"}),
        tc.LocalCluster(
            1,
            processes=False,
            host_memory="48 MiB",
            settings={"run-dir": str(run_dir), "deadline": {"default": "5s"}},
        ) as cluster,
        tc.connect(cluster) as cast,
    ):
        assert len(stores_in(run_dir)) == 1
        assert cast.pool()["host"].capacity_bytes == 48 << 20
        assert cast._core.deadline_default_s == 5.0
        # The program too is on the host of that run directory.
        assert {node.card.host for node in cast.nodes()} == {cast._core.host}


def test_a_run_directory_that_is_too_long_for_sockets_is_refused_by_name(
    tmp_path: Path,
) -> None:
    long = tmp_path / ("d" * 80)
    with pytest.raises(InvalidArgument, match=r"tensorcast\.run-dir") as caught:
        tc.LocalCluster(1, processes=False, settings={"run-dir": str(long)})
    assert str(long) in caught.value.message
    assert "100" in caught.value.message


def test_a_cluster_that_does_not_start_speaks_of_the_guard(run_dir: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        tc.LocalCluster(
            1, preload=["no_such_module"], settings={"run-dir": str(run_dir)}
        )
    assert "__main__" in caught.value.__notes__[-1]


def is_gone(cast: tc.Session, name: str) -> bool:
    try:
        return not cast.exists(name)
    except OwnerGone:
        return True


def test_a_session_whose_client_was_closed_first_says_so_and_closes(
    run_dir: Path,
) -> None:
    with local_cluster(run_dir, protocol="tcp", host="127.0.0.1") as cluster:
        client = Client(cluster.scheduler_address)
        cast = tc.connect(client)
        kept = cast.put({"x": np.arange(3)}, "kept")
        lent = cast.register({"y": np.arange(4)}, "lent")
        client.close()
        with pytest.raises(CatalogUnavailable, match="has ended"):
            cast.list()
        assert repr(kept)
        cast.close()
        cast.close()
        with tc.connect(cluster.scheduler_address) as again:
            assert again.artifact("kept").tensor().tolist() == [0, 1, 2]
            eventually(lambda: is_gone(again, "lent"), within_s=60)
        assert repr(lent)
