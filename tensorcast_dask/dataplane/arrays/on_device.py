"""Tensors that lie on a device: made over its memory, copied into it and out of it.

Rules:

1. What is on a device is bytes and a description. `DeviceTensor` is that and no more; cupy and
   torch make arrays of their own over the same bytes, where they have the dtype.
2. The memory of a result is given back with its last tensor (`Holding`).
3. A tensor that is shared is not written to by us: whoever else reads it would see that.
4. No copy is under way when a call returns.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import numpy as np

from tensorcast_dask.dataplane.arrays.contract import Places, Source
from tensorcast_dask.exceptions import (
    UnsupportedDtype,
    UnsupportedPlatform,
)
from tensorcast_dask.tensors.devices import SLAB_SPAN

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from typing_extensions import Buffer

    from tensorcast_dask.dataplane.arrays.contract import Bytes
    from tensorcast_dask.dataplane.devices import Device, DeviceRange, Memory
    from tensorcast_dask.dataplane.devices.holding import Holding
    from tensorcast_dask.tensors.dtypes import DType
    from tensorcast_dask.tensors.specs import Index, Shape

__all__ = [
    "DeviceBackend",
    "DeviceTensor",
    "LentSlabs",
    "fill_slab",
    "lent_slabs",
    "materialise_on",
]

_ZEROS: Final = bytes(4096)


class DeviceTensor:
    """One tensor on a device, without an array library.

    Attributes
    ----------
    dtype : DType
        Its dtype.
    shape : tuple of int
        Its shape.
    place : DeviceRange
        Its bytes, in C order.
    """

    __slots__ = ("__weakref__", "_holding", "dtype", "place", "shape")

    def __init__(
        self, holding: Holding, place: DeviceRange, dtype: DType, shape: Shape
    ) -> None:
        self._holding = holding
        self.place = place
        self.dtype = dtype
        self.shape = shape

    @property
    def device(self) -> Device:
        """The device, as this process has it open."""
        return self._holding.device

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.place.nbytes

    @property
    def shared(self) -> bool:
        """Whether other processes have the same memory: it must not be written to."""
        return self._holding.shared

    def to_host(self) -> bytearray:
        """Copy the bytes to host memory."""
        found = bytearray(self.nbytes)
        if found:
            self.device.copy(found, self.place).wait()
        return found

    def read_into(self, first: int, out: Bytes) -> None:
        """Copy bytes from byte `first` on to host memory, as many as `out` has."""
        place = self.place.memory.range(self.place.offset + first, out.nbytes)
        self.device.copy(out, place).wait()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        message = f"the tensor lies on {self.device.id}: copy it with to_host() first"
        raise TypeError(message)

    __array__ = __len__ = __getitem__ = __iter__ = __bytes__ = __dlpack__ = _refuse

    def __repr__(self) -> str:
        how = ", shared" if self.shared else ""
        return f"<{self.dtype.name} tensor {self.shape} on {self.device.id}{how}>"


def _tensor(source: Source) -> DeviceTensor:
    value = source.value
    assert isinstance(value, DeviceTensor), "arrays: a device source holds a tensor"
    return value


class DeviceBackend:
    """`DeviceTensor` behind the contract of `ArrayBackend`."""

    name = "device"

    def describe(self, name: str, value: object) -> Source:  # noqa: ARG002 - a backend's
        """Describe a tensor; its bytes are reached by copies alone."""
        assert isinstance(value, DeviceTensor), "arrays: the registry sends those here"
        return Source(self, value, value.dtype, tuple(value.shape), flat=False)

    def describe_all(self, tensors: Mapping[str, object]) -> list[Source]:
        """Describe one after the other."""
        return [self.describe(name, value) for name, value in tensors.items()]

    def locate(self, sources: Sequence[Source]) -> None:
        """Do nothing: no source is flat."""

    def tie(self, source: Source) -> Hashable:
        """Compare by memory and by the way it is read."""
        place = _tensor(source).place
        if not place.nbytes:
            return id(source.value)
        return id(place.memory), place.offset, source.dtype.name, source.shape

    def extent(self, source: Source) -> tuple[int, int]:  # noqa: ARG002 - a backend's
        """Take no host memory."""
        return 0, 0

    def write(self, sources: Sequence[Source], out: Bytes) -> None:
        """Copy to host memory."""
        tensor = _tensor(sources[0])
        if tensor.nbytes:
            tensor.device.copy(out, tensor.place).wait()

    def make(self, buffer: Buffer, places: Places) -> list[object]:  # noqa: ARG002 - a backend's
        """Refuse: nothing of a device lies over host memory."""
        message = "device tensors lie on a device; ask for them with device=..."
        raise UnsupportedPlatform(message)

    def refusal(self, target: Source) -> str:
        """Refuse what others have open (rule 3)."""
        return "is shared with other processes" if _tensor(target).shared else ""

    def read_into(self, target: Source, data: Bytes) -> None:
        """Copy from host memory."""
        tensor = _tensor(target)
        if tensor.nbytes:
            tensor.device.copy(tensor.place, data).wait()


# ------------------------------------------------------------------ lent by handle
class LentSlabs(NamedTuple):
    """Tensors that lie on one device, for processes that have it open too."""

    #: UUID of the device.
    device: str
    handles: tuple[bytes, ...]
    #: As in `Opened.slabs`.
    spans: bytes


def lent_slabs(index: Index, sources: Sequence[Source]) -> LentSlabs | None:
    """Make handles of the memory in which sources lie; None where they lie on no one device.

    Raises
    ------
    UnsupportedPlatform, Unimplemented
        When memory of its allocator cannot be opened by other processes; it names the setting.
    InvalidArgument
        When it is another process's already.
    """
    numbers: dict[Memory, int] = {}
    handles, devices, spans = [], set(), []
    for source, start, nbytes in zip(sources, index.offsets, index.sizes, strict=True):
        value = source.value
        if not nbytes:
            continue
        if not isinstance(value, DeviceTensor):
            return None
        devices.add(value.device)
        place = value.place
        if place.memory not in numbers:
            numbers[place.memory] = len(numbers)
            handles.append(value.device.export(place.memory).encode())
        spans.append(SLAB_SPAN.pack(start, numbers[place.memory], place.offset, nbytes))
    if len(devices) != 1:
        return None
    return LentSlabs(devices.pop().id.uuid, tuple(handles), b"".join(spans))


# ------------------------------------------------------------------ into a slab
def fill_slab(
    device: Device, memory: Memory, index: Index, sources: Sequence[Source]
) -> None:
    """Write the content of a segment to a slab: device to device where a source is there.

    Raises
    ------
    DeviceError, OwnerGone
        When the device, or the slab's owner, has failed.
    """
    events = [
        device.copy(memory.range(at + step, len(piece)), piece)
        for at, nbytes in index.gaps()
        for step, piece in _zeros(nbytes)
    ]
    for source, offset, nbytes in zip(sources, index.offsets, index.sizes, strict=True):
        if not nbytes:
            continue
        place = memory.range(offset, nbytes)
        value = source.value
        if isinstance(value, DeviceTensor) and value.device is device:
            events.append(device.copy(place, value.place))
        else:
            content = np.empty(nbytes, np.uint8)
            source.backend.write([source], content)
            events.append(device.copy(place, content))
    for event in events:
        event.wait()


def _zeros(nbytes: int) -> Iterable[tuple[int, bytes]]:
    for at in range(0, nbytes, len(_ZEROS)):
        yield at, _ZEROS[: nbytes - at]


# ------------------------------------------------------------------ out of a slab
def materialise_on(
    holding: Holding,
    index: Index,
    *,
    framework: str | None = None,
    names: Iterable[str] | None = None,
) -> dict[str, object]:
    """Make tensors over memory of a device that holds a segment.

    Parameters
    ----------
    holding : Holding
        The segment's bytes, from its first one on.
    index : Index
        What lies in it.
    framework : {None, "raw", "cupy", "torch"}
        Whose arrays; "raw" gives `DeviceTensor`, None what the device's driver makes.
    names : iterable of str, optional
        Which tensors; default: all, in put order.

    Raises
    ------
    NotFound
        For a name that is not there.
    UnsupportedDtype
        When the library has no such dtype; ask for "raw".
    UnsupportedPlatform
        When the library cannot make arrays on this device.
    """
    chosen = index.names if names is None else list(dict.fromkeys(names))
    make = _maker(holding, framework)
    made: dict[int, object] = {}
    found: dict[str, object] = {}
    for name in chosen:
        at = index.position(name)
        if at not in made:
            place = holding.memory.range(index.offsets[at], index.sizes[at])
            made[at] = make(
                DeviceTensor(holding, place, index.dtypes[at], index.shapes[at])
            )
        found[name] = made[at]
    return found


def _maker(holding: Holding, framework: str | None) -> Any:  # noqa: ANN401 - one of ours
    if framework == "raw" or not holding.device.libraries:
        if framework not in (None, "raw"):
            message = f"{framework} has no arrays on {holding.device.id}; ask for framework='raw'"
            raise UnsupportedPlatform(message)
        return lambda tensor: tensor
    if framework is None:
        framework = "cupy" if importlib.util.find_spec("torch") is None else "torch"
    makers = {"torch": _torch, "cupy": _cupy}
    if (
        framework not in holding.device.libraries
        or importlib.util.find_spec(framework) is None
    ):
        message = f"framework={framework!r} is not here for arrays on a device; ask for torch, cupy or raw"
        raise UnsupportedPlatform(message)
    return makers[framework]


def _wrapped(tensor: DeviceTensor) -> Any:  # noqa: ANN401 - the library's own array
    """Give the bytes as the driver's library knows them; they keep the holding alive."""
    return tensor.device.wrap(tensor.place, keep=tensor)


def _cupy(tensor: DeviceTensor) -> object:
    dtype = tensor.dtype
    if dtype.numpy is None or dtype.needs_ml_dtypes:
        message = f"cupy has no {dtype.name}; ask for framework='torch' or 'raw'"
        raise UnsupportedDtype(message)
    cupy = importlib.import_module("cupy")
    flat = cupy.asarray(_wrapped(tensor))
    return flat.view(np.dtype(dtype.numpy)).reshape(tensor.shape)


def _torch(tensor: DeviceTensor) -> object:
    torch = importlib.import_module("torch")
    dtype = getattr(torch, tensor.dtype.torch, None)
    if dtype is None:
        message = f"torch {torch.__version__} has no {tensor.dtype.name}; ask for framework='raw'"
        raise UnsupportedDtype(message)
    flat = torch.as_tensor(_wrapped(tensor), device=f"cuda:{tensor.device.id.ordinal}")
    return flat.view(dtype).reshape(tensor.shape)
