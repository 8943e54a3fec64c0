"""Tensors in Dask's own messages, bit for bit, and what is left to others."""

from __future__ import annotations

from typing import Any

import distributed.protocol
import numpy as np
import pytest

from tensorcast_dask.exceptions import WrongPeer
from tensorcast_dask.worker_plugin.serializers import FAMILY, dumps, install, loads

protocol: Any = distributed.protocol
ODD = np.random.default_rng(7).bytes(96)  # NaNs with payloads among them
NAMES = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "complex64", "bool"]


@pytest.fixture(autouse=True)
def installed() -> None:
    install()


def there_and_back(value: Any, **how: Any) -> tuple[dict[str, Any], Any]:
    header, frames = protocol.serialize(value, on_error="raise", **how)
    return header, protocol.deserialize(header, [bytearray(frame) for frame in frames])


def torch_of(name: str) -> Any:
    torch = pytest.importorskip("torch")
    raw = torch.frombuffer(bytearray(ODD), dtype=torch.uint8)
    if name == "bool":
        raw &= 1
    return raw.view(getattr(torch, name)).view(2, -1)


def bits(tensor: Any) -> bytes:
    torch = pytest.importorskip("torch")
    found: bytes = tensor.detach().flatten().view(torch.uint8).numpy().tobytes()
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", [{}, {"serializers": [FAMILY]}])
def test_tensors_of_torch_cross_bit_for_bit(name: str, how: dict[str, Any]) -> None:
    tensor = torch_of(name)
    for value in (tensor, tensor.T, tensor[:, :0], tensor[0, 0]):
        _, made = there_and_back(value, **how)
        assert (made.dtype, made.shape) == (value.dtype, value.shape)
        assert bits(made) == bits(value)


def test_what_dask_can_do_is_left_to_dask() -> None:
    header, _ = there_and_back(torch_of("float32"))
    assert FAMILY not in header["sub-header"]
    header, _ = there_and_back(torch_of("bfloat16"))
    assert header["sub-header"][FAMILY] == "torch"


def test_gradients_and_parameters_cross() -> None:
    torch = pytest.importorskip("torch")
    value = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    _, made = there_and_back(value)
    assert isinstance(made, torch.nn.Parameter)
    leaf = torch.ones(5, dtype=torch.bfloat16, requires_grad=True)
    leaf.sum().backward()
    _, made = there_and_back(leaf)
    assert made.requires_grad
    assert bits(made.grad) == bits(leaf.grad)


def test_arrays_of_numpy_cross_without_pickle() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    whole = np.frombuffer(ODD, ml_dtypes.bfloat16).reshape(2, -1)
    for value in (whole, whole.T, whole[::-1]):
        header, made = there_and_back(value, serializers=[FAMILY])
        assert set(header) == {FAMILY, "dtype", "shape", "writeable", "serializer"}
        assert made.dtype == value.dtype
        assert made.tobytes() == value.tobytes()


@pytest.mark.parametrize("value", ["text", np.array([object()]), np.array(["a"])])
def test_what_no_artifact_holds_is_the_next_familys(value: Any) -> None:
    with pytest.raises(NotImplementedError):
        dumps(value)
    _, made = there_and_back(value, serializers=[FAMILY, "dask", "pickle"])
    assert type(made) is type(value)


def test_bytes_that_are_not_those_of_the_header_are_refused() -> None:
    header, frames = dumps(np.arange(4))
    assert loads(header, [bytes(frames[0])]).flags.writeable
    with pytest.raises(WrongPeer, match="31 bytes"):
        loads(header, [bytes(frames[0])[:-1]])


def test_the_family_of_devices_is_left_alone() -> None:
    ours, family = "tensorcast_dask", protocol.cuda_serialize
    registered = [*family._lookup.values(), *family._lazy.values()]
    assert not [f for f in registered if f.__module__.startswith(ours)]
