"""Two nodes that are strangers to one another, and programs beside one of them and beside none.

Odd tensors (P02 to P05) take every path: `map` and `slab` for a program on the node's host, `tcp`
for one elsewhere and from node to node, `disk` after the node's memory was needed for others.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.dataplane.maps import live_maps
from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.tensors.dtypes import DTYPES
from tensorcast_dask.tensors.messages import Tier
from tests.kit.contracts import noise
from tests.kit.eventually import eventually
from tests.kit.tasks import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tensorcast_dask.tensors.messages import NodeState

torch = pytest.importorskip("torch")

MIB = 1 << 20
NODE_BYTES = 24 * MIB


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tc.LocalCluster]:
    run = tmp_path_factory.mktemp("run")
    run.chmod(0o700)
    with (
        pytest.MonkeyPatch.context() as patch,
        tc.LocalCluster(
            2,
            threads_per_worker=1,
            host_memory=NODE_BYTES,
            separate_hosts=True,
            disk=True,
            settings={
                "run-dir": str(run),
                "segment": {"slab-bytes": MIB, "own-bytes": MIB // 4},
            },
        ) as made,
    ):
        patch.setenv("TENSORCAST_RUN_DIR", str(run))
        yield made


@pytest.fixture
def cast(cluster: tc.LocalCluster) -> Iterator[tc.Session]:
    """A program on neither host."""
    with tc.connect(cluster) as session:
        eventually(lambda: len(session.workers()) == 2, within_s=60)
        yield session
        for artifact in session.list(all_versions=True):
            session.destroy(artifact.id)
        gc.collect()  # a node that is full, or thought so, is no place for the next test
        eventually(lambda: not any(map(used_bytes, session.nodes())), within_s=30)


def used_bytes(node: NodeState) -> int:
    """What a node has taken of its host memory, as the catalog knows it."""
    use = node.uses.get(Tier.HOST)  # a program that lends memory has none
    if use is None:
        return 0
    return use.used_bytes + use.reserved_bytes + use.lingering_bytes


@pytest.fixture
def beside(cluster: tc.LocalCluster, cast: tc.Session) -> Iterator[tc.Session]:
    """A program on the host of the first worker."""
    first = cast.workers()[0].node
    (host,) = {one.card.host for one in cast.nodes() if one.card.node == first}
    with (
        dask.config.set({"tensorcast.host": host}),
        tc.connect(cluster.scheduler_address) as session,
    ):
        yield session


# ------------------------------------------------------------------ odd tensors
def odd_tensors(more: int) -> dict[str, Any]:
    """Tensors that no plain copy of memory gets right, and `more` bytes of a plain one."""
    wide = torch.from_numpy(np.frombuffer(noise(24 * 8), np.int64).copy()).view(4, 6)
    waves = torch.complex(torch.arange(6.0), -torch.arange(6.0)).view(2, 3)
    tied = torch.arange(5, dtype=torch.float64)
    tensors: dict[str, Any] = {
        "tied": tied,
        "overlaps": tied[1:4],
        "conj": waves.conj(),
        "neg": torch._neg_view(torch.arange(6.0)),
        "neg of every other": waves.conj().imag,
        "conj of a transpose": waves.t().conj(),
        "0-d": torch.tensor(-0.0),
        "0-d, numpy": np.array(7, np.uint16),
        "no element": torch.empty(0, dtype=torch.bfloat16),
        "2 x 0": np.empty((2, 0), np.complex128),
        "fortran": np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4)),
        "swapped": np.arange(5, dtype=">i4"),
        "reversed": np.arange(9)[::-2],
        "transposed": wide.t(),
        "expanded": wide[:, :1].expand(4, 3),
        "plain": np.frombuffer(noise(more), np.uint8),
    }
    for name, entry in DTYPES.items():
        if hasattr(torch, entry.torch):
            raw = np.frombuffer(noise(6 * entry.itemsize, 3), np.uint8).copy()
            tensors[name] = torch.from_numpy(raw).view(getattr(torch, entry.torch))
    tensors["tied again"] = tied
    return tensors


def canonical_of(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and logical values, as the library itself gives them."""
    if isinstance(value, np.ndarray):
        plain = value.astype(value.dtype.newbyteorder("="))
        return value.dtype.name, value.shape, plain.tobytes()
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    flat = value.contiguous().reshape(-1)
    name = str(value.dtype).removeprefix("torch.")
    return name, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()


def check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert canonical_of(found[name]) == canonical_of(value), name
    assert found["tied"].data_ptr() == found["tied again"].data_ptr()
    assert found["overlaps"].data_ptr() != found["tied"].data_ptr() + 8
    found["tied"][0] = 9.0
    assert found["tied again"][0] == 9.0


