"""The safetensors format: headers read strictly, headers written.

A file is an 8-byte little-endian length, that many bytes of JSON, and the tensors' bytes.

Rules:

1. Nothing that a header claims is believed before it is checked against the file: the
   length against the file's size, each tensor's bytes against its dtype and shape, and
   all tensors together against the data: no overlap, no hole, nothing left over.
2. Whatever is wrong is one CorruptFile that names the file, and the tensor where one is
   to blame. It is raised before anything is allocated for the tensors.
3. What the format's own loader refuses is refused. Beyond it: a name given twice (which
   the format forbids and its loader lets pass), members that the format does not know,
   and shapes that no array library can make.
4. Memory stays in proportion to the header: values are parsed one entry at a time, so
   that no nesting or long list in the JSON grows before it is refused.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

import msgspec

from tensorcast_dask.dataplane.files.opening import opened
from tensorcast_dask.exceptions import CorruptFile, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "DTYPE_BITS",
    "MAX_HEADER_BYTES",
    "Entry",
    "FileHeader",
    "encode_header",
    "parse_header",
    "read_header",
]

#: The format's own limit; a larger header is refused by every reader.
MAX_HEADER_BYTES: Final = 100_000_000

#: Bits of one element of every dtype that the format names.
DTYPE_BITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "C64": 64,
        "F64": 64,
        "I64": 64,
        "U64": 64,
    }
)

_PREFIX: Final = struct.Struct("<Q")
_METADATA: Final = "__metadata__"
_MAX_ENTRY_CHARS: Final = 4096
_MAX_INT: Final = 2**63 - 1
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER: Final = json.JSONDecoder()

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a file."""

    name: str
    dtype: str
    """The format's name of it, a key of `DTYPE_BITS`."""
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the start of the data."""
    end: int
    """One past the last byte."""

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """What a valid file says of itself."""

    path: str
    entries: tuple[Entry, ...]
    """In the order of the header's JSON, which need not be that of the bytes."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    data_start: int
    file_size: int
    raw: bytes = field(default=b"", repr=False, compare=False)
    """The JSON as it stands in the file."""

    @property
    def data_nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.file_size - self.data_start


def read_header(source: str | os.PathLike[str] | int, *, name: str = "") -> FileHeader:
    """Read and check the header of a file.

    Parameters
    ----------
    source : path or int
        The file, or a descriptor of it, which stays open and keeps its position.
    name : str
        What errors call the file; its path where that is given.

    Raises
    ------
    CorruptFile
        When anything that the header claims does not hold.
    NotFound
        When there is no such file.
    """
    if not isinstance(source, int):
        with opened(source) as fd:
            return read_header(fd, name=os.fspath(source))
    path = name or f"fd {source}"
    file_size = os.fstat(source).st_size
    head = os.pread(source, _PREFIX.size, 0)
    header_nbytes = _header_nbytes(head, file_size, path=path)
    raw = bytearray()
    while len(raw) < header_nbytes:
        part = os.pread(source, header_nbytes - len(raw), _PREFIX.size + len(raw))
        if not part:
            _refuse(path, "it became shorter while its header was read")
        raw += part
    return parse_header(bytes(raw), file_size=file_size, path=path)


def _header_nbytes(head: bytes, file_size: int, *, path: str) -> int:
    if len(head) < _PREFIX.size:
        _refuse(path, f"{file_size} bytes are too few for a header's length")
    (header_nbytes,) = _PREFIX.unpack(head)
    if header_nbytes > MAX_HEADER_BYTES:
        _refuse(
            path, f"its header claims {header_nbytes} bytes, over the format's limit"
        )
    if header_nbytes > file_size - _PREFIX.size:
        _refuse(
            path, f"its header claims {header_nbytes} of the file's {file_size} bytes"
        )
    return int(header_nbytes)


def parse_header(raw: bytes, *, file_size: int, path: str) -> FileHeader:
    """Check a header's JSON against a file of `file_size` bytes.

    Raises
    ------
    CorruptFile
        As `read_header`.
    """
    try:
        text = raw.decode()
        members, metadata = _parse_members(text)
    except ValueError as error:  # JSON, UTF-8 and surrogates all end here
        _refuse(path, f"its header cannot be read ({error})")
    header = FileHeader(
        path=path,
        entries=tuple(_entry(name, value, path=path) for name, value in members),
        metadata=MappingProxyType(metadata),
        data_start=_PREFIX.size + len(raw),
        file_size=file_size,
        raw=raw,
    )
    _check_coverage(header)
    return header


def _refuse(path: str, what: str, *, tensor: str | None = None) -> NoReturn:
    of = "" if tensor is None else f", tensor {tensor!r}"
    message = f"{path}{of}: {what}; it is damaged or no safetensors file, get it again"
    raise CorruptFile(message, {"file": path, "tensor": tensor})


# ------------------------------------------------------------------------ JSON


def _parse_members(text: str) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Split a header into its tensors' values, still as text, and its metadata."""
    metadata: dict[str, str] = {}

    def value(name: str, at: int) -> tuple[str, int]:
        if name != _METADATA:
            return _tensor_text(text, at)
        if text.startswith("null", at):
            return "", at + 4
        found, end = _object(text, at, lambda _, start: _string(text, start))
        metadata.update(found)
        return "", end

    members, end = _object(text, 0, value)
    if _skip(text, end) != len(text):
        message = f"text after its end at {end}"
        raise ValueError(message)
    return [(name, value) for name, value in members if name != _METADATA], metadata


