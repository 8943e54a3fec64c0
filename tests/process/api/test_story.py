"""What a program sees, on a cluster of real processes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.exceptions import (
    AlreadyExists,
    CapacityError,
    Gone,
    Incomplete,
    InvalidArgument,
    Mismatch,
    NotFound,
    UnsupportedPlatform,
)

pytestmark = pytest.mark.process


def big(seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "w": rng.standard_normal((1024, 1024)).astype(np.float32),
        "b": rng.integers(0, 255, 77, np.uint8),
    }


def small(seed: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).standard_normal(100)}


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return list(left) == list(right) and all(
        left[k].dtype == right[k].dtype and left[k].tobytes() == right[k].tobytes()
        for k in left
    )


@pytest.mark.parametrize("make", [big, small])
def test_what_was_put_comes_back_bit_for_bit(cast: tc.Session, make: object) -> None:
    tensors = make()  # type: ignore[operator]
    artifact = cast.put(tensors, "a/b")
    assert artifact.version >= 1
    assert same(artifact.tensor_dict(framework="numpy"), tensors)
    assert same(cast.artifact("a/b").tensor_dict(framework="numpy"), tensors)
    meta = artifact.tensor_meta()
    assert {k: (s.shape, s.dtype.name) for k, s in meta.items()} == {
        k: (t.shape, str(t.dtype)) for k, t in tensors.items()
    }


@pytest.mark.parametrize("make", [big, small])
def test_a_readers_edit_stays_its_own(cast: tc.Session, make: object) -> None:
    tensors = make()  # type: ignore[operator]
    artifact = cast.put(tensors, "mine")
    read = artifact.tensor_dict(framework="numpy")
    for tensor in read.values():
        tensor[...] = 7
    assert same(artifact.tensor_dict(framework="numpy"), tensors)


def test_a_taken_id_is_refused_and_equal_content_is_the_same_artifact(
    cast: tc.Session,
) -> None:
    artifact = cast.put(big(1), "taken")
    assert cast.put(big(1), "taken").generation == artifact.generation
    with pytest.raises(AlreadyExists):
        cast.put(big(2), "taken")
    assert same(cast.artifact("taken").tensor_dict(framework="numpy"), big(1))


def test_versions_show_only_when_published(cast: tc.Session) -> None:
    first = cast.put(big(1), "v")
    with pytest.raises(NotFound):
        cast.latest("v")
    first.publish()
    second = cast.put(big(2), "v", version="next")
    assert second.version == 2
    assert cast.latest("v").version == 1
    with pytest.raises(Mismatch):
        second.publish(7)
    second.publish()
    assert cast.latest("v").version == 2
    assert cast.artifact("v", version=1).version == 1
    cast.destroy(second)
    assert cast.put(big(3), "v", version="next").version == 3


def test_destroy_is_final_and_readers_keep_what_they_hold(cast: tc.Session) -> None:
    artifact = cast.put(big(1), "gone")
    held = artifact.tensor_dict(framework="numpy")
    cast.destroy("gone")
    assert same(held, big(1))
    with pytest.raises(Gone, match="'gone' v1 is gone"):
        artifact.tensor_dict()
    assert not cast.exists("gone")
    again = cast.put(big(2), "gone")
    assert same(again.tensor_dict(framework="numpy"), big(2))
    assert same(held, big(1))


def test_a_view_shows_what_the_slice_shows(cast: tc.Session) -> None:
    tensors = big(1)
    artifact = cast.put(tensors, "base")
    head = artifact.view({"w": tc.s_[:10, ::2]}, name="base/head")
    assert np.array_equal(head.tensor(framework="numpy"), tensors["w"][:10, ::2])
    assert cast.artifact("base/head").generation == artifact.generation
    assert artifact.view(slice(0, 3), "b").tensor(framework="numpy").tolist() == (
        tensors["b"][:3].tolist()
    )


def test_a_replica_on_the_same_host_shares_the_memory(cast: tc.Session) -> None:
    artifact = cast.put(big(1), "two")
    held = {place.card.node for place in artifact.locations()}
    target = next(worker for worker in cast.workers() if worker.node not in held)
    moved = artifact.replicate(target).result()
    assert moved.via == "shm"
    assert {place.card.node for place in artifact.locations()} == held | {target.node}
    cast.release(artifact, worker=target)
    assert {place.card.node for place in artifact.locations()} == held
    with pytest.raises(Mismatch):
        cast.release(artifact, worker=next(iter(held)))


def test_a_draft_is_built_in_place_and_commit_copies_nothing(cast: tc.Session) -> None:
    tensors = big(5)
    draft = cast.create({k: (t.shape, t.dtype) for k, t in tensors.items()}, "draft")
    own = draft.tensors(framework="numpy")
    for name, tensor in tensors.items():
        own[name][...] = tensor
    address = own["w"].ctypes.data
    artifact = draft.commit()
    assert own["w"].ctypes.data == address
    own["w"][...] = 0
    assert same(artifact.tensor_dict(framework="numpy"), tensors)


def test_a_small_draft_is_built_and_committed_like_a_large_one(
    cast: tc.Session,
) -> None:
    with cast.create(
        {"a": ((3,), "float32"), "b": (2, np.int64)}, "draft/small"
    ) as draft:
        own = draft.tensors(framework="numpy")
        own["a"][...] = 1.5
        own["b"][...] = 7
    own["a"][...] = 0
    got = cast.artifact("draft/small").tensor_dict(framework="numpy")
    assert got["a"].tolist() == [1.5] * 3
    assert got["b"].tolist() == [7, 7]


def test_a_registered_tensor_is_served_without_a_copy_and_mutates_in_its_fence(
    cast: tc.Session,
) -> None:
    tensors = big(1)
    artifact = cast.register(tensors, "lent")
    assert same(artifact.tensor_dict(framework="numpy"), tensors)
    with artifact.mutate():
        tensors["w"][...] = 3
    assert (artifact.tensor_dict(framework="numpy")["w"] == 3).all()
    artifact.release()
    with pytest.raises(Gone):
        artifact.tensor_dict()


def test_what_is_published_of_lent_memory_is_of_one_moment(cast: tc.Session) -> None:
    """The owner changes it all the while, and several connections read it."""
    tensor = np.zeros((6, 2 << 20), np.float32)
    artifact = cast.register({"w": tensor}, "moving")
    over = threading.Event()

    def change() -> None:
        count = 0
        while not over.is_set():
            count += 1
            with artifact.mutate():
                tensor[...] = count
            over.wait(0.002 * (count % 9))

    owner = threading.Thread(target=change)
    owner.start()
    try:
        for _ in range(12):
            try:
                published = cast.publish(artifact).result()
            except Incomplete:
                continue
            found = published.tensor(framework="numpy")
            assert (found == found[0, 0]).all()
            cast.destroy(published)
    finally:
        over.set()
        owner.join()
    assert (cast.publish(artifact).result().tensor(framework="numpy") == tensor).all()


def test_a_file_is_loaded_and_saved_as_safetensors_reads_it(
    cast: tc.Session, tmp_path: object
) -> None:
    from safetensors.numpy import load_file, save_file

    path = tmp_path / "m.safetensors"  # type: ignore[operator]
    tensors = big(3)
    save_file(tensors, path)
    artifact = cast.load(path, "file").result()
    got = artifact.tensor_dict(framework="numpy")
    assert {k: t.tobytes() for k, t in got.items()} == {
        k: t.tobytes() for k, t in tensors.items()
    }
    artifact.save(tmp_path / "out.safetensors")  # type: ignore[operator]
    back = load_file(tmp_path / "out.safetensors")  # type: ignore[operator]
    assert {k: t.tobytes() for k, t in back.items()} == {
        k: t.tobytes() for k, t in tensors.items()
    }


def total(artifact: tc.Artifact) -> float:
    return float(artifact.tensor_dict(framework="numpy")["w"].sum())


def test_a_task_gets_a_handle_whose_tensors_are_beside_it(cast: tc.Session) -> None:
    tensors = big(1)
    artifact = cast.put(tensors, "task")
    expected = float(tensors["w"].sum())
    assert cast.client.submit(total, artifact).result(timeout=20) == expected
    assert cast.submit(total, artifact).result(timeout=20) == expected


def make_array(n: int) -> np.ndarray:
    return np.full((n, 1000), 3, np.float32)


def test_dask_gathers_and_scatters_tensors_that_numpy_lacks(cast: tc.Session) -> None:
    torch = pytest.importorskip("torch")
    value = torch.arange(1000).to(torch.bfloat16)
    doubled = cast.client.submit(torch.add, cast.client.scatter(value), value)
    assert torch.equal(doubled.result(timeout=20), value + value)


def test_a_dask_future_is_put_where_its_result_lies(cast: tc.Session) -> None:
    future = cast.client.submit(make_array, 1000, pure=False)
    artifact = cast.put(future, "future")
    assert (artifact.tensor(framework="numpy") == 3).all()


def test_sql_list_and_explain_tell_of_an_artifact(cast: tc.Session) -> None:
    artifact = cast.put(big(1), "sql/a", labels={"kind": "weights"})
    cast.put(small(1), "sql/b")
    assert [a.id for a in cast.list("sql/")] == ["sql/a", "sql/b"]
    assert [a.id for a in cast.list(labels={"kind": "weights"})] == ["sql/a"]
    rows = cast.sql(
        "SELECT id, version FROM versions WHERE id LIKE 'sql/%' ORDER BY id"
    ).rows
    assert rows == (("sql/a", 1), ("sql/b", 1))
    assert cast.explain(artifact)


def test_a_recycled_segment_shows_nothing_of_its_former_content(
    cast: tc.Session,
) -> None:
    """The second put lands in pages of the first: read by the store from this process."""
    gaps = {f"t{n}": np.full(1000 + n, 200 + n % 50, np.uint8) for n in range(2000)}
    other = {f"t{n}": np.full(999 + n, n % 50, np.uint8) for n in range(2000)}
    for name, content in (("one", gaps), ("two", other), ("three", gaps)):
        artifact = cast.put(content, f"recycled/{name}")
        got = artifact.tensor_dict(framework="raw")
        assert same(artifact.tensor_dict(framework="numpy"), content)
        held = {k: bytes(raw.data) for k, raw in got.items()}
        assert held == {k: t.tobytes() for k, t in content.items()}
        del got
        cast.destroy(artifact)


def test_what_is_not_flat_is_stored_by_its_values_into_fresh_and_used_pages(
    cast: tc.Session,
) -> None:
    rng = np.random.default_rng(4)
    base = rng.standard_normal((1500, 1000))
    tensors = {
        "turned": base.T,
        "every": base[::3, ::2],
        "back": base[::-1],
        "big": base,
    }
    for _ in range(3):
        artifact = cast.put(tensors, "strided")
        got = artifact.tensor_dict(framework="numpy")
        assert all(np.array_equal(got[k], tensors[k]) for k in tensors)
        del got
        cast.destroy("strided")


@pytest.mark.parametrize(
    ("device", "kind", "missing"),
    [
        ("device", CapacityError, "device-memory"),
        ("pinned", CapacityError, "device-memory"),
        ("cuda:0", UnsupportedPlatform, "cupy|driver|CUDA"),
        ("emulated:0", UnsupportedPlatform, "tensorcast.device"),
        ("gpu", InvalidArgument, "cuda:0"),
    ],
)
def test_a_device_that_is_not_there_is_refused_and_the_message_says_what_is_missing(
    cast: tc.Session, device: str, kind: type[Exception], missing: str
) -> None:
    artifact = cast.put(small(1), "tier")
    with pytest.raises(kind, match=missing):
        cast.prefetch(artifact, device=device, wait=True).result()
    if device != "pinned":  # that is host memory, which every result lies in
        with pytest.raises(kind, match=missing):
            artifact.tensor_dict(device=device)
