"""The journal: what the catalog decided, on disk, by one thread of its own.

Three files beside the database file: `.versions` (numbers that are used up, and how far it
has come), `.head` (which journal it is, its epoch) and `.token` (the cluster's id and token).

Rules:

1. A batch is *told* (`Journaled`) after the database has committed it and the version log
   has its numbers and its mark, in this order. What was told is found again, or its loss is
   said. Each is one system call: others wait for the interpreter lock meanwhile.
2. All batches that wait are committed as one, up to `GROUP_ROWS` rows.
3. A lazy batch waits a moment for others to ride with.
4. A disk that does not take a batch stalls the journal: it says so once, keeps the batch,
   and tries until the disk takes it. Nothing is dropped, and nobody else has to act.
5. Each start goes one epoch up, on disk before `open` returns.
"""

from __future__ import annotations

import shutil
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import duckdb
import msgspec

from tensorcast_dask.dataplane import faults
from tensorcast_dask.exceptions import CatalogUnavailable
from tensorcast_dask.scheduler_plugin.head import HeadFile
from tensorcast_dask.scheduler_plugin.identity import read_secret, write_secret
from tensorcast_dask.scheduler_plugin.ledger import Ledger
from tensorcast_dask.scheduler_plugin.state.events import (
    Issued,
    JournalBack,
    Journaled,
    JournalStalled,
    Persist,
    Recovered,
    Row,
)
from tensorcast_dask.scheduler_plugin.versionlog import Mark, VersionLog
from tensorcast_dask.tensors.ids import ClusterId, Epoch

__all__ = ["Journal", "Notify"]

Notify: TypeAlias = Callable[[Journaled | JournalStalled | JournalBack], None]
Absorb: TypeAlias = Callable[[tuple[Row, ...]], None]

