"""What a tensor is, and how named tensors lie packed in one segment.

Rules:

1. Bytes are little-endian and in C order. An *entry* is one stored tensor: dtype, shape and
   offset; its length follows from dtype and shape and is stated nowhere else.
2. Every entry has at least one name. *Tied* names share one entry: the bytes are stored
   once and come back as one tensor under both names.
3. Entries stand in put order. Packed, each begins at the next multiple of `ALIGN_BYTES`;
   an index whose entries lie elsewhere (a file's own layout) says where. Entries with
   bytes never overlap, and each begins at a multiple of its itemsize.
4. The segment is as long as its index says (`nbytes`), at most 2**63 - 1. Bytes between
   entries are zero, so that equal tensors make equal segments.
5. Equal indices encode to equal bytes; `digest` names the content of an index for ever.
6. `decode` believes nothing: what contradicts rules 1 to 4 is CorruptFile.
"""

from __future__ import annotations

import hashlib
import math
from itertools import accumulate, chain, pairwise, repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from tensorcast_dask.exceptions import (
    CorruptFile,
    InvalidArgument,
    InvalidName,
    NotFound,
    RequestError,
)
from tensorcast_dask.tensors.dtypes import DType, dtype
from tensorcast_dask.tensors.ids import MAX_NAME_BYTES, check_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "ALIGN_BYTES",
    "MAX_DIMS",
    "Entry",
    "Index",
    "Shape",
    "TensorSpec",
    "nbytes_of",
]

Shape = tuple[int, ...]

ALIGN_BYTES: Final = 64
MAX_DIMS: Final = 64
_MAX: Final = (1 << 63) - 1
_FORMAT: Final = 1
#: ASCII that can be seen; a name of other characters is looked at by itself.
_PLAIN: Final = bytes(range(0x20, 0x7F))
_NAME: Final = attrgetter("name")
_K = TypeVar("_K")


def nbytes_of(dtype: DType, shape: Shape) -> int:
    """Bytes of a dense tensor.

    Raises
    ------
    InvalidArgument
        For more than 64 dimensions, a negative one, or a size beyond 2**63 - 1 (also where
        another dimension is 0: no library can make such a tensor).
    """
    total = math.prod(shape) * dtype.itemsize
    if len(shape) > MAX_DIMS or (shape and min(shape) < 0):
        message = (
            f"shape {shape} needs 0 to {MAX_DIMS} dimensions, none of them negative"
        )
        raise InvalidArgument(message)
    if total > _MAX or (total == 0 and math.prod(n for n in shape if n) > _MAX // 16):
        message = (
            f"a {dtype.name} tensor of shape {shape} is larger than 2**63 - 1 bytes"
        )
        raise InvalidArgument(message)
    return total


class TensorSpec(msgspec.Struct, frozen=True):
    """Name, dtype and shape of one tensor: everything but its bytes."""

    name: str
    dtype: DType
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes, 0 for zero-size ones."""
        return nbytes_of(self.dtype, self.shape)

    def __repr__(self) -> str:
        return f"<{self.name!r} {self.dtype.name} {list(self.shape)}>"


class Entry(msgspec.Struct, frozen=True):
    """One stored tensor of a segment."""

    dtype: DType
    shape: Shape
    offset: int
    nbytes: int


class _Wire(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Columns, so that 10,000 tensors are a handful of objects to the codec."""

    format: int
    names: list[str]
    #: Entry of each name; None when there are as many entries as names, in order.
    entry_of: list[int] | None
    dtypes: list[str]
    dtype_of: bytes  # one byte an entry, into `dtypes`
    shapes: list[tuple[int, ...]]
    shape_of: list[int]  # into `shapes`
    #: None when packed.
    offsets: list[int] | None
    nbytes: int


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_Wire)


