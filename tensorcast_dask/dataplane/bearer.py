"""The token of HTTP callers: derived from the cluster's, or the user's own in a file.

Rules:

1. The derived one is the same on every host, and nobody comes from it to the cluster's token.
2. It is written into the cluster's folder by the scheduler (mode 0600, in a folder of mode 0700).
3. A file that others could read or write is refused, as ssh refuses a key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from typing import TYPE_CHECKING, Final

from tensorcast_dask.exceptions import InvalidArgument

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FILE", "derived", "keep", "of_file"]

#: In the cluster's folder of the scheduler's host.
FILE: Final = "http.token"
_TOKEN: Final = re.compile(r"[\x21-\x7e]{16,4096}")


def derived(secret: bytes) -> str:
    """Derive the token from the cluster's (rule 1)."""
    return hmac.new(secret, b"tensorcast http 1", hashlib.sha256).hexdigest()


def keep(folder: Path, token: str) -> None:
    """Write the token for this user's programs (rule 2)."""
    fresh = folder / f".{FILE}.{os.getpid()}"
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, token.encode() + b"\n")
    finally:
        os.close(fd)
    fresh.replace(folder / FILE)


def of_file(path: str) -> str:
    """Read a user's own token.

    Raises
    ------
    InvalidArgument
        When the file cannot be read, is not this user's alone, or holds no token.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            text = os.read(fd, 8192).decode(errors="replace").strip()
        finally:
            os.close(fd)
    except OSError as error:
        message = f"setting tensorcast.http.token-file cannot be read: {error}"
        raise InvalidArgument(message) from error
    if found.st_uid not in {os.getuid(), 0} or stat.S_IMODE(found.st_mode) & 0o077:
        message = (
            f"{path} must be yours and readable by nobody else (chmod 600); see the setting "
            "tensorcast.http.token-file"
        )
        raise InvalidArgument(message)
    if not _TOKEN.fullmatch(text):
        message = (
            f"{path} holds no token: at least 16 printable characters without a space"
        )
        raise InvalidArgument(message)
    return text
