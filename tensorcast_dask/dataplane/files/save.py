"""Saving a segment as safetensors, one file or shards with an index.

Rules:

1. A save shows nothing before it is complete: a kill at any byte leaves the previous
   model whole. One rename is the instant at which the new one takes its place: that of
   the file, or that of the index, whose shards carry names that no other save has.
2. What the new model replaces is removed after that instant, and is named in the new one
   with inode, time and size, so that a later save removes it where this one was killed.
3. What a dead save left (drafts, shards that no index names) is removed by the next save
   into the folder, and by `clean_leftovers`. What a live one is writing is locked and
   stays; so does every file that is not provably ours.

Fault points: `save.write` (each block), `save.before_rename` and `save.after_rename`
(each file), `save.before_cleanup`.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.dataplane import faults
from tensorcast_dask.dataplane.files.durable import (
    Draft,
    drafts_in,
    remove_unlocked,
    require_room,
    resolve_target,
)
from tensorcast_dask.dataplane.files.layout import (
    FilePlan,
    Replaced,
    check_seal,
    plan_write,
    replaced_by,
    split,
)
from tensorcast_dask.dataplane.files.model import (
    DEFAULT_STEM,
    INDEX_SUFFIX,
    SUFFIX,
    read_shard_index,
)
from tensorcast_dask.dataplane.files.opening import system_errors
from tensorcast_dask.dataplane.files.reading import CHUNK_BYTES
from tensorcast_dask.dataplane.files.safetensors import read_header
from tensorcast_dask.dataplane.files.writing import SegmentSource, write_file
from tensorcast_dask.exceptions import FileError, InvalidArgument, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tensorcast_dask.tensors.specs import Index

__all__ = ["Saved", "clean_leftovers", "save"]

#: What other libraries look for before they read a file.
_DEFAULT_METADATA: Final = {"format": "pt"}
_SHARD = re.compile(r"(?P<stem>.+)-[0-9a-f]{8}-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save wrote."""

    path: str
    """The file or index that stands for the model."""
    files: tuple[str, ...]
    """Every file of it."""
    nbytes: int
    """Bytes written."""


