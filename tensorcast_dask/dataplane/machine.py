"""What the machine says of its memory: MemAvailable and the cgroups of our whole path.

Rules:

1. Every cgroup from ours up to the root may limit us; the one that leaves least counts.
   Version 1 and version 2 are read, also side by side.
2. File cache that the kernel may drop counts as free; shared memory does not.
3. What cannot be read is no limit: an unreadable file never refuses a put.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final, NamedTuple

from tensorcast_dask.exceptions import CapacityError

__all__ = ["Limits", "Machine"]

_MEMINFO: Final = Path("/proc/meminfo")
_UNLIMITED: Final = 1 << 60


class Limits(NamedTuple):
    """What the machine and the tightest cgroup have, in bytes; -1 where nothing is known."""

    available_bytes: int
    total_bytes: int
    cgroup_limit_bytes: int
    cgroup_free_bytes: int


class _Group(NamedTuple):
    """The files of one memory cgroup."""

    limit: Path
    usage: Path
    stat: Path
    inactive: str  # name of the droppable file cache in `stat`


class Machine:
    """Reads the machine's headroom; the cgroup path is looked up once."""

    def __init__(
        self, *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
    ) -> None:
        self._meminfo = proc / "meminfo"
        self._groups = _limited(_groups(proc, cgroups))

    def check_room(self, nbytes: int) -> None:
        """Refuse to fill memory that is not there: the kernel would end this process.

        Raises
        ------
        CapacityError
            When the machine, or a cgroup, has not so much free.
        """
        limits = self.limits()
        known = (limits.available_bytes, limits.cgroup_free_bytes)
        free = min((one for one in known if one >= 0), default=nbytes)
        if nbytes > free:
            message = (
                f"this takes {nbytes} bytes of memory, and there are {free}; take a part by a "
                "view, or make room"
            )
            raise CapacityError(message, {"wanted": nbytes, "free": free})

    def limits(self) -> Limits:
        """Return what is free now."""
        available_bytes, total_bytes = self._memory()
        tightest = min(
            (_room(group) for group in self._groups),
            key=lambda room: room[1],
            default=(-1, -1),
        )
        return Limits(
            available_bytes=available_bytes,
            total_bytes=total_bytes,
            cgroup_limit_bytes=tightest[0],
            cgroup_free_bytes=tightest[1],
        )

    def _memory(self) -> tuple[int, int]:
        found = {"MemAvailable": -1, "MemTotal": 0}
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in self._meminfo.read_text().splitlines():
                name, _, rest = line.partition(":")
                if name in found:
                    found[name] = int(rest.split()[0]) * 1024
        return found["MemAvailable"], found["MemTotal"]


def _groups(proc: Path, cgroups: Path) -> list[_Group]:
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[_Group] = []
    for line in lines:
        number, kinds, path = line.split(":", 2)
        if "memory" in kinds.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            found += _path(cgroups / "memory", path, names, "total_inactive_file")
        elif number == "0" and not kinds:
            for root in (cgroups, cgroups / "unified"):
                names = ("memory.max", "memory.current")
                found += _path(root, path, names, "inactive_file")
    return found


def _path(root: Path, path: str, names: tuple[str, str], inactive: str) -> list[_Group]:
    """List the group at `path` below `root` and all those above it."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return [
        _Group(folder / names[0], folder / names[1], folder / "memory.stat", inactive)
        for depth in range(len(parts), -1, -1)
        if (folder := root.joinpath(*parts[:depth])).is_dir()
    ]


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max", or not there
        return _UNLIMITED


def _limited(groups: list[_Group]) -> list[_Group]:
    """Keep groups that exist: a limit may be set later, a file does not appear."""
    return [group for group in groups if group.limit.exists()]


def _room(group: _Group) -> tuple[int, int]:
    limit_bytes = _number(group.limit)
    if limit_bytes >= _UNLIMITED:
        return -1, _UNLIMITED
    free_bytes = limit_bytes - _number(group.usage) + _inactive(group)
    return limit_bytes, free_bytes


def _inactive(group: _Group) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in group.stat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == group.inactive:
                return int(value)
    return 0
