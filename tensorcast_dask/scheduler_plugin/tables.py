"""`sql()`: the catalog as tables, in a DuckDB of their own, in a thread of their own.

Rules:

1. The tables show what the journal has committed (`absorb`), and beside it what no row
   holds, as it was at the instant of the question (`RunQuery.snapshot`).
2. One thread owns the database. Rows are taken over when somebody asks, not before: a
   catalog that nobody asks pays one append a batch.
3. A question is one SELECT, run in a read-only transaction in a database that can reach no
   file, no network, no extension and no Python object, whose settings are locked. It ends
   at its row limit, its length or its time: the setting's, or the asker's where that is
   less, so that nobody's question outlives the wish for its answer and holds up the others.
   One call of a function is never interrupted, and what it makes no limit counts: `repeat('x',
   1000000000)` takes its gigabyte and its seconds. Who may ask may also run code here.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import duckdb
import msgspec

from tensorcast_dask.exceptions import (
    CatalogUnavailable,
    DeadlineExceeded,
    InvalidArgument,
    TensorCastError,
)
from tensorcast_dask.scheduler_plugin.schema import SCHEMA
from tensorcast_dask.scheduler_plugin.state.records import (
    AliasRow,
    PinRow,
    VersionRow,
    ViewRow,
)
from tensorcast_dask.scheduler_plugin.state.runs import PlanRow, StepRow
from tensorcast_dask.tensors.messages import Fact, Fault, Rows

if TYPE_CHECKING:
    from tensorcast_dask.scheduler_plugin.state.events import (
        Emit,
        InstanceFacts,
        NodeFacts,
        OperationFacts,
        Row,
        RunQuery,
        Snapshot,
    )

__all__ = ["Tables"]

log = logging.getLogger(__name__)

_R = TypeVar("_R", bound=msgspec.Struct)

Cell: TypeAlias = Fact | bytes
Done: TypeAlias = Callable[[Rows | Fault], None]

_EVENTS: Final = 10_000
_CLOSING: Final = "the catalog is closing; ask its successor"
_CLOSE_TURNS: Final = 50
_CLOSE_TURN_S: Final = 0.02
_AGAIN_S: Final = 0.05
_MAX_INT: Final = 1 << 63
#: An answer ends with the row that makes it longer than this.
_MOST_TEXT_BYTES: Final = 64 << 20
_NESTED: Final = {"list", "array", "struct", "map", "union"}
#: The columns of every table that a question may use.
_COLUMNS: Final = (
    "SELECT table_name, string_agg(column_name, ', ' ORDER BY column_index)"
    " FROM duckdb_columns() WHERE NOT internal AND table_name NOT LIKE '\\_%' ESCAPE '\\'"
    " GROUP BY table_name ORDER BY table_name"
)
_CONFIG: Final[dict[str, str | bool | int | float | list[str]]] = {
    "threads": 1,
    "memory_limit": "512MB",
    "temp_directory": "",
    "python_enable_replacements": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}


class Tables:
    """Read-only tables of what the journal has committed.

    Parameters
    ----------
    timeout_s : float
        How long one SELECT may run.
    """

    def __init__(self, *, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        self._rows: deque[tuple[Row, ...]] = deque()
        self._events: deque[Emit] = deque(maxlen=_EVENTS)
        self._asked: deque[tuple[RunQuery, Done, float] | None] = deque()
        self._wake = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._running: duckdb.DuckDBPyConnection | None = None

    def absorb(self, rows: tuple[Row, ...]) -> None:
        """Take committed rows over; from any thread, returns at once."""
        self._rows.append(rows)

    def note(self, emitted: Emit) -> None:
        """Keep an event for the `events` table (bounded); returns at once."""
        self._events.append(emitted)

    def run(self, query: RunQuery, *, done: Done) -> None:
        """Run one SELECT in the tables' thread; `done` is called from that thread."""
        with self._lock:
            if not self._closed:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._serve, name="tensorcast-sql", daemon=True
                    )
                    self._thread.start()
                self._asked.append((query, done, time.monotonic()))
                self._wake.release()
                return
        done(Fault.of(CatalogUnavailable(_CLOSING)))

    def close(self) -> None:
        """Interrupt what runs and end the thread; blocks shortly."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is None:
            return
        self._asked.append(None)
        self._wake.release()
        # Again and again: an interrupt that comes before its SELECT has begun is lost.
        for _ in range(_CLOSE_TURNS):
            # To its very end: a database that is being closed while the process exits aborts it.
            thread.join(_CLOSE_TURN_S)
            running = self._running
            if not thread.is_alive():
                return
            if running is not None:
                running.interrupt()

    # ------------------------------------------------------------ the thread
    def _serve(self) -> None:
        mirror: _Mirror | None = None
        while True:
            self._wake.acquire()
            job = self._asked.popleft()
            if job is None:
                self._running = None
                return
            query, done, asked_s = job
            try:
                mirror = mirror or self._open()
                answer: Rows | Fault = self._answer(mirror, query, asked_s)
            except TensorCastError as error:
                answer = Fault.of(error)
            except duckdb.Error as error:
                answer = Fault.of(self._refusal(error, query))
            except (
                Exception
            ) as error:  # the thread serves everybody: it outlives any question
                log.exception("a SELECT failed")
                answer = Fault.of(_cannot(error))
            done(answer)

    def _open(self) -> _Mirror:
        try:
            mirror = _Mirror()
        except duckdb.Error as error:
            message = f"the tables cannot be opened now: {str(error)[:300]}"
            raise CatalogUnavailable(message) from error
        self._running = mirror.connection
        return mirror

    def _refusal(self, error: duckdb.Error, query: RunQuery) -> TensorCastError:
        if isinstance(error, duckdb.InterruptException):
            if self._closed:
                return CatalogUnavailable(_CLOSING)
            within_s = min(self._timeout_s, query.within_s)
            message = f"the SELECT did not end within {within_s:.3g} s; ask for less"
            return DeadlineExceeded(message)
        return _cannot(error)

    def _answer(self, mirror: _Mirror, query: RunQuery, asked_s: float) -> Rows:
        _check_select(query.sql)
        while self._rows:
            mirror.take(self._rows.popleft())
        mirror.catch_up()
        mirror.show(query.snapshot, list(self._events))
        if self._closed:
            raise CatalogUnavailable(_CLOSING)
        if self._left_s(query, asked_s) <= 0:
            message = "others' SELECTs took all the time that this one had; ask again"
            raise DeadlineExceeded(message)
        over = threading.Event()
        watch = threading.Thread(
            target=self._interrupt,
            args=(mirror.connection, self._left_s(query, asked_s), over),
            name="tensorcast-sql-watch",
            daemon=True,
        )
        watch.start()
        try:
            return mirror.select(query.sql, query.limit)
        except duckdb.BinderException as error:
            raise _cannot(error, mirror.columns(query.sql)) from error
        finally:
            over.set()
            watch.join()

    def _left_s(self, query: RunQuery, asked_s: float) -> float:
        """How long it may still run; its asker's time also passes while it waits for its turn."""
        left_s = asked_s + query.within_s - time.monotonic()
        return min(self._timeout_s, left_s)

    @staticmethod
    def _interrupt(
        running: duckdb.DuckDBPyConnection, after_s: float, over: threading.Event
    ) -> None:
        """Stop a SELECT that is not over by then; again and again, since one may be missed."""
        while not over.wait(after_s):
            running.interrupt()
            after_s = _AGAIN_S


