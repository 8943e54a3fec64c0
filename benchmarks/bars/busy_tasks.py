"""The same pull while user tasks hold the GIL on both workers.

The reference is the same pull while two unrelated processes burn the two cores: user
tasks may cost their share of the cores, no more.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import product
from benchmarks.bars.pull import Puller
from benchmarks.harness import emit, failed, paired
from benchmarks.raw import Burners
from benchmarks.sizes import Sizes, parse


def spin(flag: str) -> None:
    """Pure Python, as long as the flag stands."""
    total = 0
    while Path(flag).exists():
        for at in range(200_000):
            total += at


def hold(flag: str) -> None:
    """A C call that never lets the GIL go: about half a second each."""
    while Path(flag).exists():
        sum(range(25_000_000))


class Busy:
    """The same task on every worker."""

    def __init__(self, client: Any, task: Callable[[str], None], folder: Path) -> None:
        self._client, self._task, self._flag = client, task, folder / task.__name__
        self._futures: list[Any] = []

    def __enter__(self) -> None:
        self._flag.touch()
        self._futures = [
            self._client.submit(
                self._task, str(self._flag), workers=[address], pure=False
            )
            for address in self._client.scheduler_info()["workers"]
        ]
        time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self._flag.unlink()
        for future in self._futures:
            future.result(60)


def lapses(cast: Any) -> list[Any]:
    """What the catalog told of leases that lapsed; a node that healed looks as before."""
    told = [event for _, event in cast.client.get_events("tensorcast")]
    return [event for event in told if event.get("topic") == "node_lapsed"]


def main(sizes: Sizes) -> None:
    """Two lines of speed, one of leases."""
    with (
        tempfile.TemporaryDirectory() as folder,
        product.cluster(sizes, separate_hosts=True) as cluster,
        product.session(cluster) as cast,
    ):
        big = sizes.big_bytes
        cast.put(product.big_array(big), "bench/big", worker=product.one_node(cast))
        puller, burners = Puller(cast, "bench/big"), Burners()
        before = len(lapses(cast))

        def beside_burners() -> float:
            burners.start()
            spent = puller.seconds()
            burners.stop()
            return big / spent / 1e9

        for task in (spin, hold):
            busy = Busy(cast.client, task, Path(folder))

            def beside_tasks(busy: Busy = busy) -> float:
                with busy:
                    return big / puller.seconds() / 1e9

            how = "pure Python" if task is spin else "a C call"
            emit(
                paired(
                    f"pull while tasks hold the GIL ({how})",
                    beside_tasks,
                    beside_burners,
                    unit="GB/s",
                    bar=0.9,
                    better="higher",
                    pairs=sizes.pairs,
                    notes={"via": puller.via},
                )
            )
        burners.close()
        lost = lapses(cast)[before:]
        if lost:
            emit(failed("no lease is lost to busy tasks", f"{lost}"))


if __name__ == "__main__":
    main(parse())
