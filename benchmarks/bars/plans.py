"""Plans: 100 steps that do nothing, against Dask's own graph of them; a plan asked for twice."""

from __future__ import annotations

import itertools
import time
from typing import Any

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


def _number(rid: str) -> int:
    return int(rid.rpartition(":")[2])


def main(sizes: Sizes) -> None:
    """Two lines."""
    with product.cluster(sizes) as cluster, product.session(cluster) as cast:
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
