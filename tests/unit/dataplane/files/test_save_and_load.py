"""Saving and loading: what comes back, what other readers see, and what is kept (P03-P05, P11)."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tensorcast_dask.dataplane import faults
from tensorcast_dask.dataplane.files import reading
from tensorcast_dask.dataplane.files.layout import plan_write
from tensorcast_dask.dataplane.files.model import Model, open_model
from tensorcast_dask.dataplane.files.reading import ReadReport, read_into
from tensorcast_dask.dataplane.files.save import Saved, save
from tensorcast_dask.exceptions import (
    CapacityError,
    CorruptFile,
    DeadlineExceeded,
    FileChanged,
    FileError,
    InvalidArgument,
    NotFound,
    UnsupportedDtype,
)
from tensorcast_dask.tensors.dtypes import dtype
from tensorcast_dask.tensors.specs import Index
from tests.kit.models import Sample, every_dtype, fill, sample, tensor_bytes

MIB = 1 << 20


def put(path: Path, artifact: Sample, **options: object) -> Saved:
    return save(path, artifact.index, memoryview(artifact.segment), **options)  # type: ignore[arg-type]


def get(path: Path, **options: object) -> tuple[Sample, ReadReport]:
    with open_model(path) as model:
        return read(model, **options)


def read(model: Model, **options: object) -> tuple[Sample, ReadReport]:
    segment = bytearray(b"\xaa" * model.index.nbytes)
    report = read_into(model, memoryview(segment), **options)  # type: ignore[arg-type]
    return Sample(model.index, bytes(segment)), report


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def big(nbytes: int = 20 * MIB, *, seed: int = 0) -> Sample:
    specs = {
        "a": ("uint8", (nbytes - 3 * MIB - 7,)),
        "b": ("float32", (MIB // 4, 2)),
        "c": ("bfloat16", (MIB // 4,)),
        "d": ("int16", (3,)),
    }
    return sample(specs, seed=seed)


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    artifact = every_dtype()
    put(tmp_path / "m.safetensors", artifact)
    found, report = get(tmp_path / "m.safetensors")
    assert found.index == artifact.index
    assert found.index.digest() == artifact.index.digest()
    assert found.segment == artifact.segment
    assert report.verified


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    artifact = sample(
        {"embed": ("float32", (8, 8)), "row": ("float32", (8,))},
        ties={"lm_head": "embed"},
    )
    path = tmp_path / "m.safetensors"
    put(path, artifact)
    found, _ = get(path)
    assert found == artifact
    assert found.index.ties == (("embed", "lm_head"),)
    with open_model(path) as model:
        assert model.file_nbytes == 8 * 8 * 4 + 8 * 4
    assert set(safetensors.numpy.load_file(path)) == {"embed", "row"}


def test_the_formats_own_loader_reads_the_same_values(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    reference = pytest.importorskip("safetensors.torch")
    artifact = every_dtype(seed=3)
    path = tmp_path / "m.safetensors"
    put(path, artifact, metadata={"epoch": "7"})
    loaded = reference.load_file(path)
    assert set(loaded) == set(artifact.index.names) - {"tied/ünï", "also"}
    for name, tensor in loaded.items():
        entry = artifact.index.entry(name)
        raw = (
            tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            if tensor.numel()
            else b""
        )
        assert raw == artifact.tensor(name)
        if entry.dtype.safetensors is not None:
            assert tensor.dtype is getattr(torch, entry.dtype.torch)
            assert tuple(tensor.shape) == entry.shape
        else:
            assert tensor.dtype is torch.uint8
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["epoch"] == "7"
        assert file.metadata()["format"] == "pt"


def test_a_file_by_the_formats_own_writer_is_read_bit_for_bit(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    reference = pytest.importorskip("safetensors.torch")
    tensors = {
        "w": torch.randn(33, 7).to(torch.bfloat16),
        "b": torch.randn(5, dtype=torch.float64),
        "s": torch.tensor(3, dtype=torch.int8),
        "z": torch.zeros(0, 4),
    }
    path = tmp_path / "m.safetensors"
    reference.save_file(tensors, path, metadata={"who": "them"})
    with open_model(path) as model:
        found, report = read(model)
        assert model.metadata == {"who": "them"}
    assert not report.verified
    for name, tensor in tensors.items():
        entry = found.index.entry(name)
        assert (entry.dtype.torch, entry.shape) == (
            str(tensor.dtype)[6:],
            tuple(tensor.shape),
        )
        raw = (
            tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            if tensor.numel()
            else b""
        )
        assert found.tensor(name) == raw


def test_an_empty_artifact_is_a_file_too(tmp_path: Path) -> None:
    put(tmp_path / "m", sample({}))
    assert get(tmp_path / "m")[0].index.names == ()
    assert safetensors.numpy.load_file(tmp_path / "m") == {}


def test_a_tensor_may_have_the_formats_reserved_name(tmp_path: Path) -> None:
    artifact = sample(
        {"__metadata__": ("uint8", (3,)), "__metadata__ (tensor)": ("uint8", (2,))}
    )
    put(tmp_path / "m", artifact)
    assert get(tmp_path / "m")[0] == artifact
    assert len(safetensors.numpy.load_file(tmp_path / "m")) == 2


def test_a_layout_that_is_not_packed_comes_back(tmp_path: Path) -> None:
    index = Index(
        ["a", "b"], [dtype("float32")] * 2, [(3,), (2,)], offsets=[16, 4], nbytes=40
    )
    artifact = fill(index, 1)
    put(tmp_path / "m", artifact)
    assert get(tmp_path / "m")[0] == artifact


def test_a_segment_that_is_mostly_holes_is_refused(tmp_path: Path) -> None:
    index = Index(["a"], [dtype("uint8")], [(1,)], offsets=[0], nbytes=MIB)
    with pytest.raises(InvalidArgument):
        put(tmp_path / "m", fill(index, 1))
    assert names(tmp_path) == []


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_memory_and_memory_files_are_filled_alike(
    tmp_path: Path, *, direct: bool, threads: int
) -> None:
    artifact = big()
    path = tmp_path / "m.safetensors"
    source = os.memfd_create("source")
    dest = os.memfd_create("dest")
    try:
        os.pwrite(source, artifact.segment, 4096)
        saved = save(path, artifact.index, source, source_offset=4096)
        assert saved.nbytes == path.stat().st_size
        found, _ = get(path, direct=direct, threads=threads)
        assert found == artifact
        os.pwrite(dest, b"\xaa" * (artifact.index.nbytes + 200), 0)
        with open_model(path) as model:
            read_into(model, dest, offset=100, threads=threads, direct=direct)
        content = os.pread(dest, artifact.index.nbytes + 200, 0)
        assert content == b"\xaa" * 100 + artifact.segment + b"\xaa" * 100
    finally:
        os.close(source)
        os.close(dest)


@pytest.mark.parametrize("direct", [False, True])
def test_a_foreign_file_whose_data_begin_anywhere_is_read_past_the_cache_too(
    tmp_path: Path, *, direct: bool
) -> None:
    path = tmp_path / "m.safetensors"
    arrays = {
        "x" * n: np.random.default_rng(n).integers(0, 255, 3 * MIB + n, dtype=np.uint8)
        for n in range(1, 5)
    }
    safetensors.numpy.save_file(arrays, path)
    dest = os.memfd_create("dest")
    try:
        with open_model(path) as model:
            report = read_into(model, dest, direct=direct)
            content = os.pread(dest, model.index.nbytes, 0)
            for name, array in arrays.items():
                assert tensor_bytes(model.index, content, name) == array.tobytes()
        assert report.direct in {direct, False}
    finally:
        os.close(dest)


def test_a_long_file_is_read_past_the_cache_only_while_it_is_cold(
    tmp_path: Path,
) -> None:
    path = tmp_path / "m.safetensors"
    artifact = sample({"a": ("uint8", (65 * MIB,))})
    put(path, artifact)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        os.preadv(fd, [bytearray(1)], 32 * MIB, os.RWF_NOWAIT)
    except BlockingIOError:
        cold = True
    except OSError:
        cold = False  # a file system that cannot tell
    else:
        cold = False  # one that lies in memory
    os.close(fd)
    found, report = get(path)
    assert found == artifact
    assert report.direct == cold
    get(path, direct=False)
    assert not get(path)[1].direct


def test_a_file_system_that_breaks_its_word_on_direct_reads_is_read_all_the_same(
    tmp_path: Path,
) -> None:
    path = tmp_path / "m.safetensors"
    put(path, big())
    with open_model(path) as model, ExitStack() as stack:
        file = reading._OpenFile(model.files[0], stack, direct=True)
        if file.direct_fd is None:
            pytest.skip("no O_DIRECT on this file system")
        unaligned = memoryview(bytearray(101))[1:]
        assert file.read([unaligned], 7, direct=True) == 100
        assert file.direct_fd is None
        assert unaligned == path.read_bytes()[7:107]


def test_thousands_of_small_tensors_are_read_in_blocks(tmp_path: Path) -> None:
    artifact = sample({f"t{n}": ("uint8", (n % 700,)) for n in range(5000)})
    put(tmp_path / "m", artifact)
    assert get(tmp_path / "m")[0] == artifact


def test_the_sums_of_a_read_are_those_of_the_segment(tmp_path: Path) -> None:
    from xxhash import xxh3_64_intdigest

    artifact = sample({"a": ("uint8", (9 * MIB,)), "b": ("uint8", (64,))})
    put(tmp_path / "m", artifact)
    _, report = get(tmp_path / "m")
    step = report.chunk_bytes
    assert report.sums == tuple(
        xxh3_64_intdigest(artifact.segment[at : at + step])
        for at in range(0, len(artifact.segment), step)
    )
    put(tmp_path / "n", big())
    assert get(tmp_path / "n")[1].sums is None


# ------------------------------------------------------------------ corruption


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    artifact = sample(
        {"a": ("uint8", (100,)), "b": ("complex128", (2,))}, ties={"t": "a"}
    )
    path = tmp_path / "m.safetensors"
    put(path, artifact)
    good = path.read_bytes()
    silent = []
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        try:
            found, report = get(path)
        except (FileError, UnsupportedDtype):
            continue
        # In the 40 bytes that say that there is a seal: then nothing claims to be verified.
        assert not report.verified
        assert found.tensor("a") == artifact.tensor("a")
        silent.append(at)
    assert len(silent) <= 40


def test_a_wrong_chunk_names_file_and_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    put(path, big())
    with path.open("r+b") as file:
        file.seek(17 * MIB + 5)
        byte = file.read(1)
        file.seek(17 * MIB + 5)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CorruptFile) as caught:
        get(path, threads=2)
    assert caught.value.data["file"] == str(path)
    assert caught.value.data["tensor"] in {"a", "b", "c", "d"}


def test_a_file_that_another_program_rewrote_keeps_dtypes_and_ties(
    tmp_path: Path,
) -> None:
    artifact = sample(
        {"a": ("float32", (4,)), "z": ("complex128", (2, 1))}, ties={"tied": "a"}
    )
    path = tmp_path / "m.safetensors"
    put(path, artifact)
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
    arrays = safetensors.numpy.load_file(path)
    arrays["a"] = arrays["a"] * 0 + 1
    safetensors.numpy.save_file(arrays, path, metadata=metadata)
    found, report = get(path)
    assert not report.verified
    assert found.tensor("z") == artifact.tensor("z")
    assert found.index.spec("z") == artifact.index.spec("z")
    assert found.index.ties == (("a", "tied"),)
    assert found.tensor("tied") == np.ones(4, np.float32).tobytes()


def test_a_file_that_is_cut_or_written_while_it_is_read_has_changed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "m.safetensors"
    tensors = {"a": np.zeros(20 * MIB, np.uint8)}
    safetensors.numpy.save_file(tensors, path)
    with open_model(path) as model:
        os.truncate(path, 10 * MIB)
        with pytest.raises(FileChanged):
            read(model)
    safetensors.numpy.save_file(tensors, path)

    def write(_: int) -> None:
        os.utime(path, ns=(1, 1))

    with open_model(path) as model, pytest.raises(FileChanged):
        read(model, on_bytes=write)


def test_a_read_can_be_ended_from_outside(tmp_path: Path) -> None:
    put(tmp_path / "m", big())

    def end(_: int) -> None:
        raise DeadlineExceeded("enough")

    with pytest.raises(DeadlineExceeded):
        get(tmp_path / "m", on_bytes=end, threads=2)
    with pytest.raises(DeadlineExceeded):
        put(tmp_path / "m", big(), on_bytes=end)
    assert names(tmp_path) == ["m"]


def test_unusable_destinations_and_sources_are_refused(tmp_path: Path) -> None:
    artifact = sample({"a": ("uint8", (100,))})
    put(tmp_path / "m", artifact)
    with open_model(tmp_path / "m") as model:
        for dest in (
            memoryview(bytes(100)),
            memoryview(bytearray(99)),
            memoryview(bytearray(300))[::2],
        ):
            with pytest.raises(InvalidArgument):
                read_into(model, dest)
    for source in (memoryview(bytes(99)), memoryview(bytes(300))[::2]):
        with pytest.raises(InvalidArgument):
            save(tmp_path / "n", artifact.index, source)
    empty = os.memfd_create("short")
    with pytest.raises(FileError):
        save(tmp_path / "n", artifact.index, empty)
    os.close(empty)
    assert names(tmp_path) == ["m"]


# --------------------------------------------------------- saving over (P11)


def test_saving_onto_the_path_that_is_being_read_keeps_the_readers_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = big(seed=1), big(seed=2)
    path = tmp_path / "dir" / "m.safetensors"
    path.parent.mkdir()
    put(path, old)
    link, hard = tmp_path / "link.safetensors", tmp_path / "hard.safetensors"
    link.symlink_to(path)
    os.link(path, hard)
    monkeypatch.chdir(tmp_path)
    with open_model(path) as first, open_model(link) as second:
        put(link, new)
        assert read(first)[0] == old
        assert get(path)[0] == new
        assert link.is_symlink()
        put(Path("dir/../dir/m.safetensors"), old)
        assert read(second)[0] == old
    assert get(hard)[0] == old
    with open_model(path) as third:
        put(hard, new)
        assert read(third)[0] == old
    assert get(path)[0] == old
    assert get(hard)[0] == new
    assert names(tmp_path) == [
        "dir",
        "hard.safetensors",
        "link.safetensors",
    ]


def test_a_replaced_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "m"
    put(path, big())
    path.chmod(0o640)
    put(path, big())
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("point", ["save.write", "save.before_rename"])
@pytest.mark.parametrize("shard_bytes", [None, 8 * MIB])
def test_a_save_that_fails_leaves_the_old_model_and_nothing_else(
    tmp_path: Path, point: str, shard_bytes: int | None
) -> None:
    folder = tmp_path / "model"
    old, new = big(seed=1), big(seed=2)
    put(folder, old, max_shard_bytes=8 * MIB)
    before = names(folder)
    for hit in (1, 2, 3):
        failed = False
        with faults.armed(f"{point}=raise:ENOSPC@{hit}"):
            try:
                put(folder, new, max_shard_bytes=shard_bytes)
            except CapacityError:
                failed = True
        assert failed or (
            point == "save.before_rename" and shard_bytes is None and hit > 1
        )
        if failed:
            assert names(folder) == before
            assert get(folder)[0] == old
        else:
            put(folder, old, max_shard_bytes=8 * MIB)
            before = names(folder)


def test_without_room_nothing_is_written(tmp_path: Path) -> None:
    index = Index(["a"], [dtype("uint8")], [(1 << 50,)])
    with pytest.raises(CapacityError) as caught:
        save(tmp_path / "m", index, os.memfd_create("nothing"))
    assert caught.value.data["needed"] == 1 << 50
    assert names(tmp_path) == []


def test_paths_that_cannot_be_saved_to_are_refused_by_type(tmp_path: Path) -> None:
    artifact = big()
    with pytest.raises(NotFound):
        put(tmp_path / "absent" / "m", artifact)
    with pytest.raises(InvalidArgument):
        put(tmp_path / "m.safetensors", artifact, max_shard_bytes=MIB)
    with pytest.raises(InvalidArgument):
        put(tmp_path / "m", artifact, max_shard_bytes=0)
    with pytest.raises(InvalidArgument):
        put(Path("a\0b"), artifact)
    with pytest.raises(InvalidArgument):
        put(tmp_path / ("x" * 300), artifact)
    for metadata in ({"a": 1}, {1: "a"}, {"tensorcast": ""}, {"a": "\ud800"}):
        with pytest.raises(InvalidArgument):
            put(tmp_path / "m", artifact, metadata=metadata)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    for path in ("fifo", "link"):
        with pytest.raises(InvalidArgument, match="regular"):
            put(tmp_path / path, artifact)
    with pytest.raises(InvalidArgument):
        save("", artifact.index, memoryview(artifact.segment))
    (tmp_path / "fifo").unlink()
    (tmp_path / "link").unlink()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(FileError):
        put(tmp_path / "loop", artifact)
    assert names(tmp_path) == ["loop"]


def test_a_plans_head_has_one_length_whatever_the_sums() -> None:
    plan = plan_write(big().index, metadata={"a": "b"}, chunk_bytes=MIB)
    assert len(plan.head()) == len(plan.head(range(plan.chunks)))
    assert len(plan.head()) % 4096 == 0
    assert json.loads(plan.head()[8:])["__metadata__"]["a"] == "b"