@pytest.mark.parametrize("more", [100, 3 * MIB], ids=["slab", "map"])
def test_odd_tensors_come_back_bit_for_bit_on_every_path(
    cast: tc.Session, beside: tc.Session, more: int
) -> None:
    wanted = odd_tensors(more)
    here, there = cast.workers()
    artifact = cast.put(wanted, "odd", worker=here)
    # On the node's host.
    before = live_maps()
    found = beside.artifact("odd").tensor_dict(framework="torch")
    assert live_maps() - before == (1 if more > MIB else 0)
    check(found, wanted)
    del found
    # To a program elsewhere, and from node to node and on to a program.
    check(artifact.tensor_dict(framework="torch"), wanted)
    moved = cast.migrate(artifact, here, there).result()
    assert moved.via == "tcp"
    check(artifact.tensor_dict(framework="torch"), wanted)
    # To the disk of the other node, and back.
    cast.prefetch(artifact, worker=there, device="disk", wait=True)
    filler = cast.put(np.zeros(NODE_BYTES - MIB // 2, np.uint8), "fill", worker=there)
    (place,) = artifact.locations()
    assert place.tier is Tier.DISK
    cast.destroy(filler.id)
    check(artifact.tensor_dict(framework="torch"), wanted)


def test_a_view_is_read_from_another_host_without_a_copy_of_its_base(
    cast: tc.Session, beside: tc.Session
) -> None:
    content = np.arange(MIB, dtype=np.int32)
    base = cast.put({"x": content}, "base", worker=cast.workers()[1])
    base.view({"x": tc.s_[100:200]}, name="part")
    found = beside.artifact("part").tensor(framework="numpy")
    assert np.array_equal(found, content[100:200])
    assert [at.card.node for at in base.locations()] == [cast.workers()[1].node]


# ------------------------------------------------------------------ tasks
def make(n: int) -> np.ndarray:
    return np.arange(n)


def where_it_runs(artifact: tc.Artifact) -> str:
    from distributed import get_worker

    return get_worker().address


def test_a_task_is_sent_to_the_host_that_has_its_artifact(cast: tc.Session) -> None:
    one, two = cast.workers()
    for number, worker in enumerate((one, two, two, one, one)):
        artifact = cast.put(make(100), f"at/{number}", worker=worker)
        future = cast.submit(where_it_runs, artifact, pure=False)
        assert future.result(60) == worker.address


def test_futures_are_put_by_the_worker_that_has_most_of_them_however_busy(
    cast: tc.Session, tmp_path: Path
) -> None:
    client = cast.client
    idle, at = (worker.address for worker in cast.workers())
    futures = {
        name: client.submit(make, 1000, workers=[place], pure=False)
        for name, place in (("a", at), ("b", idle), ("c", at))
    }
    client.gather(list(futures.values()))
    gate = tmp_path / "gate"
    busy = client.submit(wait_for, str(gate), workers=[at], pure=False)
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(cast.put, futures, "put")
        try:
            eventually(lambda: len(client.processing()[at]) == 2, within_s=30)
        finally:
            gate.touch()
        putting.result(60)
    (place,) = cast.artifact("put").locations()
    assert place.card.worker == at, cast.explain("put")
    assert busy.result(60)


def test_a_part_of_what_lies_elsewhere_comes_alone(
    cast: tc.Session, beside: tc.Session
) -> None:
    _, there = cast.workers()
    raw, small = noise(3 * MIB), np.arange(7)
    w = np.frombuffer(raw, np.uint8)
    artifact = beside.put({"b": small, "w": w}, "far", worker=there)
    lent = cast.register({"w": w.copy()}, "lent")
    for start, stop in ((0, 16), (MIB - 5, 2 * MIB + 3), (3 * MIB - 1, 3 * MIB)):
        for one in (artifact, lent):
            part = beside.read_part(one, "w", start, stop)
            assert bytes(part) == raw[start:stop]
    assert {at.card.node for at in artifact.locations()} == {there.node}
    head = artifact.view({"w": tc.s_[MIB:]}, name="far/tail")
    assert bytes(beside.read_part(head, "w", 5, 70)) == raw[MIB + 5 : MIB + 70]
    assert bytes(cast.read_part(artifact, "b", 8, 16)) == small.tobytes()[8:16]
    none: Any = ((-1, 2), (2, 1), (0, 3 * MIB + 1), (1.5, 2))
    for start, stop in none:
        with pytest.raises(InvalidArgument, match="are not in a tensor"):
            beside.read_part(artifact, "w", start, stop)
    lent.release()


def test_the_story_of_a_request_has_what_its_node_did(cast: tc.Session) -> None:
    here, there = cast.workers()
    artifact = cast.put({"w": np.frombuffer(noise(MIB), np.uint8)}, "told", worker=here)
    told = cast.replicate(artifact, there).explain()
    stations = ("has begun to pull it", f"asks {here.name} for its bytes", "copied to")
    places = [
        next(at for at, line in enumerate(told) if one in line) for one in stations
    ]
    assert places == sorted(places), told
