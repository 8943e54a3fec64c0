"""The journal's rows in a DuckDB file, and the proof that none is missing.

Rules:

1. One table, only ever appended to; the newest row of a (kind, key) counts. No index, and
   no DDL after the file was made: both are what makes write-ahead logs unreadable.
2. Every batch ends in a *seal*: how many rows there are, and the sum of their checksums.
   What is read at a start must fit the last seal, or rows are missing and that is said.
3. Before a file is opened its write-ahead log is copied. It is dropped when all is well,
   and kept under `.quarantined-n` when it is not: nothing that could be studied is lost.
4. A write-ahead log that cannot be replayed is moved aside and the last checkpoint opened;
   a file that cannot be opened at all is moved aside too. Opening ends, and never raises
   because of damage.
5. One thread. `append` raises `duckdb.Error` or OSError when the disk does not take it,
   and may be called again with the same rows.
"""

from __future__ import annotations

import shutil
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import duckdb
import msgspec

from tensorcast_dask.scheduler_plugin.state.events import Row

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Found", "Ledger", "Seal"]

_CONFIG: Final[dict[str, str | bool | int | float | list[str]]] = {
    "threads": 1,
    "memory_limit": "512MB",
    "checkpoint_threshold": "1TB",  # checkpoints are our own
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}
_CREATE: Final = (
    "CREATE TABLE IF NOT EXISTS log "
    "(seq UBIGINT, kind VARCHAR, key VARCHAR, blob BLOB, crc UBIGINT)"
)
_INSERT: Final = (
    "INSERT INTO log SELECT unnest(?::UBIGINT[]), unnest(?::VARCHAR[]), "
    "unnest(?::VARCHAR[]), unnest(?::BLOB[]), unnest(?::UBIGINT[])"
)
#: The one statement of a commit has nothing to optimise; trying takes a fifth of its time.
_PLAIN: Final = "PRAGMA disable_optimizer"
_SELECT: Final = "SELECT seq, kind, key, blob, crc FROM log ORDER BY rowid"
_SEAL: Final = "seal"
_MASK: Final = (1 << 64) - 1
#: Own checkpoints: when the write-ahead log is so large, or this many rows are dead.
_WAL_BYTES: Final = 16 << 20
_LINE_BYTES: Final = 100
_DEAD_ROWS: Final = 50_000


class Seal(msgspec.Struct, array_like=True, frozen=True):
    """What a batch says of all rows up to it."""

    rows: int
    sum: int
    epoch: int


class _Line(NamedTuple):
    seq: int
    kind: str
    key: str
    blob: bytes | None
    crc: int


@dataclass(slots=True, kw_only=True)
class Found:
    """What a start has found."""

    rows: tuple[Row, ...] = ()
    seq: int = 0
    epoch: int = 0
    #: Rows are missing, or cannot be trusted.
    lost: bool = False
    said: list[str] | None = None

    def say(self, text: str) -> None:
        """Note a loss."""
        self.lost = True
        self.said = [*(self.said or []), text]


