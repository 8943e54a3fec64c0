"""Which bytes are asked for: `Range`, `If-Range` and `If-None-Match` (RFC 9110).

Rules:

1. One range of bytes is answered by 206. Several at once, another unit and what cannot be read are
   ignored, as the standard allows: then all bytes are given.
2. A range that begins behind the end is 416, and says how long the bytes are.
3. An entity tag is strong: it names one version's one life, whose bytes never change.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

import msgspec

__all__ = ["Part", "etag_of", "part_of", "unchanged"]

_RANGE: Final = re.compile(r"bytes=\s*(\d*)-(\d*)\s*", re.ASCII)
_DIGITS: Final = 18


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent of some bytes.

    Attributes
    ----------
    status : int
        200 for all, 206 for a part, 416 for none.
    start, stop : int
        First byte, and the one after the last.
    length : int
        Of the whole.
    """

    status: int
    start: int
    stop: int
    length: int

    @property
    def content_range(self) -> str:
        """The header `Content-Range`; "" where there is none."""
        if self.status == 200:
            return ""
        if self.status == 416:
            return f"bytes */{self.length}"
        return f"bytes {self.start}-{self.stop - 1}/{self.length}"


def etag_of(generation: int, index_digest: str, name: str) -> str:
    """Name the bytes of one tensor of one version."""
    named = f"{index_digest}/{name}".encode()
    return f'"{generation:x}-{hashlib.blake2b(named, digest_size=16).hexdigest()}"'


def part_of(header: str, length: int, *, etag: str, if_range: str = "") -> Part:
    """Read a `Range` header over so many bytes.

    Parameters
    ----------
    header : str
        The header; "" without one.
    length : int
        Of the bytes.
    etag : str
        Theirs.
    if_range : str
        The header `If-Range`: with another tag all bytes are given.
    """
    whole = Part(status=200, start=0, stop=length, length=length)
    found = _RANGE.fullmatch(header)
    if found is None or (if_range and if_range != etag):
        return whole
    first, last = found.groups()
    if not (first or last) or max(len(first), len(last)) > _DIGITS:
        return whole
    if first and last and int(last) < int(first):
        return whole
    start = int(first) if first else max(0, length - int(last))
    stop = min(length, int(last) + 1) if first and last else length
    if start >= length or (not first and int(last) == 0):
        return Part(status=416, start=0, stop=0, length=length)
    return Part(status=206, start=start, stop=stop, length=length)


def unchanged(header: str, etag: str) -> bool:
    """Tell whether an `If-None-Match` header has this tag: 304."""
    tags = [tag.strip().removeprefix("W/") for tag in header.split(",")]
    return "*" in tags or etag in tags