def save(
    path: str | os.PathLike[str],
    index: Index,
    source: memoryview | int,
    *,
    source_offset: int = 0,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Saved:
    """Write a segment to `path`; what was there stays readable until the new is complete.

    Parameters
    ----------
    path : path
        A file; or a folder, which then holds `model.safetensors` or shards with
        `model.safetensors.index.json`; or the path of such an index. What is not there is
        a folder when it ends in a slash, or when `max_shard_bytes` is given and it does
        not end in `.safetensors`.
    index : Index
        Of the segment.
    source : memoryview or int
        The segment's bytes, or a descriptor that they are read from.
    source_offset : int
        Where the segment begins in `source`.
    metadata : mapping, optional
        Text for the file's own metadata; `format` is `pt` unless given.
    max_shard_bytes : int, optional
        Cut into shards of at most so many bytes of tensors; needs a folder or index path
        when more than one comes of it. A new folder is made, its parent is not.
    on_bytes : callable, optional
        Called with the bytes of each block that was written; what it raises ends the save.

    Raises
    ------
    CapacityError
        When the disk has no room; asked for first, and then nothing has been written.
    InvalidArgument
        When path and shards do not go together, or metadata are not text.
    NotFound
        When the folder is not there.
    """
    if max_shard_bytes is not None and max_shard_bytes < 1:
        message = f"max_shard_bytes must be positive, not {max_shard_bytes}"
        raise InvalidArgument(message)
    shards = split(index, max_bytes=max_shard_bytes)
    place = _place(path, several=len(shards) > 1, sharding=max_shard_bytes is not None)
    about = {**_DEFAULT_METADATA, **(metadata or {})}
    segment = SegmentSource(source, source_offset, index.nbytes)
    with _folder(place):
        require_room(place.folder, index.content_bytes)
        clean_leftovers(place.folder, stem=place.stem if place.owns_folder else None)
        replaces = list(_standing(place).values())
        plans = [
            plan_write(index, shard, metadata=about, chunk_bytes=CHUNK_BYTES)
            for shard in shards
        ]
        require_room(
            place.folder, sum(plan.file_nbytes for plan in plans)
        )  # with the heads
        if place.file:
            return _save_one(place, plans[0].replacing(replaces), segment, on_bytes)
        return _save_shards(place, plans, segment, replaces=replaces, on_bytes=on_bytes)


# ----------------------------------------------------------------------- where


@dataclass(frozen=True, slots=True)
class _Place:
    folder: Path
    stem: str
    #: Name of the single file; "" for shards.
    file: str
    #: The folder is the model's: what else stands for it there is replaced.
    owns_folder: bool

    @property
    def index_path(self) -> Path:
        return self.folder / f"{self.stem}{INDEX_SUFFIX}"


def _place(path: str | os.PathLike[str], *, several: bool, sharding: bool) -> _Place:
    target = resolve_target(path)
    with system_errors(path):
        is_folder = target.is_dir() or os.fspath(path).endswith(os.sep)
    if target.name.endswith(INDEX_SUFFIX):
        return _Place(
            target.parent, target.name.removesuffix(INDEX_SUFFIX), "", owns_folder=True
        )
    if is_folder or (sharding and not target.name.endswith(SUFFIX)):
        file = "" if several else f"{DEFAULT_STEM}{SUFFIX}"
        return _Place(target, DEFAULT_STEM, file, owns_folder=True)
    if several:
        message = (
            f"{target} is one file and several shards are to be written; give a folder"
        )
        raise InvalidArgument(message)
    return _Place(
        target.parent, target.name.removesuffix(SUFFIX), target.name, owns_folder=False
    )


@contextmanager
def _folder(place: _Place) -> Iterator[None]:
    """Make the model's folder where it is not there; take it away again on failure."""
    with system_errors(place.folder):
        made = place.owns_folder and not place.folder.exists()
        if made:
            place.folder.mkdir()
    try:
        yield
    except BaseException:
        if made:
            with suppress(OSError):
                place.folder.rmdir()
        raise


# --------------------------------------------------------------------- writing


def _save_one(
    place: _Place,
    plan: FilePlan,
    segment: SegmentSource,
    on_bytes: Callable[[int], None] | None,
) -> Saved:
    target = place.folder / place.file
    with Draft(target, need_bytes=plan.file_nbytes) as draft:
        nbytes = write_file(draft, plan, segment, point="save.write", on_bytes=on_bytes)
        obsolete = _standing(place)
        draft.publish()
    _remove(place.folder, obsolete.values(), keep={place.file})
    return Saved(str(target), (str(target),), nbytes)


def _save_shards(
    place: _Place,
    plans: list[FilePlan],
    segment: SegmentSource,
    *,
    replaces: list[Replaced],
    on_bytes: Callable[[int], None] | None,
) -> Saved:
    tag = os.urandom(4).hex()
    names = [
        f"{place.stem}-{tag}-{number:05}-of-{len(plans):05}{SUFFIX}"
        for number in range(1, len(plans) + 1)
    ]
    nbytes = 0
    with ExitStack() as stack:
        shards: list[
            Draft
        ] = []  # locked, and taken away on failure, until the index is there
        for name, plan in zip(names, plans, strict=True):
            shard = stack.enter_context(
                Draft(place.folder / name, need_bytes=plan.file_nbytes)
            )
            nbytes += write_file(
                shard, plan, segment, point="save.write", on_bytes=on_bytes
            )
            shard.place()
            shards.append(shard)
        document = _index_document(names, plans, replaces)
        index = stack.enter_context(Draft(place.index_path, need_bytes=len(document)))
        nbytes += index.write([document], at=0)
        obsolete = _standing(place)
        for shard in shards:
            shard.settle()
        try:
            index.publish()
        except BaseException:
            if not index.in_place():  # else the shards are those of the model by now
                for shard in shards:
                    shard.withdraw()
            raise
    _remove(place.folder, obsolete.values(), keep={place.index_path.name, *names})
    files = tuple(str(place.folder / name) for name in names)
    return Saved(str(place.index_path), (*files, str(place.index_path)), nbytes)


def _index_document(
    names: list[str], plans: list[FilePlan], replaces: list[Replaced]
) -> bytes:
    """Make the index that other libraries read, with what we replace in its metadata."""
    document = {
        "metadata": {
            "total_size": sum(plan.data_nbytes for plan in plans),
            "tensorcast_replaces": replaces,
        },
        "weight_map": {
            entry.name: name
            for name, plan in zip(names, plans, strict=True)
            for entry in plan.entries
        },
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


# -------------------------------------------------------------------- cleaning


def _standing(place: _Place) -> dict[str, Replaced]:
    """Files that stand for the model of a folder now, by name."""
    if not place.owns_folder:
        return {}
    index = place.index_path
    names = [f"{place.stem}{SUFFIX}", index.name]
    with suppress(NotFound, FileError):
        names += set(read_shard_index(index).weight_map.values())
    found: dict[str, Replaced] = {}
    for name in names:
        with suppress(OSError):
            stat = (place.folder / name).lstat()
            if "/" not in name:
                found[name] = (name, stat.st_ino, stat.st_mtime_ns, stat.st_size)
    return found


def _remove(folder: Path, files: Iterable[Replaced], *, keep: set[str]) -> list[Path]:
    """Remove those of `files` that are still the same ones."""
    removed: list[Path] = []
    for name, inode, mtime_ns, size in files:
        path = folder / name
        faults.point("save.before_cleanup", str(path))
        with suppress(OSError):
            stat = path.lstat()
            if name not in keep and (stat.st_ino, stat.st_mtime_ns, stat.st_size) == (
                inode,
                mtime_ns,
                size,
            ):
                path.unlink()
                removed.append(path)
    return removed


def clean_leftovers(
    folder: str | os.PathLike[str], *, stem: str | None = DEFAULT_STEM
) -> list[Path]:
    """Remove what dead saves left in a folder; return what was removed.

    Parameters
    ----------
    folder : path
        Where models are saved.
    stem : str, optional
        Also look at the model of this name: remove what it says that it replaced, and
        shards of ours that no index names. None leaves all but drafts alone.
    """
    place = _Place(Path(folder), stem or "", "", owns_folder=True)
    removed = remove_unlocked(drafts_in(place.folder))
    if stem is None:
        return removed
    replaced: list[Replaced] = []
    try:
        with suppress(NotFound):
            replaced += replaced_by(read_header(place.folder / f"{stem}{SUFFIX}"))
        with suppress(NotFound):
            replaced += read_shard_index(place.index_path).replaces
    except (FileError, InvalidArgument):
        return removed  # a damaged model: nothing beside it is provably a leftover
    removed += _remove(place.folder, replaced, keep=set())
    return removed + remove_unlocked(
        _shards_of(place), unless=lambda path: _is_named(path, place.index_path)
    )


def _is_named(shard: Path, index_path: Path) -> bool:
    """Say whether the index, as it is now, needs a shard; a damaged one may need any."""
    try:
        return shard.name in read_shard_index(index_path).weight_map.values()
    except NotFound:
        return False
    except (FileError, InvalidArgument):
        return True


def _shards_of(place: _Place) -> list[Path]:
    """Files that carry the name and the seal of one of our shards."""
    found: list[Path] = []
    with system_errors(place.folder):
        names = os.listdir(place.folder)  # noqa: PTH208  # names are all that is needed
    for name in names:
        match = _SHARD.fullmatch(name)
        if match is not None and match["stem"] == place.stem:
            with suppress(NotFound, FileError, InvalidArgument):
                if check_seal(read_header(place.folder / name)):
                    found.append(place.folder / name)
    return found
