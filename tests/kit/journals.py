"""A journal and the news of it, for tests that write real files."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from tensorcast_dask.scheduler_plugin.journal import Journal
from tensorcast_dask.scheduler_plugin.state.events import (
    Issued,
    JournalBack,
    Journaled,
    JournalStalled,
    Persist,
    Row,
)
from tensorcast_dask.scheduler_plugin.state.numbers import digest_of
from tests.kit.eventually import eventually

__all__ = ["OpenJournal", "batch"]


def batch(seq: int, *, rows: int = 2, size: int = 50) -> Persist:
    """One change: `rows` rows that say which change they are of, and a version number."""
    return Persist(
        seq=seq,
        rows=tuple(
            Row(kind="version", key=f"{seq}.{n}", blob=b"%d:" % seq + bytes(size))
            for n in range(rows)
        ),
        issued=(Issued(digest=digest_of("x"), version=seq),),
    )


class OpenJournal:
    """A journal that is closed at the end of the block."""

    def __init__(self, path: Path | str, **more: object) -> None:
        self.news: list[Journaled | JournalStalled | JournalBack] = []
        self._lock = threading.Lock()
        self.journal = Journal.open(path, notify=self._note, **more)  # type: ignore[arg-type]

    def _note(self, news: Journaled | JournalStalled | JournalBack) -> None:
        with self._lock:
            self.news.append(news)

    @property
    def durable(self) -> int:
        """Last sequence number that was told."""
        with self._lock:
            return max(
                (one.seq for one in self.news if isinstance(one, Journaled)), default=0
            )

    def write(self, first: int, last: int) -> None:
        """Submit changes and wait until all were told."""
        for seq in range(first, last + 1):
            self.journal.submit(batch(seq))
        eventually(lambda: self.durable >= last, within_s=30)

    def changes(self) -> list[int]:
        """Which changes were recovered, whole ones only."""
        keys = [row.key for row in self.journal.recovered.rows]
        seqs = sorted({int(key.partition(".")[0]) for key in keys})
        return [seq for seq in seqs if {f"{seq}.0", f"{seq}.1"} <= set(keys)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.journal.close()
