"""From an artifact's index to a file and back.

The format packs tensors without holes, has names for most dtypes, and one owner for each
byte. What it cannot say stands in the file's own metadata under `tensorcast`, as JSON::

    {"v": 1, "chunk_bytes": 8388608, "sums": "<16 hex digits a chunk of the data>",
     "tensors": {"z": ["complex128", [2, 3]]},      # stored as U8
     "ties": {"lm_head": ["embed", 1]},             # owner, place among the names
     "renamed": {"stored name": "name"},            # the one name that the format keeps
     "offsets": [...], "nbytes": n}                 # of a segment that is not packed

and under `tensorcast.seal` the xxh3 of the whole header, its own digits taken as zeros.

Rules:

1. Only this reader gives ties and foreign dtypes back; every other reader still reads the
   file, with the tied tensor under its first name.
2. A sealed header that does not match its seal is CorruptFile. One that another program
   rewrote has no seal in its place: its sums and layout no longer count, its dtypes and
   ties do, as far as they agree with the tensors that are there.
3. Our own metadata is believed no more than the rest of the header.
4. Names come back in put order: the JSON keeps it, whatever the order of the bytes.
5. Tensors whose length is a multiple of 64 come first in the data, so that a packed
   segment and the data are the same bytes in the common case; the others follow, the
   largest elements first, so that all lie on their own alignment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec
from xxhash import xxh3_64_hexdigest

from tensorcast_dask.dataplane.files.pieces import Piece, merged
from tensorcast_dask.dataplane.files.safetensors import Entry, FileHeader, encode_header
from tensorcast_dask.exceptions import CorruptFile, InvalidArgument, RequestError
from tensorcast_dask.tensors.dtypes import DType, dtype, from_safetensors
from tensorcast_dask.tensors.specs import ALIGN_BYTES, Index, Shape, nbytes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "FilePlan",
    "Replaced",
    "Sums",
    "check_seal",
    "plan_read",
    "plan_write",
    "replaced_by",
    "split",
    "sums_of",
    "user_metadata",
]

#: Data of at least this length begin on a page, so that it can be read past the cache.
_PAGE_ALIGNED_BYTES: Final = 1 << 20
_PAGE_BYTES: Final = 4096

_KEY: Final = "tensorcast"
_SEAL: Final = "tensorcast.seal"
_NO_SEAL: Final = "0" * 16
_SEALED = re.compile(rb'"tensorcast\.seal":"([0-9a-f]{16})"\}\} *\Z')
#: The one name that a tensor can have in an artifact and not in a file.
_RESERVED: Final = "__metadata__"
_VERSION: Final = 1
#: A place behind all names.
_LAST: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Sums:
    """Checksums of a file's data, chunk by chunk."""

    chunk_bytes: int
    values: tuple[int, ...]


#: Name, inode, mtime_ns and size of a file that a save made obsolete.
Replaced = tuple[str, int, int, int]


class _Own(msgspec.Struct, kw_only=True, omit_defaults=True):
    v: int = _VERSION
    chunk_bytes: int = 0
    sums: str = ""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    ties: dict[str, tuple[str, int]] = {}
    renamed: dict[str, str] = {}
    offsets: list[int] | None = None
    nbytes: int = 0
    #: Files that this one took the place of: name, inode, mtime_ns, size.
    replaces: list[Replaced] = []


_NOTHING_OWN: Final = _Own(v=0)


# --------------------------------------------------------------------- writing


