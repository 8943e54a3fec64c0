"""P13 and P38 with real processes: a save that dies shows nothing, and full disks lose nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tensorcast_dask.dataplane import faults
from tensorcast_dask.dataplane.files.model import open_model
from tensorcast_dask.dataplane.files.reading import read_into
from tensorcast_dask.dataplane.files.save import clean_leftovers, save
from tensorcast_dask.dataplane.files.spool import Spool
from tensorcast_dask.tensors.ids import ArtifactId, Generation, Version
from tests.kit.eventually import eventually
from tests.kit.models import Sample
from tests.kit.saver import MIB, SHARD_BYTES, eight

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
V1, V2, V3 = eight(1), eight(2), eight(3)


def start(
    what: str, path: Path, seed: int, *, limit_bytes: int = 0, **env: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.kit.saver",
            what,
            str(path),
            str(seed),
            str(limit_bytes),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        text=True,
    )


def put(folder: Path, artifact: Sample, what: str) -> None:
    shard_bytes = SHARD_BYTES if what == "shards" else None
    save(
        folder,
        artifact.index,
        memoryview(artifact.segment),
        max_shard_bytes=shard_bytes,
    )


def get(path: Path) -> Sample:
    with open_model(path) as model:
        segment = bytearray(model.index.nbytes)
        assert read_into(model, memoryview(segment)).verified
        return Sample(model.index, bytes(segment))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def check_after_a_kill(folder: Path, what: str) -> str:
    found = get(folder)
    assert found in (V1, V2), "neither version is whole"
    clean_leftovers(folder)
    assert get(folder) in (found, V2), "cleaning went backwards"
    count = len(names(folder))
    assert count == (5 if (folder / "model.safetensors.index.json").exists() else 1)
    put(folder, V3, what)
    assert get(folder) == V3
    assert len(names(folder)) == (5 if what == "shards" else 1)
    return "v1" if found == V1 else "v2"


@pytest.mark.parametrize("what", ["file", "shards"])
@pytest.mark.parametrize("before", ["file", "shards"])
def test_a_kill_at_each_point_leaves_one_whole_version(
    tmp_path: Path, before: str, what: str
) -> None:
    spec: Sequence[str] = ["save.write@1", "save.write@5", "save.before_rename@1"]
    if what == "shards":
        spec = [*spec, "save.before_rename@3", "save.before_rename@5"]
    spec = [*spec, "save.after_rename@1", "save.before_cleanup@2"]
    outcomes = []
    for kill in spec:
        folder = tmp_path / kill
        folder.mkdir()
        put(folder, V1, before)
        point, hit = kill.split("@")
        child = start(what, folder, 2, TENSORCAST_FAULTS=f"{point}=kill@{hit}")
        child.communicate(timeout=30)
        # A single file over a single file has nothing to clean up.
        assert child.returncode in {-signal.SIGKILL, 0}
        assert child.returncode == -signal.SIGKILL or point == "save.before_cleanup"
        outcomes.append(check_after_a_kill(folder, what))
    assert set(outcomes[:3]) == {"v1"}


def test_a_kill_at_twenty_random_moments_leaves_one_whole_version(
    tmp_path: Path,
) -> None:
    rng = random.Random(13)
    kinds = ["file", "shards"]
    took_s = {what: _time_of_a_save(tmp_path / what, what) for what in kinds}
    for n in range(20):
        before, what = kinds[n // 2 % 2], kinds[n % 2]
        folder = tmp_path / str(n)
        folder.mkdir()
        put(folder, V1, before)
        child = start(what, folder, 2)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        moment_s = rng.uniform(0, took_s[what])
        time.sleep(moment_s)  # scene: the moment of the kill
        child.kill()
        child.communicate(timeout=30)
        check_after_a_kill(folder, what)


def _time_of_a_save(folder: Path, what: str) -> float:
    folder.mkdir()
    child = start(what, folder, 2)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    began_s = time.monotonic()
    assert child.stdout.readline() == "done\n"
    took_s = time.monotonic() - began_s
    assert child.wait(30) == 0
    child.stdout.close()
    return took_s


def test_a_living_writers_draft_is_no_leftover(tmp_path: Path) -> None:
    folder, spec, log = tmp_path / "m", tmp_path / "spec", tmp_path / "log"
    folder.mkdir()
    put(folder, V1, "file")
    faults.write_spec(spec, "save.before_rename=pause:30@2")
    child = start(
        "shards",
        folder,
        2,
        TENSORCAST_FAULTS_FILE=str(spec),
        TENSORCAST_FAULTS_LOG=str(log),
    )
    try:
        eventually(lambda: faults.read_log(log), within_s=30)
        # One shard under its name, one draft: both are locked.
        during = names(folder)
        assert len(during) == 3
        assert clean_leftovers(folder) == []
        assert names(folder) == during
        assert get(folder) == V1
        faults.write_spec(spec, "")
        child.communicate(timeout=30)
        assert child.returncode == 0
    finally:
        child.kill()
        child.communicate(timeout=30)
    assert get(folder) == V2
    assert len(names(folder)) == 5


@pytest.mark.parametrize("what", ["file", "shards", "spool"])
def test_a_disk_that_fills_up_midway_is_a_capacity_error_and_nothing_else(
    tmp_path: Path, what: str
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    if what != "spool":
        put(folder, V1, what)
    before = set(names(folder))
    child = start(what, folder, 2, limit_bytes=3 * MIB // 2)
    child.communicate(timeout=30)
    assert child.returncode == 3
    assert set(names(folder)) - {".lock"} == before
    if what != "spool":
        assert get(folder) == V1


@pytest.mark.parametrize(
    "kill", ["spill.write@1", "spill.write@6", "save.before_rename@1"]
)
def test_a_store_that_dies_while_it_spills_leaves_what_was_whole(
    tmp_path: Path, kill: str
) -> None:
    spool = Spool(tmp_path)
    spool.write(
        Generation(1),
        ArtifactId("m"),
        Version(1),
        index=V1.index,
        source=memoryview(V1.segment),
    )
    spool.close()
    point, hit = kill.split("@")
    child = start("spool", tmp_path, 2, TENSORCAST_FAULTS=f"{point}=kill@{hit}")
    child.communicate(timeout=30)
    assert child.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 3
    spool = Spool(tmp_path)
    found = spool.recover()
    assert [replica.generation for replica in found.replicas] == [1]
    assert len(found.removed) == 1
    segment = bytearray(V1.index.nbytes)
    spool.read_into(Generation(1), memoryview(segment))
    assert segment == V1.segment
    assert len(names(tmp_path)) == 2
    spool.close()
