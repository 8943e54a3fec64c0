"""10,000 tensors of 8 KiB as one artifact, against one tensor of the same bytes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import xxhash

from benchmarks import product
from benchmarks.harness import emit, paired
from benchmarks.helpers import Helper
from benchmarks.sizes import Sizes, parse

EACH = 8192


def read_all(state: dict[str, Any], name: str, count: int) -> float:
    """Every tensor made, every byte touched; milliseconds."""
    begin = time.perf_counter()
    tensors = state["cast"].artifact(name).tensor_dict(framework="numpy")
    for array in tensors.values():
        xxhash.xxh3_64_intdigest(array)
    spent = time.perf_counter() - begin
    assert len(tensors) == count
    return spent * 1e3


def main(sizes: Sizes) -> None:
    """Two lines."""
    count = sizes.tensors
    whole = np.ones(count * EACH, dtype=np.uint8)
    rows = whole.reshape(count, EACH)
    many = {f"layer.{at:05d}.weight": rows[at] for at in range(count)}
    with (
        product.cluster(sizes, n_workers=1) as cluster,
        product.session(cluster) as cast,
        Helper("reader") as reader,
    ):
        number = [0]

        def put_ms(tensors: Any) -> float:
            number[0] += 1
            name = f"bench/put-{number[0]}"
            begin = time.perf_counter()
            cast.put(tensors, name)
            spent = time.perf_counter() - begin
            cast.destroy(name)
            return spent * 1e3

        emit(
            paired(
                f"put {count} tensors of 8 KiB, against one tensor",
                lambda: put_ms(many),
                lambda: put_ms(whole),
                bar=3,
                better="lower",
                pairs=sizes.pairs,
            )
        )
        cast.put(many, "bench/many")
        cast.put(whole, "bench/one")
        reader(product.attach, cluster.scheduler_address)
        emit(
            paired(
                f"read {count} tensors of 8 KiB, against one tensor",
                lambda: reader(read_all, "bench/many", count),
                lambda: reader(read_all, "bench/one", 1),
                bar=3,
                better="lower",
                pairs=sizes.pairs,
            )
        )


if __name__ == "__main__":
    main(parse())
