"""A whole tensor service on this machine, for tests, notebooks and laptops."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import dask.config
import distributed
from dask.utils import parse_timedelta
from distributed.deploy.cluster import Cluster

from tensorcast_dask.config import Settings, Tree, merged
from tensorcast_dask.dataplane import hosts
from tensorcast_dask.deploy import scheduler_plugin

__all__ = ["LocalCluster"]

#: How long a worker that died may take to come back.
_PATIENCE_S: Final = 120.0
_GUARD: Final = (
    "Workers are processes that import the program's file: put what starts them under `if "
    '__name__ == "__main__":`. Where it stands there, the first error above says what failed.'
)


class LocalCluster(distributed.LocalCluster):
    """Dask's `LocalCluster` whose workers have stores beside them.

    Parameters
    ----------
    n_workers : int
        How many nodes.
    host_memory : str, int or float, optional
        Budget of each node's host tier, as Dask's `memory_limit` is: bytes, text such as
        "1 GiB", or a share of the machine.
    device_memory : str, int or float, optional
        Budget of each node's device tier: bytes, text, or a share of the device below 1. What
        drives devices is the setting `device`.
    disk : bool or str
        Whether nodes have a disk tier: True makes a temporary folder that goes with the
        cluster, text names one.
    separate_hosts : bool
        Give every node a host identity of its own, as if each were on another machine:
        bytes between them go over TCP. For tests and measurements.
    journal : str
        "temporary" (default), ":memory:" or a path.
    settings : dict, optional
        Further settings of section `tensorcast`, nested as in `tensorcast.yaml`.
    **kwargs
        Passed to `distributed.LocalCluster`.

    Attributes
    ----------
    arguments : dict
        The settings given here: they win over `dask.config` and the environment.

    Raises
    ------
    InvalidArgument
        When a setting is wrong, or the run directory's path too long for sockets.
    OwnershipError
        When the run directory is not this user's own.
    """

    def __init__(
        self,
        n_workers: int | None = None,
        *,
        host_memory: str | float | None = None,
        device_memory: str | float | None = None,
        disk: bool | str = False,
        separate_hosts: bool = False,
        journal: str | None = None,
        settings: Tree | None = None,
        **kwargs: Any,
    ) -> None:
        self._pid = os.getpid()
        #: When workers that were lost are given up, by name.
        self._lost: dict[Any, asyncio.TimerHandle] = {}
        self._disk: tempfile.TemporaryDirectory[str] | None = None
        arguments: Tree = {"node": {}}
        if host_memory is not None:
            arguments["node"]["host-memory"] = host_memory
        if device_memory is not None:
            arguments["node"]["device-memory"] = device_memory
        if disk is True:
            self._disk = tempfile.TemporaryDirectory(prefix="tensorcast-disk-")
            disk = self._disk.name
        if disk:
            arguments["node"]["disk-dir"] = str(Path(disk).absolute())
        if separate_hosts:
            arguments["separate-hosts"] = True
        if journal is not None:
            arguments["journal"] = journal
        self.arguments: Tree = merged(arguments, settings or {})
        # What is wrong is refused before anything is started.
        run_dir = hosts.run_directory(Settings.read(self.arguments).run_dir)
        hosts.check_length(run_dir)
        kwargs.setdefault("dashboard_address", ":0")
        options = dict(kwargs.pop("scheduler_kwargs", None) or {})
        plugins = [*options.pop("plugins", ()), scheduler_plugin(self.arguments)]
        try:
            super().__init__(  # type: ignore[no-untyped-call]
                n_workers=n_workers,
                scheduler_kwargs={**options, "plugins": plugins},
                **kwargs,
            )
        except RuntimeError as error:  # whose own words do not say it
            if "Nanny failed" in str(error):
                error.add_note(_GUARD)
            raise

    def _update_worker_status(self, op: str, msg: Any) -> None:
        # Dask ends the nanny of a worker that is away `lost-worker-timeout` (15 s) after any
        # loss, also an earlier one that it had come back from. On a busy machine a start takes
        # longer, and the store that waits for the worker would be let go with all it holds: so
        # a worker has longer here, counted from its last loss.
        if op == "remove":
            name = self.scheduler_info["workers"][msg]["name"]
            if name in self._lost:
                self._lost.pop(name).cancel()
            key = "distributed.deploy.lost-worker-timeout"
            patience_s = max(parse_timedelta(dask.config.get(key)), _PATIENCE_S)
            loop = asyncio.get_running_loop()
            self._lost[name] = loop.call_later(patience_s, self._give_up, name)
        Cluster._update_worker_status(self, op, msg)  # type: ignore[no-untyped-call]  # noqa: SLF001

    def _give_up(self, name: Any) -> None:
        """End what looks after a worker that did not come back."""
        del self._lost[name]
        there = {one["name"] for one in self.scheduler_info["workers"].values()}
        if name in self.workers and name not in there:
            end = asyncio.ensure_future(self.workers.pop(name).close())
            self._futures.add(end)

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child of the one that made the cluster."""
        return self._pid != os.getpid()

    def close(self, timeout: float | None = None) -> Any:
        """End the cluster and its stores; in a forked child nothing: it is its parent's."""
        return None if self.forked else super().close(timeout)

    async def _close(self) -> None:
        for timer in self._lost.values():
            timer.cancel()
        self._lost.clear()
        await super()._close()  # type: ignore[no-untyped-call]
        if self._disk is not None:
            self._disk.cleanup()
            self._disk = None
