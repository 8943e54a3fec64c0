"""Artifacts on a device, from a program: an emulated device in a real cluster."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import dask
import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.dataplane.devices import own
from tensorcast_dask.exceptions import DataLost, Gone, Mismatch, UnsupportedPlatform
from tensorcast_dask.instance import attach
from tests.kit.eventually import eventually

MIB = 1 << 20


@pytest.fixture(scope="module")
def run_dir() -> Iterator[Path]:
    made = Path(mkdtemp(prefix="tc-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def cast(session: tc.Session) -> Iterator[tc.Session]:
    """The session, which holds nothing before and after each test."""
    yield session
    for artifact in session.list(all_versions=True):
        session.destroy(artifact.id)


@pytest.fixture(scope="module")
def cluster(run_dir: Path) -> Iterator[tc.LocalCluster]:
    settings = {"run-dir": str(run_dir), "device": "emulated:1x128MiB"}
    with tc.LocalCluster(
        1,
        processes=False,
        host_memory="128 MiB",
        device_memory="64 MiB",
        settings=settings,
    ) as made:
        yield made


@pytest.fixture(scope="module")
def session(cluster: tc.LocalCluster) -> Iterator[tc.Session]:
    with tc.connect(cluster) as made:
        yield made
        own.let_go()


def tensors(seed: int) -> dict[str, np.typing.NDArray[Any]]:
    rng = np.random.default_rng(seed)
    return {"w": rng.standard_normal((1000, 700)).astype(np.float32), "b": np.ones(3)}


def raw(made: dict[str, Any]) -> dict[str, bytes]:
    return {name: bytes(one.to_host()) for name, one in made.items()}


def bits(content: dict[str, np.typing.NDArray[Any]]) -> dict[str, bytes]:
    return {name: one.tobytes() for name, one in content.items()}


def store(cast: tc.Session) -> dict[str, Any]:
    """What the node's store says of itself; a process that lends is a node too."""
    states: dict[str, dict[str, Any]] = cast.debug_state()["stores"]
    return next(one for one in states.values() if "tiers" in one)


def on_device(cast: tc.Session) -> dict[str, int]:
    """What the node's device holds, as its store says now."""
    found: dict[str, int] = store(cast)["tiers"]["device"]
    return found


def tiers(cast: tc.Session, artifact: tc.Artifact) -> set[str]:
    copies = store(cast)["generations"][str(artifact.generation)]
    return {copy.partition(":")[0] for copy in copies}


def test_a_replica_is_brought_to_the_device_by_tier_and_by_name(
    cast: tc.Session,
) -> None:
    first, second = cast.put(tensors(1), "one"), cast.put(tensors(2), "two")
    moved = cast.prefetch(first, device="device", wait=True).result()
    assert (moved.location.tier, moved.moved_bytes) == ("device", first.nbytes)
    cast.prefetch(second, device="emulated:0", wait=True).result()
    (worker,) = cast.workers()
    eventually(lambda: cast.pool()["device"].replicas == 2, within_s=10.0)
    assert worker.device.startswith("EMU-")
    cast.prefetch(first, device="pinned", wait=True).result()
    got = first.tensor_dict(framework="numpy")
    assert np.array_equal(got["w"], tensors(1)["w"])


def test_a_result_on_a_device_is_private_and_outlives_what_it_came_from(
    cast: tc.Session,
) -> None:
    content = tensors(3)
    artifact = cast.put(content, "read")
    from_host = artifact.tensor_dict(device="emulated:0")
    assert tiers(cast, artifact) == {"host"}
    cast.prefetch(artifact, device="device", wait=True).result()
    from_slab = artifact.tensor_dict(device="device", names=["w"])
    view = artifact.view({"w": tc.s_[10:20, ::2]}).tensor_dict(device="emulated:0")
    cast.destroy(artifact)
    assert raw(from_host) == bits(content)
    assert raw(from_slab) == {"w": content["w"].tobytes()}
    assert raw(view) == {"w": content["w"][10:20, ::2].tobytes()}
    assert not from_slab["w"].shared
    with pytest.raises(TypeError, match="to_host"):
        np.asarray(from_host["w"])
    with pytest.raises(UnsupportedPlatform, match="raw"):
        cast.put(content, "read2").tensor_dict(device="emulated:0", framework="torch")
    eventually(lambda: not on_device(cast)["lingering_bytes"], within_s=10.0)


def test_a_shared_result_is_the_nodes_own_memory_and_goes_with_its_last_tensor(
    cast: tc.Session,
) -> None:
    content = tensors(4)
    artifact = cast.put(content, "shared")
    made = artifact.tensor_dict(device="emulated:0", share=True)
    assert tiers(cast, artifact) == {"host", "device"}
    used = on_device(cast)["used_bytes"]
    again = artifact.tensor_dict(device="emulated:0", share=True)
    assert made["w"].place.memory is again["w"].place.memory
    with pytest.raises(Mismatch, match="shared"):
        cast.bind(artifact, {"w": made["w"]})
    cast.destroy(artifact)
    assert on_device(cast)["lingering_bytes"] == used
    assert raw(made) == bits(content)
    del made
    assert raw(again) == bits(content)
    del again
    eventually(lambda: not on_device(cast)["lingering_bytes"], within_s=10.0)


