"""The disk tier of one node: a folder with one safetensors file for each replica.

Rules:

1. One store has one folder, locked while it lives. A store that comes later takes over a
   folder that nobody has locked, and finds what its predecessor left; never that of another
   owner (cluster), whose generations would be mistaken for its own.
2. A file's name begins with the generation, which is unique for ever, and goes on with the
   artifact's id, escaped, for people. What the file is stands inside it, under its seal.
3. A replica is on disk when its file has its final name: written, synced, renamed, and
   read back against its checksums. Until `write` has returned, the copy in memory is the
   only one; when it raises, nothing is left on the disk and nothing in memory is touched.
4. Room is booked before it is used: files and bookings together never exceed the limit.
5. Every read is checked against the checksums. A file that fails is set aside (`.bad`),
   not served again, and kept until the next start for whoever wants to look.
6. The folder may vanish at any time: a read then says Gone, a write makes the folder
   anew. Memory of the process has nothing to do with either.
7. A file system in memory is no disk and is refused, unless the caller insists.

Fault points: `spill.write` (each block), `save.before_rename`.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.dataplane.files.durable import Draft, drafts_in, remove_unlocked
from tensorcast_dask.dataplane.files.layout import check_seal, plan_write
from tensorcast_dask.dataplane.files.model import Model, open_model
from tensorcast_dask.dataplane.files.mounts import file_system_of
from tensorcast_dask.dataplane.files.opening import system_errors
from tensorcast_dask.dataplane.files.reading import (
    CHUNK_BYTES,
    ReadReport,
    read_into,
    verify,
)
from tensorcast_dask.dataplane.files.safetensors import read_header
from tensorcast_dask.dataplane.files.writing import SegmentSource, write_file
from tensorcast_dask.exceptions import (
    AlreadyExists,
    CapacityError,
    CorruptFile,
    FileChanged,
    FileError,
    Gone,
    InvalidArgument,
    Mismatch,
    NotFound,
)
from tensorcast_dask.tensors.ids import ArtifactId, Generation, Version

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.dataplane.files.layout import FilePlan
    from tensorcast_dask.tensors.specs import Index

__all__ = ["Recovered", "Spool", "Spooled", "file_name"]

_MEMORY_FILE_SYSTEMS: Final = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_LOCK: Final = ".lock"
_OWNER: Final = ".owner"
_SUFFIX: Final = ".safetensors"
_BAD: Final = ".bad"
_KEY: Final = "tensorcast.spool"
_MAX_NAME_BYTES: Final = 255 - len(_BAD)
_PLAIN = re.compile(rb"[A-Za-z0-9_.-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spooled:
    """One replica on the disk."""

    generation: Generation
    id: ArtifactId
    version: Version
    path: str
    file_nbytes: int
    record: bytes
    """What the store wanted to find again; not looked into here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a folder held at the start."""

    replicas: tuple[Spooled, ...]
    removed: tuple[str, ...]
    """Drafts of a dead writer, and files that an earlier start set aside."""
    set_aside: tuple[str, ...]
    """Files that are not what they should be, by their new names."""


class _Tag(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a spooled file says about itself."""

    generation: int
    id: str
    version: int
    record: bytes


def file_name(generation: Generation, artifact: ArtifactId) -> str:
    """Name the file of a replica: no two replicas share one, of at most 255 bytes."""
    plain = "".join(
        chr(byte) if _PLAIN.match(bytes([byte])) else f"%{byte:02X}"
        for byte in artifact.encode()
    )
    head = f"{generation:016x}-"
    room = _MAX_NAME_BYTES - len(head) - len(_SUFFIX)
    if len(plain) > room:
        digest = blake2b(artifact.encode(), digest_size=16).hexdigest()
        plain = f"{plain[: room - len(digest) - 1]}~{digest}"
    return f"{head}{plain}{_SUFFIX}"