class Ledger:
    """The database file of one journal.

    Attributes
    ----------
    found : Found
        What it held when it was opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._wal = path.with_name(path.name + ".wal")
        self.found = Found()
        self._rows = 0
        self._sum = 0
        self._live = 0
        #: About as long as the write-ahead log is.
        self._wal_bytes = 0
        fresh = not path.exists()
        self._copy = self._copy_wal()
        self._connection = self._open_somehow()
        if fresh:
            self._connection.execute("CHECKPOINT")
            path.chmod(0o600)
        self._recover()

    def _drop_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.unlink()

    def judged(self) -> None:
        """Keep the copy of the write-ahead log when rows are missing, else drop it."""
        if self._copy is not None and self.found.lost:
            self._quarantine(self._copy, self._wal.name)
            self._copy = None
        self._drop_copy()

    # ------------------------------------------------------------ opening
    def _copy_wal(self) -> Path | None:
        if not self._wal.exists():
            return None
        copy = self._wal.with_name(self._wal.name + ".copy")
        shutil.copyfile(self._wal, copy)
        return copy

    def _quarantine(self, path: Path, name: str) -> Path:
        count = 1
        while (aside := path.with_name(f"{name}.quarantined-{count}")).exists():
            count += 1
        path.rename(aside)
        return aside

    def _open_somehow(self) -> duckdb.DuckDBPyConnection:
        try:
            return self._open()
        except duckdb.Error as error:
            if self._wal.exists():
                aside = self._quarantine(self._wal, self._wal.name)
                self._drop_copy()
                self.found.say(
                    f"the write-ahead log could not be replayed ({_first(error)}); it is "
                    f"kept as {aside.name} and the last checkpoint was opened"
                )
        try:
            return self._open()
        except duckdb.Error as error:
            if self._path.exists():
                aside = self._quarantine(self._path, self._path.name)
                self.found.say(
                    f"the database could not be opened ({_first(error)}); it is kept as "
                    f"{aside.name} and an empty one was made"
                )
        return self._open()

    def _open(self) -> duckdb.DuckDBPyConnection:
        connection = duckdb.connect(self._path, config=_CONFIG)
        try:
            connection.execute(_CREATE)
            connection.execute("SELECT count(*), sum(crc) FROM log").fetchall()
            connection.execute(_PLAIN)
        except duckdb.Error:
            connection.close()
            raise
        # Parsed once: parsing is one more turn at the interpreter lock in each commit.
        (self._insert,) = connection.extract_statements(_INSERT)
        return connection

    def _recover(self) -> None:
        found = self.found
        rows: list[Row] = []
        seal, bad = Seal(0, 0, 0), 0
        for raw in self._read_lines():
            line = _Line(*raw)
            found.seq = max(found.seq, line.seq)
            if line.crc != _crc(line.kind, line.key, line.blob):
                bad += 1
            elif line.kind != _SEAL:
                rows.append(Row(kind=line.kind, key=line.key, blob=line.blob))
                self._rows += 1
                self._sum = (self._sum + line.crc) & _MASK
            elif line.blob is not None:
                seal = msgspec.msgpack.decode(line.blob, type=Seal)
        found.rows = tuple(rows)
        found.epoch = seal.epoch
        if bad:
            found.say(f"{bad} rows of the journal do not fit their checksum")
        if (self._rows, self._sum) != (seal.rows, seal.sum):
            found.say(
                f"the journal holds {self._rows} rows, its last batch speaks of {seal.rows}"
            )
        self._live = len({(row.kind, row.key) for row in rows})

    def _read_lines(self) -> list[tuple[int, str, str, bytes | None, int]]:
        try:
            return self._connection.execute(_SELECT).fetchall()
        except duckdb.Error as error:
            self.found.say(f"the journal cannot be read to its end ({_first(error)})")
            self.close()
            self._quarantine(self._path, self._path.name)
            self._connection = self._open()
            return []

    # ------------------------------------------------------------ writing
    @property
    def sum(self) -> int:
        """Sum over the checksums of all rows."""
        return self._sum

    def append(self, rows: list[Row], *, seq: int, epoch: int) -> None:
        """Commit rows; all of them or none."""
        crcs = [_crc(row.kind, row.key, row.blob) for row in rows]
        count = self._rows + len(rows)
        total = (self._sum + sum(crcs)) & _MASK
        seal = msgspec.msgpack.encode(Seal(count, total, epoch))
        self._connection.execute(
            self._insert,
            [
                [seq] * (len(rows) + 1),
                [*(row.kind for row in rows), _SEAL],
                [*(row.key for row in rows), ""],
                [*(row.blob for row in rows), seal],
                [*crcs, _crc(_SEAL, "", seal)],
            ],
        )
        self._rows, self._sum = count, total
        self._wal_bytes += sum(len(row.blob or b"") + _LINE_BYTES for row in rows)

    def tidy(self, *, seq: int, epoch: int) -> None:
        """Checkpoint, or drop dead rows, when it is time; bounds what a start replays."""
        if self._rows > 2 * self._live + _DEAD_ROWS:
            self.compact(seq=seq, epoch=epoch)
        elif self._wal_bytes > _WAL_BYTES:
            self.checkpoint()

    def compact(self, *, seq: int, epoch: int) -> None:
        """Keep the newest row of each key, seal what is left, and checkpoint."""
        run = self._connection.execute
        run("PRAGMA enable_optimizer")
        run("BEGIN")
        run(
            "DELETE FROM log WHERE rowid NOT IN "
            "(SELECT max(rowid) FROM log GROUP BY kind, key)"
        )
        run(f"DELETE FROM log WHERE blob IS NULL OR kind = '{_SEAL}'")  # noqa: S608
        left = run(
            "SELECT count(*), coalesce(sum(crc), 0)::HUGEINT FROM log"
        ).fetchone()
        assert left is not None, "journal: an aggregate without a row"
        count, total = int(left[0]), int(left[1]) & _MASK
        seal = msgspec.msgpack.encode(Seal(count, total, epoch))
        run(
            "INSERT INTO log VALUES (?, ?, ?, ?, ?)",
            [seq, _SEAL, "", seal, _crc(_SEAL, "", seal)],
        )
        run("COMMIT")
        run(_PLAIN)
        self._rows, self._sum, self._live = count, total, count
        self.checkpoint()

    def again(self) -> int:
        """Open the file anew after a failed write; the last sequence number it holds."""
        self.close()
        self._connection = self._open()
        last = self._connection.execute(
            f"SELECT seq, blob FROM log WHERE kind = '{_SEAL}' "  # noqa: S608
            "ORDER BY rowid DESC LIMIT 1"
        ).fetchone()
        if last is None:
            self._rows = self._sum = 0
            return 0
        seal = msgspec.msgpack.decode(bytes(last[1]), type=Seal)
        self._rows, self._sum = seal.rows, seal.sum
        return int(last[0])

    def checkpoint(self) -> None:
        """Move everything into the file, so that the next start replays nothing."""
        self._connection.execute("CHECKPOINT")
        self._wal_bytes = 0

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


def _crc(kind: str, key: str, blob: bytes | None) -> int:
    head = f"{kind}\x00{key}\x00{blob is None}".encode()
    return zlib.crc32(blob or b"", zlib.crc32(head)) | len(blob or b"") << 32


def _first(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