def test_tensors_of_a_device_are_put_there_and_bound_from_there(
    cast: tc.Session,
) -> None:
    first, second = tensors(5), tensors(6)
    source = cast.put(first, "first").tensor_dict(device="emulated:0")
    artifact = cast.put(source, "on device")
    assert tiers(cast, artifact) == {"device"}
    assert artifact.tier == "device"
    assert artifact.nbytes == cast.artifact("first").nbytes
    target = cast.put(second, "second").tensor_dict(device="emulated:0")
    cast.bind(artifact, target)
    assert raw(target) == bits(first)
    got = artifact.tensor_dict(framework="numpy")
    assert {name: one.tobytes() for name, one in got.items()} == bits(first)
    small = cast.put(target["b"], "small")
    assert tiers(cast, small) == {"host"}
    assert small.tier == "host"
    assert bytes(small.tensor(framework="raw").data) == first["b"].tobytes()


def test_tensors_of_a_device_are_lent_by_handle(cast: tc.Session) -> None:
    first, second = tensors(8), tensors(9)
    mine = cast.put(first, "mine").tensor_dict(device="emulated:0")
    artifact = cast.register(mine, "lent")
    (place,) = artifact.locations()
    assert (place.tier, artifact.owner) == ("device", "caller")
    got = artifact.tensor_dict(device="emulated:0")
    assert raw(got) == bits(first)
    assert got["w"].place.memory is not mine["w"].place.memory
    with artifact.mutate():
        cast.bind(cast.put(second, "next"), mine)
    assert raw(got) == bits(first)
    cast.bind(artifact, got)
    assert raw(got) == bits(second)
    host = artifact.tensor_dict(framework="numpy")
    assert {name: one.tobytes() for name, one in host.items()} == bits(second)
    cast.release(artifact)
    with pytest.raises(Gone):
        artifact.tensor_dict(device="emulated:0")


def test_an_instance_lends_tensors_of_a_device_by_handle(
    cast: tc.Session, run_dir: Path
) -> None:
    first, second = tensors(10), tensors(11)
    mine = cast.put(first, "mine").tensor_dict(device="emulated:0")
    with attach("engine", run_dir=str(run_dir)) as instance:
        lent = instance.register(mine, "lent")
        artifact = cast.artifact("lent")
        (place,) = artifact.locations()
        assert (place.tier, artifact.owner) == ("device", "caller")
        got = artifact.tensor_dict(device="emulated:0")
        assert raw(got) == bits(first)
        assert got["w"].place.memory is not mine["w"].place.memory
        with lent.mutate():
            cast.bind(cast.put(second, "next"), mine)
        cast.bind(artifact, got)
        assert raw(got) == bits(second)
        began, goes_on = threading.Event(), threading.Event()

        @instance.function
        def wait() -> bool:
            began.set()
            return goes_on.wait(60)

        with ThreadPoolExecutor() as pool:
            call = pool.submit(cast.instance("engine").call, "wait")
            assert began.wait(60)
            host = artifact.tensor_dict(framework="numpy")  # the instance is not asked
            goes_on.set()
            assert call.result() is True
        assert {name: one.tobytes() for name, one in host.items()} == bits(second)
        lent.release()
        with pytest.raises(Gone):
            artifact.tensor_dict(device="emulated:0")


def test_memory_that_no_handle_opens_is_lent_as_a_copy_when_asked(
    cluster: tc.LocalCluster, run_dir: Path
) -> None:
    own.let_go()
    settings = {"device": "emulated:1x128MiB:pool", "run-dir": str(run_dir)}
    with (
        dask.config.set(tensorcast=settings),
        tc.connect(cluster.scheduler_address) as pooled,
    ):
        mine = pooled.put(tensors(1), "mine").tensor_dict(device="emulated:0")
        with pytest.raises(
            UnsupportedPlatform, match=r"take :pool off tensorcast\.device"
        ):
            pooled.register(mine, "lent")
        with attach("engine", run_dir=str(run_dir)) as instance:
            with pytest.raises(UnsupportedPlatform, match=":pool"):
                instance.register(mine, "by an instance")
            instance.register(mine, "by an instance", copy=True)
            copy = pooled.artifact("by an instance")
            assert copy.locations()[0].tier == "host"
            assert raw(copy.tensor_dict(device="emulated:0")) == bits(tensors(1))
        lent = pooled.register(mine, "lent", copy=True)
        assert raw(lent.tensor_dict(device="emulated:0")) == bits(tensors(1))
        pooled.release(lent)
        pooled.destroy("mine")
    own.let_go()


def test_the_death_of_the_device_process_loses_what_was_only_there(
    cast: tc.Session,
) -> None:
    kept = cast.put(tensors(7), "kept")
    source = kept.tensor_dict(device="emulated:0")
    lost = cast.put(source, "lost")
    cast.prefetch(kept, device="device", wait=True).result()
    os.kill(store(cast)["device_pid"], signal.SIGKILL)
    with pytest.raises(DataLost):
        eventually(lambda: lost.tensor_dict() is None, within_s=20.0)
    assert raw(kept.tensor_dict(device="emulated:0")) == bits(tensors(7))
    eventually(lambda: on_device(cast)["capacity_bytes"] == 64 * MIB, within_s=20.0)
    cast.prefetch(kept, device="device", wait=True).result()
    assert raw(kept.tensor_dict(device="emulated:0")) == bits(tensors(7))
