"""A model on disk: one safetensors file, or shards with an index that promises them.

Rules:

1. A model opens whole or not at all: every file and every tensor that the index promises
   is there, where it says, and nothing is there that it does not promise.
2. Where a folder has both `model.safetensors` and an index, the single file is the model,
   as for the format's other readers; saving relies on it.
3. An open model holds its files open: what happens to their paths later (a save over
   them, a removal) does not touch it.
4. A shard that is missing while the index has just been replaced is no damage: the new
   index is read instead.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, Self

import msgspec

from tensorcast_dask.dataplane.files.layout import (
    Replaced,
    Sums,
    plan_read,
    sums_of,
    user_metadata,
)
from tensorcast_dask.dataplane.files.opening import (
    Identity,
    open_regular,
    opened,
    system_errors,
)
from tensorcast_dask.dataplane.files.safetensors import (
    MAX_HEADER_BYTES,
    FileHeader,
    read_header,
)
from tensorcast_dask.exceptions import CorruptFile, InvalidArgument, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from tensorcast_dask.dataplane.files.pieces import Piece
    from tensorcast_dask.tensors.specs import Index

__all__ = [
    "INDEX_SUFFIX",
    "Model",
    "ModelFile",
    "ShardIndex",
    "open_model",
    "read_shard_index",
]

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
DEFAULT_STEM: Final = "model"
_ATTEMPTS: Final = 8


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One open file of a model."""

    path: str
    fd: int
    identity: Identity
    header: FileHeader
    pieces: tuple[Piece, ...]
    sums: Sums | None
    """What its chunks must hash to; None for a file that brings no checksums."""


class Model:
    """An open model, a context manager; closing it closes its files.

    Parameters
    ----------
    path : str
        What was opened.
    files : tuple of ModelFile
        In the order in which their tensors stand in `index`.
    index : Index
        Of the segment that holds all of it.
    closing : callable
        What `close` calls.
    """

    def __init__(
        self,
        path: str,
        files: tuple[ModelFile, ...],
        index: Index,
        *,
        closing: Callable[[], None],
    ) -> None:
        self.path = path
        self.files = files
        self.index = index
        self._closing = closing

    @property
    def headers(self) -> tuple[FileHeader, ...]:
        """The header of each file."""
        return tuple(file.header for file in self.files)

    @property
    def metadata(self) -> dict[str, str]:
        """What the files' writer said about them; the first file's word counts."""
        found: dict[str, str] = {}
        for file in reversed(self.files):
            found |= user_metadata(file.header)
        return found

    @property
    def file_nbytes(self) -> int:
        """Bytes of tensors in the files."""
        return sum(file.header.data_nbytes for file in self.files)

    def close(self) -> None:
        """Close the files; a second time is fine."""
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_model(path: str | os.PathLike[str], *, check_total: bool = True) -> Model:
    """Open and check a model.

    Parameters
    ----------
    path : path
        A safetensors file, an index (`*.safetensors.index.json`), or a folder with either.
    check_total : bool
        Whether a model is refused whose index says that it has more bytes than there are.

    Raises
    ------
    NotFound
        When there is nothing of the kind.
    CorruptFile
        When a file contradicts itself, or the index what is there; it is named.
    InvalidName, UnsupportedDtype
        For a tensor that no artifact can hold; it is named.
    """
    missing: NotFound | None = None
    for _ in range(_ATTEMPTS):
        found = _locate(path)
        try:
            return _open_at(os.fspath(path), found, check_total=check_total)
        except NotFound as error:  # what stood there has been replaced since
            missing = error
    assert missing is not None, "model: only NotFound goes round again"
    raise missing


def _open_at(path: str, found: Path, *, check_total: bool) -> Model:
    if not found.name.endswith(INDEX_SUFFIX):
        return _open(path, [found], None)
    index = read_shard_index(found)
    shards = [found.parent / name for name in sorted(set(index.weight_map.values()))]
    try:
        return _open(path, shards, index if check_total else index.untotalled())
    except NotFound as error:
        if _replaced(found, index):
            raise
        _refuse(
            os.fspath(found), f"it promises a file that is missing ({error.message})"
        )


def _locate(path: str | os.PathLike[str]) -> Path:
    """Find the one file that stands for the model."""
    if not os.fspath(path):
        message = "an empty path names no model; give the path of a file or folder"
        raise InvalidArgument(message)
    given = Path(path)
    with system_errors(path):
        try:
            if not given.is_dir():
                return given
            names = sorted(os.listdir(given))  # noqa: PTH208  # names are all that is needed
        except ValueError as error:
            message = f"{os.fspath(path)!r} is not a path ({error})"
            raise InvalidArgument(message) from error
    for name in (f"{DEFAULT_STEM}{SUFFIX}", f"{DEFAULT_STEM}{INDEX_SUFFIX}"):
        if name in names:
            return given / name
    for suffix in (INDEX_SUFFIX, SUFFIX):
        fitting = [
            name for name in names if name.endswith(suffix) and not name.startswith(".")
        ]
        if len(fitting) > 1:
            message = f"{given} has several models ({', '.join(fitting[:5])}); name one of them"
            raise InvalidArgument(message)
        if fitting:
            return given / fitting[0]
    message = f"{given} has no *{SUFFIX} and no *{INDEX_SUFFIX}; check the path"
    raise NotFound(message)