def _object(
    text: str, at: int, value: Callable[[str, int], tuple[_Value, int]]
) -> tuple[list[tuple[str, _Value]], int]:
    """Read one JSON object at `at`, its values by `value`; return its members and its end."""
    at = _skip(text, _expect(text, at, "{"))
    members: dict[str, _Value] = {}
    if text.startswith("}", at):
        return [], at + 1
    while True:
        name, at = _string(text, at)
        if name in members:
            message = f"{name!r} stands there twice"
            raise ValueError(message)
        at = _skip(text, _expect(text, _skip(text, at), ":"))
        members[name], at = value(name, at)
        at = _skip(text, at)
        if text.startswith("}", at):
            return list(members.items()), at + 1
        at = _skip(text, _expect(text, at, ","))


def _skip(text: str, at: int) -> int:
    if at < len(text) and text[at] > " ":
        return at
    found = _SPACE.match(text, at)
    assert found is not None, "a pattern that may be empty always matches"
    return found.end()


def _expect(text: str, at: int, token: str) -> int:
    if not text.startswith(token, at):
        message = f"{token!r} expected at {at}"
        raise ValueError(message)
    return at + 1


def _string(text: str, at: int) -> tuple[str, int]:
    _expect(text, at, '"')
    found, end = _DECODER.raw_decode(text, at)
    if not found.isascii():
        found.encode()  # refuses what `\ud800` makes
    return found, end


def _tensor_text(text: str, at: int) -> tuple[str, int]:
    """Cut out a tensor's value: no legal one has a brace inside, or is long."""
    _expect(text, at, "{")
    end = text.find("}", at, at + _MAX_ENTRY_CHARS) + 1
    if not end:
        message = f"no end of the value at {at} within {_MAX_ENTRY_CHARS} characters"
        raise ValueError(message)
    return text[at:end], end


# --------------------------------------------------------------------- tensors


class _Members(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_MEMBERS: Final = msgspec.json.Decoder(_Members)
#: What no legal entry has outside its strings, and no dtype inside: signs and fractions.
_NOT_NATURAL = re.compile(r"[-.]|\d[eE]")
#: Three keys and a dtype: with more, a member stands there twice.
_QUOTES: Final = 8


def _entry(name: str, text: str, *, path: str) -> Entry:
    try:
        members = _MEMBERS.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        _refuse(
            path,
            f"its entry is not dtype, shape and data_offsets ({error})",
            tensor=name,
        )
    if text.count('"') != _QUOTES:
        _refuse(path, "its entry says something twice", tensor=name)
    if members.dtype not in DTYPE_BITS:
        _refuse(
            path, f"dtype {members.dtype!r} is not one of the format's", tensor=name
        )
    begin, end = members.data_offsets
    if _NOT_NATURAL.search(text) or max(begin, end, *members.shape) > _MAX_INT:
        _refuse(
            path,
            "shape and data_offsets must be whole numbers below 2**63",
            tensor=name,
        )
    entry = Entry(
        name=name, dtype=members.dtype, shape=members.shape, begin=begin, end=end
    )
    _check_nbytes(entry, path=path)
    return entry


def _check_nbytes(entry: Entry, *, path: str) -> None:
    bits = DTYPE_BITS[entry.dtype]
    # Zeros do not hide an absurd extent: no library can make [0, 2**62, 8].
    if math.prod(extent or 1 for extent in entry.shape) * bits > _MAX_INT:
        _refuse(path, f"shape {list(entry.shape)} is too big", tensor=entry.name)
    bits *= math.prod(entry.shape)
    if bits % 8 or bits // 8 != entry.nbytes:
        what = f"{entry.dtype} {list(entry.shape)} takes {bits / 8:g} bytes, its data_offsets {entry.nbytes}"
        _refuse(path, what, tensor=entry.name)


def _check_coverage(header: FileHeader) -> None:
    """Refuse overlaps, holes, and bytes before, between or behind the tensors."""
    at = 0
    for entry in sorted(header.entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != at:
            kind = "overlaps its neighbour" if entry.begin < at else "leaves a hole"
            what = f"its data begins at {entry.begin} and {kind}: {at} was due"
            _refuse(header.path, what, tensor=entry.name)
        at = entry.end
        if at > header.data_nbytes:
            what = f"its data ends at {at}, the file's at {header.data_nbytes}"
            _refuse(header.path, what, tensor=entry.name)
    if at != header.data_nbytes:
        _refuse(header.path, f"{header.data_nbytes - at} bytes belong to no tensor")


# --------------------------------------------------------------------- writing


def encode_header(
    entries: Sequence[Entry], *, metadata: Mapping[str, str], align_bytes: int = 8
) -> bytes:
    """Return the first bytes of a file: length, JSON, and spaces up to `align_bytes`.

    The metadata stands last in the JSON, in the order given.

    Raises
    ------
    InvalidArgument
        When the header would be longer than any reader takes.
    """
    document: dict[str, object] = {}
    for entry in entries:
        document[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (entry.begin, entry.end),
        }
    if metadata:
        document[_METADATA] = dict(metadata)
    raw = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-(_PREFIX.size + len(raw)) % align_bytes)
    if len(raw) > MAX_HEADER_BYTES:
        message = f"a header of {len(raw)} bytes is over the format's limit; save in several files"
        raise InvalidArgument(message)
    return _PREFIX.pack(len(raw)) + raw
