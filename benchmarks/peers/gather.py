"""Dask's own way to bring an array from one worker to another: ``gather_dep``."""

from __future__ import annotations

import time
from typing import Self

import dask
import numpy as np
from distributed import Client, LocalCluster, wait

__all__ = ["DaskGather"]


def _make(size: int, dtype: str) -> np.ndarray:
    return np.full(size // np.dtype(dtype).itemsize, 1, dtype=dtype)


def _use(array: np.ndarray) -> int:
    return int(array[-1])


class DaskGather:
    """Two workers of a plain cluster, memory managers off as `peers` advise."""

    def __init__(self, size: int, dtype: str = "uint8") -> None:
        memory = "distributed.worker.memory."
        self._config = dask.config.set(
            {memory + key: False for key in ("target", "spill", "pause", "terminate")}
        )
        self._config.__enter__()
        self._cluster = LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            memory_limit=0,
            dashboard_address="127.0.0.1:0",
        )
        self._client = Client(self._cluster)
        self.size = size
        self._first, self._second = sorted(self._client.scheduler_info()["workers"])
        self._held = self._client.submit(
            _make, size, dtype, workers=[self._first], pure=False
        )
        wait(self._held)
        #: What the task itself costs, taken off nothing: only said.
        self.noop_s = min(self._noop() for _ in range(5))

    def _noop(self) -> float:
        begin = time.perf_counter()
        self._client.submit(_nothing, workers=[self._second], pure=False).result()
        return time.perf_counter() - begin

    def seconds(self) -> float:
        """The array crosses to the other worker, where a task looks at its end."""
        begin = time.perf_counter()
        self._client.submit(
            _use, self._held, workers=[self._second], pure=False
        ).result()
        spent = time.perf_counter() - begin
        # The copy is dropped again: the next one must cross anew.
        self._client.run_on_scheduler(_drop, self._held.key, self._second)
        stop = time.perf_counter() + 10
        while self._second in self._client.who_has(self._held)[self._held.key]:
            if time.perf_counter() > stop:
                msg = "Dask did not drop the copy"
                raise TimeoutError(msg)
            time.sleep(0.02)
        return spent

    def close(self) -> None:
        """End the cluster."""
        self._client.close()
        self._cluster.close()
        self._config.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nothing() -> None:
    return None


def _drop(key: str, address: str, dask_scheduler: object = None) -> None:
    scheduler = dask_scheduler
    scheduler.request_remove_replicas(address, [key], stimulus_id="bench-drop")  # type: ignore[union-attr]
