"""The catalog: resolve by id from 16 sessions in 4 processes; durable commits.

1. The bare handler sits in the same scheduler and answers the same size of message on 16
   comms of its own, from the same 4 processes, in alternate windows of the same run.
2. The bare loop commits groups as large as the product's were (its journal is asked) by one
   ``unnest`` statement and syncs a head file and a version log after each.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import operator
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import duckdb

from benchmarks import product
from benchmarks.harness import emit, paired
from benchmarks.helpers import Helper
from benchmarks.sizes import Sizes, parse

PROCESSES, EACH = 4, 4
INSERT = (
    "INSERT INTO log SELECT unnest(?::UBIGINT[]), unnest(?::VARCHAR[]), "
    "unnest(?::VARCHAR[]), unnest(?::BLOB[]), unnest(?::UBIGINT[])"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """What the product's journal committed in one window."""

    groups: int
    rows: int
    blob_bytes: int
    puts: int

    @property
    def rows_each(self) -> float:
        """Rows of a group."""
        return self.rows / max(1, self.groups)

    @property
    def bytes_each(self) -> float:
        """Bytes of a row."""
        return self.blob_bytes / max(1, self.rows)

    @property
    def puts_each(self) -> float:
        """Puts and publishes that a group acknowledges, in the mean."""
        return self.puts / max(1, self.groups)


# ------------------------------------------------------------------ in the helpers
def open_bare(state: dict[str, Any], address: str) -> None:
    """Four comms to the bare handler, on a loop of the helper's own."""
    loop = state["loop"] = asyncio.new_event_loop()

    async def go() -> list[Any]:
        from distributed.comm.core import connect

        comms = []
        for _ in range(EACH):
            comm = await connect(address)
            await comm.write({"op": "bench_bare"})
            comms.append(comm)
        return comms

    state["bare"] = loop.run_until_complete(go())


def run_bare(state: dict[str, Any], for_s: float) -> list[float]:
    """Each comm asks again as soon as it is answered; the latencies."""

    async def one(comm: Any, latencies: list[float]) -> None:
        stop = time.perf_counter() + for_s
        ask = {"op": "Resolve", "rid": 1, "id": "bench/small-00001"}
        while (begin := time.perf_counter()) < stop:
            await comm.write(ask)
            await comm.read()
            latencies.append(time.perf_counter() - begin)

    async def go() -> list[float]:
        latencies: list[float] = []
        await asyncio.gather(*(one(comm, latencies) for comm in state["bare"]))
        return latencies

    return state["loop"].run_until_complete(go())


def open_sessions(state: dict[str, Any], address: str) -> None:
    """Four sessions of the product on the same loop."""

    async def go() -> list[Any]:
        return [await product.connect_async(address) for _ in range(EACH)]

    state["sessions"] = state["loop"].run_until_complete(go())


def run_resolve(state: dict[str, Any], for_s: float) -> list[float]:
    """Each session resolves ids, one after the other."""

    async def one(cast: Any, latencies: list[float]) -> None:
        stop, at = time.perf_counter() + for_s, 0
        while (begin := time.perf_counter()) < stop:
            at = (at + 1) % 100
            await cast.artifact(f"bench/small-{at:05d}")
            latencies.append(time.perf_counter() - begin)

    async def go() -> list[float]:
        latencies: list[float] = []
        await asyncio.gather(*(one(cast, latencies) for cast in state["sessions"]))
        return latencies

    return state["loop"].run_until_complete(go())


def run_commits(state: dict[str, Any], for_s: float, prefix: str) -> int:
    """Each session puts and publishes small artifacts, one after the other; how many of both."""
    import numpy as np

    value = np.zeros(64, dtype=np.uint8)

    async def one(number: int, cast: Any) -> int:
        stop, made = time.perf_counter() + for_s, 0
        while time.perf_counter() < stop:
            name = f"{prefix}-{os.getpid()}-{number}-{made}"
            await cast.publish(await cast.put(value, name))
            made += 2
        return made

    async def go() -> int:
        casts = enumerate(state["sessions"])
        return sum(await asyncio.gather(*(one(n, cast) for n, cast in casts)))

    return state["loop"].run_until_complete(go())


def close_sessions(state: dict[str, Any]) -> None:
    """Leave politely."""

    async def go() -> None:
        for cast in state.pop("sessions", ()):
            await product.close_async(cast)
        for comm in state.pop("bare", ()):
            await comm.close()

    state["loop"].run_until_complete(go())


# ------------------------------------------------------------------ in the scheduler
def install_bare(dask_scheduler: Any = None) -> None:
    """A handler that answers as many bytes as a resolve is answered with."""
    answer = {"rid": 1, "value": b"x" * 300}

    async def bench_bare(comm: Any) -> str:
        from distributed.comm.core import CommClosedError

        try:
            while True:
                await comm.read()
                await comm.write(answer)
        except (CommClosedError, OSError):
            return "dont-reply"

    dask_scheduler.handlers["bench_bare"] = bench_bare


def count_groups(dask_scheduler: Any = None) -> None:
    """Count what the journal commits; the scheduler is the bench's own process."""
    from tensorcast_dask.scheduler_plugin import journal

    counts = dask_scheduler._bench_groups = [0, 0, 0]
    write = journal._Disk.write

    def counted(self: Any, group: list[Any]) -> None:
        write(self, group)
        rows = [row for batch in group for row in batch.rows]
        counts[0] += 1
        counts[1] += len(rows)
        counts[2] += sum(len(row.blob or b"") for row in rows)

    journal._Disk.write = counted  # type: ignore[method-assign]


