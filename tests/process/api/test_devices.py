"""Artifacts on a device, from a program: an emulated device in a real cluster."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.dataplane.devices import own
from tests.kit.eventually import eventually

MIB = 1 << 20


@pytest.fixture(scope="module")
def run_dir() -> Iterator[Path]:
    made = Path(mkdtemp(prefix="tc-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def cast(run_dir: Path) -> Iterator[tc.Session]:
    settings = {"run-dir": str(run_dir), "device": "emulated:1x128MiB"}
    with (
        tc.LocalCluster(
            1,
            processes=False,
            host_memory="128 MiB",
            device_memory="64 MiB",
            settings=settings,
        ) as cluster,
        tc.connect(cluster) as session,
    ):
        yield session
        own.let_go()


def tensors(seed: int) -> dict[str, np.typing.NDArray[Any]]:
    rng = np.random.default_rng(seed)
    return {"w": rng.standard_normal((1000, 700)).astype(np.float32), "b": np.ones(3)}


def tiers(cast: tc.Session, artifact: tc.Artifact) -> set[str]:
    rows = cast.sql(
        f"SELECT tier FROM replicas WHERE generation = {artifact.generation}"
    )
    return {row[0] for row in rows.rows}


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
