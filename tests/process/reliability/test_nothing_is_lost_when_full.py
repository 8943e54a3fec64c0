"""P38: memory and disk are full."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.exceptions import CapacityError
from tests.kit.baseline import baseline
from tests.kit.eventually import eventually

SIZE = 2 << 20


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 255, SIZE, np.uint8)


def same(artifact: tc.Artifact, number: int) -> bool:
    got = artifact.tensor(framework="numpy", deadline=60)
    return bool(np.array_equal(got, content(number)))


def put_until_refused(cast: tc.Session, numbers: Iterable[int]) -> None:
    for number in numbers:
        cast.put({"x": content(number)}, f"full/{number}")


@pytest.mark.parametrize("strangers", [False, True], ids=["one host", "strangers"])
def test_p38_a_full_node_refuses_puts_and_keeps_all_that_it_accepted(
    tmp_path_factory: pytest.TempPathFactory, strangers: bool
) -> None:
    run = tmp_path_factory.mktemp("run")  # short, since sockets live in it
    run.chmod(0o700)
    settings = {"run-dir": str(run), "node": {"disk-memory": "32 MiB"}}
    with (
        tc.LocalCluster(
            1,
            host_memory="64 MiB",
            disk=True,
            separate_hosts=strangers,
            settings=settings,
        ) as cluster,
        tc.connect(cluster) as cast,
    ):
        eventually(lambda: len(cast.workers()) == 1, within_s=60)
        with baseline(cast):
            accepted = itertools.count()
            with pytest.raises(CapacityError) as refused:
                put_until_refused(cast, accepted)
            count = next(accepted) - 1
            assert {"tier", "needed", "free"} <= refused.value.data.keys()
            assert count > 32  # more than memory alone, which holds 32
            assert all(same(cast.artifact(f"full/{n}"), n) for n in range(count))
            cast.destroy("full/0")
            assert same(cast.put({"x": content(7)}, "again"), 7)
            for artifact in cast.list():
                cast.destroy(artifact.id)
