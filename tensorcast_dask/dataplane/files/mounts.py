"""Which kind of file system a path lies on."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

__all__ = ["file_system_of"]

_TABLE: Final = "/proc/self/mountinfo"
_OCTAL = re.compile(r"\\([0-7]{3})")


def file_system_of(path: str | os.PathLike[str]) -> str:
    """Name the file system of an existing path as the kernel does; "" where it cannot tell.

    The device decides; where the table does not know it (btrfs), the longest mount point
    above the path does.
    """
    real = os.path.realpath(path)
    device = Path(real).stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        table = Path(_TABLE).read_text(errors="surrogateescape")
    except OSError:
        return ""
    best, kind = "", ""
    for line in table.splitlines():
        # 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if fields[2] == wanted:
            return right.split(" ")[0]
        point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), fields[4])
        above = point in ("/", real) or real.startswith(point + "/")
        if above and len(point) >= len(best):
            best, kind = point, right.split(" ")[0]
    return kind
