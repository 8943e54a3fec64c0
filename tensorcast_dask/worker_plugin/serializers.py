"""Tensors in Dask's own messages: what a task returns, `gather`, `scatter`.

Rules:

1. The family `tensorcast` takes every tensor of the host that an artifact can hold, of numpy or
   torch. For others it says NotImplementedError, which sends Dask to its next family.
   It is used where it is named: `Client(serializers=["tensorcast", "dask", "pickle"])`.
2. Dask's own family has functions for torch, which stop at the dtypes that numpy lacks
   (bfloat16, float8). What they refuse goes our way; all else goes theirs, as before.
3. No pickle: a header names dtype, shape and library, a frame is the bytes.
4. Memory of devices is left to whoever else is registered (Dask, RAPIDS).
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import sys
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tensorcast_dask.dataplane.arrays import Places, backend_named, describe
from tensorcast_dask.exceptions import TensorCastError, WrongPeer
from tensorcast_dask.tensors.dtypes import dtype

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FAMILY", "dumps", "install", "loads"]

#: It has no types.
_protocol: Final[Any] = importlib.import_module("distributed.protocol")

FAMILY: Final = "tensorcast"
_OURS: Final = "tensorcast"

Header = dict[str, Any]
Frames = list[Any]


def dumps(value: Any) -> tuple[Header, Frames]:  # noqa: ANN401
    """Describe a tensor; its bytes, where they lie if they lie well.

    Raises
    ------
    NotImplementedError
        When it is no tensor of the host, or one that an artifact cannot hold.
    """
    library = type(value).__module__.partition(".")[0]
    if library not in {"numpy", "torch"} or getattr(value, "requires_grad", False):
        raise NotImplementedError
    try:
        (source,) = describe({_OURS: value})
    except TensorCastError as error:
        raise NotImplementedError from error
    if library == "torch" and not value.is_cpu:
        raise NotImplementedError
    nbytes = prod(source.shape) * source.dtype.itemsize
    if source.flat and nbytes:
        source.backend.locate([source])
        data: Any = (ctypes.c_ubyte * nbytes).from_address(source.address)
        data.keeps = value
    else:
        data = np.empty(nbytes, np.uint8)
        if nbytes:
            source.backend.write([source], data)
    header = {
        _OURS: source.backend.name,
        "dtype": source.dtype.name,
        "shape": source.shape,
        "writeable": (True,),
    }
    return header, [memoryview(data).cast("B")]


def loads(header: Header, frames: Frames) -> Any:  # noqa: ANN401
    """Make the tensor again, over the frame where that can be written to.

    Raises
    ------
    WrongPeer
        When the bytes are not those of the header.
    """
    kind, shape = dtype(header["dtype"]), tuple(int(n) for n in header["shape"])
    data = memoryview(frames[0]) if frames else memoryview(b"")
    if data.nbytes != prod(shape) * kind.itemsize:
        message = f"{data.nbytes} bytes came for {shape} of {kind.name}"
        raise WrongPeer(message)
    buffer = bytearray(data) if data.readonly else data
    places = Places([kind], [shape], [0])
    (made,) = backend_named(header[_OURS]).make(buffer, places)
    return made


@functools.cache
def install() -> None:
    """Register both ways in this process, once."""
    _protocol.register_serialization_family(FAMILY, dumps, loads)
    torch = sys.modules.get("torch")
    if torch is not None and "distributed.protocol.torch" in sys.modules:
        _extend_torch()
    else:  # when Dask meets its first tensor of torch
        _protocol.dask_serialize.register_lazy("torch", _extend_torch)
        _protocol.dask_deserialize.register_lazy("torch", _extend_torch)


def _extend_torch() -> None:
    theirs = importlib.import_module("distributed.protocol.torch")
    kind = sys.modules["torch"].Tensor
    _protocol.dask_serialize.register(kind)(_dumper(theirs.serialize_torch_Tensor))
    _protocol.dask_deserialize.register(kind)(_loader(theirs.deserialize_torch_Tensor))


def _taken(value: Any) -> tuple[Header, Frames] | None:  # noqa: ANN401
    try:
        return dumps(value)
    except NotImplementedError:
        return None


def _dumper(theirs: Callable[[Any], tuple[Header, Frames]]) -> Callable[..., Any]:
    def dumps_tensor(value: Any) -> tuple[Header, Frames]:  # noqa: ANN401
        try:
            return theirs(value)
        except (TypeError, RuntimeError):  # a dtype, or a lazy bit, that numpy has not
            taken = _taken(value.detach())
            if taken is None:
                raise
        header, frames = taken
        header["requires_grad"] = value.requires_grad
        if value.grad is not None:
            header["grad"], more = dumps_tensor(value.grad)
            frames += more
        return header, frames

    return dumps_tensor


def _loader(theirs: Callable[[Header, Frames], Any]) -> Callable[..., Any]:
    def loads_tensor(header: Header, frames: Frames) -> Any:  # noqa: ANN401
        if _OURS not in header:
            return theirs(header, frames)
        made = loads(header, frames[:1]).requires_grad_(header["requires_grad"])
        if "grad" in header:
            made.grad = loads_tensor(header["grad"], frames[1:])
        return made

    return loads_tensor
