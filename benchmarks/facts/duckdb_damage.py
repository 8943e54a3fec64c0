"""What does DuckDB do with a damaged WAL or database, and with a full disk?

1. A child process commits 40 groups, each acknowledged into a head file beside the
   database, and dies without a checkpoint: acknowledged and found can be compared.
2. Bytes are flipped, or the file is cut, at chosen places; then it is opened afresh.
3. The disk is filled for real: a small tmpfs in a mount namespace of a child, else
   RLIMIT_FSIZE.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import duckdb

from benchmarks.facts.report import Row, show

GROUPS, ROWS = 40, 20
_left_open: list[duckdb.DuckDBPyConnection] = []  # closing one would checkpoint
INSERT = "INSERT INTO log SELECT unnest($1::BIGINT[]), unnest($2::VARCHAR[])"


def connect(path: Path) -> duckdb.DuckDBPyConnection:
    """As the journal does."""
    con = duckdb.connect(str(path), config={"threads": 1, "memory_limit": "64MB"})
    con.execute("SET checkpoint_threshold='1GB'")
    con.execute("CREATE TABLE IF NOT EXISTS log(seq BIGINT, body VARCHAR)")
    return con


def in_child(work: Callable[[], object]) -> object:
    """The JSON value that the work returns in a forked child, which dies at once."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        said: object = None
        try:
            said = work()
        except BaseException as error:
            said = {"error": f"{type(error).__name__}: {error}"[:160]}
        os.write(into, json.dumps(said).encode())
        os._exit(0)
    os.close(into)
    text = b""
    while block := os.read(out, 65536):
        text += block
    os.close(out)
    status = os.waitpid(pid, 0)[1]
    return json.loads(text) if text else {"error": f"wait status {status}"}


def write(path: Path, *, checkpoint: bool) -> int:
    """Commit the groups; the last sequence acknowledged in the head file."""
    con = connect(path)
    _left_open.append(con)
    head = os.open(path.with_suffix(".head"), os.O_CREAT | os.O_RDWR)
    seq = 0
    for _ in range(GROUPS):
        seqs = list(range(seq + 1, seq + ROWS + 1))
        con.execute(INSERT, [seqs, [f"{at:060d}" for at in seqs]])
        seq = seqs[-1]
        os.pwrite(head, seq.to_bytes(8, "little"), 0)
        os.fdatasync(head)
    if checkpoint:
        con.execute("CHECKPOINT")
    return seq


def look(path: Path) -> dict[str, object]:
    """Open, read all, and add one row."""
    found: dict[str, object] = {}
    try:
        con = connect(path)
    except duckdb.Error as error:
        return {"open": f"{type(error).__name__}: {error}".replace("\n", " ")[:110]}
    found["open"] = "ok"
    try:
        row = con.execute("SELECT count(*), max(seq), sum(length(body)) FROM log")
        found["rows"], found["last"], _ = row.fetchone() or (0, 0, 0)
        con.execute("INSERT INTO log VALUES (-1, 'later')")
        con.execute("CHECKPOINT")
    except duckdb.Error as error:
        found["then"] = f"{type(error).__name__}: {error}".replace("\n", " ")[:110]
    return found


def flip(file: Path, at: int, count: int = 4) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        old = opened.read(count)
        opened.seek(at)
        opened.write(bytes(byte ^ 0xFF for byte in old))


def damage(folder: Path) -> list[Row]:
    """One database for each wound."""

    def cut(file: Path, fraction: float) -> None:
        os.truncate(file, int(file.stat().st_size * fraction))

    def flip_at(fraction: float) -> Callable[[Path], None]:
        return lambda file: flip(file, int(file.stat().st_size * fraction))

    wounds: list[tuple[str, str, Callable[[Path], None]]] = [
        ("none", "wal", lambda _: None),
        ("flip at the start", "wal", lambda file: flip(file, 0)),
        ("flip at 1 %", "wal", flip_at(0.01)),
        ("flip at 25 %", "wal", flip_at(0.25)),
        ("flip at 50 %", "wal", flip_at(0.5)),
        ("flip in the last 12 bytes", "wal", lambda f: flip(f, f.stat().st_size - 12)),
        ("cut to 50 %", "wal", lambda file: cut(file, 0.5)),
        ("cut the last 3 bytes", "wal", lambda f: os.truncate(f, f.stat().st_size - 3)),
        ("emptied", "wal", lambda file: cut(file, 0)),
        ("removed", "wal", lambda file: file.unlink()),
        (
            "zeros appended (64 KiB)",
            "wal",
            lambda f: os.truncate(f, f.stat().st_size + 65536),
        ),
        ("none", "db", lambda _: None),
        ("flip in the main header", "db", lambda file: flip(file, 16)),
        ("flip in both db headers", "db", lambda f: (flip(f, 4104), flip(f, 8200))),  # type: ignore[func-returns-value]
        ("flip in block 0", "db", lambda file: flip(file, 12288 + 200)),
        ("flip in every 4 KiB past the headers", "db", _flip_all),
        ("cut to 50 %", "db", lambda file: cut(file, 0.5)),
    ]
    rows = []
    for name, kind, wound in wounds:
        path = folder / f"{len(rows)}.db"
        acknowledged = in_child(lambda: write(path, checkpoint=kind == "db"))
        wound(path if kind == "db" else Path(f"{path}.wal"))
        found = in_child(lambda: look(path))
        assert isinstance(found, dict)
        rows.append({"file": kind, "wound": name, "acked": acknowledged} | found)
    return rows


