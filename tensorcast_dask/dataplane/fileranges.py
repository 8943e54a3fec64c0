"""Stretches of open files as places for bytes, beside buffers.

Fresh pages of a memory file are made fastest by writing them: a map would fault each one in.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from tensorcast_dask.exceptions import WrongPeer

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["FileRange", "write_all"]


class FileRange(NamedTuple):
    """Bytes of an open file, as source or target of a move."""

    fd: int
    offset: int
    nbytes: int

    def write(self, data: memoryview) -> None:
        """Write to the front of the range.

        Raises
        ------
        WrongPeer
            When it is longer than the range; nothing has been written.
        """
        if data.nbytes > self.nbytes:
            message = f"{data.nbytes} bytes came where {self.nbytes} belong"
            raise WrongPeer(message)
        write_all(self.fd, data, self.offset)


def write_all(fd: int, data: Buffer, offset: int) -> None:
    """Write all bytes of a buffer to a place of a file.

    Raises
    ------
    OSError
        What the file refused with; some bytes may be there.
    """
    left = memoryview(data)
    while left:
        written = os.pwrite(fd, left, offset)
        left, offset = left[written:], offset + written