GROUP_ROWS: Final = 5000
RETRY_S: Final = 0.25
#: How long a lazy batch lies before it is committed by itself.
LAZY_S: Final = 0.05


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

    def __init__(
        self, disk: _Disk | None, recovered: Recovered, notify: Notify
    ) -> None:
        self.recovered = recovered
        self.token = disk.token if disk is not None else b""
        self.link_port = disk.head.head.link_port if disk is not None else 0
        self._disk = disk
        self._notify = notify
        self._absorb: Absorb | None = None
        self._queue: deque[Persist] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._keep = True
        self._thread = threading.Thread(
            target=self._run, name="tensorcast-journal", daemon=True
        )
        self._thread.start()

    @classmethod
    def open(
        cls,
        where: str | Path,
        *,
        notify: Notify,
        temporary: bool = False,
        fresh_epoch: int = 1,
    ) -> Journal:
        """Open or make a journal; blocks for as long as recovery takes.

        Parameters
        ----------
        where : str or Path
            Path of the database file, or ":memory:" (no file at all).
        notify : callable
            Called from the journal's thread.
        temporary : bool
            `close()` removes all files unless told to keep them.
        fresh_epoch : int
            Epoch of a journal that begins empty. One that rises with the time (minutes
            since some year) keeps a lost journal's successor ahead of it.

        Raises
        ------
        CatalogUnavailable
            When another process holds the file, or nothing can be written there.
        """
        if str(where) == ":memory:":
            recovered = Recovered(cluster=ClusterId(""), epoch=Epoch(fresh_epoch))
            return cls(None, recovered, notify)
        path = Path(where)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            disk = _Disk(path)
            recovered = disk.start(fresh_epoch)
        except (OSError, duckdb.Error) as error:
            message = f"the journal at {path} cannot be opened: {error}"
            raise CatalogUnavailable(message) from error
        journal = cls(disk, recovered, notify)
        journal._keep = not temporary
        return journal

    # ------------------------------------------------------------ identity
    def name_cluster(self, cluster: ClusterId, token: bytes) -> None:
        """Keep the cluster's id and token (mode 0600, synced); blocks shortly."""
        self.token = token
        if self._disk is not None:
            self._disk.name_cluster(cluster, token)

    def remember_link_port(self, port: int) -> None:
        """Keep the port so that a restart can listen where nodes look; blocks shortly."""
        self.link_port = port
        if self._disk is not None:
            self._disk.remember(link_port=port)

    # ------------------------------------------------------------ work
    def submit(self, batch: Persist) -> None:
        """Queue a batch; never blocks. `notify` follows."""
        with self._wake:
            self._queue.append(batch)
            # While lazy ones lie, another one changes nothing.
            if not batch.lazy or len(self._queue) == 1:
                self._wake.notify()

    def on_commit(self, absorb: Absorb) -> None:
        """Have committed rows handed to `absorb` (the tables), from the journal's thread.

        What was recovered is handed over first, by the caller's thread.
        """
        absorb(self.recovered.rows)
        self._absorb = absorb

    def close(self, *, keep: bool | None = None, within_s: float = 10.0) -> None:
        """Commit what is queued, checkpoint, end the thread; blocks.

        Parameters
        ----------
        keep : bool, optional
            False removes all files: the cluster is gone for good. By default a temporary
            journal is removed, another kept.
        within_s : float
            A disk that takes nothing is left after so long; what waits is lost then, and
            nobody was told of it.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(within_s)
        disk = self._disk
        if disk is not None and not self._thread.is_alive():
            self._disk = None
            disk.close(keep=self._keep if keep is None else keep)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing:
                    self._wake.wait()
                if not self._closing and all(batch.lazy for batch in self._queue):
                    self._wake.wait_for(self._is_wanted, LAZY_S)
                if not self._queue:
                    return
                group = self._next_group()
            if not self._commit(group):
                return
            if self._absorb is not None:
                self._absorb(tuple(row for batch in group for row in batch.rows))
            self._notify(Journaled(seq=group[-1].seq))

    def _is_wanted(self) -> bool:
        return self._closing or not all(batch.lazy for batch in self._queue)

    def _next_group(self) -> list[Persist]:
        group = [self._queue.popleft()]
        count = len(group[0].rows)
        while self._queue and count + len(self._queue[0].rows) <= GROUP_ROWS:
            batch = self._queue.popleft()
            count += len(batch.rows)
            group.append(batch)
        return group

    def _commit(self, group: list[Persist]) -> bool:
        """Write until the disk takes it; False when the journal was closed meanwhile."""
        stalled, kinds = False, _kinds(group)
        while self._disk is not None:
            try:
                faults.point("journal.before_commit", kinds)
                self._disk.write(group)
                break
            except (OSError, duckdb.Error) as error:
                if not stalled:
                    stalled = True
                    self._notify(JournalStalled(why=str(error).partition("\n")[0]))
                with self._wake:
                    if self._closing:
                        return False
                    self._wake.wait_for(lambda: self._closing, RETRY_S)
        if stalled:
            self._notify(JournalBack())
        faults.point("journal.committed", kinds)
        return True


def _kinds(group: list[Persist]) -> str:
    return ",".join(sorted({row.kind for batch in group for row in batch.rows}))


class _Disk:
    """The files of one journal, by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.head = HeadFile(path.with_name(path.name + ".head"))
        try:
            self._versions = VersionLog(path.with_name(path.name + ".versions"))
            existed = path.exists()
            self._ledger = Ledger(path)
        except BaseException:
            self.head.close()
            raise
        self._existed = existed
        self._secret = path.with_name(path.name + ".token")
        #: Head and identity may be written from two threads.
        self._lock = threading.Lock()
        #: The last write failed; what the database holds is looked up before the next.
        self._unsure = False
        self.token = b""

    def start(self, fresh_epoch: int) -> Recovered:
        """See what is there, and go one epoch up."""
        head, found = self.head.head, self._ledger.found
        mark = self._versions.mark
        told = max(head.seq, mark.seq)
        if found.seq < told:
            found.say(
                f"the journal ends at change {found.seq}, but {told} were acknowledged"
            )
        elif self._existed and not mark.seq and found.seq:
            found.say("the version log is missing, so the last changes may be missing")
        if self._versions.damaged:
            found.say(
                f"{self._versions.damaged} records of the version log cannot be read"
            )
        if self.head.damaged:
            found.said = [*(found.said or []), "the head file could not be read"]
        self._ledger.judged()
        cluster, self.token = read_secret(self._secret)
        cluster = ClusterId(cluster or head.cluster)
        last = max(head.epoch, mark.epoch, found.epoch)
        epoch = Epoch(max(last + 1, fresh_epoch if not last else 0))
        seq = max(told, found.seq)
        self.head.write(
            msgspec.structs.replace(
                head, seq=seq, epoch=epoch, cluster=cluster, digest=self._ledger.sum
            )
        )
        if found.lost:
            # From here on the database is whole again, as far as it goes.
            self._ledger.compact(seq=seq, epoch=epoch)
        return Recovered(
            cluster=cluster,
            epoch=epoch,
            rows=found.rows,
            issued=self._versions.issued,
            seq=seq,
            lost=found.lost,
            said="; ".join(found.said or ()),
        )

    def name_cluster(self, cluster: ClusterId, token: bytes) -> None:
        """Keep id and token."""
        write_secret(self._secret, cluster, token)
        self.token = token
        self.remember(cluster=cluster)

    def remember(
        self, *, cluster: str = "", link_port: int = 0, epoch: int = 0
    ) -> None:
        """Write the head with another identity."""
        with self._lock:
            head = self.head.head
            self.head.write(
                msgspec.structs.replace(
                    head,
                    cluster=cluster or head.cluster,
                    link_port=link_port or head.link_port,
                    epoch=epoch or head.epoch,
                    seq=self._versions.mark.seq or head.seq,
                )
            )

    def write(self, group: list[Persist]) -> None:
        """Commit a group everywhere; may be called again after it raised."""
        seq = group[-1].seq
        epoch = max(self.head.head.epoch, *(batch.epoch for batch in group))
        done = False
        if self._unsure:
            done = self._ledger.again() >= seq
        self._unsure = True
        if not done:
            rows = [row for batch in group for row in batch.rows]
            self._ledger.append(rows, seq=seq, epoch=epoch)
        issued: list[Issued] = [one for batch in group for one in batch.issued]
        self._versions.append(issued, Mark(epoch, self._ledger.sum, seq))
        if epoch != self.head.head.epoch:
            self.remember(epoch=epoch)
        self._ledger.tidy(seq=seq, epoch=epoch)
        self._versions.tidy()
        self._unsure = False

    def close(self, *, keep: bool) -> None:
        """Checkpoint and close, or remove everything."""
        try:
            if keep:
                self._ledger.checkpoint()
                self.remember()
            self._ledger.close()
        except (duckdb.Error, OSError):
            pass  # the next start replays the log
        finally:
            self._versions.close()
            if not keep:
                self._remove()
            self.head.close()

    def _remove(self) -> None:
        for path in self._path.parent.glob(self._path.name + "*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
