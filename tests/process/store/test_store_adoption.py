"""Who a store belongs to, and how it ends, with real processes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import msgspec
import pytest

from tensorcast_dask.dataplane import hosts
from tensorcast_dask.dataplane.channel import Prefer
from tensorcast_dask.exceptions import Mismatch, PeerLost, StaleOwner, TensorCastError
from tensorcast_dask.store.ends import grant_of
from tensorcast_dask.store.launch import start
from tensorcast_dask.tensors.ids import ClusterId, Epoch
from tensorcast_dask.tensors.messages import NodeCard, Role
from tests.kit.certificates import mint_certificates
from tests.kit.eventually import eventually, never
from tests.kit.stores import TOKEN, StoreClient, Stores, content, nowhere

ROOT = Path(__file__).parents[3]


def worker(stores: Stores, card: NodeCard, *, name: str) -> subprocess.Popen[bytes]:
    """Adopt a store from a process of its own, and hold it until it is ended."""
    code = f"""
        import sys, time
        from pathlib import Path
        from tensorcast_dask.dataplane import hosts
        from tensorcast_dask.exceptions import TensorCastError
        from tensorcast_dask.tensors.messages import Role
        from tests.kit.stores import StoreClient, Stores
        card = hosts.read_card(Path({str(stores.folder(card))!r}))
        stores = Stores(Path({str(stores.run_dir)!r}))
        client = StoreClient(card, role=Role.WORKER)
        print("asking", flush=True)
        sys.stdin.readline()
        try:
            found = client.adopt(stores.settings(orphan_ttl_s=20.0), worker={name!r})
            print("adopted", found.card.incarnation, flush=True)
        except TensorCastError as error:
            print(error.kind, flush=True)
        for line in sys.stdin:
            try:
                eval(line)
                print("ok", flush=True)
            except TensorCastError as error:
                print(error.kind, flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"asking\n"
    return process


def say(process: subprocess.Popen[bytes], line: str = "") -> str:
    """Say a line to a worker and hear one."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line.encode() + b"\n")
    process.stdin.flush()
    return process.stdout.readline().decode().strip()


def finish(*processes: subprocess.Popen[bytes]) -> None:
    """End workers."""
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


# ------------------------------------------------------------------ starting
def test_a_store_is_detached_from_who_started_it(stores: Stores) -> None:
    card = stores.start()
    fds = Path(f"/proc/{card.pid}/fd")
    targets = {n: str((fds / str(n)).readlink()) for n in range(3)}
    log = str(stores.folder(card) / "log")
    assert targets == {0: "/dev/null", 1: log, 2: log}
    stat = Path(f"/proc/{card.pid}/stat").read_text().rpartition(")")[2].split()
    session = int(stat[3])
    assert session == card.pid
    links = [str(fd.readlink()) for fd in fds.iterdir()]
    assert not [link for link in links if link.startswith("pipe:")]


def test_a_store_imports_neither_dask_nor_an_array_library(stores: Stores) -> None:
    card = stores.start()
    with StoreClient(card) as client:
        client.read(client.put(content(1 << 20)))
    maps = Path(f"/proc/{card.pid}/maps").read_text()
    for name in ("numpy", "torch", "duckdb"):
        assert f"/{name}/" not in maps
    code = """
        import sys
        import tensorcast_dask.store.main
        print({m.partition(".")[0] for m in sys.modules} & {"dask", "distributed",
            "numpy", "torch", "duckdb", "tornado", "asyncio", "ml_dtypes"})
    """
    said = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=True,
        capture_output=True,
        cwd=ROOT,
    ).stdout
    assert said == b"set()\n"


def test_a_store_never_forks(stores: Stores) -> None:
    card = stores.start(link=nowhere())
    with StoreClient(card) as client:
        client.read(client.put(content(1 << 20)))
    tasks = Path(f"/proc/{card.pid}/task")
    children = [
        (task / "children").read_text()
        for task in tasks.iterdir()
        if (task / "children").exists()
    ]
    assert not "".join(children).strip()


def test_news_of_a_lease_ends_no_store(stores: Stores) -> None:
    card = stores.start()
    os.kill(card.pid, signal.SIGIO)
    with StoreClient(card) as client:
        gen = client.put(content(1 << 20))
        assert client.read(gen) == content(1 << 20)


def test_a_store_takes_all_descriptors_that_it_may_have(stores: Stores) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        card = stores.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)
    assert resource.prlimit(card.pid, resource.RLIMIT_NOFILE) == (wanted, hard)


def test_secrets_are_neither_in_arguments_nor_environment_nor_files(
    stores: Stores,
) -> None:
    card = stores.start(link=nowhere())
    for name in ("cmdline", "environ"):
        text = Path(f"/proc/{card.pid}/{name}").read_bytes()
        assert TOKEN not in text
        assert TOKEN.hex().encode() not in text
    for path in stores.folder(card).iterdir():
        if path.is_file():
            assert TOKEN not in path.read_bytes()


def test_a_store_that_cannot_start_says_why(stores: Stores) -> None:
    with pytest.raises(PeerLost, match="disk_dir_allow_tmpfs"):
        start(
            stores.settings(disk_dir="/dev/shm/tc-no", disk_bytes=1 << 20),
            timeout_s=20.0,
        )
    for path in stores.run_dir.rglob("log"):
        path.unlink()


def test_a_store_that_no_worker_came_for_ends(stores: Stores) -> None:
    card = stores.start(free_ttl_s=0.3)
    stores.await_end(card)
    assert not stores.folder(card).exists()


def test_sigterm_ends_a_store_and_leaves_nothing(stores: Stores) -> None:
    card = stores.start()
    with StoreClient(card) as client:
        client.put(content(1 << 20))
        os.kill(card.pid, signal.SIGINT)
        never(lambda: not hosts.is_alive(card), for_s=0.2)
        os.kill(card.pid, signal.SIGTERM)
        stores.await_end(card)
    assert not stores.folder(card).exists()


# ------------------------------------------------------------------ adopting
def test_of_two_workers_that_race_one_adopts(stores: Stores) -> None:
    card = stores.start()
    one, two = (worker(stores, card, name=f"tcp://w{n}") for n in range(2))
    try:
        said: list[str] = []
        threads = [
            threading.Thread(target=lambda p=p: said.append(say(p))) for p in (one, two)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(said) == ["StaleOwner", "adopted 1"]
        with StoreClient(card) as client:
            assert client.state()["standing"] == "held"
    finally:
        finish(one, two)


def test_two_workers_race_for_an_orphan_and_one_gets_it_with_its_bytes(
    stores: Stores,
) -> None:
    card = stores.start()
    former = worker(stores, card, name="tcp://former")
    assert say(former) == "adopted 1"
    heirs = [worker(stores, card, name=f"tcp://heir{n}") for n in range(2)]
    try:
        with StoreClient(card) as client:
            gen = client.put(content(1 << 20))
            former.kill()
            former.wait()
            said: list[str] = []
            threads = [
                threading.Thread(target=lambda p=p: said.append(say(p))) for p in heirs
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(said) == ["StaleOwner", "adopted 2"]
            assert client.read(gen) == content(1 << 20)
    finally:
        finish(former, *heirs)


def test_a_killed_worker_orphans_its_store_which_stays_readable_and_then_ends(
    stores: Stores,
) -> None:
    card = stores.start()
    held = worker(stores, card, name="tcp://w")
    try:
        assert say(held) == "adopted 1"
        with StoreClient(card) as client:
            gen = client.put(content(1 << 20))
            held.kill()
            held.wait()
            eventually(lambda: client.state()["standing"] == "orphaned", within_s=15.0)
            assert client.read(gen) == content(1 << 20)
            found = hosts.read_card(stores.folder(card))
            assert found is not None
            assert found.worker == ""
            with StoreClient(card, role=Role.WORKER) as heir:
                adopted = heir.adopt(stores.settings(orphan_ttl_s=0.3))
                assert (adopted.replicas, adopted.nbytes) == (1, 1 << 20)
                assert adopted.card.incarnation == 2
            # The heir's connection ended: an orphan again, with the heir's shorter time.
            stores.await_end(card)
        assert not stores.folder(card).exists()
    finally:
        finish(held)


def test_a_stopped_worker_keeps_its_store_until_a_signed_grant_and_is_refused_then(
    stores: Stores,
) -> None:
    card = stores.start(link=nowhere())
    former = worker(stores, card, name="tcp://former")
    try:
        assert say(former) == "adopted 1"
        os.kill(former.pid, signal.SIGSTOP)
        with StoreClient(card, role=Role.WORKER) as heir:
            settings = stores.settings()
            with pytest.raises(StaleOwner, match="former"):
                heir.adopt(settings, worker="tcp://heir")
            link = msgspec.structs.replace(nowhere(), epoch=Epoch(2))
            with pytest.raises(Mismatch, match="grant"):
                heir.adopt(settings, worker="tcp://heir", link=link, grant=b"forged")
            grant = grant_of(TOKEN, node=card.node, epoch=Epoch(2), worker="tcp://heir")
            adopted = heir.adopt(settings, worker="tcp://heir", link=link, grant=grant)
            assert adopted.card.incarnation == 2
            os.kill(former.pid, signal.SIGCONT)
            for line in ("client.let_go(0.01)", "client.end()"):
                assert say(former, line) == "StaleOwner"
            again = "client.adopt(stores.settings(), worker='tcp://former')"
            assert say(former, again) == "StaleOwner"
            former.kill()
            former.wait()
            never(lambda: heir.state()["standing"] != "held", for_s=0.3)
    finally:
        finish(former)


def test_a_released_store_ends_in_its_time_unless_adopted(stores: Stores) -> None:
    card = stores.start()
    with StoreClient(card, role=Role.WORKER) as first:
        first.adopt(stores.settings())
        first.let_go(20.0)
        assert first.state()["standing"] == "released"
    with StoreClient(card, role=Role.WORKER) as second:
        assert second.adopt(stores.settings()).card.incarnation == 2
        second.let_go(0.2)
        stores.await_end(card)


def test_a_store_that_is_let_go_without_a_time_lives_for_that_of_its_settings(
    stores: Stores,
) -> None:
    card = stores.start()
    with StoreClient(card, role=Role.WORKER) as client:
        client.adopt(stores.settings(released_ttl_s=60.0, orphan_ttl_s=900.0))
        client.let_go(0.0)
        left_s = client.state()["ends_in_s"]
        assert 30 < left_s <= 60


def test_an_end_message_ends_the_store_and_its_memory_goes_with_its_reader(
    stores: Stores,
) -> None:
    card = stores.start()
    with StoreClient(card, role=Role.WORKER) as client:
        client.adopt(stores.settings())
        held = client.open(client.put(content(1 << 20)))
        client.end()
        stores.await_end(card)
        assert bytes(held.data) == content(1 << 20)
    assert not stores.folder(card).exists()


def test_a_worker_of_another_cluster_is_refused_while_artifacts_are_held(
    stores: Stores,
) -> None:
    card = stores.start(link=nowhere())
    stranger = msgspec.structs.replace(nowhere(), cluster=ClusterId("other"))
    with StoreClient(card, role=Role.WORKER) as client:
        client.put(content(100))
        with pytest.raises(Mismatch, match="other"):
            client.adopt(stores.settings(), link=stranger)
        assert client.state()["standing"] == "free"
        client.adopt(stores.settings())


def test_the_data_port_takes_the_certificates_of_the_newest_adoption(
    stores: Stores,
) -> None:
    card = stores.start()
    former, later = mint_certificates(), mint_certificates()
    with StoreClient(card, role=Role.WORKER) as client:
        gen = client.put(content(1 << 20))
        for files, other in ((former, later), (later, former)):
            link = msgspec.structs.replace(nowhere(), tls=files)
            client.adopt(stores.settings(), link=link)
            known = hosts.read_card(stores.folder(card))
            assert known is not None
            assert known.tls
            with StoreClient(known, prefer=Prefer.TCP, tls=files) as remote:
                assert remote.read(gen) == content(1 << 20)
            with pytest.raises(TensorCastError):
                StoreClient(known, prefer=Prefer.TCP, tls=other)
