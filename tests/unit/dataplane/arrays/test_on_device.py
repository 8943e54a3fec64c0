"""Tensors on an emulated device, in and out of slabs."""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tensorcast_dask.dataplane import arrays
from tensorcast_dask.dataplane.arrays import DeviceTensor
from tensorcast_dask.dataplane.devices import Device, Holding, open_device
from tensorcast_dask.exceptions import (
    Mismatch,
    NotFound,
    UnsupportedDtype,
    UnsupportedPlatform,
)
from tensorcast_dask.tensors.devices import parse_devices

MIB = 1 << 20


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    run_dir = tempfile.mkdtemp(prefix="tc-", dir="/tmp")
    spec = parse_devices("emulated:1x8MiB")
    with open_device("emulated:0", spec, run_dir) as made:
        yield made
    shutil.rmtree(run_dir, ignore_errors=True)


def on_device(device: Device, tensors: dict[str, Any]) -> dict[str, Any]:
    """What tensors of the host become on the device."""
    index, sources = arrays.canonical(tensors)
    memory = device.allocate(max(1, index.nbytes))
    arrays.fill_slab(device, memory, index, sources)
    return arrays.materialise_on(Holding(device, memory), index)


def test_tensors_go_to_a_slab_and_back_bit_for_bit(device: Device) -> None:
    content = {
        "odd": np.arange(3, dtype=np.int8),
        "turned": np.arange(6.0).reshape(2, 3).T,
        "none": np.empty((0, 4), np.float32),
        "scalar": np.float64(-0.0),
    }
    made = on_device(device, content)
    assert {name: bytes(one.to_host()) for name, one in made.items()} == {
        name: np.ascontiguousarray(one).tobytes() for name, one in content.items()
    }
    assert [one.shape for one in made.values()] == [(3,), (3, 2), (0, 4), ()]


def test_equal_tensors_make_equal_slabs_gaps_included(device: Device) -> None:
    content = {"a": np.ones(3, np.int8), "b": np.ones(5, np.int64)}
    index, sources = arrays.canonical(content)
    assert list(index.gaps())
    wanted = bytearray(index.nbytes)
    arrays.copy_into(sources, index, wanted)
    found = bytearray(index.nbytes)
    for given in (content, on_device(device, content)):
        memory = device.allocate(index.nbytes)
        arrays.fill_slab(device, memory, index, arrays.canonical(given)[1])
        device.copy(found, memory.range()).wait()
        device.free(memory)
        assert found == wanted


def test_tied_tensors_of_a_device_are_stored_once(device: Device) -> None:
    made = on_device(device, {"w": np.arange(9.0)})
    index, sources = arrays.canonical({"x": made["w"], "y": made["w"]})
    assert (len(index), len(sources), index.nbytes) == (2, 1, 72)


def test_the_memory_goes_with_the_last_tensor_on_it(device: Device) -> None:
    before = device.list().owned_bytes
    made = on_device(device, {"a": np.ones(4), "b": np.ones(4)})
    kept = made.pop("a")
    wrapped = device.wrap(kept.place, keep=kept)
    del made, kept
    gc.collect()
    assert device.list().owned_bytes > before
    del wrapped
    gc.collect()
    assert device.list().owned_bytes == before


def test_a_tensor_that_others_have_open_is_not_written_to(device: Device) -> None:
    memory = device.allocate(64)
    index, _ = arrays.canonical({"w": np.zeros(8)})
    holding = Holding(device, memory)
    holding.shared = True
    target = arrays.materialise_on(holding, index)
    with pytest.raises(Mismatch, match="shared"):
        arrays.copy_out(bytes(64), index, target)


def test_libraries_that_are_being_imported_stand_in_nobodys_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("cupy", "torch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    _, sources = arrays.canonical({"turned": np.arange(6.0).reshape(2, 3).T})
    arrays.settle(sources)
    assert arrays.adopted(sources, pytest.fail) == sources
    with pytest.raises(UnsupportedDtype):
        arrays.canonical({"x": object()})


def test_what_cannot_be_made_is_said_by_type(device: Device) -> None:
    index, _ = arrays.canonical({"w": np.zeros(8)})
    holding = Holding(device, device.allocate(64))
    for framework in ("torch", "cupy", "numpy"):
        with pytest.raises(UnsupportedPlatform, match="raw"):
            arrays.materialise_on(holding, index, framework=framework)
    with pytest.raises(NotFound):
        arrays.materialise_on(holding, index, names=["x"])
    (made,) = arrays.materialise_on(holding, index, framework="raw").values()
    assert isinstance(made, DeviceTensor)
    for read in (np.asarray, len, list, bytes):
        with pytest.raises(TypeError, match="to_host"):
            read(made)
