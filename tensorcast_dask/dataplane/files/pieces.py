"""Which bytes of a file are which bytes of a segment, and moving them block by block.

Rule: the pieces of one file are in the order of its bytes and cover its data without a
hole. What moves between a file and a segment therefore needs no other map.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["BLOCK_BYTES", "IOV_MAX", "Piece", "bounce_buffer", "merged", "overlap"]

#: Unit of one system call: large enough to cost nothing, small enough to be hashed while
#: it is in the cache of the core that read it.
BLOCK_BYTES: Final = 1 << 20
#: Buffers that one scattered read or gathered write takes.
IOV_MAX: Final = os.sysconf("SC_IOV_MAX")


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that are together in a file and in a segment."""

    file_offset: int
    segment_offset: int
    nbytes: int

    @property
    def file_end(self) -> int:
        """One past the last byte in the file."""
        return self.file_offset + self.nbytes


def merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Join neighbours in the file that are neighbours in the segment; drop the empty."""
    found: list[Piece] = []
    for piece in pieces:
        if not piece.nbytes:
            continue
        last = found[-1] if found else None
        if (
            last is not None
            and last.file_end == piece.file_offset
            and last.segment_offset + last.nbytes == piece.segment_offset
        ):
            found[-1] = Piece(
                last.file_offset, last.segment_offset, last.nbytes + piece.nbytes
            )
        else:
            found.append(piece)
    return tuple(found)


def overlap(pieces: Sequence[Piece], begin: int, end: int) -> Iterator[Piece]:
    """Cut out the pieces between the bytes `begin` and `end` of the file."""
    at = max(0, bisect_right(pieces, begin, key=lambda piece: piece.file_offset) - 1)
    while at < len(pieces) and pieces[at].file_offset < end:
        piece = pieces[at]
        low, high = max(begin, piece.file_offset), min(end, piece.file_end)
        if low < high:
            yield Piece(low, piece.segment_offset + low - piece.file_offset, high - low)
        at += 1


def bounce_buffer() -> memoryview:
    """Make a buffer of one block and two pages that begins on a page, as O_DIRECT needs."""
    return memoryview(mmap.mmap(-1, BLOCK_BYTES + 2 * mmap.PAGESIZE))
