"""Writing one planned file from a segment: data first, hashed as they pass, head last.

Fault point: the one that the caller names, once a block, with the target as detail.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from xxhash import xxh3_64

from tensorcast_dask.dataplane.files.opening import system_errors
from tensorcast_dask.dataplane.files.pieces import BLOCK_BYTES, bounce_buffer, overlap
from tensorcast_dask.exceptions import FileError, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.dataplane.files.durable import Draft
    from tensorcast_dask.dataplane.files.layout import FilePlan

__all__ = ["SegmentSource", "write_file"]

#: Bytes after which the kernel is asked to begin writing to the disk.
_WRITEBACK_BYTES: Final = 64 << 20


class SegmentSource:
    """A segment's bytes, in the order that a file wants them.

    Parameters
    ----------
    source : memoryview or int
        Memory, or a descriptor that is read from, its position left alone.
    offset : int
        Where the segment begins in it.
    nbytes : int
        How long the segment is.

    Raises
    ------
    InvalidArgument
        When the memory is not contiguous, or too short.
    """

    def __init__(self, source: memoryview | int, offset: int, nbytes: int) -> None:
        self._fd: int | None = None
        self._offset = offset
        if isinstance(source, int):
            self._fd = source
            self._bounce = bounce_buffer()
            return
        try:
            self._memory = source.cast("B")
        except TypeError as error:
            message = f"the source must be contiguous memory ({error})"
            raise InvalidArgument(message) from error
        if len(self._memory) < offset + nbytes:
            message = f"the source has {len(self._memory)} bytes, {offset + nbytes} are needed"
            raise InvalidArgument(message)

    def block(self, plan: FilePlan, begin: int, end: int) -> list[memoryview]:
        """Return the data's bytes from `begin` to `end`, at most a block."""
        parts: list[memoryview] = []
        for piece in overlap(plan.pieces, begin, end):
            at = self._offset + piece.segment_offset
            if self._fd is None:
                parts.append(self._memory[at : at + piece.nbytes])
                continue
            part = self._bounce[piece.file_offset - begin :][: piece.nbytes]
            parts.append(part)
            self._read(part, at)
        return parts

    def _read(self, part: memoryview, at: int) -> None:
        assert self._fd is not None, "saving: only a descriptor is read from"
        with system_errors("the segment"):
            while part:
                got = os.preadv(self._fd, [part], at)
                if not got:
                    message = f"the segment ends at byte {at}, before its index says so"
                    raise FileError(message)
                part, at = part[got:], at + got


def write_file(
    draft: Draft,
    plan: FilePlan,
    source: SegmentSource,
    *,
    point: str,
    on_bytes: Callable[[int], None] | None = None,
) -> int:
    """Write all of a file into its draft; return its length."""
    start = plan.head_nbytes
    sums: list[int] = []
    for chunk in range(0, plan.data_nbytes, plan.chunk_bytes):
        end = min(chunk + plan.chunk_bytes, plan.data_nbytes)
        sum_ = xxh3_64()
        for at in range(chunk, end, BLOCK_BYTES):
            parts = source.block(plan, at, min(at + BLOCK_BYTES, end))
            for part in parts:
                sum_.update(part)
            written = draft.write(parts, at=start + at, point=point)
            if on_bytes is not None:
                on_bytes(written)
        sums.append(sum_.intdigest())
        if end % _WRITEBACK_BYTES == 0:
            draft.begin_writeback()
    head = plan.head(sums)
    assert len(head) == start, "writing: checksums never change a head's length"
    draft.write([head], at=0)
    return start + plan.data_nbytes
