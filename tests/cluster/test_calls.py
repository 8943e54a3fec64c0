"""What calls say for themselves: notes, refusals, and what a stranger reads."""

from __future__ import annotations

import pydoc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import tensorcast_dask as tc
from tensorcast_dask.exceptions import (
    AlreadyExists,
    CatalogUnavailable,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    UnsupportedDtype,
    UnsupportedPlatform,
)
from tensorcast_dask.tensors.quantities import human_bytes
from tests.kit.local import stores_in

MODEL: dict[str, np.ndarray] = {
    "w": np.arange(300, dtype=np.float32),
    "b": np.ones(7, np.float16),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tc.LocalCluster]:
    run_dir = tmp_path_factory.mktemp("tc") / "r"
    with tc.LocalCluster(
        1,
        processes=False,
        host_memory="32 MiB",
        settings={"run-dir": str(run_dir)},
    ) as made:
        yield made


@pytest.fixture
def cast(cluster: tc.LocalCluster) -> Iterator[tc.Session]:
    with tc.connect(cluster) as session:
        yield session
        for artifact in session.list(all_versions=True):
            session.destroy(artifact.id)


def test_a_file_that_the_id_holds_already_is_the_artifact_that_is_there(
    cast: tc.Session, tmp_path: Path
) -> None:
    path = tmp_path / "m.safetensors"
    save_file(MODEL, path)
    first = cast.load(path, "twice").result()
    again = cast.load(path, "twice")
    assert again.result() == first
    assert "already" in again.note
    save_file({**MODEL, "b": np.zeros(7, np.float16)}, path)
    with pytest.raises(AlreadyExists):
        cast.load(path, "twice")


def test_fewer_replicas_than_asked_for_are_said(
    cast: tc.Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = cast.put(MODEL, "two", replicas=2)
    assert "1 of 2 hosts" in artifact.degraded
    assert "degraded" in repr(artifact)
    assert "1 of 2 hosts" in caplog.text
    assert "1 of 2 hosts" in "\n".join(cast.explain(artifact))
    artifact.save(tmp_path / "two.safetensors")
    loading = cast.load(tmp_path / "two.safetensors", "three", replicas=2)
    assert "1 of 2 hosts" in loading.note


def test_an_operation_tells_how_far_it_came_and_what_the_catalog_did(
    cast: tc.Session, tmp_path: Path
) -> None:
    putting = cast.put(MODEL, "handle", wait=False)
    artifact = putting.result()
    loading = cast.load(artifact.save(tmp_path / "m").result().path, "again")
    bringing = cast.prefetch(artifact, worker=cast.workers()[0], wait=True)
    for operation, told in ((putting, "committed"), (loading, "file"), (bringing, "")):
        state = operation.progress()
        assert state.done_bytes == state.total_bytes == artifact.nbytes
        assert told in "\n".join(operation.explain())
        assert operation.explain()
    with pytest.raises(AttributeError, match=r"tensor_dict.*result\(\)"):
        loading.tensor_dict()
    assert not cast.destroy("again").note
    assert "nothing was there" in repr(cast.destroy("again"))


def test_what_its_caller_cancels_has_ended_and_says_so(cast: tc.Session) -> None:
    async def scene() -> tc.Operation[tc.Artifact]:
        putting: tc.Operation[tc.Artifact] = await cast.put(MODEL, "no", wait=False)
        await putting.cancel()
        return putting

    putting = cast.client.sync(scene)
    assert putting.status == "cancelled"
    with pytest.raises(DeadlineExceeded, match="cancelled by its caller") as ended:
        putting.result()
    assert ended.value.data == {"cancelled": True}
    assert not cast.exists("no")


def test_a_forgotten_await_is_called_by_the_name_of_the_call(cast: tc.Session) -> None:
    async def forgets() -> None:
        cast.exists("x")

    with pytest.warns(RuntimeWarning, match="'exists' was never awaited"):
        cast.client.sync(forgets)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (torch.nn.Linear(2, 2), "state_dict"),
        ({"w": np.ones(3), "step": 7}, "asarray"),
        ({"w": {"inner": np.ones(3)}}, "flat mapping"),
        ("an/id", "id second"),
    ],
)
def test_who_puts_what_is_no_tensor_is_told_what_to_give(
    cast: tc.Session, given: object, hint: str
) -> None:
    with pytest.raises(UnsupportedDtype, match=hint):
        cast.put(given, "an/id")


