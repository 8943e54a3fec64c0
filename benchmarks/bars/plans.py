"""Plans: steps that do nothing, by Dask against its own graph of them, by a store against bare
requests to the catalog; a plan asked for twice.
"""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import Any

import numpy as np
from dask._task_spec import Task, TaskRef

import tensorcast_dask as tc
from benchmarks import product
from benchmarks.harness import absolute, emit, paired
from benchmarks.sizes import Sizes, parse

CHAINS, LENGTH = 4, 25
RUNS = itertools.count()


def nothing(*_: object) -> None:
    """An empty task."""


def plan_ms(cast: Any) -> float:
    """Build nothing in the timed part: run a plan of four chains."""
    plan = cast.plan(tc.context(key=f"bench-{next(RUNS)}"))
    workers = cast.workers()
    last: list[Any] = [None] * CHAINS
    for _ in range(LENGTH):
        for chain in range(CHAINS):
            at = plan.on_worker(workers[chain % len(workers)])
            last[chain] = at.noop(last[chain])
    begin = time.perf_counter()
    assert plan.run().status == "done"
    return (time.perf_counter() - begin) * 1e3


def graph_ms(cast: Any) -> float:
    """The same chains of empty tasks by ``client.get``."""
    run = next(RUNS)
    graph = {}
    for at, chain in itertools.product(range(LENGTH), range(CHAINS)):
        before = [TaskRef(f"empty-{run}-{at - 1}-{chain}")] if at else []
        key = f"empty-{run}-{at}-{chain}"
        graph[key] = Task(key, nothing, *before)
    ends = [f"empty-{run}-{LENGTH - 1}-{chain}" for chain in range(CHAINS)]
    begin = time.perf_counter()
    cast.client.get(graph, ends)
    return (time.perf_counter() - begin) * 1e3


def requests_of_a_repeat(cast: Any) -> float:
    """How many requests a plan takes that is over already."""
    plan = cast.plan(tc.context(key=f"bench-{next(RUNS)}"))
    plan.on_any().noop()
    plan.run()
    link = cast._core.link
    before = _number(link.next_rid())
    plan.run()
    return float(_number(link.next_rid()) - before - 1)


def rpc_us(cast: Any, length: int, **about: Any) -> float:
    """A chain of so many steps, run as a plan that a store drives; building it is not timed."""
    plan = cast.plan(tc.context(**about))
    last = None
    for _ in range(length):
        last = plan.on_any().noop(last)
    begin = time.perf_counter()
    assert plan.run(executor="rpc").status == "done"
    return (time.perf_counter() - begin) * 1e6


def bare_us(cast: Any, length: int) -> float:
    """As many requests to the catalog, one after the other, as the same program asks them."""
    begin = time.perf_counter()
    for _ in range(length):
        cast.exists("nothing of that name")
    return (time.perf_counter() - begin) * 1e6


def durable_us(cast: Any, artifact: Any) -> float:
    """One request that the catalog answers when it is on disk: the smallest there is."""
    begin = time.perf_counter()
    cast.alias("bench-alias", artifact)
    return (time.perf_counter() - begin) * 1e6


def median_of(act: Any, times: int) -> float:
    """The median of a few, since one is over in a moment."""
    return sorted(act() for _ in range(times))[times // 2]


def by_rpc(sizes: Sizes, cast: Any) -> None:
    """One step and sixteen, and one that is on disk before it is told."""
    for length, times in ((1, 30), (16, 10)):
        emit(
            paired(
                f"a plan of {length} no-op steps in a chain by rpc, against as many bare requests",
                partial(median_of, partial(rpc_us, cast, length), times),
                partial(median_of, partial(bare_us, cast, length), times),
                unit="us",
                bar=2,
                better="lower",
                pairs=sizes.pairs,
                warm=2,
            )
        )
    small = cast.put({"x": np.zeros(1)}, "bench/small")
    emit(
        paired(
            "a plan of one no-op step by rpc under a key, against one bare request that is kept",
            lambda: median_of(lambda: rpc_us(cast, 1, key=f"bench-{next(RUNS)}"), 10),
            lambda: median_of(lambda: durable_us(cast, small), 10),
            unit="us",
            bar=2,
            better="lower",
            pairs=sizes.pairs,
            warm=2,
        )
    )


def _number(rid: str) -> int:
    return int(rid.rpartition(":")[2])


def main(sizes: Sizes) -> None:
    """Five lines."""
    with product.cluster(sizes) as cluster, product.session(cluster) as cast:
        by_rpc(sizes, cast)
        emit(
            paired(
                "a plan of 100 no-op steps, against the same empty tasks",
                lambda: plan_ms(cast),
                lambda: graph_ms(cast),
                bar=1.5,
                better="lower",
                pairs=sizes.pairs,
                warm=2,
            )
        )
        emit(
            absolute(
                "a plan under a key that was used, requests",
                lambda: requests_of_a_repeat(cast),
                bar=3,
                better="lower",
                unit="requests",
                times=sizes.pairs,
            )
        )


if __name__ == "__main__":
    main(parse())
