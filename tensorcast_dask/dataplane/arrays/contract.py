"""What an array library must offer, and the values that pass between it and us.

Rules:

1. A `Source` is one tensor of a caller, described. Making one reads no element and copies
   nothing; what cannot be stored is refused then, by type.
2. A source is *flat* when its memory already holds the canonical bytes (little-endian, C
   order, no lazy bit): it is copied as bytes. Any other writes its logical values straight
   into their place; there is no temporary copy in between.
3. `Places` says where tensors lie in a buffer. Arrays made for places keep the buffer
   alive, and each is memory of its own to the library: saving or resizing one never
   touches its neighbours.
4. Bits are never changed: NaN payloads, -0.0 and odd bytes in a bool included.
5. Hosts are little-endian.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from tensorcast_dask.tensors.dtypes import DType
from tensorcast_dask.tensors.specs import Shape

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Buffer

    Bytes = npt.NDArray[np.uint8]

__all__ = ["ArrayBackend", "Places", "Source"]


class Source(msgspec.Struct, eq=False, gc=False):  # no cycles lead through it
    """One tensor of a caller.

    Attributes
    ----------
    backend : ArrayBackend
        Who described it.
    value : object
        The caller's array, kept alive by this.
    dtype : DType
        Its dtype.
    shape : tuple of int
        Its shape.
    flat : bool
        Whether its memory holds the canonical bytes.
    address : int
        Where its first element lies; 0 until `backend.locate` or `backend.extent` was asked.
    alone : bool
        Whether no other array object can be the same tensor, so that ties need not be
        looked for by address.
    """

    backend: ArrayBackend
    value: object
    dtype: DType
    shape: Shape
    flat: bool
    address: int = 0
    alone: bool = False


@dataclass(slots=True)
class Places:
    """Where tensors lie in a buffer, in columns.

    Attributes
    ----------
    dtypes, shapes : sequence
        Of each tensor.
    offsets : sequence of int
        Byte at which its first element lies.
    strides : sequence of (tuple of int or None), optional
        In elements, also negative; None (or no column) means C order.
    """

    dtypes: Sequence[DType]
    shapes: Sequence[Shape]
    offsets: Sequence[int]
    strides: Sequence[Shape | None] | None = None


class ArrayBackend(Protocol):
    """One array library."""

    name: str

    def describe(self, name: str, value: object) -> Source:
        """Describe `value`, called `name`; UnsupportedDtype when it cannot be stored."""
        ...

    def describe_all(self, tensors: Mapping[str, object]) -> list[Source]:
        """Describe many, all of this library, in order, at the price of few calls."""
        ...

    def locate(self, sources: Sequence[Source]) -> None:
        """Find the `address` of every flat source of this library that has bytes."""
        ...

    def tie(self, source: Source) -> Hashable:
        """Equal for two sources exactly when they are one tensor, across libraries."""
        ...

    def extent(self, source: Source) -> tuple[int, int]:
        """First and one-past-last host address of the memory that it touches.

        (0, 0) when it takes no host memory. For a flat source the first is where its bytes
        begin; it is remembered as `address`.
        """
        ...

    def write(self, sources: Sequence[Source], out: Bytes) -> None:
        """Write logical values as canonical bytes, one source after the other.

        Several sources are flat, have one dtype and one shape of at least one dimension,
        and fill `out` without gaps: one call for many small tensors.
        """
        ...

    def make(self, buffer: Buffer, places: Places) -> list[object]:
        """Make one array for each place, without a copy where the library can."""
        ...

    def refusal(self, target: Source) -> str:
        """Why the caller's array cannot be written to, or ""."""
        ...

    def read_into(self, target: Source, data: Bytes) -> None:
        """Fill the caller's array from canonical bytes."""
        ...
