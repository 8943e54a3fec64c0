"""Arrays that CUDA's libraries made, as tensors of a device that this process has open.

Rules:

1. What is C-contiguous and without a lazy bit is taken as it lies. Anything else is written
   to host memory by its library.
2. The library's work on an array is waited for before anybody reads it: its streams are not
   ours.
3. Not run on a GPU yet: `tests/gpu` is to be run where there is one.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensorcast_dask.dataplane.arrays.contract import Places, Source
from tensorcast_dask.dataplane.arrays.numpy_backend import our_dtype
from tensorcast_dask.dataplane.arrays.on_device import DeviceBackend, DeviceTensor
from tensorcast_dask.dataplane.devices import ArrayMemory, Holding
from tensorcast_dask.exceptions import UnsupportedPlatform

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from typing_extensions import Buffer

    from tensorcast_dask.dataplane.arrays.contract import Bytes
    from tensorcast_dask.dataplane.devices import Device

__all__ = ["CupyBackend", "adopted", "kind_of", "lies_on_device", "settle"]

_ON_DEVICE = DeviceBackend()


class _Place(NamedTuple):
    """Where an array's bytes lie."""

    ordinal: int
    address: int
    nbytes: int


def adopted(sources: Sequence[Source], opened: Callable[[str], Device]) -> list[Source]:
    """Describe arrays of CUDA by their memory where they can be (rule 1).

    Parameters
    ----------
    sources : sequence of Source
        As `canonical` gives them.
    opened : callable
        Gives the device of a name (`cuda:0`), open in this process.
    """
    settle(sources)
    return [_adopted(source, opened) for source in sources]


def settle(sources: Sequence[Source]) -> None:
    """Wait until the libraries have done what they were asked to do with their arrays."""
    waits: dict[tuple[str, int], Callable[[], object]] = {}
    for source in sources:
        value: Any = source.value
        if _is(value, "torch", "Tensor") and value.is_cuda:
            at = value.device.index
            waits["torch", at] = partial(sys.modules["torch"].cuda.synchronize, at)
        elif _is(value, "cupy", "ndarray"):
            waits["cupy", value.device.id] = value.device.synchronize
    for wait in waits.values():
        wait()


def lies_on_device(value: object) -> bool:
    """Say whether a tensor lies on a device so that it can be taken as it is (rule 1)."""
    return isinstance(value, DeviceTensor) or _place_of(value) is not None


def _adopted(source: Source, opened: Callable[[str], Device]) -> Source:
    place = None if source.flat else _place_of(source.value)
    if place is None or not place.nbytes:
        return source
    device = opened(f"cuda:{place.ordinal}")
    what = ArrayMemory(place.address, place.nbytes, source.value)
    memory = device.open(what)
    tensor = DeviceTensor(
        Holding(device, memory), memory.range(), source.dtype, source.shape
    )
    return _ON_DEVICE.describe("", tensor)


def _place_of(value: Any) -> _Place | None:  # noqa: ANN401 - any library's
    if _is(value, "torch", "Tensor"):
        lazy = value.is_conj() or value.is_neg()
        if not value.is_cuda or not value.is_contiguous() or lazy:
            return None
        return _Place(value.device.index, value.data_ptr(), value.nbytes)
    if _is(value, "cupy", "ndarray") and value.flags.c_contiguous:
        return _Place(value.device.id, int(value.data.ptr), int(value.nbytes))
    return None


def _is(value: object, library: str, name: str) -> bool:
    kind = kind_of(library, name)
    return kind is not None and isinstance(value, kind)


def kind_of(library: str, name: str) -> type | None:
    """Give a library's kind of array; None while nobody has (wholly) imported the library."""
    found: type | None = getattr(sys.modules.get(library), name, None)
    return found


class CupyBackend:
    """cupy behind the contract of `ArrayBackend`; results are made by `materialise_on`."""

    name = "cupy"

    def describe(self, name: str, value: Any) -> Source:  # noqa: ANN401 - cupy's
        """Describe an array; its bytes lie on a device."""
        dtype = our_dtype(name, np.dtype(value.dtype))
        return Source(self, value, dtype, tuple(value.shape), flat=False)

    def describe_all(self, tensors: Mapping[str, object]) -> list[Source]:
        """Describe one after the other."""
        return [self.describe(name, value) for name, value in tensors.items()]

    def locate(self, sources: Sequence[Source]) -> None:
        """Do nothing: no source is flat."""

    def tie(self, source: Source) -> Hashable:
        """Compare by memory and by the way it is read."""
        value: Any = source.value
        if not value.size:
            return id(value)
        place = value.device.id, int(value.data.ptr), tuple(value.strides)
        return *place, source.dtype.name, source.shape

    def extent(self, source: Source) -> tuple[int, int]:  # noqa: ARG002 - a backend's
        """Take no host memory."""
        return 0, 0

    def write(self, sources: Sequence[Source], out: Bytes) -> None:
        """Copy to host memory, one after the other."""
        cupy, at = importlib.import_module("cupy"), 0
        for source in sources:
            value: Any = source.value
            with value.device:
                found = cupy.asnumpy(cupy.ascontiguousarray(value))
            out[at : at + found.nbytes] = found.reshape(-1).view(np.uint8)
            at += found.nbytes

    def make(self, buffer: Buffer, places: Places) -> list[object]:  # noqa: ARG002 - a backend's
        """Refuse: nothing of a device lies over host memory."""
        message = "cupy arrays lie on a device; ask for them with device='cuda:0'"
        raise UnsupportedPlatform(message)

    def refusal(self, target: Source) -> str:  # noqa: ARG002 - a backend's
        """Take every array."""
        return ""

    def read_into(self, target: Source, data: Bytes) -> None:
        """Copy from host memory."""
        value: Any = target.value
        cupy = importlib.import_module("cupy")
        with value.device:
            value[...] = cupy.asarray(data.view(value.dtype).reshape(value.shape))
            cupy.cuda.get_current_stream().synchronize()
