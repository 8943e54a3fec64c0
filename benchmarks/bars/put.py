"""A client on the host puts 1 GiB into a fresh and into a recycled segment; commit."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import numpy as np

from benchmarks import product
from benchmarks.harness import absolute, emit, paired, seconds, section, unavailable
from benchmarks.peers.ray_peer import NotInstallable, Ray
from benchmarks.raw import Memcpy, Segments
from benchmarks.sizes import MIB, Sizes, parse


class Putter:
    """Puts the same array again and again; each is destroyed before the next."""

    def __init__(self, cast: Any, source: np.ndarray, *, rest_s: float) -> None:
        self._cast, self._source, self._number = cast, source, 0
        self._rest_s = rest_s  # see `pull.Puller`

    def seconds(self) -> float:
        """One put, timed; the destroy is not."""
        self._number += 1
        name = f"bench/put-{self._number}"
        begin = time.perf_counter()
        self._cast.put(self._source, name)
        spent = time.perf_counter() - begin
        self._cast.destroy(name)
        settle(self._cast)
        time.sleep(self._rest_s)
        return spent


def settle(cast: Any, within_s: float = 5.0) -> None:
    """Until the segment of what was destroyed is back in the pool (or given up)."""
    stop = time.perf_counter() + within_s
    while time.perf_counter() < stop:
        uses = cast.pool().values()
        if not any(use.used_bytes or use.lingering_bytes for use in uses):
            return
        time.sleep(0.01)


def against_segments(sizes: Sizes, segments: Segments, *, fresh: bool) -> None:
    """The product's put against the fastest plain way into the same kind of file."""
    best, found = segments.best(fresh=fresh)
    kind = "fresh" if fresh else "recycled"
    with (
        product.cluster(sizes, n_workers=1, warm_bytes=0 if fresh else None) as cluster,
        product.session(cluster) as cast,
    ):
        putter = Putter(cast, segments.source, rest_s=0.4 if fresh else 0.0)
        emit(
            paired(
                f"put {sizes.big_bytes >> 20} MiB into a {kind} segment",
                lambda: sizes.big_bytes / putter.seconds() / 1e9,
                lambda: sizes.big_bytes / segments.seconds(best, fresh=fresh) / 1e9,
                unit="GB/s",
                bar=0.85,
                better="higher",
                pairs=sizes.pairs,
                warm=2,
                notes={"fastest": best, "ms": found},
            )
        )
        if not fresh:
            against_ray(sizes, putter)
            anonymous(sizes, putter)


def against_ray(sizes: Sizes, putter: Putter) -> None:
    """Ray's put of the same array in its warm store."""
    name = "put into a recycled segment, against Ray's warm put"
    try:
        ray = Ray(sizes.big_bytes)
    except NotInstallable as error:
        emit(unavailable(name, str(error), bar=1))
        return
    try:
        emit(
            paired(
                name,
                lambda: putter.seconds() * 1e3,
                lambda: ray.seconds("put") * 1e3,
                bar=1,
                better="lower",
                pairs=sizes.pairs,
                notes={"ray": ray.version},
            )
        )
    finally:
        ray.close()


def anonymous(sizes: Sizes, putter: Putter) -> None:
    """Anonymous memory of client and store together."""

    def grown_mib() -> float:
        with product.PeakAnonymous([os.getpid(), *product.store_pids()]) as peak:
            putter.seconds()
        return peak.grown / MIB

    emit(
        absolute(
            f"put {sizes.big_bytes >> 20} MiB, anonymous memory of client and store",
            grown_mib,
            bar=64,
            better="lower",
            unit="MiB",
            times=3,
            notes={"stores": len(product.store_pids())},
        )
    )


def commit(sizes: Sizes) -> None:
    """``commit`` after ``create``, against one memcpy."""
    with (
        product.cluster(sizes, n_workers=1) as cluster,
        product.session(cluster) as cast,
    ):
        memcpy, number = Memcpy(sizes.big_bytes), [0]

        def commit_ms() -> float:
            number[0] += 1
            name = f"bench/built-{number[0]}"
            draft = cast.create({"t": ((sizes.big_bytes,), "uint8")}, name)
            tensors = draft.tensors(framework="numpy")
            tensors["t"][:] = 7
            spent = seconds(draft.commit)
            assert tensors["t"][-1] == 7
            del tensors, draft
            cast.destroy(name)
            settle(cast)
            return spent * 1e3

        emit(
            paired(
                f"commit after create of {sizes.big_bytes >> 20} MiB, against memcpy",
                commit_ms,
                lambda: memcpy.seconds() * 1e3,
                bar=1,
                better="lower",
                pairs=sizes.pairs,
            )
        )


def main(sizes: Sizes) -> None:
    """Five lines."""
    segments = Segments(sizes.big_bytes)
    for fresh in (True, False):
        kind = "fresh" if fresh else "recycled"
        section(
            f"put into a {kind} segment",
            functools.partial(against_segments, sizes, segments, fresh=fresh),
        )
    segments.close()
    section("commit after create", lambda: commit(sizes))


if __name__ == "__main__":
    main(parse())
