"""The disk tier: names, limits, recovery, and a folder that vanishes (P04, P14, P38)."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from tensorcast_dask.dataplane import faults
from tensorcast_dask.dataplane.files.mounts import file_system_of
from tensorcast_dask.dataplane.files.spool import Spool, file_name
from tensorcast_dask.exceptions import (
    AlreadyExists,
    CapacityError,
    CorruptFile,
    DeadlineExceeded,
    FileError,
    Gone,
    InvalidArgument,
    Mismatch,
    NotFound,
)
from tensorcast_dask.tensors.ids import ArtifactId, Generation, Version
from tests.kit.eventually import eventually
from tests.kit.models import Sample, every_dtype, sample

MIB = 1 << 20
ONE = sample({"a": ("uint8", (MIB,))}, seed=1)

#: P14's ids, and more whose escapes could meet.
IDS = [
    "a/b", "a-SEP-b", "a%2Fb", "a__b", "a--b", "a\\b", "a:b", "a b", "a.b", "a@1",
    "a%2fb", "a%252Fb", ".", "..", "~", "A/B", "ä", "a\u0308", "日本", "x" * 512, "x" * 511 + "y",
    "é" * 256, "con", "-", "'", '"', "a;rm -rf", "a.safetensors", "a.bad", ".lock",
]  # fmt: skip


def write(
    spool: Spool, generation: int, artifact: Sample = ONE, *, name: str = "m"
) -> None:
    spool.write(
        Generation(generation),
        ArtifactId(name),
        Version(1),
        index=artifact.index,
        source=memoryview(artifact.segment),
        record=b"r\0" + name.encode(),
    )


def read(spool: Spool, generation: int) -> Sample:
    with spool.open(Generation(generation)) as model:
        segment = bytearray(b"\xaa" * model.index.nbytes)
        index = model.index
    report = spool.read_into(Generation(generation), memoryview(segment))
    assert report.verified
    return Sample(index, bytes(segment))


def files(folder: Path) -> list[str]:
    return sorted(
        path.name for path in folder.iterdir() if path.name not in {".lock", ".owner"}
    )


def test_every_tensor_comes_back_under_its_generation(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    artifact = every_dtype()
    write(spool, 7, artifact)
    assert read(spool, 7) == artifact
    assert spool.remove(Generation(7))
    assert not spool.remove(Generation(7))
    assert files(tmp_path) == []
    assert spool.used_bytes == spool.booked_bytes == 0
    with pytest.raises(NotFound):
        spool.open(Generation(7))
    spool.close()


def test_every_legal_id_has_a_name_of_its_own_that_a_folder_can_hold() -> None:
    names = [file_name(Generation(1), ArtifactId(name)) for name in IDS]
    assert len(set(names)) == len(IDS)
    assert all(len(name.encode()) <= 251 and name.isascii() for name in names)
    assert file_name(Generation(2), ArtifactId("a")) != file_name(
        Generation(3), ArtifactId("a")
    )
    assert len(file_name(Generation((1 << 63) - 1), ArtifactId("x" * 512))) <= 251


def test_each_id_returns_its_own_value_after_a_restart(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    artifacts = {
        name: sample({"t": ("uint8", (50,))}, seed=n) for n, name in enumerate(IDS)
    }
    for n, (name, artifact) in enumerate(artifacts.items()):
        write(spool, n + 1, artifact, name=name)
    spool.close()
    spool = Spool(tmp_path)
    found = spool.recover()
    assert {replica.id for replica in found.replicas} == set(IDS)
    assert found.removed == found.set_aside == ()
    for replica in found.replicas:
        assert replica.record == b"r\0" + replica.id.encode()
        assert read(spool, replica.generation) == artifacts[replica.id]
    spool.close()


# ---------------------------------------------------------------------- limits


def test_writes_are_refused_at_the_limit_and_go_on_after_a_removal(
    tmp_path: Path,
) -> None:
    spool = Spool(tmp_path, limit_bytes=5 * MIB)
    accepted = [1, 2, 3, 4]
    for generation in accepted:
        write(spool, generation)
    with pytest.raises(CapacityError) as caught:
        write(spool, 5)
    assert caught.value.data["tier"] == "disk"
    assert caught.value.data["needed"] == (tmp_path / files(tmp_path)[0]).stat().st_size
    assert all(read(spool, generation) == ONE for generation in accepted)
    assert spool.used_bytes == sum(
        (tmp_path / f).stat().st_size for f in files(tmp_path)
    )
    spool.remove(Generation(2))
    write(spool, 50)
    assert read(spool, 50) == ONE
    spool.close()


def test_bookings_count_before_a_byte_is_written(tmp_path: Path) -> None:
    spool = Spool(tmp_path, limit_bytes=5 * MIB)
    refused = []

    def attempt(generation: int) -> None:
        try:
            write(spool, generation)
        except CapacityError:
            refused.append(generation)

    with faults.armed("spill.write=delay:0.05"):
        threads = [threading.Thread(target=attempt, args=(n,)) for n in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(refused) == 4
    assert len(spool.replicas) == 4
    assert spool.booked_bytes == 0
    spool.close()


@pytest.mark.parametrize("why", ["ENOSPC", "EDQUOT", "EFBIG"])
@pytest.mark.parametrize("point", ["spill.write", "save.before_rename"])
def test_a_full_disk_leaves_nothing_and_loses_nothing(
    tmp_path: Path, point: str, why: str
) -> None:
    spool = Spool(tmp_path)
    write(spool, 1)
    with faults.armed(f"{point}=raise:{why}"), pytest.raises(CapacityError):
        write(spool, 2)
    assert files(tmp_path) == [file_name(Generation(1), ArtifactId("m"))]
    assert spool.booked_bytes == 0
    write(spool, 2)
    assert read(spool, 1) == read(spool, 2) == ONE
    spool.close()


def test_a_generation_is_written_once(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    write(spool, 1)
    with pytest.raises(AlreadyExists):
        write(spool, 1)
    spool.close()


def test_a_write_can_be_ended_from_outside(tmp_path: Path) -> None:
    spool = Spool(tmp_path)

    def end(_: int) -> None:
        raise DeadlineExceeded("enough")

    with pytest.raises(DeadlineExceeded):
        spool.write(
            Generation(1),
            ArtifactId("m"),
            Version(1),
            index=ONE.index,
            source=memoryview(ONE.segment),
            on_bytes=end,
        )
    assert files(tmp_path) == []
    spool.close()


# -------------------------------------------------------------------- damage


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_a_damaged_file_is_set_aside_and_not_served_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    write(spool, 1)
    write(spool, 2)
    flip(tmp_path / file_name(Generation(1), ArtifactId("m")), MIB // 2)
    flip(tmp_path / file_name(Generation(2), ArtifactId("m")), 20)
    segment = memoryview(bytearray(MIB))
    for generation in (1, 2):
        with pytest.raises(CorruptFile):
            spool.read_into(Generation(generation), segment)
        with pytest.raises(NotFound):
            spool.read_into(Generation(generation), segment)
    assert all(name.endswith(".bad") for name in files(tmp_path))
    assert spool.used_bytes == 0
    spool.close()
    spool = Spool(tmp_path)
    assert len(spool.recover().removed) == 2
    assert files(tmp_path) == []
    spool.close()


def test_a_disk_that_keeps_other_bytes_than_it_was_given_is_found_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv(faults.ENV_LOG, str(log))
    spool = Spool(tmp_path / "tier")
    raised: list[Exception] = []

    def attempt() -> None:
        try:
            write(spool, 1)
        except CorruptFile as error:
            raised.append(error)

    thread = threading.Thread(target=attempt)
    with faults.armed("save.before_rename=pause:30"):
        thread.start()
        eventually(lambda: faults.read_log(log), within_s=20)
        (draft,) = (tmp_path / "tier").glob(".*-draft")
        flip(draft, MIB // 2)
    thread.join()
    assert len(raised) == 1
    assert files(tmp_path / "tier") == []
    assert spool.replicas == ()
    assert spool.booked_bytes == 0
    spool.close()


def test_a_failing_reader_does_not_condemn_the_file(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    write(spool, 1)
    closed = os.memfd_create("closed")
    read_only = os.open(f"/proc/self/fd/{closed}", os.O_RDONLY)
    with pytest.raises(FileError):
        spool.read_into(Generation(1), read_only)
    os.close(read_only)
    os.close(closed)
    assert read(spool, 1) == ONE
    spool.close()


def test_recovery_takes_what_is_whole_and_sets_the_rest_aside(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for generation in range(1, 7):
        write(spool, generation)
    spool.close()
    paths = [tmp_path / file_name(Generation(n), ArtifactId("m")) for n in range(1, 7)]
    os.truncate(paths[0], MIB // 2)
    flip(paths[1], 30)
    paths[2].rename(tmp_path / file_name(Generation(3), ArtifactId("other")))
    shutil.copy(paths[3], tmp_path / file_name(Generation(44), ArtifactId("m")))
    (tmp_path / "foreign.txt").write_text("hands off")
    (tmp_path / ".0123.abcd.tensorcast-draft").write_bytes(b"half")
    paths[4].write_bytes(b"")
    spool = Spool(tmp_path)
    found = spool.recover()
    assert sorted(replica.generation for replica in found.replicas) == [4, 6]
    assert len(found.set_aside) == 5
    assert found.removed == (str(tmp_path / ".0123.abcd.tensorcast-draft"),)
    assert (tmp_path / "foreign.txt").read_text() == "hands off"
    assert read(spool, 4) == read(spool, 6) == ONE
    spool.close()


def test_a_folder_that_vanishes_is_gone_for_reads_and_made_anew_for_writes(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "tier"
    spool = Spool(folder, limit_bytes=3 * MIB)
    write(spool, 1)
    write(spool, 2)
    with spool.open(Generation(1)) as model:
        shutil.rmtree(folder)
        assert model.index == ONE.index
    with pytest.raises(Gone):
        read(spool, 1)
    with pytest.raises(NotFound):
        read(spool, 1)
    assert spool.remove(Generation(2))
    assert spool.used_bytes == 0
    write(spool, 3)
    assert read(spool, 3) == ONE
    folder_file = tmp_path / "tier"
    shutil.rmtree(folder_file)
    folder_file.write_text("in the way")
    with pytest.raises((FileError, NotFound)):
        write(spool, 4)
    assert spool.booked_bytes == 0
    spool.close()


# -------------------------------------------------------------------- folders


def test_one_folder_has_one_store_and_its_successor_finds_it(tmp_path: Path) -> None:
    first = Spool.claim(tmp_path, name="n1")
    write(first, 1)
    with pytest.raises(AlreadyExists):
        Spool(tmp_path / "n1")
    second = Spool.claim(tmp_path, name="n2")
    assert second.folder == tmp_path / "n2"
    write(second, 2)
    first.close()
    first.close()
    third = Spool.claim(tmp_path, name="n3")
    assert third.folder == tmp_path / "n1"
    assert [replica.generation for replica in third.recover().replicas] == [1]
    second.close()
    assert Spool.claim(tmp_path, name="n2").folder == tmp_path / "n2"
    third.close()


def test_a_folder_that_was_made_anew_is_locked_again(tmp_path: Path) -> None:
    spool = Spool.claim(tmp_path, name="n1", owner="cluster-a")
    shutil.rmtree(tmp_path / "n1")
    write(spool, 1)
    write(spool, 2)
    with pytest.raises(AlreadyExists):
        Spool(tmp_path / "n1")
    spool.close()
    spool = Spool(tmp_path / "n1")
    assert spool.owner == "cluster-a"
    assert len(spool.recover().replicas) == 2
    spool.close()


def test_a_folder_of_another_cluster_is_left_alone(tmp_path: Path) -> None:
    ours = Spool.claim(tmp_path, name="n1", owner="cluster-a")
    write(ours, 1)
    ours.close()
    for owner in ("cluster-b", ""):
        other = Spool.claim(tmp_path, name=f"n2{owner}", owner=owner)
        assert other.folder == tmp_path / f"n2{owner}"
        assert other.recover().replicas == ()
        assert other.owner == owner
        other.close()
    again = Spool.claim(tmp_path, name="n3", owner="cluster-a")
    assert again.folder == tmp_path / "n1"
    assert [replica.generation for replica in again.recover().replicas] == [1]
    again.own("cluster-a")
    with pytest.raises(Mismatch):
        again.own("cluster-b")
    again.close()


def test_a_folder_in_memory_is_refused_unless_allowed() -> None:
    folder = Path("/dev/shm") / f"tensorcast-test-{os.getpid()}"
    if file_system_of("/dev/shm") != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    try:
        with pytest.raises(InvalidArgument, match="tmpfs"):
            Spool(folder)
        spool = Spool(folder, allow_tmpfs=True)
        write(spool, 1)
        assert read(spool, 1) == ONE
        spool.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_the_kernel_names_the_file_systems() -> None:
    assert file_system_of("/proc") == "proc"
    assert file_system_of("/") not in {"", "proc"}