def groups_so_far(dask_scheduler: Any = None) -> list[int]:
    """Groups, rows, bytes."""
    return list(dask_scheduler._bench_groups)


# ------------------------------------------------------------------ references
class BareCommits:
    """DuckDB by one unnest statement, head and version log synced after each group."""

    def __init__(self, folder: Path) -> None:
        self._con = duckdb.connect(str(folder / "bare.db"), config={"threads": 1})
        self._con.execute("SET checkpoint_threshold='1GB'")
        self._con.execute(
            "CREATE TABLE log(seq UBIGINT, kind VARCHAR, key VARCHAR, blob BLOB, crc UBIGINT)"
        )
        self._head = os.open(folder / "head", os.O_CREAT | os.O_RDWR)
        self._log = os.open(folder / "log", os.O_CREAT | os.O_RDWR)
        os.write(self._head, bytes(4096))
        os.write(self._log, bytes(8 << 20))  # its size need not change with each group
        os.fsync(self._head)
        os.fsync(self._log)
        self._at = 0

    def rate(self, groups: Groups, for_s: float) -> float:
        """Puts and publishes a second that a loop would commit in such groups."""
        size, nbytes = max(1, round(groups.rows_each)), round(groups.bytes_each)
        columns = [[1] * size, ["artifact"] * size, ["key" * 8] * size]
        columns += [[b"b" * nbytes] * size, [7] * size]
        loops, begin = 0, time.perf_counter()
        while time.perf_counter() < begin + for_s:
            self._con.execute(INSERT, columns)
            self._at += os.pwrite(self._log, b"v" * 32 * size, self._at)
            os.fdatasync(self._log)
            os.pwrite(self._head, b"h" * 64, 0)
            os.fdatasync(self._head)
            loops += 1
        return loops * groups.puts_each / (time.perf_counter() - begin)

    def close(self) -> None:
        """Close the files."""
        self._con.close()
        os.close(self._head)
        os.close(self._log)


def all_of(helpers: list[Helper], function: Any, *args: Any) -> list[Any]:
    """The same in every helper at once."""
    for helper in helpers:
        helper.start(function, *args)
    return [helper.result() for helper in helpers]


def p95(latencies: list[float]) -> float:
    """In microseconds."""
    return statistics.quantiles(latencies, n=20)[-1] * 1e6


def main(sizes: Sizes) -> None:
    """Three lines."""
    with (
        tempfile.TemporaryDirectory(dir=str(product.ROOT), prefix=".bench-") as folder,
        product.cluster(
            sizes,
            journal=str(Path(folder) / "journal.db"),
            more={"on-close": "end"},
        ) as cluster,
        product.session(cluster) as cast,
    ):
        product.put_small(cast, 100)
        cast.client.run_on_scheduler(install_bare)
        helpers = [Helper(f"sessions-{n}") for n in range(PROCESSES)]
        all_of(helpers, open_bare, cluster.scheduler_address)
        all_of(helpers, open_sessions, cluster.scheduler_address)
        tails: dict[str, float] = {}

        def window(kind: str, function: Any) -> float:
            found: list[float] = functools.reduce(
                operator.iadd, all_of(helpers, function, sizes.rate_s), []
            )
            tails[kind] = p95(found)
            return len(found) / sizes.rate_s

        emit(
            paired(
                "resolve from 16 sessions in 4 processes",
                lambda: window("product", run_resolve),
                lambda: window("bare", run_bare),
                unit="1/s",
                bar=0.4,
                better="higher",
                pairs=sizes.pairs,
                notes={"expected": "over 2,000/s"},
            )
        )

        def tail(kind: str, function: Any) -> float:
            window(kind, function)
            return tails[kind]

        emit(
            paired(
                "resolve from 16 sessions, p95",
                lambda: tail("product", run_resolve),
                lambda: tail("bare", run_bare),
                unit="us",
                bar=3,
                better="lower",
                pairs=sizes.pairs,
                warm=0,
            )
        )
        bare, seen = BareCommits(Path(folder)), [Groups(1, 4, 1000, 1)]
        cast.client.run_on_scheduler(count_groups)

        def commits() -> float:
            before = cast.client.run_on_scheduler(groups_so_far)
            asked = (sizes.rate_s, f"c{len(seen)}")
            made = sum(all_of(helpers, run_commits, *asked))
            after = cast.client.run_on_scheduler(groups_so_far)
            grown = [b - a for a, b in zip(before, after, strict=True)]
            seen.append(Groups(grown[0], grown[1], grown[2], made))
            return made / sizes.rate_s

        emit(
            paired(
                "durable puts and publishes from 16 sessions",
                commits,
                lambda: bare.rate(seen[-1], sizes.rate_s),
                unit="1/s",
                bar=0.5,
                better="higher",
                pairs=sizes.pairs,
                notes={"expected": "over 500/s", "groups": seen},
            )
        )
        bare.close()
        all_of(helpers, close_sessions)
        for helper in helpers:
            helper.close()


if __name__ == "__main__":
    main(parse())