def _cannot(error: Exception, more: str = "") -> TensorCastError:
    text = str(error).partition("\n")[0][:300]
    return InvalidArgument(f"this SELECT cannot be run: {text}{more}")


def _check_select(sql: str) -> None:
    statements = duckdb.extract_statements(sql)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        message = "sql() takes one SELECT; changes go through the calls of the session"
        raise InvalidArgument(message)


class _Mirror:
    """The database behind the tables."""

    def __init__(self) -> None:
        self.connection = duckdb.connect(":memory:", config=_CONFIG)
        for statement in SCHEMA:
            self.connection.execute(statement)
        # It computes constants while it plans, where neither an interrupt nor the memory limit
        # reaches: unnest(range(100000000)) took 9 GB of the scheduler and half a minute there.
        self.connection.execute("SET disabled_optimizers = 'expression_rewriter'")
        self.connection.execute("SET enable_external_access = false")
        self.connection.execute("SET lock_configuration = true")
        #: Newest blob of every changed row that is not in the tables yet.
        self._changed: dict[tuple[str, str], bytes | None] = {}

    def take(self, rows: tuple[Row, ...]) -> None:
        """Note what has changed."""
        for row in rows:
            self._changed[row.kind, row.key] = row.blob

    def catch_up(self) -> None:
        """Bring the tables up to what was noted."""
        changed, self._changed = self._changed, {}
        by_kind: dict[str, list[tuple[str, bytes | None]]] = {}
        for (kind, key), blob in changed.items():
            by_kind.setdefault(kind, []).append((key, blob))
        self._replace_versions(by_kind.get("version", []))
        self._replace(
            "aliases",
            by_kind.get("alias", []),
            AliasRow,
            lambda a: [a.name, a.target_id, a.target, a.alias_generation],
        )
        self._replace(
            "views",
            by_kind.get("view", []),
            ViewRow,
            lambda v: [v.id, v.base, v.index_digest, v.nbytes, v.tensors],
        )
        self._replace(
            "pins",
            by_kind.get("pin", []),
            PinRow,
            lambda p: [p.pin, p.generation, p.node, p.ttl_s],
        )
        self._replace(
            "plans",
            by_kind.get("plan", []),
            PlanRow,
            lambda p: [p.key, p.status, p.run, p.digest, _said(p.fault)],
        )
        self._replace("steps", by_kind.get("step", []), StepRow, _step)

    def _delete(self, table: str, keys: list[str]) -> None:
        self.connection.execute(
            f"DELETE FROM {table} WHERE key IN (SELECT unnest(?::VARCHAR[]))",  # noqa: S608
            [keys],
        )

    def _insert(self, table: str, lines: list[list[Cell]]) -> None:
        if not lines:
            return
        marks = ", ".join("unnest(?)" for _ in lines[0])
        columns = [list(column) for column in zip(*lines, strict=True)]
        self.connection.execute(f"INSERT INTO {table} SELECT {marks}", columns)

    def _replace(
        self,
        table: str,
        changed: list[tuple[str, bytes | None]],
        as_type: type[_R],
        line: Callable[[_R], list[Cell]],
    ) -> None:
        if changed:
            self._delete(f"_{table}", [key for key, _ in changed])
            found = _unpack(changed, as_type)
            self._insert(f"_{table}", [[key, *line(row)] for key, row in found])

    def _replace_versions(self, changed: list[tuple[str, bytes | None]]) -> None:
        if not changed:
            return
        keys = [key for key, _ in changed]
        self._delete("_versions", keys)
        self._delete("_replicas", keys)
        rows = list(_unpack(changed, VersionRow))
        self._insert(
            "_versions",
            [
                [
                    key,
                    row.id,
                    row.version,
                    row.generation,
                    row.owner,
                    row.published,
                    row.nbytes,
                    row.tensors,
                    row.index_digest,
                    row.replicas,
                    row.degraded,
                    msgspec.json.encode(row.labels).decode(),
                ]
                for key, row in rows
            ],
        )
        self._insert(
            "_replicas",
            [
                [key, row.id, row.version, row.generation, node, tier]
                for key, row in rows
                for node, tiers in row.holders
                for tier in tiers
            ],
        )

    def show(self, snapshot: Snapshot, events: list[Emit]) -> None:
        """Replace what is true at this instant only."""
        tables: tuple[tuple[str, list[list[Cell]]], ...] = (
            ("nodes", [_cells(one) for one in snapshot.nodes]),
            ("instances", [_cells(one) for one in snapshot.instances]),
            (
                "operations",
                [_cells(one) for one in snapshot.operations],
            ),
            ("_creating", [[*one] for one in snapshot.creating]),
            (
                "events",
                [
                    [at, one.topic, msgspec.json.encode(one.facts).decode()]
                    for at, one in enumerate(events)
                ],
            ),
        )
        for table, lines in tables:
            self.connection.execute(f"DELETE FROM {table}")  # noqa: S608
            self._insert(table, lines)

    def columns(self, sql: str) -> str:
        """Say which columns the tables have that a SELECT names."""
        known = self.connection.execute(_COLUMNS).fetchall()
        named = [(t, c) for t, c in known if re.search(rf"\b{t}\b", sql, re.IGNORECASE)]
        return "".join(f"; {table} has {columns}" for table, columns in named)

    def select(self, sql: str, limit: int) -> Rows:
        """Run one SELECT."""
        run = self.connection.execute
        columns, sql = self._flat(sql)
        rows: list[tuple[Fact, ...]] = []
        text_bytes, more = 0, False
        run("BEGIN TRANSACTION READ ONLY")
        try:
            cursor = run(sql)
            columns = columns or [column[0] for column in cursor.description or ()]
            while (row := cursor.fetchone()) is not None:
                more = len(rows) >= limit or text_bytes > _MOST_TEXT_BYTES
                if more:
                    break
                rows.append(tuple(_plain(cell) for cell in row))
                text_bytes += sum(
                    len(cell) for cell in rows[-1] if isinstance(cell, str)
                )
        finally:
            run("ROLLBACK")
        return Rows(columns=tuple(columns), rows=tuple(rows), truncated=more)

    def _flat(self, sql: str) -> tuple[list[str], str]:
        """Have the database make lists and structs text, with the names of the columns.

        Made into objects they would hold the scheduler's interpreter: `range(100000000)` in
        one cell for more than a minute, in which every node lost its lease.
        """
        try:
            found = self.connection.sql(sql)
        except duckdb.Error:  # whoever runs it says what is wrong
            return [], sql
        if not any(kind.id in _NESTED for kind in found.types):
            return [], sql
        names = [f"c{number}" for number in range(len(found.types))]
        cells = ", ".join(
            f"{name}::VARCHAR" if kind.id in _NESTED else name
            for name, kind in zip(names, found.types, strict=True)
        )
        whole = sql.rstrip().rstrip(";")
        # On a line of its own: what is asked may end in a comment.
        inner = f"FROM ({whole}\n) AS t({', '.join(names)})"
        return found.columns, f"SELECT {cells} {inner}"


def _cells(facts: NodeFacts | InstanceFacts | OperationFacts) -> list[Cell]:
    return list(msgspec.structs.astuple(facts))


def _said(fault: Fault | None) -> str:
    return "" if fault is None else fault.message


def _step(row: StepRow) -> list[Cell]:
    one = row.outcome
    if one is None:
        return [row.key, row.step, row.kind, "", "", 0, 0.0, 0, ""]
    return [
        row.key,
        row.step,
        row.kind,
        one.status,
        one.node,
        one.moved_bytes,
        one.seconds,
        one.attempts,
        _said(one.fault),
    ]


def _plain(cell: object) -> Fact:
    """Make a cell what a message can carry: what is no plain value becomes text."""
    if cell is None or isinstance(cell, str | bool | float):
        return cell
    if isinstance(cell, bytes):
        return cell.hex()
    if isinstance(cell, int) and -_MAX_INT <= cell < _MAX_INT:
        return cell
    return str(cell)


def _unpack(
    changed: Iterable[tuple[str, bytes | None]], as_type: type[_R]
) -> Iterable[tuple[str, _R]]:
    decoder = msgspec.msgpack.Decoder(as_type)
    for key, blob in changed:
        if blob is not None:
            yield key, decoder.decode(blob)
