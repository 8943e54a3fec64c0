"""Lag of the event loops of scheduler and worker while 1 GiB moves, back to back.

The reference is the same loops, idle, while two unrelated processes move the same bytes
through plain sockets for as long: neither shares an interpreter with a loop.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import product
from benchmarks.bars.pull import Puller
from benchmarks.harness import emit, paired
from benchmarks.helpers import Helper
from benchmarks.raw import Wire
from benchmarks.sizes import Sizes, parse

TICK_S = 0.002


def start_probe(dask_worker: Any = None, dask_scheduler: Any = None) -> None:
    """On a Dask server's own loop: sleep a little, note how much too long it was."""
    server = dask_worker or dask_scheduler

    async def probe() -> None:
        lags = server._bench_lags = []
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(TICK_S)
            lags.append(time.perf_counter() - begin - TICK_S)

    async def begin() -> None:
        server._bench_probe = asyncio.get_running_loop().create_task(probe())

    server.loop.add_callback(begin)


def stop_probe(dask_worker: Any = None, dask_scheduler: Any = None) -> float:
    """The 99th percentile, in milliseconds."""
    server = dask_worker or dask_scheduler
    server.loop.add_callback(server._bench_probe.cancel)
    return statistics.quantiles(list(server._bench_lags), n=100)[-1] * 1e3


# ------------------------------------------------------------------ in a helper
def open_wire(state: dict[str, Any], size: int) -> tuple[str, int, str]:
    """Make both ends; the best way between them."""
    state["wire"] = Wire(size)
    return state["wire"].best(fresh=False, rounds=1)[0]


def receive_for(
    state: dict[str, Any], seconds: float, way: tuple[str, int, str]
) -> int:
    """Receive everything again and again; how often."""
    stop, moved = time.monotonic() + seconds, 0
    while time.monotonic() < stop:
        state["wire"].seconds(way, fresh=False)
        moved += 1
    return moved


def close_wire(state: dict[str, Any]) -> None:
    """End the sender."""
    state.pop("wire").close()


def main(sizes: Sizes) -> None:
    """One line for each kind of server."""
    with (
        product.cluster(sizes, separate_hosts=True) as cluster,
        product.session(cluster) as cast,
        Helper("raw-receiver") as plain,
    ):
        first = product.one_node(cast)
        cast.put(product.big_array(sizes.big_bytes), "bench/big", worker=first)
        puller = Puller(cast, "bench/big")
        best = plain(open_wire, sizes.big_bytes)
        puller.seconds()
        moved = {"product": 0, "plain": 0}
        lags: dict[str, list[dict[str, float]]] = {"product": [], "plain": []}

        def pull_for(seconds: float) -> int:
            stop, pulls = time.monotonic() + seconds, 0
            while time.monotonic() < stop:
                puller.seconds()
                pulls += 1
            return pulls

        def window(kind: str, move_for: Callable[[float], int]) -> float:
            client = cast.client
            client.run_on_scheduler(start_probe)
            client.run(start_probe)
            moved[kind] += move_for(sizes.window_s)
            found = {"scheduler": client.run_on_scheduler(stop_probe)}
            found["worker"] = max(client.run(stop_probe).values())
            lags[kind].append(found)
            return max(found.values())

        emit(
            paired(
                "event loops while 1 GiB moves, p99 of the worst",
                lambda: window("product", pull_for),
                lambda: window("plain", lambda s: plain(receive_for, s, best)),
                bar=2,
                better="lower",
                pairs=sizes.pairs,
                warm=0,
                notes={"moves": moved, "plain way": best, "p99 ms": lags},
            )
        )
        plain(close_wire)


if __name__ == "__main__":
    main(parse())
