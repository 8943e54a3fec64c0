"""Chunks of a segment and the sums that travel with them.

Rules:

1. A segment is cut into chunks of `chunk_bytes`, the last one shorter; an empty segment has
   no chunks. The cut is part of what the sums mean, so it travels with them.
2. A chunk's sum is the xxh3_64 of its bytes with seed 0. It finds damage, not malice.
3. A content digest names index and bytes together: equal digests mean the same tensors. It
   is a digest over the sums, so it is known as soon as they are, and it depends on the cut.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Final

import xxhash

from tensorcast_dask.exceptions import CorruptFile, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "MAX_CHUNK_BYTES",
    "MIN_CHUNK_BYTES",
    "check_chunk_bytes",
    "chunk_count",
    "chunk_range",
    "chunk_sum",
    "chunk_sums",
    "chunks_of_range",
    "content_digest",
    "decode_sums",
    "encode_sums",
]

DEFAULT_CHUNK_BYTES: Final = 8 << 20
MIN_CHUNK_BYTES: Final = 4 << 10
MAX_CHUNK_BYTES: Final = 1 << 30
_SUM_BYTES: Final = 8


def check_chunk_bytes(chunk_bytes: int) -> int:
    """Return the chunk size when it is a multiple of 4 KiB from 4 KiB to 1 GiB.

    Raises
    ------
    InvalidArgument
        When it is not.
    """
    within = MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES
    if not within or chunk_bytes % MIN_CHUNK_BYTES:
        message = (
            f"chunks take a multiple of 4 KiB up to 1 GiB, not {chunk_bytes} bytes"
        )
        raise InvalidArgument(message)
    return chunk_bytes


def chunk_count(nbytes: int, chunk_bytes: int) -> int:
    """Chunks of a segment."""
    return -(-nbytes // chunk_bytes)


def chunk_range(chunk: int, nbytes: int, chunk_bytes: int) -> tuple[int, int]:
    """Offset and length of one chunk.

    Raises
    ------
    InvalidArgument
        When the segment has no such chunk.
    """
    start = chunk * chunk_bytes
    if chunk < 0 or start >= nbytes:
        message = (
            f"a segment of {nbytes} bytes has no chunk {chunk} of {chunk_bytes} bytes"
        )
        raise InvalidArgument(message)
    return start, min(chunk_bytes, nbytes - start)


def chunks_of_range(offset: int, nbytes: int, chunk_bytes: int) -> range:
    """Chunks that a range of bytes touches."""
    if not nbytes:
        return range(0)
    return range(offset // chunk_bytes, (offset + nbytes - 1) // chunk_bytes + 1)


def chunk_sum(data: Buffer) -> int:
    """xxh3_64 of some bytes."""
    return xxhash.xxh3_64_intdigest(data)


def chunk_sums(data: Buffer, nbytes: int, chunk_bytes: int) -> Iterator[int]:
    """Sum of each chunk of the first `nbytes` bytes, in order.

    Lazy, so that a caller decides between two chunks whether to go on.

    Raises
    ------
    InvalidArgument
        When there are fewer bytes.
    """
    view = memoryview(data)
    if view.nbytes < nbytes:
        message = f"there are {view.nbytes} bytes, not {nbytes}"
        raise InvalidArgument(message)
    if nbytes:
        # A ctypes array has the format "<B", which cannot be cast and need not be.
        flat = view if view.itemsize == view.ndim == 1 else view.cast("B")
        for start in range(0, nbytes, chunk_bytes):
            yield chunk_sum(flat[start : min(start + chunk_bytes, nbytes)])


def encode_sums(sums: Sequence[int]) -> bytes:
    """Return sums as little-endian u64s."""
    return struct.pack(f"<{len(sums)}Q", *sums)


def decode_sums(data: bytes, *, nbytes: int, chunk_bytes: int) -> tuple[int, ...]:
    """Read what `encode_sums` wrote for a segment.

    Raises
    ------
    CorruptFile
        When there is not one sum for each chunk.
    """
    count = chunk_count(nbytes, chunk_bytes)
    if len(data) != count * _SUM_BYTES:
        message = f"{len(data)} bytes are not the sums of {count} chunks"
        raise CorruptFile(message)
    return struct.unpack(f"<{count}Q", data)


def content_digest(index_digest: str, sums: Sequence[int], chunk_bytes: int) -> str:
    """Name of an artifact's content: 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16, person=b"tc-content")
    digest.update(f"{index_digest}:{chunk_bytes}:".encode())
    digest.update(encode_sums(sums))
    return digest.hexdigest()