def _packed(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Offsets of entries one after the other, and where the last one ends."""
    if not sizes:
        return (), 0
    rooms = [(size + ALIGN_BYTES - 1) & -ALIGN_BYTES for size in sizes]
    offsets = tuple(accumulate(chain((0,), rooms[:-1])))
    return offsets, offsets[-1] + sizes[-1]


def _check_places(
    offsets: Sequence[int], sizes: Sequence[int], dtypes: Sequence[DType]
) -> None:
    if min(offsets, default=0) < 0:
        message = "an entry begins before its segment"
        raise InvalidArgument(message)
    for offset, dtype_ in zip(offsets, dtypes, strict=True):
        if offset % dtype_.itemsize:
            message = f"an entry at {offset} is not aligned for its dtype {dtype_.name}"
            raise InvalidArgument(message)
    placed = sorted((o, o + n) for o, n in zip(offsets, sizes, strict=True) if n)
    for (_, end), (start, _) in pairwise(placed):
        if start < end:
            message = f"two entries overlap at byte {start}"
            raise InvalidArgument(message)


def _check_names(names: Sequence[str]) -> None:
    """`check_name` for each of them, at the price of one for all in the good case."""
    lines = "\n".join(names) if set(map(type, names)) == {str} else "\t"
    odd = lines.encode("utf-8", "surrogatepass").translate(None, _PLAIN)
    legal = (
        odd == b"\n" * (len(names) - 1)
        and all(names)
        and max(map(len, names), default=0) <= MAX_NAME_BYTES
        and "\n " not in lines
        and " \n" not in lines
        and lines.strip() == lines
    )
    if not legal:
        for name in names:
            check_name(name, what="tensor name")


def _check_entry_of(entry_of: Sequence[int], entries: int) -> None:
    """Entries are named in order of first use, none is left out."""
    seen = 0
    for entry in entry_of:
        if not 0 <= entry <= seen:
            break
        seen += entry == seen
    else:
        if seen == entries:
            return
    message = "names must take up entries in order, each at least once"
    raise InvalidArgument(message)


class Index:
    """How named tensors are packed in one segment. Immutable; equal by content.

    Columns rather than one object a tensor: `dtypes`, `shapes`, `offsets` and `sizes` run
    over the entries, `names` and `entry_of` over the names.

    Parameters
    ----------
    names : sequence of str
        Names of the tensors, unique, in put order.
    dtypes, shapes : sequence
        Of each entry.
    entry_of : sequence of int, optional
        Entry of each name; default: the n-th name has the n-th entry.
    offsets : sequence of int, optional
        Where each entry begins; default: packed.
    nbytes : int, optional
        Length of the segment; default: the end of the last entry.

    Raises
    ------
    InvalidName
        For a name that is not legal or occurs twice.
    InvalidArgument
        For whatever else contradicts the rules of this module.
    """

    __slots__ = (
        "_encoded",
        "_position",
        "dtypes",
        "entry_of",
        "names",
        "nbytes",
        "offsets",
        "packed",
        "shapes",
        "sizes",
    )

    names: tuple[str, ...]
    #: Entry of each name. First uses are 0, 1, 2, ...
    entry_of: tuple[int, ...]
    dtypes: tuple[DType, ...]
    shapes: tuple[Shape, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    #: Whether `offsets` and `nbytes` are those that packing gives.
    packed: bool
    #: Logical length of the segment.
    nbytes: int

    def __init__(
        self,
        names: Sequence[str],
        dtypes: Sequence[DType],
        shapes: Sequence[Shape],
        *,
        entry_of: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        nbytes: int | None = None,
    ) -> None:
        _check_names(names)
        #: What `encode` made, once it was asked: a put needs it three times over.
        self._encoded = b""
        self._position = dict(zip(names, range(len(names)), strict=True))
        if len(self._position) != len(names):
            message = "a tensor name occurs twice"
            raise InvalidName(message)
        if len(dtypes) != len(shapes) or (
            entry_of is None and len(names) != len(dtypes)
        ):
            message = "names, dtypes and shapes must be equally many"
            raise InvalidArgument(message)
        self.names = tuple(names)
        self.dtypes = tuple(dtypes)
        self.shapes = tuple(shapes)
        if entry_of is None:
            self.entry_of = tuple(range(len(names)))
        else:
            self.entry_of = tuple(entry_of)
            if len(self.entry_of) != len(names):
                message = "every name needs one entry"
                raise InvalidArgument(message)
            _check_entry_of(self.entry_of, len(dtypes))
        self.sizes = _sizes(self.dtypes, self.shapes)
        self._place(offsets, nbytes)

    def _place(self, offsets: Sequence[int] | None, nbytes: int | None) -> None:
        packed, packed_end = _packed(self.sizes)
        if offsets is None:
            self.offsets, end = packed, packed_end
        elif len(offsets) != len(self.sizes):
            message = "every entry needs one offset"
            raise InvalidArgument(message)
        else:
            _check_places(offsets, self.sizes, self.dtypes)
            self.offsets = tuple(offsets)
            end = max(map(int.__add__, self.offsets, self.sizes), default=0)
        self.nbytes = end if nbytes is None else nbytes
        if not end <= self.nbytes <= _MAX:
            message = (
                f"a segment of {self.nbytes} bytes cannot hold entries up to byte {end}"
            )
            raise InvalidArgument(message)
        self.packed = self.nbytes == packed_end and self.offsets == packed

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> Index:
        """Pack tensors that are not tied, in the order given."""
        listed = list(specs)
        return cls(
            [spec.name for spec in listed],
            [spec.dtype for spec in listed],
            [spec.shape for spec in listed],
        )

    # ------------------------------------------------------------------ looking
    def __len__(self) -> int:
        """Count the names."""
        return len(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self._position

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Index):
            return NotImplemented
        return self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self._content())

    def __repr__(self) -> str:
        return f"Index({len(self.names)} names, {len(self.sizes)} entries, {self.nbytes} bytes)"

    def _content(self) -> tuple[object, ...]:
        return (
            self.names,
            self.entry_of,
            self.dtypes,
            self.shapes,
            self.offsets,
            self.nbytes,
        )

    def position(self, name: str) -> int:
        """Entry of `name`.

        Raises
        ------
        NotFound
            When no tensor is called that.
        """
        at = self._position.get(name)
        if at is None:
            few = ", ".join(repr(known) for known in self.names[:5])
            message = f"there is no tensor {name!r} among {len(self.names)} (the first: {few})"
            raise NotFound(message)
        return self.entry_of[at]

    def entry(self, name: str) -> Entry:
        """Where the tensor called `name` lies; NotFound as for `position`."""
        at = self.position(name)
        return Entry(self.dtypes[at], self.shapes[at], self.offsets[at], self.sizes[at])

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of the tensor called `name`; NotFound as for `position`."""
        at = self.position(name)
        return TensorSpec(name, self.dtypes[at], self.shapes[at])

    def specs(self) -> Iterator[TensorSpec]:
        """Every name's spec, in put order; tied ones each."""
        for name, at in zip(self.names, self.entry_of, strict=True):
            yield TensorSpec(name, self.dtypes[at], self.shapes[at])

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names that are one tensor; singles are left out."""
        groups: dict[int, list[str]] = {}
        if len(self.names) != len(self.sizes):
            for name, at in zip(self.names, self.entry_of, strict=True):
                groups.setdefault(at, []).append(name)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    @property
    def content_bytes(self) -> int:
        """Bytes of the entries, without those between them."""
        return sum(self.sizes)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """(offset, length) of the bytes that belong to no entry; they are zero."""
        end = 0
        places = zip(self.offsets, self.sizes, strict=True)
        for offset, size in places if self.packed else sorted(places):
            if size:
                if offset > end:
                    yield end, offset - end
                end = offset + size
        if self.nbytes > end:
            yield end, self.nbytes - end

    # ---------------------------------------------------------------- the codec
    def encode(self) -> bytes:
        """Return the index as bytes; equal indices give equal bytes."""
        if not self._encoded:
            self._encoded = self._encode()
        return self._encoded

    def _encode(self) -> bytes:
        dtype_at, shape_at = _Numbers[str](), _Numbers[Shape]()
        dtype_of = bytes(map(dtype_at.__getitem__, map(_NAME, self.dtypes)))
        shape_of = list(map(shape_at.__getitem__, self.shapes))
        tied = len(self.names) != len(self.sizes)
        return _ENCODER.encode(
            _Wire(
                format=_FORMAT,
                names=list(self.names),
                entry_of=list(self.entry_of) if tied else None,
                dtypes=list(dtype_at),
                dtype_of=dtype_of,
                shapes=list(shape_at),
                shape_of=shape_of,
                offsets=None if self.packed else list(self.offsets),
                nbytes=self.nbytes,
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> Index:
        """Read what `encode` wrote.

        Raises
        ------
        CorruptFile
            When the bytes are not an index, or one that contradicts itself.
        """
        try:
            wire = _DECODER.decode(data)
            if wire.format != _FORMAT:
                message = f"format {wire.format} is not known to this release"
                raise InvalidArgument(message)
            dtypes = [dtype(name) for name in wire.dtypes]
            if wire.shape_of and min(wire.shape_of) < 0:
                message = "a shape number is negative"
                raise InvalidArgument(message)
            return cls(
                wire.names,
                [dtypes[at] for at in wire.dtype_of],
                [wire.shapes[at] for at in wire.shape_of],
                entry_of=wire.entry_of,
                offsets=wire.offsets,
                nbytes=wire.nbytes,
            )
        except IndexError as error:
            message = (
                "this is not the index of an artifact: a column points past its table"
            )
            raise CorruptFile(message) from error
        except (msgspec.MsgspecError, UnicodeDecodeError, RequestError) as error:
            message = f"this is not the index of an artifact: {error}"
            raise CorruptFile(message) from error

    def digest(self) -> str:
        """Name of this index: 32 hex digits, the same in every process and release."""
        return hashlib.blake2b(self.encode(), digest_size=16).hexdigest()


def _sizes(dtypes: Sequence[DType], shapes: Sequence[Shape]) -> tuple[int, ...]:
    """Bytes of each entry; a shape that occurs often is checked once."""
    if dtypes and all(map(is_, dtypes, repeat(dtypes[0]))):
        return tuple(map(_Sizes(dtype(dtypes[0].name)).__getitem__, shapes))
    of = {name: _Sizes(dtype(name)) for name in dict.fromkeys(map(_NAME, dtypes))}
    return tuple(
        [of[one.name][shape] for one, shape in zip(dtypes, shapes, strict=True)]
    )


class _Numbers(dict[_K, int]):
    """Numbers things in the order in which they are first asked for."""

    def __missing__(self, key: _K) -> int:
        number = self[key] = len(self)
        return number


class _Sizes(dict[Shape, int]):
    """Bytes of a tensor of one dtype, by shape."""

    def __init__(self, of: DType) -> None:
        super().__init__()
        self._dtype = of

    def __missing__(self, shape: Shape) -> int:
        size = self[shape] = nbytes_of(self._dtype, shape)
        return size
