"""The journal: what the catalog decided, on disk, by one thread of its own.

Contract for the shell that owns it (all but `Journal.open` and `close` return at once):

    recovered, journal = ...open(path, notify=lambda event: loop.call_soon_threadsafe(...))
    journal.submit(persist)            # for every Persist instruction, in order
    ... notify(Journaled(seq)) / notify(JournalStalled(why)) / notify(JournalBack())
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from tensorcast_dask.scheduler_plugin.state.events import (
    JournalBack,
    Journaled,
    JournalStalled,
    Persist,
    Recovered,
    Row,
)

if TYPE_CHECKING:
    from tensorcast_dask.tensors.ids import ClusterId

Notify: TypeAlias = Callable[[Journaled | JournalStalled | JournalBack], None]


class Journal:
    """One owner thread over a DuckDB file, a head file and a version log.

    Attributes
    ----------
    recovered : Recovered
        What was found; hand it to `Catalog`. `cluster` is "" when the journal is empty:
        call `name_cluster` before the first node or session is let in, and use
        `msgspec.structs.replace(recovered, cluster=...)`.
    token : bytes
        The cluster token that is kept beside the journal; b"" when there is none yet.
    link_port : int
        Where links were listened for in the last life; 0 when there was none.
    """

    recovered: Recovered
    token: bytes
    link_port: int

    @classmethod
    def open(cls, where: str, *, notify: Notify, temporary: bool = False) -> Journal:
        """Open or make a journal; blocks for as long as recovery takes.

        Parameters
        ----------
        where : str
            Path of the database file, or ":memory:" (no file at all).
        notify : callable
            Called from the journal's thread.
        temporary : bool
            `close(keep=False)` removes all files.

        Raises
        ------
        CatalogUnavailable
            When another process holds the file, or nothing can be written there.
        """
        raise NotImplementedError

    def name_cluster(self, cluster: ClusterId, token: bytes) -> None:
        """Keep the cluster's id and token (mode 0600, synced); blocks shortly."""
        raise NotImplementedError

    def remember_link_port(self, port: int) -> None:
        """Keep the port so that a restart can listen where the nodes look; blocks shortly."""
        raise NotImplementedError

    def submit(self, batch: Persist) -> None:
        """Queue a batch; never blocks. `notify` follows."""
        raise NotImplementedError

    def on_commit(self, absorb: Callable[[tuple[Row, ...]], None]) -> None:
        """Have committed rows handed to `absorb` (the tables), from the journal's thread."""
        raise NotImplementedError

    def close(self, *, keep: bool = True) -> None:
        """Commit what is queued, checkpoint, end the thread; blocks."""
        raise NotImplementedError