def _flip_all(file: Path) -> None:
    for at in range(12288 + 64, file.stat().st_size, 4096):
        flip(file, at)


def fill(path: Path) -> dict[str, object]:
    """Commit until it fails, go on, and say what still works."""
    con = connect(path)
    _left_open.append(con)
    acknowledged, errors = 0, []
    for seq in range(1, 4000):
        try:
            con.execute(INSERT, [[seq], ["x" * 20_000]])
        except duckdb.Error as error:
            errors.append(f"{type(error).__name__}: {error}".replace("\n", " ")[:120])
            break
        acknowledged = seq
    for sql in ("SELECT count(*) FROM log", "INSERT INTO log VALUES (-1, 'small')"):
        try:
            con.execute(sql).fetchall()
            errors.append("then works: " + sql[:6])
        except duckdb.Error as error:
            errors.append(f"{sql[:6]}: {error}".replace("\n", " ")[:120])
    return {"acked": acknowledged, "said": errors}


def small_disk(folder: Path) -> str:
    """A 4 MiB tmpfs that only this process sees; else a limit of the file size."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(0x00020000) == 0
        and libc.mount(b"none", b"/", None, 0x44000, None) == 0
        and libc.mount(b"none", bytes(folder), b"tmpfs", 0, b"size=4m") == 0
    ):
        return "tmpfs of 4 MiB"
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
    return "RLIMIT_FSIZE of 4 MiB"


def full_disk(folder: Path) -> Row:
    """Fill in one child, which then opens the file again in a child of its own."""
    folder.mkdir()

    def work() -> dict[str, object]:
        how = small_disk(folder)
        path = folder / "full.db"
        filled = in_child(lambda: fill(path))
        again = in_child(lambda: look(path))
        return {"how": how, "filled": filled, "opened again": again}

    found = in_child(work)
    assert isinstance(found, dict)
    return found


def groups(folder: Path) -> list[Row]:
    """One durable group, by each way, with the two files beside it."""
    rows: list[Row] = []
    for size in (1, 20, 200, 2000):
        body = [f"{at:060d}" for at in range(size)]
        seqs = list(range(size))
        each: dict[str, float] = {}
        con = connect(folder / f"groups-{size}.db")
        head = os.open(folder / f"groups-{size}.head", os.O_CREAT | os.O_RDWR)

        def unnest(con: duckdb.DuckDBPyConnection = con) -> None:
            con.execute(INSERT, [seqs, body])

        def many(con: duckdb.DuckDBPyConnection = con) -> None:
            con.execute("BEGIN")
            con.executemany(
                "INSERT INTO log VALUES (?, ?)", list(zip(seqs, body, strict=True))
            )
            con.execute("COMMIT")

        def appender(con: duckdb.DuckDBPyConnection = con) -> None:
            with con.appender("log") as rows_out:
                for seq, text in zip(seqs, body, strict=True):
                    rows_out.append_row(seq, text)

        def files(head: int = head) -> None:
            os.pwrite(head, b"h" * 64, 0)
            os.fdatasync(head)

        for name, way in (
            ("unnest", unnest),
            ("executemany", many),
            ("appender", appender),
            ("head fdatasync", files),
        ):
            times = []
            for _ in range(5 if name == "executemany" else 25):
                begin = time.perf_counter()
                try:
                    way()
                except Exception as error:
                    each[f"{name} failed"] = 0.0
                    print(name, type(error), error)
                    break
                times.append(time.perf_counter() - begin)
            if times:
                each[f"{name} ms"] = sorted(times)[len(times) // 2] * 1e3
        con.close()
        os.close(head)
        rows.append({"rows a group": size} | each)
    return rows


def fences(folder: Path) -> list[Row]:
    """What a cursor of a locked connection may still do."""
    path = folder / "fenced.db"
    con = duckdb.connect(
        str(path),
        config={
            "threads": 1,
            "memory_limit": "64MB",
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "allow_community_extensions": False,
            "python_enable_replacements": False,
        },
    )
    con.execute("CREATE TABLE log(seq BIGINT, body VARCHAR)")
    con.execute("INSERT INTO log VALUES (1, 'a')")
    con.execute("SET enable_external_access=false")
    con.execute("SET lock_configuration=true")
    (folder / "other.csv").write_text("a,b\n1,2\n")
    variable = [1, 2]
    cursor = con.cursor()
    rows: list[Row] = []
    for sql in (
        "SELECT count(*) FROM log",
        "INSERT INTO log VALUES (2, 'b')",
        "CHECKPOINT",
        "SELECT * FROM checkpoint()",
        "SELECT * FROM force_checkpoint()",
        f"SELECT * FROM read_csv('{folder}/other.csv')",
        "SELECT * FROM read_text('/etc/hostname')",
        f"COPY log TO '{folder}/out.csv'",
        f"ATTACH '{folder}/more.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET threads=4",
        "SET enable_external_access=true",
        "PRAGMA database_list",
        "SELECT * FROM variable",
        "SELECT getenv('HOME')",
        "SELECT * FROM glob('/etc/*')",
        "SELECT current_setting('memory_limit')",
        "SELECT * FROM duckdb_settings() LIMIT 1",
        "EXPLAIN ANALYZE INSERT INTO log VALUES (3, 'c')",
        "SELECT * FROM query('SELECT 1')",
        "WITH x AS (SELECT 1) SELECT * FROM x",
        "SELECT 1; DROP TABLE log",
        "CREATE TEMP TABLE t(a INT)",
        "SELECT sum(a.range) FROM range(100000000) a",
        "SELECT list(range) FROM range(100000000)",
    ):
        try:
            kinds = [each.type.name for each in con.extract_statements(sql)]
        except duckdb.Error as error:
            kinds = [type(error).__name__]
        if sql.startswith("SELECT 1; DROP"):
            rows.append(
                {"sql": sql, "statements": "+".join(kinds), "outcome": "not run"}
            )
            continue
        begin = time.perf_counter()
        try:
            cursor.execute(sql).fetchall()
            outcome = "works"
        except duckdb.Error as error:
            outcome = f"{type(error).__name__}: {error}".split("\n")[0][:80]
        spent = time.perf_counter() - begin
        rows.append(
            {
                "sql": sql.replace(str(folder), "DIR"),
                "statements": "+".join(kinds),
                "outcome": outcome,
                "ms": spent * 1e3,
            }
        )
    assert variable
    con.close()
    again = duckdb.connect(str(path)).execute("SELECT count(*) FROM log").fetchone()
    rows.append({"sql": "(re-opened: rows)", "outcome": str(again)})
    return rows


def pressed(folder: Path) -> list[Row]:
    """Durable commits on one cursor while another's SELECT wants more than there is."""
    rows: list[Row] = []
    for name, sql in (
        ("nothing", "SELECT 1"),
        ("aggregate", "SELECT sum(hash(a.range)) FROM range(200000000) a"),
        ("out of memory", "SELECT list(range) FROM range(100000000)"),
        ("sort", "SELECT * FROM range(3000000) ORDER BY hash(range)"),
    ):
        con = connect(folder / f"pressed-{name}.db")
        done, errors = threading.Event(), []

        def select(cursor: duckdb.DuckDBPyConnection, sql: str = sql) -> None:
            for _ in range(3):
                try:
                    cursor.execute(sql).fetchmany(10)
                except duckdb.Error as error:
                    errors.append(type(error).__name__)
            done.set()

        thread = threading.Thread(target=select, args=(con.cursor(),))
        thread.start()
        times, failed, seq = [], [], 0
        while not done.is_set() or seq < 30:
            seq += 1
            begin = time.perf_counter()
            try:
                con.execute(INSERT, [[seq] * ROWS, ["x" * 60] * ROWS])
            except duckdb.Error as error:
                failed.append(f"{type(error).__name__}: {error}".split("\n")[0][:80])
            times.append(time.perf_counter() - begin)
        thread.join()
        con.close()
        rows.append(
            {
                "SELECT beside": name,
                "its errors": len(errors),
                "commits": seq,
                "failed": len(failed),
                "median ms": sorted(times)[len(times) // 2] * 1e3,
                "worst ms": max(times) * 1e3,
                "first failure": failed[0] if failed else "-",
            }
        )
    return rows


def main() -> None:
    """Ask everything, in a folder of its own."""
    with tempfile.TemporaryDirectory(dir=str(Path.cwd()), prefix=".bench-") as name:
        folder = Path(name)
        show("duckdb_damage", damage(folder), duckdb=duckdb.__version__)
        show("duckdb_damage.full_disk", [], **full_disk(folder / "disk"))
        show("duckdb_damage.groups", in_child(lambda: groups(folder)))  # type: ignore[arg-type]
        show("duckdb_damage.pressed", in_child(lambda: pressed(folder)))  # type: ignore[arg-type]
        show("duckdb_damage.fences", in_child(lambda: fences(folder)))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
