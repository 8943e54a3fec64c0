"""P07, P22, P38: bytes that were changed or taken away under a store are never handed out."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.exceptions import (
    CapacityError,
    CorruptFile,
    DataLost,
    DeadlineExceeded,
    PeerLost,
    TensorCastError,
    WrongPeer,
)
from tests.kit.baseline import baseline
from tests.kit.faulty import (
    Faults,
    faulty_cluster,
    holders,
    others,
    store_pid,
    whole,
)

NBYTES = 3 << 20
DAMAGED = (WrongPeer, PeerLost, DataLost, CorruptFile, DeadlineExceeded)


@pytest.fixture(scope="module")
def strangers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[tc.Session, Path, Faults]]:
    disk = tmp_path_factory.mktemp("disk")
    with (
        faulty_cluster(
            tmp_path_factory.mktemp("run"),
            2,
            separate_hosts=True,
            host_memory="48 MiB",
            disk=str(disk),
            settings={"transfer": {"chunk-bytes": "512 KiB"}},
        ) as (cluster, faults),
        tc.connect(cluster) as session,
    ):
        whole(session, 2)
        yield session, disk, faults


def noise(seed: int, nbytes: int = NBYTES) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, nbytes, np.uint8)


def same(artifact: tc.Artifact, content: np.ndarray) -> bool:
    got = artifact.tensor(framework="numpy", deadline=60)
    return bool(got.tobytes() == content.tobytes())


def damage_memory(pid: int, content: np.ndarray) -> None:
    """Change one byte of the segment that begins as `content` does."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:" not in str(entry.readlink()):
            continue
        with entry.open("rb") as file:
            if file.read(4096) != content[:4096].tobytes():
                continue
        fd = os.open(entry, os.O_RDWR)
        try:
            at = len(content) // 2
            os.pwrite(fd, bytes([content[at] ^ 1]), at)
        finally:
            os.close(fd)
        return
    raise AssertionError("no segment of this content")


def damage_file(disk: Path, content: np.ndarray) -> Path:
    """Change one byte of the file that holds `content`."""
    for path in disk.rglob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        at = raw.find(content.tobytes())
        if at >= 0:
            raw[at + len(content) // 2] ^= 1
            path.write_bytes(raw)
            return path
    raise AssertionError("no file of this content")


def test_p22_damaged_memory_is_refused_and_another_holder_is_read(
    strangers: tuple[tc.Session, Path, Faults],
) -> None:
    session, _, _ = strangers
    content = noise(7)
    with baseline(session):
        artifact = session.put({"x": content}, "d", replicas=2)
        assert same(artifact, content)
        first, second = holders(artifact)
        damage_memory(store_pid(session, first), content)
        assert same(artifact, content)
        session.release(artifact, worker=second)
        with pytest.raises(WrongPeer, match="damaged"):  # and at once
            artifact.tensor(framework="numpy")
        with pytest.raises(DAMAGED):
            session.replicate(artifact, second, deadline=5)
        assert holders(artifact) == [first]
        session.destroy("d")


@pytest.mark.parametrize("replicas", [1, 2])
def test_p22_a_damaged_file_is_refused_and_another_holder_is_read(
    strangers: tuple[tc.Session, Path, Faults], replicas: int
) -> None:
    session, disk, _ = strangers
    content = noise(8)
    with baseline(session):
        artifact = session.put({"x": content}, "d")
        first = holders(artifact)[0]
        (second,) = others(session, artifact)
        session.replicate(artifact, second, device="disk")
        damage_file(disk, content)
        if replicas == 1:
            session.release(artifact, worker=first)
            with pytest.raises(DAMAGED):
                artifact.tensor(framework="numpy", deadline=20)
            with pytest.raises(DataLost):
                session.artifact("d").tensor(framework="numpy", deadline=20)
        else:
            assert same(artifact, content)
            session.prefetch(artifact, worker=second, wait=True, deadline=30)
            assert same(artifact, content)
            session.release(artifact, worker=first)
            assert same(artifact, content)
        session.destroy("d")
        for path in disk.rglob("*damaged*"):
            path.unlink()


def test_p22_a_read_under_eviction_gets_the_right_bytes_or_a_typed_error(
    strangers: tuple[tc.Session, Path, Faults],
) -> None:
    session, _, faults = strangers
    content = noise(9)
    wrong: list[str] = []
    over = threading.Event()

    def read() -> None:
        with tc.connect(session.client) as reader:
            artifact = reader.artifact("kept")
            while not over.is_set():
                try:
                    if not same(artifact, content):
                        wrong.append("other bytes")
                except TensorCastError as error:
                    if not error.retryable:
                        wrong.append(repr(error))

    with baseline(session):
        session.put({"x": content}, "kept", replicas=2)
        reader = threading.Thread(target=read)
        with faults.armed("copy.chunk=delay:0.02"):
            reader.start()
            for number in range(40):  # more than the memory of both
                session.put({"x": noise(number)}, f"noise/{number}")
            over.set()
            reader.join(90)
        assert not wrong
        assert same(session.artifact("kept"), content)
        for artifact in session.list():
            session.destroy(artifact.id)


def test_p38_a_disk_that_is_taken_away_loses_nothing_that_is_in_memory(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    disk = tmp_path_factory.mktemp("disk")
    with (
        faulty_cluster(
            tmp_path_factory.mktemp("run"),
            1,
            host_memory="24 MiB",
            disk=str(disk),
        ) as (cluster, _),
        tc.connect(cluster) as session,
    ):
        whole(session, 1)
        made = {n: session.put({"x": noise(n)}, f"m/{n}") for n in range(12)}
        rows = session.sql("select id, tier from replicas").rows
        in_memory = {name for name, tier in rows if tier == "host"}
        assert 0 < len(in_memory) < len(made)
        shutil.rmtree(disk)
        kept = {n: one for n, one in made.items() if one.id in in_memory}
        assert all(same(artifact, noise(n)) for n, artifact in kept.items())
        for artifact in made.values():
            if artifact.id not in in_memory:
                with pytest.raises((DataLost, CorruptFile)):
                    artifact.tensor(framework="numpy", deadline=10)
        for number in range(20, 32):  # more than there is memory for
            with contextlib.suppress(CapacityError):
                one = session.put({"x": noise(number)}, f"m/{number}", deadline=10)
                kept[number] = one
        assert all(same(artifact, noise(n)) for n, artifact in kept.items())
