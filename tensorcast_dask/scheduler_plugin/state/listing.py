"""Pages of a long list, in order, without walking all of it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping
from typing import Final

from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.tensors.ids import ArtifactId

__all__ = ["MAX_LOOKS", "MAX_PAGE", "SortedIds", "cursor_of", "parse_cursor", "wears"]

#: Most entries of one answer; a larger limit gets this many. Some milliseconds of the loop.
MAX_PAGE: Final = 250
#: Most versions that one answer looks at: with labels a page may have few entries, and go on.
MAX_LOOKS: Final = 500
_CHUNK: Final = 512


class SortedIds:
    """Artifact ids in order, for ranges by prefix.

    A list of short lists: an insertion moves a few hundred ids, not all of them.
    """

    def __init__(self) -> None:
        self._chunks: list[list[ArtifactId]] = []
        #: First id of each chunk.
        self._firsts: list[ArtifactId] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, name: ArtifactId) -> None:
        """Add an id that is not in it."""
        self._count += 1
        if not self._chunks:
            self._chunks, self._firsts = [[name]], [name]
            return
        at = max(bisect_right(self._firsts, name) - 1, 0)
        chunk = self._chunks[at]
        insort(chunk, name)
        self._firsts[at] = chunk[0]
        if len(chunk) > _CHUNK:
            half = chunk[_CHUNK // 2 :]
            del chunk[_CHUNK // 2 :]
            self._chunks.insert(at + 1, half)
            self._firsts.insert(at + 1, half[0])

    def discard(self, name: ArtifactId) -> None:
        """Take an id out; one that is not in it is fine."""
        at = bisect_right(self._firsts, name) - 1
        chunk = self._chunks[at] if at >= 0 else []
        place = bisect_left(chunk, name)
        if place == len(chunk) or chunk[place] != name:
            return
        self._count -= 1
        del chunk[place]
        if chunk:
            self._firsts[at] = chunk[0]
        else:
            del self._chunks[at], self._firsts[at]

    def starting(self, prefix: str, *, at: str) -> Iterator[ArtifactId]:
        """Go through ids with a prefix, from `at` on (itself included)."""
        start = ArtifactId(max(prefix, at))
        first = max(bisect_right(self._firsts, start) - 1, 0)
        for chunk in self._chunks[first:]:
            for name in chunk[bisect_left(chunk, start) :]:
                if not name.startswith(prefix):
                    return
                yield name


def cursor_of(name: str, version: int) -> str:
    """Where a page ended: ids hold no NUL, so this is unambiguous."""
    return f"{name}\x00{version}"


def parse_cursor(after: str) -> tuple[str, int]:
    """Take a cursor apart; "" is the beginning.

    Raises
    ------
    InvalidArgument
        When it is none of `cursor_of`.
    """
    if not after:
        return "", 0
    name, _, version = after.rpartition("\x00")
    if not name or not version.isascii() or not version.isdigit() or len(version) > 20:
        message = "this is no cursor of a listing; pass `after` of the page before"
        raise InvalidArgument(message)
    return name, int(version)


def wears(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether all the wanted labels are among `labels`."""
    return all(labels.get(key) == value for key, value in wanted.items())
