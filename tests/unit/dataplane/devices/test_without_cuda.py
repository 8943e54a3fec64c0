"""What a machine without a GPU says: a typed error that names what is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest

from tensorcast_dask.dataplane.devices import find_devices, open_device
from tensorcast_dask.dataplane.devices.base import Copy, Memory, Role, Side
from tensorcast_dask.dataplane.devices.cuda import CudaTicket, error_of_code
from tensorcast_dask.exceptions import (
    AlreadyExists,
    CapacityError,
    DeviceError,
    InvalidArgument,
    OwnerGone,
    UnsupportedPlatform,
)
from tensorcast_dask.tensors.devices import DeviceId, parse_devices


def cuda_is_there() -> bool:
    try:
        return bool(find_devices(parse_devices(None)))
    except UnsupportedPlatform:
        return False


without_cuda = pytest.mark.skipif(cuda_is_there(), reason="this machine has a GPU")


@without_cuda
@pytest.mark.parametrize("kind", ["cupy", "torch", None])
def test_a_missing_device_says_what_to_install(kind: str | None) -> None:
    for ask in (
        lambda: find_devices(parse_devices(kind)),
        lambda: open_device("cuda:0", parse_devices(kind)),
        lambda: open_device("GPU-1", parse_devices(kind)),
    ):
        with pytest.raises(UnsupportedPlatform, match="install"):
            ask()


@without_cuda
def test_every_call_of_cupy_is_typed_without_a_driver() -> None:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed")
    from tensorcast_dask.dataplane.devices.cupy_backend import CupyDriver

    device = DeviceId("GPU-1", "cuda", 0)
    driver: Any = CupyDriver(device)
    memory = Memory(device, 4096, 10, Role.OWNED)
    side = Side(on_device=True, address=4096)
    for verb in (
        lambda: driver.allocate(10),
        lambda: driver.free(4096),
        lambda: driver.export(4096),
        lambda: driver.open(bytes(64)),
        lambda: driver.open((4096, 10)),
        lambda: driver.close(4096),
        lambda: driver.copy(Copy(side, side, 10, 0, ())),
        lambda: driver.event(0, ()),
        lambda: driver.wrap(memory, 0, 10, None),
        driver.list,
    ):
        with pytest.raises(UnsupportedPlatform, match="NVIDIA driver"):
            verb()
    driver.close(None)


def test_the_room_imports_no_array_library() -> None:
    code = (
        "import sys, tensorcast_dask.dataplane.devices as d;"
        "from tensorcast_dask.dataplane.devices import cuda, cupy_backend, torch_backend;"
        "assert not {'torch', 'cupy', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (1, InvalidArgument),
        (2, CapacityError),
        (35, UnsupportedPlatform),
        (100, UnsupportedPlatform),
        (400, OwnerGone),
        (700, DeviceError),
        (712, AlreadyExists),
        (719, DeviceError),
    ],
)
def test_a_code_of_cuda_has_one_meaning(code: int, error: type[Exception]) -> None:
    assert type(error_of_code(code, "cudaErrorOfTests")) is error


def test_a_wait_polls_to_its_end() -> None:
    from contextlib import nullcontext

    left = [3]

    def query() -> bool:
        left[0] -= 1
        return left[0] < 0

    ticket = CudaTicket(None, query, lambda: None, nullcontext)
    assert not ticket.wait(0)
    assert ticket.wait(60)
    assert ticket.wait(None)
