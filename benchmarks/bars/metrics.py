"""A scrape of `/metrics`: our scheduler with its catalog, and a stock one with as many workers.

Both schedulers are processes of their own with eight workers each, of which nothing is asked
but this; the catalog holds 1,000 artifacts. One value is the mean of 20 scrapes.
"""

from __future__ import annotations

import http.client
import multiprocessing
import time
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

import numpy as np

import tensorcast_dask as tc
from benchmarks import product
from benchmarks.harness import emit, paired
from benchmarks.sizes import Sizes, parse

WORKERS, SCRAPES, ARTIFACTS = 8, 20, 1000


def ours(sizes: Sizes, pipe: Connection) -> None:
    """A cluster with a catalog."""
    with (
        product.cluster(sizes, n_workers=WORKERS, memory="64 MiB") as cluster,
        tc.connect(cluster) as cast,
    ):
        for number in range(min(ARTIFACTS, sizes.artifacts)):
            cast.put({"x": np.zeros(8)}, f"artifact-{number}")
        pipe.send(cluster.dashboard_link)
        pipe.recv()


def stock(pipe: Connection) -> None:
    """A cluster as Dask makes it."""
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=WORKERS, threads_per_worker=1, dashboard_address="127.0.0.1:0"
    ) as cluster:
        pipe.send(cluster.dashboard_link)
        pipe.recv()


def main(sizes: Sizes) -> None:
    """One line."""
    context = multiprocessing.get_context("spawn")
    sides = []
    for target, arguments in ((ours, (sizes,)), (stock, ())):
        here, there = context.Pipe()
        process = context.Process(target=target, args=(*arguments, there))
        process.start()
        sides.append((process, here))
    addresses = [urlsplit(here.recv()).netloc for _, here in sides]
    lines: dict[str, int] = {}

    def scrapes(address: str) -> float:
        connection = http.client.HTTPConnection(address, timeout=60)
        text = b""
        started = time.perf_counter()
        for _ in range(SCRAPES):
            connection.request("GET", "/metrics")
            text = connection.getresponse().read()
        spent = time.perf_counter() - started
        connection.close()
        lines[address] = len(text.splitlines())
        return spent / SCRAPES * 1000

    emit(
        paired(
            f"a scrape of /metrics, {WORKERS} workers",
            lambda: scrapes(addresses[0]),
            lambda: scrapes(addresses[1]),
            bar=1.5,
            better="lower",
            unit="ms",
            pairs=sizes.pairs,
            warm=1,
            notes={"lines": lines},
        )
    )
    for process, here in sides:
        here.send("end")
        process.join(60)


if __name__ == "__main__":
    main(parse())
