"""torch tensors. Imported only when a caller has torch tensors or asks for them.

Rules:

1. Elements travel as bits: a tensor is viewed as the integer dtype of its width wherever
   torch allows it, so that no kernel can canonicalise a NaN.
2. The lazy conjugate and negative bits are resolved into the target, by flipping signs.
3. A made tensor has a storage of its own, exactly as long as its bytes, over the buffer's
   memory. Negative strides, which torch lacks, are copied.
4. Subclasses that dispatch (FakeTensor, DTensor, wrappers) have no bytes of their own and
   are refused; parameters and buffers are tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from tensorcast_dask.dataplane.arrays.contract import Source
from tensorcast_dask.dataplane.arrays.numpy_backend import (
    AnyArray,
    byte_strides,
    whole_buffer,
)
from tensorcast_dask.exceptions import InvalidArgument, UnsupportedDtype
from tensorcast_dask.tensors.dtypes import DTYPES, DType

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from typing_extensions import Buffer

    from tensorcast_dask.dataplane.arrays.contract import Bytes, Places

__all__ = ["TorchBackend"]

#: torch's dtype of each name; a dtype newer than the installed torch is left out.
_TORCH_OF: Final[dict[str, torch.dtype]] = {
    entry.name: getattr(torch, entry.torch)
    for entry in DTYPES.values()
    if hasattr(torch, entry.torch)
}
_DTYPE_OF: Final = {found: DTYPES[name] for name, found in _TORCH_OF.items()}
_INTEGER_OF: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Same width, for the way through numpy; complex128 is its own carrier.
_CARRIER_OF: Final = {
    1: np.uint8,
    2: np.int16,
    4: np.int32,
    8: np.int64,
    16: np.complex128,
}
#: Dtypes whose negation flips the highest bit of each number.
_SIGNED: Final = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    | {torch.complex32, torch.complex64, torch.complex128}
)
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


def _torch_dtype(dtype: DType) -> torch.dtype:
    found = _TORCH_OF.get(dtype.name)
    if found is None:
        message = (
            f"torch {torch.__version__} has no {dtype.name}; ask for framework='raw'"
        )
        raise UnsupportedDtype(message)
    return found


def _refuse(name: str, what: str) -> UnsupportedDtype:
    message = f"tensor {name!r} {what}; only dense tensors can be stored"
    return UnsupportedDtype(message)


def _unknown(name: str, value: torch.Tensor) -> UnsupportedDtype:
    instead = (
        "give its .int_repr() and its scale, or its .dequantize()"
        if value.is_quantized
        else "give its bytes, x.view(torch.uint8), and keep its dtype in a label"
    )
    message = f"tensor {name!r} has dtype {value.dtype}, which no artifact can hold; {instead}"
    return UnsupportedDtype(message)


def _check_kind(name: str, value: torch.Tensor) -> None:
    if value.layout is not torch.strided or value.is_nested:
        raise _refuse(name, f"is nested or has layout {value.layout}")
    if (
        type(value) not in _PLAIN
        and type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    ):
        raise _refuse(
            name, f"is a {type(value).__name__}, a wrapper without bytes of its own"
        )


def _tensor(source: Source) -> torch.Tensor:
    value = source.value
    assert isinstance(value, torch.Tensor), (
        "arrays: a torch source holds a torch tensor"
    )
    return value


def _bits(value: torch.Tensor) -> torch.Tensor:
    """View as integers of the same width, where there are some."""
    integer = _INTEGER_OF.get(value.dtype.itemsize)
    return value if integer is None else value.view(integer)


def _way_of(dtype: DType) -> np.dtype[np.generic]:
    """Return the numpy dtype on whose back a tensor is made: its own, or one as wide."""
    if dtype.numpy is not None and not dtype.needs_ml_dtypes:
        return np.dtype(dtype.numpy)
    return np.dtype(_CARRIER_OF[dtype.itemsize])


class TorchBackend:
    """torch behind the contract of `ArrayBackend`."""

    name = "torch"

    def describe(self, name: str, value: object) -> Source:
        """Describe a tensor on any device."""
        assert isinstance(value, torch.Tensor), (
            "arrays: the registry sends torch tensors here"
        )
        _check_kind(name, value)
        dtype = _DTYPE_OF.get(value.dtype)
        if dtype is None:
            raise _unknown(name, value)
        if not value.is_cpu:
            if value.is_meta:
                raise _refuse(name, "is on the meta device and has no values")
            return Source(self, value, dtype, tuple(value.shape), flat=False)
        flat = value.is_contiguous() and not value.is_neg() and not value.is_conj()
        address = value.data_ptr() if flat else 0
        return Source(self, value, dtype, tuple(value.shape), flat, address)

    def describe_all(self, tensors: Mapping[str, object]) -> list[Source]:
        """Describe one after the other."""
        return [self.describe(name, value) for name, value in tensors.items()]

    def locate(self, sources: Sequence[Source]) -> None:
        """Do nothing: a description has the address."""

    def tie(self, source: Source) -> Hashable:
        """Compare by memory and by the way it is read."""
        value = _tensor(source)
        if not value.numel():
            return id(value)
        if source.flat:
            return source.address, source.dtype.name, source.shape
        strides = tuple(n * source.dtype.itemsize for n in value.stride())
        lazy = (
            (value.is_conj(), value.is_neg())
            if value.is_conj() or value.is_neg()
            else ""
        )
        place = (value.data_ptr(), source.dtype.name, source.shape, strides, lazy)
        return place if value.is_cpu else (*place, str(value.device))

    def extent(self, source: Source) -> tuple[int, int]:
        """Bounds of the touched host memory."""
        value = _tensor(source)
        if source.flat:
            return source.address, source.address + value.nbytes
        if not value.numel() or not value.is_cpu:
            return 0, 0
        last = sum(
            (n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)
        )
        start = value.data_ptr()
        return start, start + (last + 1) * source.dtype.itemsize

    def write(self, sources: Sequence[Source], out: Bytes) -> None:
        """Write the logical values in C order."""
        first = sources[0]
        value = _tensor(first).detach()
        if value.is_conj() or value.is_neg():
            _write_lazy(value, out)
            return
        target = torch.from_numpy(out.view(_CARRIER_OF[first.dtype.itemsize]))
        if len(sources) == 1:
            target.view(value.shape).copy_(_bits(value))
        else:
            joined = target.view(value.dtype).view(-1, *value.shape[1:])
            with torch.no_grad():
                torch.cat([_tensor(source) for source in sources], out=joined)

    def make(self, buffer: Buffer, places: Places) -> list[object]:
        """Tensors over the buffer, which must be writable."""
        base = whole_buffer(buffer)
        if base.size and not base.flags.writeable:
            message = "torch tensors need a writable buffer; give a private map"
            raise InvalidArgument(message)
        kinds = {dtype.name: dtype for dtype in places.dtypes}
        wanted = {name: (_torch_dtype(d), _way_of(d)) for name, d in kinds.items()}
        made: list[object] = []
        strides = places.strides or [None] * len(places.dtypes)
        columns = zip(
            places.dtypes, places.shapes, places.offsets, strides, strict=True
        )
        for dtype, shape, offset, elements in columns:
            torch_dtype, way = wanted[dtype.name]
            array: AnyArray = np.ndarray(
                shape, way, base, offset, byte_strides(dtype, elements)
            )
            if elements is not None and min(elements, default=0) < 0:
                array = array.copy()
            tensor = torch.from_numpy(array)
            if tensor.dtype is not torch_dtype:
                tensor = tensor.view(torch_dtype)
            made.append(tensor)
        return made

    def refusal(self, target: Source) -> str:
        """Refuse lazy views, and expanded tensors, which hold an element twice."""
        value = _tensor(target)
        if value.is_conj() or value.is_neg():
            return "is a lazily conjugated or negated view"
        pairs = zip(value.shape, value.stride(), strict=True)
        if value.numel() and any(n > 1 and not s for n, s in pairs):
            return "is expanded: several elements share memory"
        return ""

    def read_into(self, target: Source, data: Bytes) -> None:
        """Assign the values, also on a device, also of a leaf that requires grad."""
        carrier = _CARRIER_OF[target.dtype.itemsize]
        values: AnyArray = data.view(carrier).reshape(target.shape)
        if not values.flags.writeable:
            values = values.copy()  # torch warns of any other
        _bits(_tensor(target).detach()).copy_(torch.from_numpy(values))


def _write_lazy(value: torch.Tensor, out: Bytes) -> None:
    """Write a conjugated or negated view by flipping sign bits, as IEEE negation does.

    torch's kernels lack complex32, and go through float32 for the 16-bit kinds.
    """
    if value.dtype not in _SIGNED:
        carrier = _CARRIER_OF[value.dtype.itemsize]
        target = torch.from_numpy(out.view(carrier).reshape(value.shape))
        target.view(value.dtype).copy_(value)
        return
    parts = 2 if value.is_complex() else 1
    width = value.dtype.itemsize // parts
    stored = torch.empty(0, dtype=_INTEGER_OF[width], device=value.device).set_(
        value.untyped_storage(),
        value.storage_offset() * parts,
        (*value.shape, parts),
        (*(n * parts for n in value.stride()), 1),
    )
    numbers: AnyArray = out.view(_CARRIER_OF[width]).reshape(*value.shape, parts)
    torch.from_numpy(numbers).copy_(stored)
    last_bytes = out.reshape(-1, parts, width)[..., -1]  # where the signs are
    if value.is_neg():
        last_bytes[:, 0] ^= 0x80
    if parts == 2 and value.is_neg() != value.is_conj():
        last_bytes[:, 1] ^= 0x80