class Spool:
    """Replicas in one folder. Safe for use by several threads.

    Parameters
    ----------
    folder : path
        Made where it is not there; locked until `close`.
    limit_bytes : int, optional
        Most that the files may take together.
    allow_tmpfs : bool
        Take a folder that lies in memory.
    direct : bool, optional
        Read past the page cache; by default where it is likely faster.

    Raises
    ------
    AlreadyExists
        When another store has the folder.
    InvalidArgument
        When it lies in memory, or its path is no folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        limit_bytes: int | None = None,
        allow_tmpfs: bool = False,
        direct: bool | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.limit_bytes = limit_bytes
        self._direct = direct
        self._lock = threading.Lock()
        #: Complete replicas whose files stand under their final names.
        self._replicas: dict[Generation, Spooled] = {}
        #: Bytes booked for each generation that is being written.
        self._booked: dict[Generation, int] = {}
        with system_errors(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            kind = file_system_of(self.folder)
        if kind in _MEMORY_FILE_SYSTEMS and not allow_tmpfs:
            message = f"{self.folder} lies on {kind}, which is memory; choose a disk, or set disk_dir_allow_tmpfs"
            raise InvalidArgument(message)
        self._lock_fd = _lock_folder(self.folder)
        self._owner = _owner_of(self.folder)

    @classmethod
    def claim(
        cls,
        root: str | os.PathLike[str],
        *,
        name: str,
        owner: str = "",
        limit_bytes: int | None = None,
        allow_tmpfs: bool = False,
        direct: bool | None = None,
    ) -> Spool:
        """Take the folder `name` under `root`, or one that a dead store of `owner` left there.

        A folder of its own is made only when none is free. Raises as the constructor.
        """
        base = Path(root)

        def take(candidate: str) -> Spool:
            folder = base / candidate
            return cls(
                folder, limit_bytes=limit_bytes, allow_tmpfs=allow_tmpfs, direct=direct
            )

        left: list[str] = []
        with suppress(OSError):
            left = sorted(entry.name for entry in os.scandir(base) if entry.is_dir())
        for candidate in [] if name in left else left:
            with suppress(AlreadyExists):
                spool = take(candidate)
                if spool.owner == owner:
                    return spool
                spool.close()
        spool = take(name)
        if owner and not spool.owner:
            spool.own(owner)
        return spool

    @property
    def owner(self) -> str:
        """Whose replicas these are; "" while nobody has said so."""
        return self._owner

    def own(self, owner: str) -> None:
        """Say, for good, whose replicas these are.

        Raises
        ------
        Mismatch
            When they are somebody else's.
        """
        if self._owner not in {"", owner}:
            message = (
                f"{self.folder} holds replicas of {self._owner!r}, not of {owner!r}; "
                "choose another folder"
            )
            raise Mismatch(message, {"owner": self._owner})
        data = owner.encode()
        with Draft(self.folder / _OWNER, need_bytes=len(data)) as draft:
            draft.write([data], at=0)
            draft.publish()
        self._owner = owner

    def close(self) -> None:
        """Give the folder up; the files stay for whoever takes it over."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # ------------------------------------------------------------------ looking

    @property
    def used_bytes(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return sum(replica.file_nbytes for replica in self._replicas.values())

    @property
    def booked_bytes(self) -> int:
        """Bytes of what is being written."""
        with self._lock:
            return sum(self._booked.values())

    @property
    def replicas(self) -> tuple[Spooled, ...]:
        """Everything that can be read."""
        with self._lock:
            return tuple(self._replicas.values())

    def recover(self) -> Recovered:
        """Look through the folder, once, before anything else is asked of it.

        A replica counts when its file is complete and its header is under its own seal;
        its bytes are checked when they are read.
        """
        removed = [str(path) for path in remove_unlocked(drafts_in(self.folder))]
        set_aside: list[str] = []
        with system_errors(self.folder):
            names = sorted(os.listdir(self.folder))  # noqa: PTH208  # names are all that is needed
        for name in names:
            path = self.folder / name
            if name.endswith(_BAD):
                with suppress(OSError):
                    path.unlink()
                    removed.append(str(path))
            elif name.endswith(_SUFFIX) and not name.startswith("."):
                try:
                    found = _recognise(path)
                except FileError:
                    set_aside.append(_set_aside(path))
                else:
                    with self._lock:
                        self._replicas[found.generation] = found
        return Recovered(
            replicas=self.replicas, removed=tuple(removed), set_aside=tuple(set_aside)
        )

    # ------------------------------------------------------------------ writing

    def write(
        self,
        generation: Generation,
        artifact: ArtifactId,
        version: Version,
        *,
        index: Index,
        source: memoryview | int,
        source_offset: int = 0,
        record: bytes = b"",
        on_bytes: Callable[[int], None] | None = None,
    ) -> Spooled:
        """Put a replica on the disk; when this returns it is there and was read back.

        Parameters
        ----------
        generation, artifact, version
            What the replica is.
        index : Index
            Of its segment.
        source : memoryview or int
            The segment's bytes, or a descriptor that they are read from.
        source_offset : int
            Where the segment begins in `source`.
        record : bytes
            Comes back with it after a restart.
        on_bytes : callable, optional
            Called with the bytes of each written block; what it raises ends the write.

        Raises
        ------
        CapacityError
            When limit or disk have no room; nothing is left behind.
        AlreadyExists
            When the generation is on the disk, or on its way there.
        CorruptFile
            When what was read back is not what was written.
        """
        tag = _Tag(generation=generation, id=artifact, version=version, record=record)
        metadata = {_KEY: msgspec.json.encode(tag).decode()}
        plan = plan_write(index, metadata=metadata, chunk_bytes=CHUNK_BYTES)
        segment = SegmentSource(source, source_offset, index.nbytes)
        path = self.folder / file_name(generation, artifact)
        self._book(generation, plan.file_nbytes)
        try:
            nbytes = self._write(path, plan, segment, on_bytes)
            spooled = Spooled(
                generation=generation,
                id=artifact,
                version=version,
                path=str(path),
                file_nbytes=nbytes,
                record=record,
            )
            with self._lock:
                self._replicas[generation] = spooled
        finally:
            with self._lock:
                del self._booked[generation]
        return spooled

    def _book(self, generation: Generation, need_bytes: int) -> None:
        with self._lock:
            if generation in self._replicas or generation in self._booked:
                message = (
                    f"generation {generation} is on the disk already; nothing to do"
                )
                raise AlreadyExists(message)
            used = sum(replica.file_nbytes for replica in self._replicas.values())
            used += sum(self._booked.values())
            if self.limit_bytes is not None and used + need_bytes > self.limit_bytes:
                free_bytes = max(0, self.limit_bytes - used)
                message = (
                    f"the disk tier has {free_bytes} bytes free, {need_bytes} are needed; "
                    "destroy something, or raise tensorcast.node.disk-memory"
                )
                raise CapacityError(
                    message,
                    {
                        "tier": "disk",
                        "needed": need_bytes,
                        "free": free_bytes,
                    },
                )
            self._booked[generation] = need_bytes

    def _write(
        self,
        path: Path,
        plan: FilePlan,
        segment: SegmentSource,
        on_bytes: Callable[[int], None] | None,
    ) -> int:
        try:
            draft = Draft(path, need_bytes=plan.file_nbytes)
        except NotFound:
            self._remake()
            draft = Draft(path, need_bytes=plan.file_nbytes)
        with draft:
            nbytes = write_file(
                draft, plan, segment, point="spill.write", on_bytes=on_bytes
            )
            draft.place()
            draft.begin_writeback()  # clean by now: this drops it from the page cache
            with _open_sealed(str(path)) as model:
                verify(model, threads=1, direct=self._direct)
            draft.settle()
        return nbytes

    def _remake(self) -> None:
        """Make the folder that was removed under us ours again."""
        with self._lock, system_errors(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                lock = (self.folder / _LOCK).stat()
                if lock.st_ino == os.fstat(self._lock_fd).st_ino:
                    return  # another thread did
            fd = _lock_folder(self.folder)
            os.close(self._lock_fd)
            self._lock_fd = fd
        if self._owner:
            self.own(self._owner)

    # ------------------------------------------------------------------ reading

    def open(self, generation: Generation) -> Model:
        """Open the file of a replica.

        Raises
        ------
        NotFound
            When the generation is not on this disk.
        Gone
            When its file has vanished.
        CorruptFile
            When its file is damaged; it is set aside.
        """
        with self._lock:
            spooled = self._replicas.get(generation)
        if spooled is None:
            message = f"generation {generation} is not on the disk of this node"
            raise NotFound(message)
        try:
            return _open_sealed(spooled.path)
        except NotFound as error:
            self._forget(generation)
            message = f"{spooled.path} of {spooled.id!r} was removed by somebody else; use another replica"
            raise Gone(message) from error
        except CorruptFile:
            self._forget(generation)
            _set_aside(Path(spooled.path))
            raise

    def read_into(
        self,
        generation: Generation,
        dest: int | memoryview,
        *,
        offset: int = 0,
        threads: int = 2,
        on_bytes: Callable[[int], None] | None = None,
    ) -> ReadReport:
        """Fill a segment from the disk; raises as `open` and as `reading.read_into`."""
        with self.open(generation) as model:
            try:
                return read_into(
                    model,
                    dest,
                    offset=offset,
                    threads=threads,
                    direct=self._direct,
                    on_bytes=on_bytes,
                )
            except (CorruptFile, FileChanged):
                self._forget(generation)
                _set_aside(Path(model.path))
                raise

    def remove(self, generation: Generation) -> bool:
        """Remove a replica; who reads it goes on. False when it was not there."""
        spooled = self._forget(generation)
        if spooled is None:
            return False
        with system_errors(spooled.path), suppress(FileNotFoundError):
            Path(spooled.path).unlink()
        return True

    def _forget(self, generation: Generation) -> Spooled | None:
        with self._lock:
            return self._replicas.pop(generation, None)


def _owner_of(folder: Path) -> str:
    try:
        return (folder / _OWNER).read_text(errors="replace")
    except OSError:
        return ""


def _lock_folder(folder: Path) -> int:
    with system_errors(folder):
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            message = f"{folder} is the disk tier of another store that runs; choose another folder"
            raise AlreadyExists(message) from error
        except OSError:
            os.close(fd)
            raise
    return fd


def _recognise(path: Path) -> Spooled:
    """Read what a file of the folder is; FileError when it is not what its name says."""
    try:
        header = read_header(path)
        tag = msgspec.json.decode(header.metadata.get(_KEY, ""), type=_Tag)
    except (msgspec.MsgspecError, InvalidArgument, NotFound) as error:
        message = f"{path} is not a file of the disk tier ({error})"
        raise CorruptFile(message) from error
    generation, artifact = Generation(tag.generation), ArtifactId(tag.id)
    if not check_seal(header) or file_name(generation, artifact) != path.name:
        message = f"{path} is not the file that it says it is"
        raise CorruptFile(message)
    return Spooled(
        generation=generation,
        id=artifact,
        version=Version(tag.version),
        path=str(path),
        file_nbytes=header.file_size,
        record=tag.record,
    )


def _open_sealed(path: str) -> Model:
    """Open a file of ours; without its seal and sums it would be read on trust."""
    model = open_model(path)
    if model.files[0].sums is None:
        model.close()
        message = f"{path} has lost its checksums; use another replica"
        raise CorruptFile(message, {"file": path})
    return model


def _set_aside(path: Path) -> str:
    aside = path.with_name(path.name + _BAD)
    with suppress(OSError):
        path.rename(aside)
    return str(aside)
