"""Opening files, and saying in the package's own errors what the system refused.

Rules:

1. No OSError leaves the rooms of this folder bare: `system_errors` turns each into the
   error that says what a caller can do.
2. Only regular files are read; a fifo or a device in the way cannot hang a load.
3. A file is what its descriptor says (`Identity`), not what its path says: a path may be
   renamed over while it is read, and the reader goes on with the content it opened.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tensorcast_dask.exceptions import (
    CapacityError,
    FileChanged,
    FileError,
    InvalidArgument,
    NotFound,
    TensorCastError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Identity", "open_regular", "opened", "system_errors"]

_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_HANDLES: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_ABSENT: Final = {errno.ENOENT, errno.ENOTDIR}


@dataclass(frozen=True, slots=True)
class Identity:
    """Which file, and which content of it, a descriptor stands for."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, fd: int) -> Identity:
        """Ask the system."""
        found = os.fstat(fd)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def check(self, fd: int, *, path: str) -> None:
        """Raise FileChanged unless `fd` still stands for the same content."""
        if Identity.of(fd) != self:
            message = f"{path} was written to while it was read; load it again when its writer is done"
            raise FileChanged(message, {"file": path})


def _typed(error: OSError, path: str, *, need_bytes: int) -> TensorCastError:
    data = {"file": path, "errno": error.errno, "needed": need_bytes}
    why = error.strerror or str(error)
    if error.errno in _NO_ROOM:
        return CapacityError(f"{path}: {why}; free disk space or raise the limit", data)
    if error.errno in _NO_HANDLES:
        return CapacityError(f"{path}: {why}; raise the process's limits", data)
    if error.errno in _ABSENT:
        return NotFound(f"{path} is not there; check the path", data)
    if error.errno == errno.ENAMETOOLONG:
        return InvalidArgument(f"{path}: {why}; use a shorter name", data)
    return FileError(f"{path}: {why}; check its permissions and the disk", data)


@contextmanager
def system_errors(
    path: str | os.PathLike[str], *, need_bytes: int = 0
) -> Iterator[None]:
    """Turn the system's refusals inside the block into errors that name `path`."""
    try:
        yield
    except OSError as error:
        raise _typed(error, os.fspath(path), need_bytes=need_bytes) from error


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor.

    Raises
    ------
    NotFound
        When there is none.
    InvalidArgument
        When the path is a folder, fifo or device, or no path at all.
    """
    with system_errors(path):
        try:
            fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
        except ValueError as error:  # NUL bytes, lone surrogates
            message = f"{os.fspath(path)!r} is not a path ({error})"
            raise InvalidArgument(message) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        message = f"{os.fspath(path)} is not a regular file; give the path of a file"
        raise InvalidArgument(message)
    return fd


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[int]:
    """Open a regular file for the length of a block; raises as `open_regular`."""
    fd = open_regular(path)
    try:
        with system_errors(path):
            yield fd
    finally:
        os.close(fd)
