"""Replicate 1 GiB to a second node on the same host: time, and no second copy."""

from __future__ import annotations

import time
from typing import Any

from benchmarks import product
from benchmarks.harness import absolute, emit, paired
from benchmarks.sizes import MIB, Sizes, parse


def replicate_s(cast: Any, name: str) -> float:
    """One replicate, timed; the replica is let go again."""
    handle, to = cast.artifact(name), cast.workers()[1]
    begin = time.perf_counter()
    cast.replicate(handle, to)
    spent = time.perf_counter() - begin
    cast.release(handle, worker=to)
    return spent


def main(sizes: Sizes) -> None:
    """Two lines."""
    with (
        product.cluster(sizes) as cluster,
        product.session(cluster) as cast,
    ):
        first = product.one_node(cast)
        big, small = sizes.big_bytes, sizes.small_bytes
        cast.put(product.big_array(big), "bench/big", worker=first)
        cast.put(product.big_array(small), "bench/small", worker=first)
        emit(
            paired(
                f"replicate {big >> 20} MiB on one host, against {small >> 20} MiB",
                lambda: replicate_s(cast, "bench/big") * 1e3,
                lambda: replicate_s(cast, "bench/small") * 1e3,
                bar=2,
                better="lower",
                pairs=sizes.pairs * 3,
            )
        )

        def grown_mib() -> float:
            handle, to = cast.artifact("bench/big"), cast.workers()[1]
            pids = product.store_pids()
            before = product.file_bytes(pids) + product.anonymous_bytes(pids)
            cast.replicate(handle, to)
            after = product.file_bytes(pids) + product.anonymous_bytes(pids)
            cast.release(handle, worker=to)
            return (after - before) / MIB

        emit(
            absolute(
                f"replicate {big >> 20} MiB on one host, memory of both stores",
                grown_mib,
                bar=16,
                better="lower",
                unit="MiB",
                times=3,
                notes={
                    "stores": len(product.store_pids()),
                    "held MiB": product.file_bytes(product.store_pids()) / MIB,
                },
            )
        )


if __name__ == "__main__":
    main(parse())
