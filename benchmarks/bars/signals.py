"""Lag of the scheduler's event loop while 16 programs' watchers follow 8 nodes at 10 Hz.

Product and reference are the same cluster, with the same loads pushed by every node ten times
a second; the reference has no watcher. The watchers are processes of their own.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import tensorcast_dask as tc
from benchmarks import product
from benchmarks.bars.loop_lag import start_probe, stop_probe
from benchmarks.harness import emit, paired
from benchmarks.sizes import Sizes, parse

NODES, WATCHERS, PROCESSES, EVERY_S, WINDOW_S = 8, 16, 4, 0.1, 4.0


def push_loads(dask_scheduler: Any) -> None:
    """As if an instance of every node pushed its numbers, ten times a second."""
    import asyncio

    from tensorcast_dask.scheduler_plugin.dask_private import EXTENSION
    from tensorcast_dask.scheduler_plugin.state.events import NodeSaid
    from tensorcast_dask.tensors.messages import InstanceLoad

    service = dask_scheduler.extensions[EXTENSION].service

    async def push() -> None:
        number = 0
        while True:
            number += 1
            for link, card in service.cards().items():
                said = InstanceLoad(
                    instance=f"engine-{card.node[:6]}",
                    epoch=1,
                    number=number,
                    values={"queue": float(number % 7), "running": float(number % 5)},
                )
                service.tell(NodeSaid(link=link, message=said))
                await asyncio.sleep(EVERY_S / NODES)

    async def begin() -> None:
        dask_scheduler._bench_push = asyncio.get_running_loop().create_task(push())

    dask_scheduler.loop.add_callback(begin)


def watch(address: str, watchers: int, pipe: Connection) -> None:
    """One program: its watchers follow everything of nodes and instances."""
    import asyncio

    async def follow(cast: Any, told: list[int]) -> None:
        async for changes in cast.signals.watch(
            ["node/", "link/", "instance/"], every=EVERY_S
        ):
            told[0] += len(changes.changed) > 0

    async def main() -> None:
        async with await tc.connect(address, asynchronous=True) as cast:
            while True:
                if await asyncio.to_thread(pipe.recv) != "go":
                    return
                told = [0]
                tasks = [
                    asyncio.create_task(follow(cast, told)) for _ in range(watchers)
                ]
                await asyncio.to_thread(pipe.recv)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                pipe.send(told[0])

    asyncio.run(main())


def main(sizes: Sizes) -> None:
    """One line."""
    window_s = min(sizes.window_s, WINDOW_S)
    with (
        product.cluster(sizes, n_workers=NODES, memory="64 MiB") as cluster,
        product.session(cluster) as cast,
    ):
        client = cast.client
        client.run_on_scheduler(push_loads)
        context = multiprocessing.get_context("spawn")
        programs = []
        for _ in range(PROCESSES):
            ours, theirs = context.Pipe()
            address = cluster.scheduler_address
            arguments = (address, WATCHERS // PROCESSES, theirs)
            process = context.Process(target=watch, args=arguments, daemon=True)
            process.start()
            programs.append((process, ours))
        frames: list[float] = []
        lags: dict[str, list[float]] = {"watched": [], "alone": []}

        def window(kind: str, around: Callable[[str], None]) -> float:
            around("go")
            client.run_on_scheduler(start_probe)
            time.sleep(window_s)
            lag = client.run_on_scheduler(stop_probe)
            around("stop")
            lags[kind].append(lag)
            return lag

        def watched(word: str) -> None:
            for _, pipe in programs:
                pipe.send(word)
            if word == "go":
                time.sleep(0.5)
            else:
                told = sum(pipe.recv() for _, pipe in programs)
                frames.append(told / WATCHERS / (window_s + 0.5))

        emit(
            paired(
                "scheduler's loop with 16 watchers at 10 Hz, 8 nodes, lag p99",
                lambda: window("watched", watched),
                lambda: window("alone", lambda _: None),
                bar=1.5,
                better="lower",
                pairs=sizes.pairs,
                warm=1,
                notes={"frames/s each": frames, "p99 ms": lags},
            )
        )
        for process, pipe in programs:
            pipe.send("end")
            process.join(20)


if __name__ == "__main__":
    main(parse())
