"""The dense dtypes that an artifact can hold, by name.

Rules:

1. A dtype crosses process and file boundaries by `name` only. The names are torch's; for
   the dtypes that numpy has too they are numpy's as well.
2. An element is `itemsize` little-endian bytes. Two dtypes never share a name, and a name
   never changes its meaning.
3. A dtype that a library lacks is stored, moved, viewed and saved all the same: only making
   an array with that library is refused.
4. Everything else (object, text, datetime, void, long double, sparse, quantised, the
   sub-byte kinds that torch cannot address) is refused by name, before anything moves, and
   the refusal says what to give instead. Datetimes are integers with a unit that no tensor
   has; a long double has other bits on another machine, and padding that means nothing.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.exceptions import UnsupportedDtype

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DTYPES", "DType", "dtype", "from_safetensors"]


class DType(msgspec.Struct, frozen=True):
    """One dense dtype and what the libraries call it.

    Attributes
    ----------
    name : str
        The name that is stored.
    itemsize : int
        Bytes of one element.
    safetensors : str or None
        Its name in a safetensors header; None when the format has none.
    numpy : str or None
        Its name in numpy, or in `ml_dtypes` when `needs_ml_dtypes`; None when neither has it.
    torch : str
        The attribute of the `torch` module.
    needs_ml_dtypes : bool
        Whether numpy knows it only through the package `ml_dtypes`.
    """

    name: str
    itemsize: int
    safetensors: str | None
    numpy: str | None
    torch: str
    needs_ml_dtypes: bool = False


def _plain(name: str, itemsize: int, safetensors: str | None) -> DType:
    return DType(name, itemsize, safetensors, name, name)


def _extended(name: str, itemsize: int, safetensors: str | None) -> DType:
    return DType(name, itemsize, safetensors, name, name, needs_ml_dtypes=True)


#: Every dtype by name, in a fixed order (widths grow within a kind).
DTYPES: Final[Mapping[str, DType]] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            _plain("bool", 1, "BOOL"),
            _plain("uint8", 1, "U8"),
            _plain("uint16", 2, "U16"),
            _plain("uint32", 4, "U32"),
            _plain("uint64", 8, "U64"),
            _plain("int8", 1, "I8"),
            _plain("int16", 2, "I16"),
            _plain("int32", 4, "I32"),
            _plain("int64", 8, "I64"),
            _plain("float16", 2, "F16"),
            _extended("bfloat16", 2, "BF16"),
            _plain("float32", 4, "F32"),
            _plain("float64", 8, "F64"),
            _extended("float8_e4m3fn", 1, "F8_E4M3"),
            _extended("float8_e5m2", 1, "F8_E5M2"),
            _extended("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
            _extended("float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
            _extended("float8_e8m0fnu", 1, "F8_E8M0"),
            # Two values in each byte. The format's F4 counts values where torch counts
            # bytes, so a shape would not mean the same there: it travels as U8.
            DType("float4_e2m1fn_x2", 1, None, None, "float4_e2m1fn_x2"),
            DType("complex32", 4, None, None, "complex32"),
            _plain("complex64", 8, "C64"),
            _plain("complex128", 16, None),
        )
    }
)

_BY_SAFETENSORS: Final = {
    entry.safetensors: entry
    for entry in DTYPES.values()
    if entry.safetensors is not None
}


def dtype(name: str) -> DType:
    """Return the dtype called `name`.

    Raises
    ------
    UnsupportedDtype
        When no artifact can hold it.
    """
    found = DTYPES.get(name)
    if found is None:
        message = (
            f"dtype {name!r} cannot be stored; convert to one of: {', '.join(DTYPES)}"
        )
        raise UnsupportedDtype(message)
    return found


def from_safetensors(code: str) -> DType:
    """Return the dtype that a safetensors header calls `code`.

    Raises
    ------
    UnsupportedDtype
        When the format's dtype has no dense equal here.
    """
    found = _BY_SAFETENSORS.get(code)
    if found is None:
        message = f"safetensors dtype {code!r} cannot be held; known: {', '.join(_BY_SAFETENSORS)}"
        raise UnsupportedDtype(message)
    return found
