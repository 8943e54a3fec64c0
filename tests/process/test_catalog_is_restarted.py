"""P31 and P32 from end to end: the catalog's process is killed, its files are hurt."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.dataplane import faults
from tests.kit.clusters import Cluster
from tests.kit.eventually import eventually
from tests.kit.strategies import ODD_IDS

SETTINGS = {
    "LEASE__TTL": "1s",
    "STORE__RELEASED_TTL": "5s",
    "STORE__ORPHAN_TTL": "60s",
    "NODE__HOST_MEMORY": "64MiB",
    "MEMORY__RESERVE_MIN": "1MiB",
}
ARTIFACTS = 50


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).standard_normal(64)


def same(artifact: tc.Artifact, number: int) -> bool:
    return artifact.tensor(framework="numpy").tobytes() == content(number).tobytes()


def kept(journal: Path) -> None:
    """Nothing happens to the journal."""


def lost(journal: Path) -> None:
    """All files of the journal are gone."""
    for one in journal.parent.glob(journal.name + "*"):
        one.unlink()


def flipped(journal: Path) -> None:
    """The write-ahead log is damaged in its middle."""
    wal = journal.with_name(journal.name + ".wal")
    raw = bytearray(wal.read_bytes())
    raw[len(raw) // 2] ^= 0x40
    wal.write_bytes(raw)


@pytest.mark.parametrize("hurt", [kept, lost, flipped])
@pytest.mark.timeout(120)
def test_p31_everything_is_readable_after_a_kill_of_the_scheduler_whatever_its_journal(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    hurt: Callable[[Path], None],
) -> None:
    folder = tmp_path_factory.mktemp("c")
    journal = folder / "journal.duckdb"
    with Cluster(folder, SETTINGS | {"JOURNAL": str(journal)}) as cluster:
        monkeypatch.setenv("TENSORCAST_RUN_DIR", str(cluster.run_dir))
        cluster.start_scheduler()
        for name in ("a", "b"):
            cluster.start_worker(name=name)
        cluster.wait_for_nodes(2, attended=2)
        with tc.connect(cluster.address) as cast:
            for number in range(ARTIFACTS):
                cast.put(content(number), f"x/{number}")
            for number, name in enumerate(ODD_IDS):
                cast.put(content(number), f"odd/{name}")
            cast.put(content(100), "v").publish()
            cast.put(content(101), "v", version="next").publish()
            cast.put(content(102), "v", version="next")
        cluster.scheduler.kill()
        cluster.scheduler.wait()
        hurt(journal)
        cluster.start_scheduler()
        with tc.connect(cluster.address) as cast:
            eventually(
                lambda: all(cast.exists(f"x/{n}") for n in range(ARTIFACTS)),
                within_s=20,
            )
            for number in range(ARTIFACTS):
                assert same(cast.artifact(f"x/{number}"), number)
            for number, name in enumerate(ODD_IDS):  # P14
                assert same(cast.artifact(f"odd/{name}"), number)
            odd = [one.id.removeprefix("odd/") for one in cast.list("odd/")]
            assert sorted(odd) == sorted(ODD_IDS)
            assert cast.latest("v").version == 2
            assert same(cast.latest("v"), 101)
            assert same(cast.artifact("v", version=3), 102)
            for name in ("a", "b"):  # Dask's workers do not outlive their scheduler
                cluster.start_worker(name=name)
            cluster.wait_for_nodes(2, attended=2)
            assert cast.put(content(103), "v", version="next").version == 4
    quarantined = list(folder.glob("*.quarantined-*"))
    assert bool(quarantined) == (hurt is flipped)


@pytest.mark.timeout(120)
def test_p31_a_draft_is_committed_by_the_successor_of_the_scheduler_that_began_it(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("d")
    with Cluster(folder, SETTINGS) as cluster:
        monkeypatch.setenv("TENSORCAST_RUN_DIR", str(cluster.run_dir))
        cluster.start_scheduler()
        cluster.start_worker(name="a")
        cluster.wait_for_nodes(1, attended=1)
        with tc.connect(cluster.address) as cast:
            big = np.zeros(
                4 << 17
            )  # it owns a segment, so that it can be built in place
            draft = cast.create({"t": big}, "draft")
            draft.tensors(framework="numpy")["t"][:] = 7.5
            cast.put(content(1), "later")  # the draft's row is on disk with this one's
            cluster.scheduler.kill()
            cluster.scheduler.wait()
            cluster.start_scheduler()
            artifact = draft.commit()
            for found in (artifact, cast.artifact("draft")):
                assert (found.tensor(framework="numpy") == 7.5).all()


@pytest.mark.timeout(120)
def test_a_put_whose_beginning_the_successor_does_not_know_is_done_again(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("p")
    journal = folder / "journal.duckdb"
    spec, log = folder / "faults", folder / "log"
    faults.write_spec(spec, "put.before_commit=pause:60@1")
    armed = {"TENSORCAST_FAULTS_FILE": str(spec), "TENSORCAST_FAULTS_LOG": str(log)}
    with Cluster(folder, SETTINGS | {"JOURNAL": str(journal)}) as cluster:
        monkeypatch.setenv("TENSORCAST_RUN_DIR", str(cluster.run_dir))
        cluster.start_scheduler()
        cluster.start_worker(name="a", env=armed)
        cluster.wait_for_nodes(1, attended=1)
        with tc.connect(cluster.address) as cast, ThreadPoolExecutor(1) as beside:
            putting = beside.submit(cast.put, content(1), "x")
            eventually(lambda: faults.read_log(log), within_s=30)
            cluster.scheduler.kill()
            cluster.scheduler.wait()
            lost(journal)
            cluster.start_scheduler()
            eventually(cast.nodes, within_s=30)
            faults.write_spec(spec, "")
            cluster.start_worker(
                name="a"
            )  # Dask's workers do not outlive their scheduler
            made = putting.result(timeout=60)
            assert made.version == 1
            assert same(made, 1)
            assert same(cast.artifact("x"), 1)
            assert [a.id for a in cast.list(all_versions=True)] == ["x"]
            eventually(
                lambda: cast.pool()["host"].replicas == 1, within_s=30, what="one copy"
            )


@pytest.mark.parametrize("moment", ["journal.before_commit", "journal.committed"])
@pytest.mark.timeout(120)
def test_p32_a_publish_is_once_done_when_the_scheduler_dies_around_its_commit(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    folder = tmp_path_factory.mktemp("m")
    spec = folder / "faults"
    armed = {"TENSORCAST_FAULTS_FILE": str(spec)}
    journal = {"JOURNAL": str(folder / "journal.duckdb")}
    with Cluster(folder, SETTINGS | journal) as cluster:
        monkeypatch.setenv("TENSORCAST_RUN_DIR", str(cluster.run_dir))
        scheduler = cluster.start_scheduler(armed)
        cluster.start_worker(name="a")
        cluster.wait_for_nodes(1, attended=1)
        with tc.connect(cluster.address) as cast:
            artifact = cast.put(content(1), "v")
            faults.write_spec(spec, f"{moment}[*version*]=kill@1")
            publishing = artifact.publish(wait=False)
            scheduler.wait()
            spec.unlink()
            cluster.start_scheduler()
            # The session sends it again, under its first id: made now, or found made.
            assert publishing.result(60).version == 1
            assert same(cast.latest("v"), 1)
            assert cast.sql("SELECT count(*) FROM versions").rows == ((1,),)
