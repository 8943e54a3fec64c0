"""Pull 1 GiB from node to node over TCP loopback, verified."""

from __future__ import annotations

import functools
import time
from typing import Any

from benchmarks import product
from benchmarks.harness import emit, failed, paired, section
from benchmarks.peers.gather import DaskGather
from benchmarks.raw import Wire
from benchmarks.sizes import Sizes, parse


class Puller:
    """One artifact at the first node; the second pulls it, and lets it go again."""

    def __init__(self, cast: Any, name: str, *, rest_s: float = 0.0) -> None:
        self._cast = cast
        #: A gigabyte that is given back to the system takes a thread of the store 0.15 s:
        #: it must not run into the next figure, whosever that is.
        self._rest_s = rest_s
        self._handle = cast.artifact(name)
        self._to = cast.workers()[1]
        self.via: set[str] = set()

    def seconds(self) -> float:
        """One pull, timed."""
        begin = time.perf_counter()
        moved = self._cast.replicate(self._handle, self._to).result()
        spent = time.perf_counter() - begin
        self.via.add(moved.via)
        self._cast.release(self._handle, worker=self._to)
        time.sleep(self._rest_s)
        return spent


def against_sockets(sizes: Sizes, wire: Wire, *, fresh: bool) -> None:
    """The product's pull against the best raw-socket loop, the same kind of target."""
    best, found = wire.best(fresh=fresh, rounds=2)
    kind = "fresh" if fresh else "recycled"
    big = sizes.big_bytes
    with (
        product.cluster(
            sizes, separate_hosts=True, warm_bytes=0 if fresh else None
        ) as cluster,
        product.session(cluster) as cast,
    ):
        cast.put(product.big_array(big), "bench/big", worker=product.one_node(cast))
        puller = Puller(cast, "bench/big", rest_s=0.4 if fresh else 0.0)
        line = paired(
            f"pull {big >> 20} MiB into a {kind} segment",
            lambda: big / puller.seconds() / 1e9,
            lambda: big / wire.seconds(best, fresh=fresh) / 1e9,
            unit="GB/s",
            bar=0.9,
            better="higher",
            pairs=sizes.pairs,
            warm=2,
            notes={"best": best, "ms": found, "via": puller.via},
        )
        emit(line)
        if puller.via != {"tcp"}:
            emit(failed("pull goes over TCP", f"went via {puller.via}"))
        if not fresh:
            against_dask(sizes, puller)


def against_dask(sizes: Sizes, puller: Puller) -> None:
    """Dask's own gather."""
    with DaskGather(sizes.big_bytes) as gather:
        emit(
            paired(
                f"pull {sizes.big_bytes >> 20} MiB, against Dask's gather",
                lambda: puller.seconds() * 1e3,
                lambda: gather.seconds() * 1e3,
                bar=1,
                better="lower",
                pairs=sizes.pairs,
            )
        )


def brain_floats(sizes: Sizes) -> None:
    """bfloat16 against uint8, the same bytes."""
    name = "pull of bfloat16 against uint8"
    try:
        import torch
    except ImportError:
        emit(failed(name, "torch is not installed", bar=0.95))
        return
    half = sizes.big_bytes // 2
    with (
        product.cluster(sizes, separate_hosts=True) as cluster,
        product.session(cluster) as cast,
    ):
        first = product.one_node(cast)
        cast.put(product.big_array(half), "bench/u8", worker=first)
        cast.put(
            torch.ones(half // 2, dtype=torch.bfloat16), "bench/bf16", worker=first
        )
        plain, brain = Puller(cast, "bench/u8"), Puller(cast, "bench/bf16")
        emit(
            paired(
                name,
                lambda: half / brain.seconds() / 1e9,
                lambda: half / plain.seconds() / 1e9,
                unit="GB/s",
                bar=0.95,
                better="higher",
                pairs=sizes.pairs * 2,
                notes={"bytes": half},
            )
        )


def main(sizes: Sizes) -> None:
    """Four lines."""
    wire = Wire(sizes.big_bytes)
    for fresh in (True, False):
        kind = "fresh" if fresh else "recycled"
        section(
            f"pull into a {kind} segment",
            functools.partial(against_sockets, sizes, wire, fresh=fresh),
        )
    wire.close()
    section("pull of bfloat16 against uint8", lambda: brain_floats(sizes))


if __name__ == "__main__":
    main(parse())
