"""Sharded models: what an index promises is there, and nothing else is (P12, P13)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tensorcast_dask.dataplane import faults
from tensorcast_dask.dataplane.files.durable import remove_unlocked
from tensorcast_dask.dataplane.files.model import open_model
from tensorcast_dask.dataplane.files.reading import read_into
from tensorcast_dask.dataplane.files.save import _is_named, clean_leftovers, save
from tensorcast_dask.exceptions import (
    CorruptFile,
    FileError,
    InvalidArgument,
    NotFound,
    Poisoned,
)
from tests.kit.eventually import eventually
from tests.kit.models import Sample, every_dtype, sample

INDEX = "model.safetensors.index.json"
THREE = {f"t{n}": ("float32", (100,)) for n in range(3)}


def put(folder: Path, artifact: Sample, shard_bytes: int | None = 500) -> None:
    save(
        folder,
        artifact.index,
        memoryview(artifact.segment),
        max_shard_bytes=shard_bytes,
    )


def get(path: Path) -> Sample:
    with open_model(path) as model:
        segment = bytearray(b"\xaa" * model.index.nbytes)
        read_into(model, memoryview(segment))
        return Sample(model.index, bytes(segment))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def edit(folder: Path, change: object, *, key: str = "weight_map") -> None:
    path = folder / INDEX
    document = json.loads(path.read_text())
    document[key] = change(document[key])  # type: ignore[operator]
    path.write_text(json.dumps(document))


@pytest.fixture
def three(tmp_path: Path) -> Path:
    folder = tmp_path / "three"
    put(folder, sample(THREE))
    return folder


def test_shards_come_back_as_one_segment(tmp_path: Path) -> None:
    artifact = every_dtype()
    for shard_bytes in (1, 700, 3000):
        folder = tmp_path / str(shard_bytes)
        put(folder, artifact, shard_bytes)
        assert get(folder) == artifact
        assert get(folder / INDEX) == artifact


def test_shards_stay_below_their_limit_unless_one_tensor_is_larger(three: Path) -> None:
    with open_model(three) as model:
        assert [header.data_nbytes for header in model.headers] == [400, 400, 400]
        assert [len(header.entries) for header in model.headers] == [1, 1, 1]


def test_other_readers_find_every_tensor_where_the_index_says(three: Path) -> None:
    document = json.loads((three / INDEX).read_text())
    assert document["metadata"]["total_size"] == 1200
    for name, file in document["weight_map"].items():
        loaded = safetensors.numpy.load_file(three / file)[name]
        assert loaded.tobytes() == sample(THREE).tensor(name)


def test_a_model_by_other_writers_is_read(tmp_path: Path) -> None:
    weight_map: dict[str, str] = {}
    for n in range(3):
        arrays: dict[str, Any] = {
            f"l{n}.w": np.arange(7 + n, dtype=np.int16),
            f"l{n}.b": np.ones(3),
        }
        safetensors.numpy.save_file(arrays, tmp_path / f"model-{n}-of-3.safetensors")
        weight_map |= dict.fromkeys(arrays, f"model-{n}-of-3.safetensors")
    document = {
        "metadata": {"total_size": 48 + 72.0, "more": [1]},
        "weight_map": weight_map,
    }
    (tmp_path / INDEX).write_text(json.dumps(document))
    found = get(tmp_path)
    assert set(found.index.names) == set(weight_map)
    assert found.tensor("l1.w") == np.arange(8, dtype=np.int16).tobytes()


# ------------------------------------------------------------------------- P12


def test_a_missing_shard_is_named(three: Path) -> None:
    for shard in shards(three):
        shutil.move(shard, three / "elsewhere")
        with pytest.raises(CorruptFile) as caught:
            open_model(three)
        assert shard.name in str(caught.value)
        shutil.move(three / "elsewhere", shard)


def test_a_renamed_shard_is_named(three: Path) -> None:
    shard = shards(three)[1]
    shard.rename(three / "other.safetensors")
    with pytest.raises(CorruptFile, match=shard.name):
        open_model(three)


def test_a_truncated_shard_is_named(three: Path) -> None:
    for shard in shards(three):
        content = shard.read_bytes()
        for nbytes in (0, 7, 8, 100, len(content) - 1):
            os.truncate(shard, nbytes)
            with pytest.raises(CorruptFile, match=shard.name):
                open_model(three)
        shard.write_bytes(content)


def test_swapped_shards_are_found(three: Path) -> None:
    first, second, _ = shards(three)
    first.rename(three / "x")
    second.rename(first)
    (three / "x").rename(second)
    with pytest.raises(CorruptFile, match="promises"):
        open_model(three)


def test_a_tensor_that_is_promised_and_missing_is_named(three: Path) -> None:
    edit(three, lambda found: {**found, "absent": found["t0"]})
    with pytest.raises(CorruptFile) as caught:
        open_model(three)
    assert caught.value.data["tensor"] == "absent"


def test_a_tensor_that_no_index_knows_is_named(three: Path) -> None:
    edit(
        three,
        lambda found: (
            {k: v for k, v in found.items() if k != "t1"} | {"t0": found["t1"]}
        ),
    )
    with pytest.raises(CorruptFile) as caught:
        open_model(three)
    assert caught.value.data["tensor"] in {"t0", "t1"}
    shard = shards(three)[2]
    put(three, sample(THREE))
    shard = shards(three)[2]
    extra = {
        **safetensors.numpy.load_file(shard),
        "extra": safetensors.numpy.load_file(shard)["t2"],
    }
    safetensors.numpy.save_file(extra, shard)
    with pytest.raises(CorruptFile) as caught:
        open_model(three)
    assert caught.value.data["tensor"] == "extra"


def test_a_tensor_in_two_shards_is_refused(three: Path) -> None:
    first, second, _ = shards(three)
    both = safetensors.numpy.load_file(first) | safetensors.numpy.load_file(second)
    safetensors.numpy.save_file(both, second)
    with pytest.raises(CorruptFile):
        open_model(three)


def test_a_total_that_is_not_there_is_refused_and_can_be_waived(three: Path) -> None:
    edit(three, lambda found: {**found, "total_size": 1201}, key="metadata")
    with pytest.raises(CorruptFile, match="1201"):
        open_model(three)
    open_model(three, check_total=False).close()
    edit(three, lambda found: {**found, "total_size": 0}, key="metadata")
    open_model(three).close()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b"\xff",
        b'{"weight_map": {"a": "../x.safetensors"}}', b'{"weight_map": {"a": "/etc/passwd"}}',
        b'{"weight_map": {"a": ""}}', b'{"weight_map": {"a": "x\\u0000"}}',
        b'{"weight_map": {}, "metadata": {"total_size": "12"}}',
        b'{"weight_map": {}, "metadata": {"x": ' + b"[" * 100_000,
    ],
)  # fmt: skip
def test_an_index_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(CorruptFile):
        open_model(tmp_path)


def test_what_is_no_model_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        open_model(tmp_path)
    with pytest.raises(NotFound):
        open_model(tmp_path / "absent")
    with pytest.raises(InvalidArgument):
        open_model("a\0b")
    with pytest.raises(InvalidArgument):
        open_model("")
    for name in ("a.safetensors", "b.safetensors"):
        shutil.copy(_saved(tmp_path / "one"), tmp_path / name)
    with pytest.raises(InvalidArgument, match="several"):
        open_model(tmp_path)
    (tmp_path / "a.safetensors").unlink()
    open_model(tmp_path).close()


def _saved(path: Path) -> Path:
    artifact = sample(THREE)
    save(path, artifact.index, memoryview(artifact.segment))
    return path


def test_no_descriptor_is_left_open(three: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with open_model(three) as model:
        assert len(model.files) == 3
    model.close()
    shards(three)[2].unlink()
    with pytest.raises(CorruptFile):
        open_model(three)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


# ------------------------------------------------------------------------- P13


def test_saving_over_a_model_leaves_only_the_new_one(tmp_path: Path) -> None:
    old, new = sample(THREE, seed=1), sample(THREE, seed=2)
    folder = tmp_path / "m"
    for before, after in ((500, 500), (500, None), (None, 500), (None, None), (500, 1)):
        put(folder, old, before)
        with open_model(folder) as model:
            put(folder, new, after)
            segment = bytearray(model.index.nbytes)
            read_into(model, memoryview(segment))
            assert bytes(segment) == old.segment
        assert get(folder) == new
        assert len(names(folder)) == (1 if after is None else 4)


def test_a_model_by_other_writers_is_replaced_with_all_its_files(
    tmp_path: Path,
) -> None:
    test_a_model_by_other_writers_is_read(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    put(tmp_path, sample(THREE), None)
    assert names(tmp_path) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("before", [None, 500])
@pytest.mark.parametrize("after", [None, 500])
def test_what_an_interrupted_cleaning_leaves_is_cleaned_by_the_next_save(
    tmp_path: Path, before: int | None, after: int | None
) -> None:
    old, new, last = (sample(THREE, seed=seed) for seed in (1, 2, 3))
    folder = tmp_path / "m"
    folder.mkdir()
    put(folder, old, before)
    with (
        contextlib.suppress(Poisoned),
        faults.armed("save.before_cleanup=raise:Poisoned"),
    ):
        put(folder, new, after)
    assert get(folder) in (old, new)
    clean_leftovers(folder)
    assert get(folder) == new
    assert len(names(folder)) == (1 if after is None else 4)
    put(folder, last, after)
    assert get(folder) == last
    assert len(names(folder)) == (1 if after is None else 4)


@pytest.mark.parametrize("after", [None, 500])
def test_a_save_that_fails_after_its_instant_has_saved(
    tmp_path: Path, after: int | None
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    put(folder, sample(THREE, seed=1), 500)
    with faults.armed("save.after_rename=raise:EIO"), pytest.raises(FileError):
        put(folder, sample(THREE, seed=2), after)
    assert get(folder) == sample(THREE, seed=2)
    clean_leftovers(folder)
    assert get(folder) == sample(THREE, seed=2)
    assert len(names(folder)) == (1 if after is None else 4)


def test_a_reader_beside_a_saver_always_opens_one_whole_version(tmp_path: Path) -> None:
    versions = [sample(THREE, seed=seed) for seed in range(3)]
    kinds = [500, None, 500, 500, None, None, 1]
    folder = tmp_path / "m"
    folder.mkdir()
    put(folder, versions[0], 500)
    ended = threading.Event()

    def keep_saving() -> None:
        for n in range(60):
            put(folder, versions[n % 3], kinds[n % len(kinds)])
        ended.set()

    thread = threading.Thread(target=keep_saving)
    thread.start()
    seen = set()
    try:
        while not ended.is_set():
            seen.add(versions.index(get(folder)))
    finally:
        thread.join()
    assert seen == {0, 1, 2}


def test_savers_beside_each_other_leave_one_whole_version(tmp_path: Path) -> None:
    versions = [sample(THREE, seed=seed) for seed in range(3)]
    folder = tmp_path / "m"
    folder.mkdir()

    def keep_saving(number: int, kinds: list[int | None]) -> None:
        for n in range(12):
            put(folder, versions[number], kinds[n % len(kinds)])

    threads = [
        threading.Thread(target=keep_saving, args=(number, kinds))
        for number, kinds in enumerate(([500], [None, 500], [500, 1]))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert get(folder) in versions
    put(folder, versions[0], 500)
    clean_leftovers(folder)
    assert get(folder) == versions[0]
    assert len(names(folder)) == 4


def test_a_shard_whose_save_ends_after_it_was_listed_is_kept(tmp_path: Path) -> None:
    folder, log = tmp_path / "m", tmp_path / "log"
    put(folder, sample(THREE, seed=1), 500)
    artifact = sample(THREE, seed=2)
    old = shards(folder)
    thread = threading.Thread(target=put, args=(folder, artifact))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(faults.ENV_LOG, str(log))
        with faults.armed("save.before_rename=pause:30@4"):
            thread.start()
            eventually(lambda: faults.read_log(log), within_s=20)
            listed = [path for path in shards(folder) if path not in old]
            assert len(listed) == 3
            assert remove_unlocked(listed) == []
        thread.join()
    kept = remove_unlocked(listed, unless=lambda path: _is_named(path, folder / INDEX))
    assert kept == []
    assert get(folder) == artifact


def test_cleaning_leaves_alone_what_is_not_provably_ours(three: Path) -> None:
    (three / "model-00001-of-00009.safetensors").write_bytes(b"theirs")
    (three / "model-0a1b2c3d-00001-of-00001.safetensors").write_bytes(b"not sealed")
    shutil.copy(shards(three)[2], three / "model-0a1b2c3d-00001-of-00002.safetensors")
    before = names(three)
    removed = clean_leftovers(three)
    assert [path.name for path in removed] == [
        "model-0a1b2c3d-00001-of-00002.safetensors"
    ]
    assert set(before) - set(names(three)) == {
        "model-0a1b2c3d-00001-of-00002.safetensors"
    }
    assert get(three) == sample(THREE)


def test_beside_a_damaged_model_nothing_is_cleaned(three: Path) -> None:
    (three / INDEX).write_text("{")
    before = names(three)
    assert clean_leftovers(three) == []
    assert names(three) == before
