"""Arrays of CUDA's libraries as tensors on a device: taken as they lie, lent, refused."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.dataplane import arrays
from tensorcast_dask.dataplane.devices import Device, open_device
from tensorcast_dask.exceptions import UnsupportedPlatform
from tensorcast_dask.tensors.devices import parse_devices

VALUES = np.arange(600, dtype=np.float32).reshape(20, 30)


@pytest.fixture(scope="module")
def device() -> Device:
    """The device, open as long as its arrays may be."""
    try:
        return open_device("cuda:0", parse_devices("cupy"))
    except UnsupportedPlatform as error:
        pytest.skip(str(error))


def array_of(library: str) -> Any:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    module = importlib.import_module(library)
    if library == "cupy":
        return module.asarray(VALUES)
    return module.from_numpy(VALUES).cuda()


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_an_array_is_taken_as_it_lies_and_lent_by_handle(
    library: str, device: Device
) -> None:
    whole = array_of(library)
    index, described = arrays.canonical({"a": whole[4:8], "t": whole.T})
    sources = arrays.adopted(described, lambda _: device)
    part, turned = (source.value for source in sources)
    assert isinstance(part, arrays.DeviceTensor)
    assert bytes(part.to_host()) == VALUES[4:8].tobytes()
    assert not isinstance(turned, arrays.DeviceTensor)
    content = arrays.RangeReader(sources, index).read(0, index.nbytes)
    at = index.offsets[1]
    assert bytes(content[at : at + VALUES.nbytes]) == VALUES.T.tobytes()
    index, described = arrays.canonical({"a": whole[4:8]})
    lent = arrays.lent_slabs(index, arrays.adopted(described, lambda _: device))
    assert lent is not None
    assert lent.device == device.id.uuid
    assert len(lent.handles) == 1


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_an_array_is_filled_where_it_lies_from_the_nodes_device(
    library: str, device: Device, tmp_path: Path
) -> None:
    del device  # there is one
    tmp_path.chmod(0o700)
    target = array_of(library)
    with (
        tc.LocalCluster(
            1,
            processes=False,
            host_memory="64 MiB",
            device_memory="64 MiB",
            settings={"run-dir": str(tmp_path), "device": "cupy"},
        ) as cluster,
        tc.connect(cluster) as cast,
    ):
        artifact = cast.put({"a": VALUES + 1}, "weights")
        cast.prefetch(artifact, device="device", wait=True).result()
        cast.bind(artifact, {"a": target})
        got = target.get() if library == "cupy" else target.cpu().numpy()
        assert got.tobytes() == (VALUES + 1).tobytes()


def test_memory_of_a_pool_is_refused_by_its_setting(device: Device) -> None:
    cupy = importlib.import_module("cupy")
    with cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc):
        array = cupy.arange(100)
    index, described = arrays.canonical({"a": array})
    with pytest.raises(UnsupportedPlatform, match="cudaMallocAsync"):
        arrays.lent_slabs(index, arrays.adopted(described, lambda _: device))
