"""What does one durable group cost with its two small files, and what makes it dear?

1. The group: one ``unnest`` insert into DuckDB, a record in the version log, the head.
2. The version log grows by appending, or it lies in a file that was written with zeros
   beforehand: an append changes the file's size, which the file system must commit too.
3. The syncs go one after the other, or the two small files share a thread.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb

from benchmarks.facts.report import show

ROUNDS, GROUP = 150, 8
INSERT = "INSERT INTO log SELECT unnest($1::BIGINT[]), unnest($2::VARCHAR[]), unnest($3::BLOB[])"


class Files:
    """A database, a log and a head in a folder of their own."""

    def __init__(self, folder: Path, *, prepared: bool) -> None:
        self.con = duckdb.connect(str(folder / "g.db"), config={"threads": 1})
        self.con.execute("SET checkpoint_threshold='1GB'")
        self.con.execute("CREATE TABLE log(seq BIGINT, kind VARCHAR, body BLOB)")
        self.log = os.open(folder / "log", os.O_CREAT | os.O_RDWR)
        self.head = os.open(folder / "head", os.O_CREAT | os.O_RDWR)
        os.write(self.head, bytes(4096))
        if prepared:
            os.write(self.log, bytes(1 << 20))
        os.fsync(self.head)
        os.fsync(self.log)
        self.at = 0

    def insert(self) -> None:
        seqs = list(range(GROUP))
        self.con.execute(INSERT, [seqs, ["a"] * GROUP, [b"b" * 250] * GROUP])

    def append(self) -> None:
        os.pwrite(self.log, b"v" * 32 * GROUP, self.at)
        self.at += 32 * GROUP
        os.fdatasync(self.log)

    def point(self) -> None:
        os.pwrite(self.head, b"h" * 64, 0)
        os.fdatasync(self.head)

    def close(self) -> None:
        self.con.close()
        os.close(self.log)
        os.close(self.head)


def main() -> None:
    """Each arrangement in turn, interleaved in blocks."""
    rows = []
    pool = ThreadPoolExecutor(1)
    for name, prepared, aside in (
        ("DuckDB alone", True, None),
        ("log grows by appending", False, False),
        ("log written with zeros before", True, False),
        ("the same, small files in another thread", True, True),
    ):
        with tempfile.TemporaryDirectory(
            dir=str(Path.cwd()), prefix=".bench-"
        ) as folder:
            files = Files(Path(folder), prepared=prepared)
            parts: dict[str, list[float]] = {"insert": [], "log": [], "head": []}
            whole = []
            for _ in range(ROUNDS):
                begin = time.perf_counter()
                other = None
                if aside:
                    other = pool.submit(lambda: (files.append(), files.point()))
                files.insert()
                after_insert = time.perf_counter()
                if aside is False:
                    files.append()
                    after_log = time.perf_counter()
                    files.point()
                    parts["log"].append(after_log - after_insert)
                    parts["head"].append(time.perf_counter() - after_log)
                if other:
                    other.result()
                parts["insert"].append(after_insert - begin)
                whole.append(time.perf_counter() - begin)
            files.close()
        rows.append(
            {"group of 8": name, "ms": statistics.median(whole) * 1e3}
            | {
                key: statistics.median(value) * 1e3 if value else ""
                for key, value in parts.items()
            }
            | {"p95 ms": statistics.quantiles(whole, n=20)[-1] * 1e3}
        )
    show("group_commit", rows)


if __name__ == "__main__":
    main()