def _refuse(path: str, what: str, *, tensor: str | None = None) -> NoReturn:
    message = f"{path}: {what}; the model is incomplete or damaged, get it again"
    raise CorruptFile(message, {"file": path, "tensor": tensor})


# ----------------------------------------------------------------------- index


class _IndexMetadata(msgspec.Struct):
    total_size: int | float | None = None
    #: Files that this set took the place of, by our own writer.
    tensorcast_replaces: list[Replaced] = []


class _IndexDocument(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: _IndexMetadata | None = None


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """What an index file promises."""

    path: str
    identity: Identity
    weight_map: Mapping[str, str]
    """File of each tensor, relative to the index."""
    total_nbytes: float | None
    replaces: tuple[Replaced, ...]

    def untotalled(self) -> ShardIndex:
        """Return the same promise without the total."""
        return ShardIndex(
            self.path, self.identity, self.weight_map, None, self.replaces
        )


def read_shard_index(path: Path) -> ShardIndex:
    """Read an index file.

    Raises
    ------
    CorruptFile
        When it is none, or points outside its folder.
    NotFound
        When there is none.
    """
    with opened(path) as fd:
        identity = Identity.of(fd)
        if identity.nbytes > MAX_HEADER_BYTES:
            _refuse(
                os.fspath(path), f"{identity.nbytes} bytes are too many for an index"
            )
        raw = os.pread(fd, identity.nbytes, 0)
    try:
        document = msgspec.json.decode(raw, type=_IndexDocument)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        _refuse(os.fspath(path), f"it is no index ({error})")
    for tensor, name in document.weight_map.items():
        if not name or name.startswith("/") or "\0" in name or ".." in name.split("/"):
            _refuse(os.fspath(path), f"{name!r} is not a file beside it", tensor=tensor)
    about = document.metadata or _IndexMetadata()
    return ShardIndex(
        os.fspath(path),
        identity,
        document.weight_map,
        about.total_size,
        tuple(about.tensorcast_replaces),
    )


def _replaced(path: Path, index: ShardIndex) -> bool:
    """Say whether another index, or a single file, stands there by now."""
    try:
        with opened(path) as fd:
            return Identity.of(fd) != index.identity
    except NotFound:
        return True


# --------------------------------------------------------------------- opening


def _open(path: str, files: list[Path], promised: ShardIndex | None) -> Model:
    with ExitStack() as stack:
        fds: list[int] = []
        headers: list[FileHeader] = []
        identities: list[Identity] = []
        for file in files:
            fd = open_regular(file)
            stack.callback(os.close, fd)
            fds.append(fd)
            identities.append(Identity.of(fd))
            with system_errors(file):
                headers.append(read_header(fd, name=os.fspath(file)))
        if promised is not None:
            _check_promise(promised, headers)
        index, pieces = plan_read(headers)
        opened_files = tuple(
            ModelFile(header.path, fd, identity, header, part, sums_of(header))
            for header, fd, identity, part in zip(
                headers, fds, identities, pieces, strict=True
            )
        )
        return Model(path, opened_files, index, closing=stack.pop_all().close)


def _check_promise(index: ShardIndex, headers: list[FileHeader]) -> None:
    """Refuse a tensor that is promised and missing, or there and not promised."""
    folder = Path(index.path).parent
    promised: dict[str, set[str]] = {}
    for tensor, name in index.weight_map.items():
        promised.setdefault(os.fspath(folder / name), set()).add(tensor)
    for header in headers:
        there = {entry.name for entry in header.entries}
        for tensor in sorted(promised[header.path] - there):
            what = f"tensor {tensor!r}, which {index.path} promises, is not in it"
            _refuse(header.path, what, tensor=tensor)
        for tensor in sorted(there - promised[header.path]):
            what = f"tensor {tensor!r} is in it and {index.path} does not know of it"
            _refuse(header.path, what, tensor=tensor)
    there_nbytes = sum(header.data_nbytes for header in headers)
    # Some writers count too little (ties, quantised tensors), which hides nothing.
    if index.total_nbytes is not None and index.total_nbytes > there_nbytes:
        what = f"its total_size is {index.total_nbytes}, its files hold {there_nbytes} bytes of tensors"
        _refuse(index.path, what)
