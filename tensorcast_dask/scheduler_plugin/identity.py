"""The cluster's id and token, kept beside the journal for its owner alone.

Rules:

1. The file is never readable by others, not for a moment: it is made with mode 0600,
   synced, and renamed into place.
2. A file that cannot be read counts as absent: nodes bring id and token again.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_secret", "write_secret"]


class _Secret(msgspec.Struct, frozen=True):
    cluster: str
    token: bytes


def read_secret(path: Path) -> tuple[str, bytes]:
    """Read id and token; ("", b"") when there are none."""
    try:
        secret = msgspec.msgpack.decode(path.read_bytes(), type=_Secret)
    except (OSError, msgspec.MsgspecError):
        return "", b""
    return secret.cluster, secret.token


def write_secret(path: Path, cluster: str, token: bytes) -> None:
    """Keep id and token."""
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, msgspec.msgpack.encode(_Secret(cluster, token)))
        os.fsync(fd)
    finally:
        os.close(fd)
    beside.rename(path)
