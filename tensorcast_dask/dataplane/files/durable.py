"""Files that appear whole or not at all.

Rules:

1. A file is written under a draft's name in its target's own folder, synced, and renamed
   over the target: at every instant the target is the old content or the new one. Who has
   the old file open goes on reading it.
2. A symbolic link is followed: the file that it points to is replaced, the link stays.
   Another hard link of the target keeps the old content.
3. A draft is locked (flock) as long as its writer lives. A draft that nobody locks is a
   leftover of a dead writer, recognised by its name, and may be removed by anyone.
4. Room is asked for before the first byte is written; when it runs out all the same, the
   draft is gone when the CapacityError arrives.

Fault points: `save.before_rename`, `save.after_rename`, both with the target as detail.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from xxhash import xxh3_64_hexdigest

from tensorcast_dask.dataplane import faults
from tensorcast_dask.dataplane.files.opening import system_errors
from tensorcast_dask.dataplane.files.pieces import IOV_MAX
from tensorcast_dask.exceptions import CapacityError, InvalidArgument, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

__all__ = [
    "Draft",
    "drafts_in",
    "remove_unlocked",
    "require_room",
    "resolve_target",
    "sync_dir",
]

_SUFFIX: Final = ".tensorcast-draft"


def resolve_target(path: str | os.PathLike[str]) -> Path:
    """Return the file or folder that writing to `path` replaces, links resolved.

    Raises
    ------
    NotFound
        When its folder does not exist.
    InvalidArgument
        When it is a device, fifo or socket, which a rename would destroy.
    """
    if not os.fspath(path):
        message = "an empty path names no file; give the path of a file or folder"
        raise InvalidArgument(message)
    with system_errors(path):
        try:
            target = Path(os.path.realpath(path))
            _check_folder(target)
            mode = target.stat().st_mode if target.exists() else stat.S_IFREG
        except ValueError as error:
            message = f"{os.fspath(path)!r} is not a path ({error})"
            raise InvalidArgument(message) from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        message = f"{target} is no regular file and would be lost; save elsewhere"
        raise InvalidArgument(message)
    return target


def _check_folder(target: Path) -> None:
    try:
        target.parent.stat()  # raises what open would
    except (FileNotFoundError, NotADirectoryError) as error:
        message = (
            f"there is no folder {target.parent} to write {target.name} in; make it on "
            "the host that writes, or choose another"
        )
        raise NotFound(message, {"folder": str(target.parent)}) from error


def require_room(folder: Path, need_bytes: int) -> None:
    """Raise CapacityError unless the file system of `folder` has `need_bytes` free."""
    with system_errors(folder):
        found = os.statvfs(folder)
    free_bytes = found.f_bavail * found.f_frsize
    if found.f_blocks and need_bytes > free_bytes:  # some file systems cannot tell
        message = (
            f"{folder} has {free_bytes} bytes free, {need_bytes} are needed; "
            "free some or choose another disk"
        )
        raise CapacityError(
            message,
            {"tier": "disk", "needed": need_bytes, "free": free_bytes},
        )


def sync_dir(folder: Path) -> None:
    """Make the renames and removals in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that knows no such thing
            raise
    finally:
        os.close(fd)


class Draft:
    """A file under construction, a context manager; discarded unless published.

    Parameters
    ----------
    target : Path
        What it becomes; a real path (`resolve_target`).
    need_bytes : int
        How long it will be, asked for before anything is written.

    Raises
    ------
    CapacityError
        When there is no room for `need_bytes`, here or while it is written.
    """

    def __init__(self, target: Path, *, need_bytes: int) -> None:
        require_room(target.parent, need_bytes)
        self.target = target
        self._need_bytes = need_bytes
        self._settled = False
        with system_errors(target, need_bytes=need_bytes):
            self.path, self.fd = _create(target)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._settled:
            with suppress(OSError):
                self.path.unlink()
        os.close(self.fd)

    def write(
        self, buffers: Sequence[memoryview | bytes], *, at: int, point: str = ""
    ) -> int:
        """Write all of `buffers`, one after the other, at byte `at`; return their length."""
        with system_errors(self.target, need_bytes=self._need_bytes):
            if point:
                faults.point(point, str(self.target))
            return _write_all(self.fd, buffers, at)

    def begin_writeback(self) -> None:
        """Ask the kernel to start writing to the disk, so that the sync at the end is short."""
        with suppress(OSError):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def place(self) -> None:
        """Make the content durable and give it its name, which must be new.

        It is taken away again at the end of the block unless `settle` is called before.
        """
        with system_errors(self.target, need_bytes=self._need_bytes):
            os.fsync(self.fd)
            faults.point("save.before_rename", str(self.target))
            self.path.rename(self.target)
            self.path = self.target
            sync_dir(self.target.parent)

    def settle(self) -> None:
        """Keep what `place` placed."""
        self._settled = True

    def withdraw(self) -> None:
        """Take away what was placed and settled."""
        with suppress(OSError):
            self.path.unlink()

    def in_place(self) -> bool:
        """Say whether the target's name stands for this very file by now."""
        try:
            return self.target.stat().st_ino == os.fstat(self.fd).st_ino
        except OSError:
            return False

    def publish(self) -> None:
        """Make the content durable, then the one that the target's name stands for."""
        with system_errors(self.target, need_bytes=self._need_bytes):
            os.fsync(self.fd)
            faults.point("save.before_rename", str(self.target))
            self.path.rename(self.target)
            self.settle()
            faults.point("save.after_rename", str(self.target))
            sync_dir(self.target.parent)


def _create(target: Path) -> tuple[Path, int]:
    while True:
        name = f".{xxh3_64_hexdigest(os.fsencode(target.name))}.{os.urandom(4).hex()}{_SUFFIX}"
        path = target.with_name(name)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(
                fd
            ).st_nlink:  # else it was taken for a leftover before the lock
                with suppress(FileNotFoundError):
                    os.fchmod(fd, target.stat().st_mode & 0o777)
                return path, fd
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                path.unlink()
            raise
        os.close(fd)


def _write_all(fd: int, buffers: Sequence[memoryview | bytes], at: int) -> int:
    start = at
    todo = [memoryview(buffer) for buffer in buffers if len(buffer)]
    todo.reverse()
    while todo:
        batch = todo[-IOV_MAX:]
        batch.reverse()
        done = os.pwritev(fd, batch, at)
        at += done
        while todo and done >= len(todo[-1]):
            done -= len(todo.pop())
        if done:
            todo[-1] = todo[-1][done:]
    return at - start


def drafts_in(folder: Path) -> list[Path]:
    """Every draft in `folder`, of living writers and of dead ones."""
    with system_errors(folder):
        names = os.listdir(folder)  # noqa: PTH208  # names are all that is needed
    return [folder / name for name in names if name.endswith(_SUFFIX)]


def remove_unlocked(
    paths: Iterable[Path], *, unless: Callable[[Path], bool] = lambda _: False
) -> list[Path]:
    """Remove those of `paths` that no writer has locked; return what was removed.

    `unless` is asked while the lock is held, so it sees what a writer did that had it.
    """
    removed = []
    for path in paths:
        try:
            fd = os.open(
                path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            )
        except OSError:
            continue  # gone, or not ours to touch
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not unless(path):
                path.unlink()
                removed.append(path)
        except OSError:
            continue  # its writer lives
        finally:
            os.close(fd)
    return removed
