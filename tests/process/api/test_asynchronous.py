"""Sessions in asynchronous programs, in one process, and their ends."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from distributed import Client

import tensorcast_dask as tc
from tensorcast_dask.exceptions import (
    AlreadyExists,
    CatalogUnavailable,
    DeadlineExceeded,
    Gone,
    Incomplete,
    InvalidArgument,
    InvalidName,
    NotFound,
    RequestError,
    TensorCastError,
    UnsupportedDtype,
)
from tests.kit.eventually import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tc.LocalCluster]:
    run = tmp_path_factory.mktemp("run")
    run.chmod(0o700)
    with (
        pytest.MonkeyPatch.context() as patch,
        tc.LocalCluster(
            1, processes=False, host_memory="256 MiB", settings={"run-dir": str(run)}
        ) as made,
    ):
        patch.setenv("TENSORCAST_RUN_DIR", str(run))
        yield made


@pytest.fixture
def cast(cluster: tc.LocalCluster) -> Iterator[tc.Session]:
    with tc.connect(cluster) as session:
        yield session
        for artifact in session.list(all_versions=True):
            session.destroy(artifact.id)


def test_every_call_is_awaited_in_an_asynchronous_program(
    cluster: tc.LocalCluster,
) -> None:
    async def program() -> None:
        async with (
            Client(cluster.scheduler_address, asynchronous=True) as client,
            await tc.connect(client) as cast,
        ):
            tensors = {"x": np.arange(500_000.0)}
            artifact = await cast.put(tensors, "async")
            assert (
                (await artifact.tensor_dict(framework="numpy"))["x"] == tensors["x"]
            ).all()
            operation = await artifact.publish()
            assert operation.done()
            assert (await operation).generation == artifact.generation
            assert (await cast.latest("async")).version == artifact.version
            many = await asyncio.gather(
                *(cast.put({"x": np.full(10, n)}, f"async/{n}") for n in range(50))
            )
            got = await asyncio.gather(*(a.tensor(framework="numpy") for a in many))
            assert [int(x[0]) for x in got] == list(range(50))
            await cast.destroy("async")
            with pytest.raises(Gone):
                await artifact.tensor_dict()

    asyncio.run(program())


@pytest.mark.parametrize("bad", [-1, math.nan, "3", True, [1]])
def test_a_deadline_that_is_none_is_refused_before_anything_is_done(
    cast: tc.Session, bad: Any
) -> None:
    with pytest.raises(InvalidArgument):
        cast.put({"x": np.zeros(3)}, "never", deadline=bad)
    with pytest.raises(ValueError, match="deadline"):
        cast.artifact("never", deadline=bad)
    assert not cast.exists("never")


@pytest.mark.parametrize("short", [0, 0.0, 1e-9, 0.05])
def test_a_look_that_finds_nothing_comes_back_at_once(
    cast: tc.Session, short: float
) -> None:
    start_s = time.monotonic()
    with pytest.raises((NotFound, DeadlineExceeded)):
        cast.artifact("not/there", deadline=short)
    assert time.monotonic() - start_s < 5


def test_an_artifact_that_is_being_made_is_incomplete_and_given_back_on_abort(
    cast: tc.Session,
) -> None:
    draft = cast.create({"x": ((500_000,), "float32")}, "half")
    with pytest.raises(Incomplete):
        cast.artifact("half", deadline=0)
    with pytest.raises(AlreadyExists):
        cast.put({"x": np.zeros(3)}, "half")
    draft.abort()
    assert cast.put({"x": np.zeros(3)}, "half").version == 1
    draft.abort()


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ({"x": np.array([object()])}, UnsupportedDtype),
        ({"x": [1, 2, 3]}, UnsupportedDtype),
        ({"": np.zeros(3)}, InvalidName),
        ({1: np.zeros(3)}, InvalidName),
        ("text", UnsupportedDtype),
        (None, UnsupportedDtype),
    ],
)
def test_what_cannot_be_stored_is_refused_and_changes_nothing(
    cast: tc.Session, tensors: Any, error: type[TensorCastError]
) -> None:
    before = cast.debug_state()["catalog"]["seq"]
    with pytest.raises(error):
        cast.put(tensors, "refused")
    assert not cast.exists("refused")
    assert cast.debug_state()["catalog"]["seq"] == before


@pytest.mark.parametrize(
    "name", ["", " a", "a\n", "x" * 513, "\ud800", 7, None, "a\x00b"]
)
def test_an_illegal_id_is_refused_by_every_call(cast: tc.Session, name: Any) -> None:
    for call in (
        lambda: cast.put({"x": np.zeros(3)}, name),
        lambda: cast.artifact(name),
        lambda: cast.latest(name),
        lambda: cast.destroy(name),
        lambda: cast.create({"x": ((3,), "float32")}, name),
    ):
        with pytest.raises(InvalidName):
            call()


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2"])
def test_replicas_and_versions_that_are_no_counts_are_refused(
    cast: tc.Session, bad: Any
) -> None:
    with pytest.raises(InvalidArgument):
        cast.put({"x": np.zeros(3)}, "count", replicas=bad)
    with pytest.raises(InvalidArgument):
        cast.put({"x": np.zeros(3)}, "count", version=bad)
    assert not cast.exists("count")


def test_an_empty_artifact_and_odd_shapes_come_back(cast: tc.Session) -> None:
    tensors = {
        "scalar": np.array(3.5),
        "none": np.zeros((0,)),
        "flat": np.zeros((2, 0), np.int8),
        "one": np.ones((1, 1), np.float16),
        "bool": np.array([True, False]),
    }
    got = cast.put(tensors, "odd").tensor_dict(framework="numpy")
    assert {k: (t.shape, t.dtype) for k, t in got.items()} == {
        k: (t.shape, t.dtype) for k, t in tensors.items()
    }
    assert all(got[k].tobytes() == tensors[k].tobytes() for k in tensors)
    assert cast.put({}, "empty").tensor_dict(framework="numpy") == {}


def test_a_view_that_is_spelt_in_another_way_is_the_same_artifact(
    cast: tc.Session,
) -> None:
    base = cast.put({"x": np.arange(100.0).reshape(10, 10)}, "v/base")
    first = base.view({"x": tc.s_[:5]})
    for key in (tc.s_[0:5], tc.s_[-10:5, :], tc.s_[:5, ...], tc.s_[0:5:1]):
        assert base.view({"x": key}) == first
    chained = base.view({"x": tc.s_[:8]}).view({"x": tc.s_[:5]})
    assert chained.id == first.id
    named = base.view({"x": tc.s_[::-1]}, name="v/turned")
    assert base.view({"x": tc.s_[9::-1]}, name="v/turned") == named
    with pytest.raises(AlreadyExists):
        base.view({"x": tc.s_[8::-1]}, name="v/turned")
    assert base.view({"x": tc.s_[3:3]}).id == base.view({"x": tc.s_[99:]}).id
    assert named.tensor(framework="numpy")[0, 0] == 90


def test_values_that_no_message_can_carry_are_refused_and_the_session_goes_on(
    cast: tc.Session,
) -> None:
    base = cast.put(np.arange(3), "odd/base")
    for call in (
        lambda: cast.unpin(base, "x"),  # type: ignore[arg-type]
        lambda: cast.save(base, "/nowhere/x.safetensors", max_shard_bytes=5e9),  # type: ignore[arg-type]
        lambda: cast.artifact("odd/base", version=1 << 70),
        lambda: cast.alias("odd/alias", base, expect=1 << 70),
        lambda: cast.put(np.arange(3), "odd/put", replicas=1 << 70),
        lambda: cast.put(np.arange(3), "odd/put", labels=["a"]),  # type: ignore[arg-type]
        lambda: cast.sql("SELECT '\ud800'"),
        lambda: cast.pin(base, ttl=-(10**400)),
    ):
        with pytest.raises(RequestError):
            call()
    cast.unpin(base, cast.pin(base, ttl=10**400).pin)
    assert cast.artifact("odd/base") == base


def test_short_calls_take_a_deadline_too(cast: tc.Session) -> None:
    base = cast.put(np.arange(3), "short/base")
    base.publish(deadline=20)
    base.view(tc.s_[:1], deadline=20)
    cast.unpin(base, cast.pin(base, ttl=9, deadline=20).pin, deadline=20)
    for call in (base.publish, lambda **late: base.view(tc.s_[:1], **late)):
        with pytest.raises(InvalidArgument, match="deadline"):
            call(deadline=-1)
    with pytest.raises(InvalidArgument, match="deadline"):
        cast.unpin(base, deadline=-1)


def test_an_alias_may_be_told_by_the_id_of_what_it_shall_mean(cast: tc.Session) -> None:
    base = cast.put(np.arange(3), "al/base")
    assert cast.alias("al/by-id", "al/base").info.generation == base.generation
    with pytest.raises(NotFound):
        cast.alias("al/by-id", "al/nobody")
    cast.alias("al/by-id", None)


def test_fences_of_one_owner_nest_and_overlap(cast: tc.Session) -> None:
    memory = np.zeros(4)
    lent = cast.register({"x": memory}, "fence/nested", verify=True)
    with lent.mutate():
        with lent.mutate():
            memory[:2] = 1
        with pytest.raises((Incomplete, DeadlineExceeded)):
            lent.tensor_dict(framework="numpy", deadline=0.2)
        memory[2:] = 1
    read = lent.tensor_dict(framework="numpy")
    assert np.array_equal(read["x"], np.ones(4))
    lent.release()


def test_an_alias_moves_by_compare_and_set(cast: tc.Session) -> None:
    first = cast.put({"x": np.zeros(3)}, "al/a")
    second = cast.put({"x": np.ones(3)}, "al/b")
    state = cast.alias("al/now", first, expect=0)
    assert cast.artifact("al/now").generation == first.generation
    with pytest.raises(RequestError):
        cast.alias("al/now", second, expect=0)
    moved = cast.alias("al/now", second, expect=state.alias_generation)
    assert moved.alias_generation > state.alias_generation
    assert cast.artifact("al/now").generation == second.generation
    cast.alias("al/now", None)
    with pytest.raises(NotFound):
        cast.artifact("al/now")


def test_a_closed_session_says_so_and_closes_twice(cluster: tc.LocalCluster) -> None:
    session = tc.connect(cluster)
    artifact = session.put({"x": np.zeros(400_000)}, "closed")
    held = artifact.tensor(framework="numpy")
    session.close()
    session.close()
    assert (held == 0).all()
    with pytest.raises(TensorCastError):
        session.put({"x": np.zeros(3)}, "more")
    with tc.connect(cluster) as again:
        again.destroy("closed")


def test_no_scheduler_is_said_within_the_deadline() -> None:
    with pytest.raises(CatalogUnavailable):
        tc.connect("tcp://127.0.0.1:1", deadline=1)


def read_in_child(artifact: tc.Artifact, held: np.ndarray, answers: object) -> None:
    told = [float(held.sum())]
    try:
        artifact.tensor_dict()
    except TensorCastError as error:
        told.append(error.message)  # type: ignore[arg-type]
    answers.put(told)  # type: ignore[attr-defined]


def call_in_child(cast: tc.Session, cluster: tc.LocalCluster, answers: Any) -> None:
    base = cast.artifact
    for call in (
        lambda: base("forked"),
        lambda: cast.put(np.ones(3), "of-a-child"),
        lambda: cast.create({"x": ((3,), "float32")}, "of-a-child"),
        lambda: cast.register(np.ones(3), "of-a-child"),
        lambda: cast.destroy("forked"),
        lambda: cast.sql("SELECT 1"),
        cast.debug_state,
        lambda: tc.connect(cluster),
    ):
        try:
            call()
        except TensorCastError as error:
            answers.put((error.kind, "spawn" in error.message))
        else:
            answers.put(("nothing", False))
    cast.close()
    cluster.close()
    answers.put(("closed", True))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_a_forked_child_every_call_is_told_of_spawn_and_closing_closes_nothing(
    cast: tc.Session, cluster: tc.LocalCluster
) -> None:
    kept = cast.put({"x": np.ones(3)}, "forked")
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=call_in_child, args=(cast, cluster, answers))
    child.start()
    try:
        told = [answers.get(timeout=20) for _ in range(9)]
        child.join(20)
        assert not child.is_alive()
    finally:
        child.kill()
        child.join()
    assert told == [("UnsupportedPlatform", True)] * 8 + [("closed", True)]
    assert (kept.tensor(framework="numpy") == 1).all()
    assert [found.id for found in cast.list()] == ["forked"]


def test_a_closed_session_leaves_no_thread_and_no_descriptor(
    cluster: tc.LocalCluster,
) -> None:
    def things() -> tuple[int, int]:
        return threading.active_count(), len([*Path("/proc/self/fd").iterdir()])

    def session() -> None:
        with tc.connect(cluster.scheduler_address) as cast:
            cast.put(np.ones(3), "of-a-session")
            cast.destroy("of-a-session")

    session()
    before = things()
    for _ in range(3):
        session()
    eventually(lambda: things() <= before, within_s=10)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_keeps_what_was_mapped_and_is_told_of_spawn(
    cast: tc.Session,
) -> None:
    artifact = cast.put({"x": np.ones(400_000)}, "forked")
    held = artifact.tensor(framework="numpy")
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=read_in_child, args=(artifact, held, answers))
    child.start()
    total, message = answers.get()
    child.join(20)
    assert total == 400_000
    assert "spawn" in message
    assert (artifact.tensor(framework="numpy") == 1).all()
