"""The head file: which journal this is, in two slots that are written in turn.

How far it has come stands in the version log, in the mark of every group commit; here it
is repeated at each start and at a clean end.

Rules:

1. A write touches the older slot only and is synced (O_DSYNC): a crash at any byte leaves
   the newer one. One system call a write: each costs a turn at a busy interpreter lock.
2. A slot counts when its checksum fits; of two good ones the later write.
3. The file is locked for as long as it is open: one scheduler writes a journal.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.exceptions import CatalogUnavailable

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Head", "HeadFile"]

_SLOT_BYTES: Final = 4096
_CHECK_BYTES: Final = 16
_FRAME: Final = struct.Struct("<8sI")
_MAGIC: Final = b"TCHEAD01"
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DSYNC


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What one slot says."""

    #: Rises with each write.
    writes: int = 0
    #: A sequence number that was on disk.
    seq: int = 0
    epoch: int = 0
    cluster: str = ""
    link_port: int = 0
    #: Sum over the checksums of all rows at `seq`, to tell a database of another life.
    digest: int = 0


class HeadFile:
    """The head file of one journal.

    Attributes
    ----------
    head : Head
        What it says now.
    damaged : bool
        It was there and no slot could be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, _FLAGS, 0o600)
        except OSError as error:
            message = f"the journal cannot be written beside {path}: {error}"
            raise CatalogUnavailable(message) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            message = f"another process has the journal of {path} open; end it first"
            raise CatalogUnavailable(message) from error
        slots = [self._read(at) for at in (0, 1)]
        good = [slot for slot in slots if slot is not None]
        size_bytes = os.fstat(self._fd).st_size
        self.damaged = size_bytes > 0 and not good
        self.head = max(good, key=lambda slot: slot.writes, default=Head())
        if size_bytes < 2 * _SLOT_BYTES:
            # Room for both slots, so that later writes cannot meet a full disk.
            os.pwrite(self._fd, bytes(2 * _SLOT_BYTES - size_bytes), size_bytes)
            os.fsync(self._fd)

    def _read(self, slot: int) -> Head | None:
        raw = os.pread(self._fd, _SLOT_BYTES, slot * _SLOT_BYTES)
        if len(raw) < _FRAME.size:
            return None
        magic, length = _FRAME.unpack_from(raw)
        end = _FRAME.size + length
        if magic != _MAGIC or end + _CHECK_BYTES > len(raw):
            return None
        if _check(raw[:end]) != raw[end : end + _CHECK_BYTES]:
            return None
        try:
            return msgspec.msgpack.decode(raw[_FRAME.size : end], type=Head)
        except msgspec.MsgspecError:
            return None

    def write(self, head: Head) -> None:
        """Write and sync; OSError when the disk does not take it."""
        head = msgspec.structs.replace(head, writes=self.head.writes + 1)
        body = msgspec.msgpack.encode(head)
        raw = _FRAME.pack(_MAGIC, len(body)) + body
        raw += _check(raw)
        assert len(raw) <= _SLOT_BYTES, "journal: a head larger than its slot"
        os.pwrite(self._fd, raw, (head.writes % 2) * _SLOT_BYTES)
        self.head = head

    def close(self) -> None:
        """Close and unlock."""
        os.close(self._fd)


def _check(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=_CHECK_BYTES).digest()