def test_workers_are_waited_for_until_the_deadline(cast: tc.Session) -> None:
    assert cast.wait_for_workers() == cast.workers()
    with pytest.raises(DeadlineExceeded, match="1 of 2 workers"):
        cast.wait_for_workers(2, deadline=0)


def test_a_plan_is_shown_with_the_names_of_workers(cast: tc.Session) -> None:
    (worker,) = cast.workers()
    plan = cast.plan()
    plan.on_worker(worker).noop(name="rest")
    assert plan.visualize() == f"rest: noop on {worker.name}"
    with pytest.raises(UnsupportedPlatform, match="install"):
        plan.visualize("plan.of-no-kind")


def test_what_has_no_name_is_not_explained(cast: tc.Session) -> None:
    with pytest.raises(NotFound):
        cast.explain("nobody/made/this")
    cast.put(MODEL, "known")
    assert cast.explain("known")


def test_a_missing_folder_is_named_and_not_the_file(
    cast: tc.Session, tmp_path: Path
) -> None:
    artifact = cast.put(MODEL, "saved")
    with pytest.raises(NotFound, match=f"no folder {tmp_path / 'missing'} "):
        artifact.save(tmp_path / "missing" / "m.safetensors")


def test_a_view_is_saved_in_shards_too_and_a_slash_makes_a_folder(
    cast: tc.Session, tmp_path: Path
) -> None:
    model = {name: np.arange(8.0) for name in "ab"} | {"c": np.arange(3.0)}
    artifact = cast.put(model, "sharded")
    for saved in (artifact, artifact.view({name: slice(None) for name in "ab"})):
        folder = tmp_path / str(saved.info.tensors)
        saved.save(f"{folder}/", max_shard_bytes=64)
        assert len(list(folder.glob("*.safetensors"))) == saved.info.tensors
        saved.save(f"{folder}-one/")
        assert (folder.with_name(f"{folder.name}-one") / "model.safetensors").exists()
        saved.save(f"{folder}-text/", max_shard_bytes="0.1 kB")
        shards = folder.with_name(f"{folder.name}-text").glob("*.safetensors")
        assert len(list(shards)) == 2
        for path, length in (("", 0), (tmp_path, -1), (tmp_path, "one")):
            with pytest.raises(InvalidArgument):
                saved.save(path, max_shard_bytes=length)


def test_a_handle_whose_session_was_closed_says_so(cluster: tc.LocalCluster) -> None:
    with tc.connect(cluster) as session:
        artifact = session.put(MODEL, "left")
    with pytest.raises(CatalogUnavailable, match="session of this artifact was closed"):
        artifact.tensor_dict()
    with tc.connect(cluster) as session:  # the newest session serves it
        assert set(artifact.tensor_dict(framework="numpy")) == set(MODEL)
        session.destroy("left")


def test_nobody_meets_the_parts_of_a_session() -> None:
    page = pydoc.plain(pydoc.render_doc(tc.Session))
    for part in ("Making", "Finding", "Reading", "Placing", "Looking", "Calls"):
        assert part not in page
    with pytest.raises(TypeError, match=r"^Session\.put\(\)"):
        tc.Session.put(object())  # type: ignore[arg-type,call-arg]


def test_a_worker_logs_its_store_its_budget_and_its_lowered_limit(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path_factory.mktemp("tc") / "r"
    caplog.set_level("INFO", "distributed.worker")
    with tc.LocalCluster(
        1,
        processes=False,
        silence_logs=False,
        host_memory="100 TiB",
        settings={"run-dir": str(run_dir)},
    ) as cluster:
        (store,) = stores_in(run_dir)
        with tc.connect(cluster) as cast:
            capacity_bytes = cast.pool()["host"].capacity_bytes
            assert 0 < capacity_bytes < 100 << 40
    told = [line.getMessage() for line in caplog.records]
    (begun,) = [line for line in told if line.startswith(f"Store {store.node} started")]
    assert human_bytes(capacity_bytes) in begun
    assert str(run_dir) in begun
    assert any(line.startswith(f"Store {store.node} released") for line in told)
    assert any("lowered" in line for line in told)
    (warned,) = [line for line in told if "tensorcast.node.host-memory" in line]
    assert str(100 << 40) in warned
