"""The version log: numbers that are used up, and how far the journal has come.

Rules:

1. A record is 32 bytes. *Issued*: the digest of an id and a number. *Mark*: epoch, sum and
   sequence number of a group commit. The checksum tells which; a record that fits neither
   is left out, all others count, whatever lies between them.
2. The records of one group commit go out in one synced write (O_DSYNC), its mark last: one
   system call, since each costs a sync and a turn at a busy interpreter lock.
3. A torn end is cut off before the next append, so that records stay aligned.
4. A long log is rewritten, beside and renamed, with the highest of each and the last mark.
"""

from __future__ import annotations

import hashlib
import os
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from tensorcast_dask.dataplane.fileranges import write_all

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tensorcast_dask.scheduler_plugin.state.events import Issued

__all__ = ["RECORD_BYTES", "Mark", "VersionLog"]

_ISSUED: Final = struct.Struct("<16sQ")
_MARK: Final = struct.Struct("<QQQ")
_BODY_BYTES: Final = 24
_CHECK_BYTES: Final = 8
RECORD_BYTES: Final = _BODY_BYTES + _CHECK_BYTES
_REWRITE_RECORDS: Final = 200_000
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DSYNC


class Mark(NamedTuple):
    """Where the journal stands after a group commit."""

    epoch: int = 0
    sum: int = 0
    seq: int = 0


class VersionLog:
    """The version log of one journal.

    Attributes
    ----------
    issued : dict
        Highest number of each digest.
    mark : Mark
        The furthest group commit.
    damaged : int
        Records that could not be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.issued: dict[bytes, int] = {}
        self.mark = Mark()
        self.damaged = 0
        self._fd = os.open(path, _FLAGS, 0o600)
        self._end = self._load()

    def _load(self) -> int:
        raw = self._path.read_bytes()
        whole = len(raw) - len(raw) % RECORD_BYTES
        if whole != len(raw):
            self.damaged += 1
        for at in range(0, whole, RECORD_BYTES):
            body = raw[at : at + _BODY_BYTES]
            check = raw[at + _BODY_BYTES : at + RECORD_BYTES]
            if check == _check(body, b"issued"):
                self._note(*_ISSUED.unpack(body))
            elif check == _check(body, b"mark"):
                self.mark = max(self.mark, Mark(*_MARK.unpack(body)), key=_seq)
            else:
                self.damaged += 1
        return whole

    def _note(self, digest: bytes, version: int) -> None:
        if version > self.issued.get(digest, 0):
            self.issued[digest] = version

    def append(self, issued: Iterable[Issued], mark: Mark) -> None:
        """Append and sync; OSError when the disk does not take it."""
        records = [(one.digest, one.version) for one in issued]
        raw = b"".join(_record(*record) for record in records) + _mark(mark)
        # At a fixed place: what a failed attempt has left is overwritten.
        write_all(self._fd, raw, self._end)
        self._end += len(raw)
        self.mark = mark
        for record in records:
            self._note(*record)

    def tidy(self) -> None:
        """Rewrite the log when most of it has been overtaken."""
        records = self._end // RECORD_BYTES
        if records > _REWRITE_RECORDS and records > 2 * len(self.issued):
            self._rewrite()

    def _rewrite(self) -> None:
        beside = self._path.with_name(self._path.name + ".new")
        fd = os.open(beside, _FLAGS | os.O_TRUNC, 0o600)
        raw = b"".join(_record(d, v) for d, v in self.issued.items())
        raw += _mark(self.mark)
        try:
            write_all(fd, raw, 0)
            beside.rename(self._path)
        except OSError:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd, self._end = fd, len(raw)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _seq(mark: Mark) -> int:
    return mark.seq


def _record(digest: bytes, version: int) -> bytes:
    body = _ISSUED.pack(digest, version)
    return body + _check(body, b"issued")


def _mark(mark: Mark) -> bytes:
    body = _MARK.pack(*mark)
    return body + _check(body, b"mark")


def _check(body: bytes, kind: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_BYTES, person=kind).digest()
