"""kill -9 of a worker that holds 1 GiB: no read fails, none waits over a second."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

from benchmarks import product
from benchmarks.harness import absolute, emit
from benchmarks.helpers import Helper
from benchmarks.sizes import Sizes, parse

FAILED_MS = 1e6


def read_for(state: dict[str, Any], name: str, for_s: float) -> dict[str, Any]:
    """Resolve and read, over and over; the longest wait and every error."""
    stop, reads, longest, errors = time.perf_counter() + for_s, 0, 0.0, []
    while time.perf_counter() < stop:
        begin = time.perf_counter()
        try:
            tensors = state["cast"].artifact(name).tensor_dict(framework="numpy")
            array = next(iter(tensors.values()))
            assert array[0] == 1
            assert array[-1] == 1
            del array, tensors
        except Exception as error:
            errors.append(repr(error)[:200])
        longest = max(longest, time.perf_counter() - begin)
        reads += 1
        time.sleep(0.005)
    return {"reads": reads, "longest_ms": longest * 1e3, "errors": errors}


def worker_pid(cast: Any, within_s: float = 60.0) -> int:
    """The worker's, once it is there and its node is attended."""
    stop = time.monotonic() + within_s
    while True:
        with contextlib.suppress(Exception):
            pids = cast.client.run(os.getpid)
            if pids and cast.workers():
                return int(next(iter(pids.values())))
        if time.monotonic() > stop:
            msg = "no worker came back"
            raise TimeoutError(msg)
        time.sleep(0.1)


def main(sizes: Sizes) -> None:
    """One line."""
    seen: list[dict[str, Any]] = []
    with (
        product.cluster(sizes, n_workers=1) as cluster,
        product.session(cluster) as cast,
        Helper("reader") as reader,
    ):
        cast.put(product.big_array(sizes.big_bytes), "bench/big")
        reader(product.attach, cluster.scheduler_address)

        def one_kill() -> float:
            stores = product.store_pids()
            pid = worker_pid(cast)
            reader.start(read_for, "bench/big", 5.0)
            time.sleep(1.0)
            os.kill(pid, signal.SIGKILL)
            found = reader.result()
            found["same store"] = product.store_pids() == stores
            seen.append(found)
            return FAILED_MS if found["errors"] else found["longest_ms"]

        emit(
            absolute(
                f"kill -9 of a worker that holds {sizes.big_bytes >> 20} MiB, longest read",
                one_kill,
                bar=1000,
                better="lower",
                unit="ms",
                times=sizes.kills,
                notes={"kills": seen, "a failed read counts as": FAILED_MS},
            )
        )


if __name__ == "__main__":
    main(parse())
