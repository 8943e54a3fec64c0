"""The version log: numbers that are used up, one small record each, appended for ever.

Rules:

1. A record is 32 bytes: the digest of an id, the number, a checksum. One that does not fit
   its checksum is left out; all others count, whatever lies between them.
2. A torn end is cut off before the next append, so that records stay aligned.
3. At a start with many records per id it is rewritten with the highest of each, beside and
   renamed.
"""

from __future__ import annotations

import hashlib
import os
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tensorcast_dask.scheduler_plugin.state.events import Issued

__all__ = ["RECORD_BYTES", "VersionLog"]

_BODY: Final = struct.Struct("<16sQ")
_CHECK_BYTES: Final = 8
RECORD_BYTES: Final = _BODY.size + _CHECK_BYTES
_REWRITE_RECORDS: Final = 100_000


class VersionLog:
    """The version log of one journal.

    Attributes
    ----------
    issued : dict
        Highest number of each digest.
    damaged : int
        Records that could not be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.issued: dict[bytes, int] = {}
        self.damaged = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._end = self._load()
        if self._end > _REWRITE_RECORDS * RECORD_BYTES and (
            self._end > 2 * len(self.issued) * RECORD_BYTES
        ):
            self._rewrite()

    def _load(self) -> int:
        raw = self._path.read_bytes()
        whole = len(raw) - len(raw) % RECORD_BYTES
        if whole != len(raw):
            self.damaged += 1
        for at in range(0, whole, RECORD_BYTES):
            record = raw[at : at + RECORD_BYTES]
            body = record[: _BODY.size]
            if _check(body) != record[_BODY.size :]:
                self.damaged += 1
                continue
            digest, version = _BODY.unpack(body)
            if version > self.issued.get(digest, 0):
                self.issued[digest] = version
        return whole

    def _rewrite(self) -> None:
        beside = self._path.with_name(self._path.name + ".new")
        fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        raw = b"".join(_record(d, v) for d, v in self.issued.items())
        _write_all(fd, raw, 0)
        os.fsync(fd)
        beside.rename(self._path)
        os.close(self._fd)
        self._fd, self._end = fd, len(raw)

    def append(self, issued: Iterable[Issued]) -> None:
        """Append and sync; OSError when the disk does not take it."""
        raw = b"".join(_record(one.digest, one.version) for one in issued)
        if not raw:
            return
        # At a fixed place: what a failed attempt has left is overwritten.
        _write_all(self._fd, raw, self._end)
        os.fdatasync(self._fd)
        self._end += len(raw)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _write_all(fd: int, raw: bytes, at: int) -> None:
    done = 0
    while done < len(raw):
        done += os.pwrite(fd, raw[done:], at + done)


def _record(digest: bytes, version: int) -> bytes:
    body = _BODY.pack(digest, version)
    return body + _check(body)


def _check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_BYTES).digest()