@dataclass(frozen=True)
class FilePlan:
    """One file of a save, before its bytes are known."""

    entries: tuple[Entry, ...]
    pieces: tuple[Piece, ...]
    """In the order of the data, which they cover without a hole."""
    data_nbytes: int
    chunk_bytes: int
    metadata: Mapping[str, str]
    own: _Own

    @cached_property
    def head_nbytes(self) -> int:
        """Bytes before the data."""
        return len(self.head())

    @property
    def file_nbytes(self) -> int:
        """Length of the file."""
        return self.head_nbytes + self.data_nbytes

    @property
    def chunks(self) -> int:
        """Number of checksums."""
        return -(-self.data_nbytes // self.chunk_bytes)

    def replacing(self, files: Sequence[Replaced]) -> FilePlan:
        """Return the plan of a file that also says which files it made obsolete."""
        own = msgspec.structs.replace(self.own, replaces=list(files))
        return replace(self, own=own)

    def head(self, sums: Iterable[int] | None = None) -> bytes:
        """Return the file up to its data; without sums, zeros of the same length."""
        digits = "".join(f"{value:016x}" for value in sums) if sums is not None else ""
        own = msgspec.structs.replace(self.own, sums=digits or _NO_SEAL * self.chunks)
        metadata = {
            **self.metadata,
            _KEY: msgspec.json.encode(own).decode(),
            _SEAL: _NO_SEAL,
        }
        align_bytes = (
            _PAGE_BYTES if self.data_nbytes >= _PAGE_ALIGNED_BYTES else ALIGN_BYTES
        )
        head = encode_header(self.entries, metadata=metadata, align_bytes=align_bytes)
        found = _SEALED.search(head)
        assert found is not None, (
            "layout: the seal is the last member of the last object"
        )
        seal = xxh3_64_hexdigest(head[8:]).encode()
        return head[: found.start(1)] + seal + head[found.end(1) :]


def split(index: Index, *, max_bytes: int | None) -> list[range]:
    """Cut the entries into shards of at most `max_bytes`, in order.

    A tensor that is larger has a shard of its own. Without a limit there is one shard.
    """
    shards: list[range] = []
    start, filled = 0, 0
    for position, nbytes in enumerate(index.sizes):
        if max_bytes is not None and position > start and filled + nbytes > max_bytes:
            shards.append(range(start, position))
            start, filled = position, 0
        filled += nbytes
    return [*shards, range(start, len(index.sizes))]


def plan_write(
    index: Index,
    shard: range | None = None,
    *,
    metadata: Mapping[str, str],
    chunk_bytes: int,
) -> FilePlan:
    """Plan the file that holds the entries `shard` of a segment (all of them by default).

    Raises
    ------
    InvalidArgument
        For metadata that is not text, or that takes this module's own keys.
    """
    assert chunk_bytes % _PAGE_BYTES == 0, "layout: chunks are whole pages"
    _check_metadata(metadata)
    positions = range(len(index.sizes)) if shard is None else shard
    owners = _first_names(index)
    stored = {at: _stored_name(owners[at], index) for at in positions}
    begins, pieces, end = _pack(index, positions)
    entries = tuple(
        Entry(
            name=stored[at],
            dtype=index.dtypes[at].safetensors or "U8",
            shape=index.shapes[at]
            if index.dtypes[at].safetensors
            else (index.sizes[at],),
            begin=begins[at],
            end=begins[at] + index.sizes[at],
        )
        for at in positions
    )
    own = _Own(
        chunk_bytes=chunk_bytes,
        tensors={
            stored[at]: (index.dtypes[at].name, index.shapes[at])
            for at in positions
            if index.dtypes[at].safetensors is None
        },
        ties={
            name: (stored[at], place)
            for place, (name, at) in enumerate(
                zip(index.names, index.entry_of, strict=True)
            )
            if at in stored and name != owners[at]
        },
        renamed={
            stored[at]: owners[at] for at in positions if stored[at] != owners[at]
        },
        offsets=None if index.packed else [index.offsets[at] for at in positions],
        nbytes=0 if index.packed else index.nbytes,
    )
    if not index.packed and index.nbytes > _layout_limit(
        index.content_bytes, len(index.sizes)
    ):
        message = f"a segment of {index.nbytes} bytes for {end} bytes of tensors is mostly holes"
        raise InvalidArgument(message)
    return FilePlan(entries, pieces, end, chunk_bytes, dict(metadata), own)


def _layout_limit(data_nbytes: int, entries: int) -> int:
    """Longest segment that a file's word is taken for: it bounds what is allocated."""
    return 2 * data_nbytes + _PAGE_BYTES * (entries + 1)


def _check_metadata(metadata: Mapping[str, str]) -> None:
    for key, value in metadata.items():
        try:
            (key + value).encode()
        except (TypeError, AttributeError, UnicodeEncodeError) as error:
            message = f"metadata {key!r}: a key and its value are text; convert them"
            raise InvalidArgument(message) from error
        if key in {_KEY, _SEAL}:
            message = f"metadata key {key!r} is taken; choose another"
            raise InvalidArgument(message)


def _first_names(index: Index) -> list[str]:
    names = [""] * len(index.sizes)
    seen = 0
    for name, at in zip(index.names, index.entry_of, strict=True):
        if at == seen:  # entries are named in order of first use
            names[at] = name
            seen += 1
    return names


def _stored_name(name: str, index: Index) -> str:
    if name != _RESERVED:
        return name
    stored = f"{name} (tensor)"
    while stored in index:
        stored += "'"
    return stored


def _pack(
    index: Index, positions: range
) -> tuple[dict[int, int], tuple[Piece, ...], int]:
    """Give each entry its place in the data; return begins, merged pieces and the end."""
    order = sorted(
        positions,
        key=lambda at: (
            -index.dtypes[at].itemsize if index.sizes[at] % ALIGN_BYTES else -1024
        ),
    )
    begins: dict[int, int] = {}
    pieces: list[Piece] = []
    end = 0
    for at in order:
        begins[at] = end
        pieces.append(Piece(end, index.offsets[at], index.sizes[at]))
        end += index.sizes[at]
    return begins, merged(pieces), end


# --------------------------------------------------------------------- reading


def plan_read(
    headers: Sequence[FileHeader],
) -> tuple[Index, tuple[tuple[Piece, ...], ...]]:
    """Say how the tensors of files lie in one segment, and which bytes go where.

    Parameters
    ----------
    headers : sequence of FileHeader
        The files of one model, in order.

    Returns
    -------
    Index
        Of the segment; that of the artifact that was saved, for files of ours.
    tuple of tuple of Piece
        For each file, in the order of its bytes.

    Raises
    ------
    CorruptFile
        When a tensor is in two files, or metadata of ours contradicts the tensors.
    UnsupportedDtype, InvalidName
        For a tensor that no artifact can hold; it is named.
    """
    owns = [_own_of(header) for header in headers]
    _check_unique(headers)
    where = headers[0].path if headers else ""
    names = [
        own.renamed.get(entry.name, entry.name)
        for header, own in zip(headers, owns, strict=True)
        for entry in header.entries
    ]
    tensors = [
        _typed(entry, own, path=header.path)
        for header, own in zip(headers, owns, strict=True)
        for entry in header.entries
    ]
    entry_of: list[int] | None = None
    if any(own.ties for own in owns):
        names, entry_of = _with_ties(names, headers, owns)
    offsets, nbytes = _offsets(headers, owns)
    try:
        index = Index(
            names,
            [found for found, _ in tensors],
            [shape for _, shape in tensors],
            entry_of=entry_of,
            offsets=offsets,
            nbytes=nbytes,
        )
    except InvalidArgument as error:
        _refuse(where, error.message)
    except RequestError as error:
        message = f"{where}: {error.message}"
        raise type(error)(message, error.data) from error
    return index, _pieces(headers, index)


def _refuse(path: str, what: str) -> NoReturn:
    message = f"{path}: {what}; the file is damaged, get it again"
    raise CorruptFile(message, {"file": path})


def _own_of(header: FileHeader) -> _Own:
    """Read our metadata, as far as it still counts."""
    text = header.metadata.get(_KEY)
    if text is None:
        return _NOTHING_OWN
    sealed = check_seal(header)
    try:
        own = msgspec.json.decode(text, type=_Own)
    except msgspec.MsgspecError as error:
        _refuse(header.path, f"its tensorcast metadata cannot be read ({error})")
    if own.v != _VERSION:
        _refuse(
            header.path,
            f"its tensorcast metadata are of version {own.v}, a newer release",
        )
    return own if sealed else _agreeing(own, header)


def _agreeing(own: _Own, header: FileHeader) -> _Own:
    """Keep what still holds of our metadata in a file that another program wrote."""
    stored = {entry.name: entry for entry in header.entries}

    def agrees(name: str, dtype_: str, shape: Shape) -> bool:
        entry = stored.get(name)
        if entry is None or entry.dtype != "U8":
            return False
        try:
            return nbytes_of(dtype(dtype_), shape) == entry.nbytes
        except RequestError:
            return False

    return _Own(
        tensors={n: (d, s) for n, (d, s) in own.tensors.items() if agrees(n, d, s)},
        ties={
            alias: (owner, _LAST)
            for alias, (owner, _) in own.ties.items()
            if owner in stored and alias not in stored
        },
        renamed={old: new for old, new in own.renamed.items() if old in stored},
    )


def check_seal(header: FileHeader) -> bool:
    """Say whether the header is sealed.

    Raises
    ------
    CorruptFile
        When it is and has changed since.
    """
    found = _SEALED.search(header.raw)
    if found is None:
        return False
    blank = (
        header.raw[: found.start(1)] + _NO_SEAL.encode() + header.raw[found.end(1) :]
    )
    if xxh3_64_hexdigest(blank).encode() != found[1]:
        _refuse(header.path, "its header does not match its checksum")
    return True


def sums_of(header: FileHeader) -> Sums | None:
    """Return the checksums that the file brings for its data; None when it has none.

    Raises
    ------
    CorruptFile
        When they cannot be those of its data.
    """
    own = _own_of(header)
    if not own.sums and not own.chunk_bytes:
        return None
    chunks = (
        -(-header.data_nbytes // own.chunk_bytes)
        if own.chunk_bytes >= _PAGE_BYTES
        else -1
    )
    if len(own.sums) != 16 * chunks or re.search("[^0-9a-f]", own.sums):
        _refuse(header.path, "its checksums are not those of its data")
    values = tuple(
        int(own.sums[at : at + 16], 16) for at in range(0, len(own.sums), 16)
    )
    return Sums(own.chunk_bytes, values)


def replaced_by(header: FileHeader) -> list[Replaced]:
    """Return the files that the save of this one made obsolete."""
    return _own_of(header).replaces


def user_metadata(header: FileHeader) -> dict[str, str]:
    """Return the metadata that the caller of a save gave."""
    return {k: v for k, v in header.metadata.items() if k not in {_KEY, _SEAL}}


def _check_unique(headers: Sequence[FileHeader]) -> None:
    seen: dict[str, str] = {}
    for header in headers:
        for entry in header.entries:
            if entry.name in seen:
                what = f"tensor {entry.name!r} is also in {seen[entry.name]}"
                _refuse(header.path, what)
            seen[entry.name] = header.path


def _typed(entry: Entry, own: _Own, *, path: str) -> tuple[DType, Shape]:
    try:
        if entry.name not in own.tensors:
            return from_safetensors(entry.dtype), entry.shape
        name, shape = own.tensors[entry.name]
        found = dtype(name)
        nbytes = nbytes_of(found, shape)
    except InvalidArgument as error:
        _refuse(path, f"tensor {entry.name!r}: {error.message}")
    except RequestError as error:
        message = f"{path}, tensor {entry.name!r}: {error.message}"
        raise type(error)(message, {"file": path, "tensor": entry.name}) from error
    if entry.dtype != "U8" or nbytes != entry.nbytes:
        _refuse(
            path,
            f"tensor {entry.name!r} is not the {name} {list(shape)} that it should be",
        )
    return found, shape


def _with_ties(
    names: list[str], headers: Sequence[FileHeader], owns: Sequence[_Own]
) -> tuple[list[str], list[int]]:
    """Put the tied names back at their places; return all names and their entries."""
    stored = [entry.name for header in headers for entry in header.entries]
    entry_at = {name: at for at, name in enumerate(stored)}
    ties = sorted(
        (place, alias, owner)
        for own in owns
        for alias, (owner, place) in own.ties.items()
    )
    ties.reverse()
    merged: list[str] = []
    entry_of: list[int] = []
    for at, name in enumerate([*names, ""]):
        while ties and (ties[-1][0] == len(merged) or not name):
            _, alias, owner = ties.pop()
            if owner not in entry_at:
                _refuse(
                    headers[0].path,
                    f"{alias!r} is tied to {owner!r}, which is not there",
                )
            merged.append(alias)
            entry_of.append(entry_at[owner])
        if at < len(names):
            merged.append(name)
            entry_of.append(at)
    return merged, entry_of


def _offsets(
    headers: Sequence[FileHeader], owns: Sequence[_Own]
) -> tuple[list[int] | None, int | None]:
    """Return the layout that the files bring, or None for a packed segment."""
    if not owns or any(own.offsets is None for own in owns):
        return None, None
    offsets = [offset for own in owns for offset in own.offsets or ()]
    entries = sum(len(header.entries) for header in headers)
    data_nbytes = sum(header.data_nbytes for header in headers)
    nbytes = owns[0].nbytes
    limit = _layout_limit(data_nbytes, entries)
    if len(offsets) != entries or not 0 <= nbytes <= limit:
        _refuse(headers[0].path, "its layout does not fit its tensors")
    return offsets, nbytes


def _pieces(
    headers: Sequence[FileHeader], index: Index
) -> tuple[tuple[Piece, ...], ...]:
    plans: list[tuple[Piece, ...]] = []
    at = 0
    for header in headers:
        pieces = [
            Piece(header.data_start + entry.begin, index.offsets[at + n], entry.nbytes)
            for n, entry in enumerate(header.entries)
        ]
        plans.append(merged(sorted(pieces, key=lambda piece: piece.file_offset)))
        at += len(header.entries)
    return tuple(plans)
