"""100,000 artifacts of 4 KiB on one node: put, read back, count."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import Any

import numpy as np

from benchmarks import product
from benchmarks.harness import absolute, emit
from benchmarks.helpers import Helper
from benchmarks.sizes import Sizes, parse

EACH, IN_FLIGHT = 4096, 64


def content(at: int) -> np.ndarray:
    """Different for each."""
    return np.full(EACH // 8, at, dtype=np.int64)


async def in_flight(count: int, work: object) -> None:
    """Call ``work(n)`` for all n, some at a time."""
    numbers = iter(range(count))

    async def lane() -> None:
        for at in numbers:
            await work(at)  # type: ignore[operator]

    await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))


def put_and_read(
    _: dict[str, Any], address: str, count: int
) -> tuple[dict[str, float], int]:
    """In a process of its own (the scheduler is the bench's): seconds, and how many wrong."""
    took: dict[str, float] = {}
    wrong: list[int] = []

    async def go() -> None:
        cast = await product.connect_async(address)

        async def put(at: int) -> None:
            await cast.put(content(at), f"bench/page-{at}")

        async def read(at: int) -> None:
            artifact = await cast.artifact(f"bench/page-{at}")
            tensor = await artifact.tensor(framework="numpy")
            if not np.array_equal(tensor, content(at)):
                wrong.append(at)

        for name, work in (("put", put), ("read", read)):
            begin = time.perf_counter()
            await in_flight(count, work)
            took[name] = time.perf_counter() - begin
        await product.close_async(cast)

    asyncio.run(go())
    return took, len(wrong)


def main(sizes: Sizes) -> None:
    """Three lines."""
    count = sizes.artifacts
    with (
        product.cluster(sizes, n_workers=1, memory="1536 MiB") as cluster,
        Helper("client") as client,
    ):
        pids = product.store_pids()
        before = product.anonymous_bytes(pids) + product.file_bytes(pids)
        client.start(put_and_read, cluster.scheduler_address, count)
        took, wrong = client.result(within_s=400)
        pids = product.store_pids()
        held = product.anonymous_bytes(pids) + product.file_bytes(pids) - before
        notes = {
            "puts/s": count / took["put"],
            "reads/s": count / took["read"],
            "bytes each": held / count,
        }
        what = f"{count} artifacts of 4 KiB"
        for name, value, bar, unit in (
            (f"{what}: wrong after reading back", wrong, 0, "artifacts"),
            (f"{what}: descriptors", product.descriptors(pids), 999, "descriptors"),
            (
                f"{what}: bytes at the store",
                held / count,
                EACH * 1.5 + 200,
                "bytes each",
            ),
        ):
            emit(
                absolute(
                    name,
                    functools.partial(float, value),
                    bar=bar,
                    better="lower",
                    unit=unit,
                    times=1,
                    notes=notes,
                )
            )


if __name__ == "__main__":
    main(parse())
