"""A whole tensor service on this machine, for tests, notebooks and laptops."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

import dask.config
import distributed
from dask.utils import parse_timedelta

from tensorcast_dask.config import Settings, Tree, merged

__all__ = ["LocalCluster"]

_PRELOAD: Final = "tensorcast_dask.deploy"
#: How long a worker that died may take to come back.
_PATIENCE_S: Final = 120.0


class LocalCluster(distributed.LocalCluster):
    """Dask's `LocalCluster` whose workers have stores beside them.

    Parameters
    ----------
    n_workers : int
        How many nodes.
    host_memory : str, int or float, optional
        Budget of each node's host tier, as Dask's `memory_limit` is: bytes, text such as
        "1 GiB", or a share of the machine.
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
    """

    def __init__(
        self,
        n_workers: int | None = None,
        *,
        host_memory: str | float | None = None,
        disk: bool | str = False,
        separate_hosts: bool = False,
        journal: str | None = None,
        settings: Tree | None = None,
        **kwargs: Any,
    ) -> None:
        self._disk: tempfile.TemporaryDirectory[str] | None = None
        arguments: Tree = {"node": {}}
        if host_memory is not None:
            arguments["node"]["host-memory"] = host_memory
        if disk is True:
            self._disk = tempfile.TemporaryDirectory(prefix="tensorcast-disk-")
            disk = self._disk.name
        if disk:
            arguments["node"]["disk-dir"] = str(Path(disk).absolute())
        if separate_hosts:
            arguments["separate-hosts"] = True
        if journal is not None:
            arguments["journal"] = journal
        arguments = merged(arguments, settings or {})
        Settings.read(arguments)  # refuse what is wrong before anything is started
        kwargs.setdefault("dashboard_address", ":0")
        preloads = [*dask.config.get("distributed.scheduler.preload", []), _PRELOAD]
        with dask.config.set(
            {
                "tensorcast": merged(dask.config.get("tensorcast", {}), arguments),
                "distributed.scheduler.preload": preloads,
            }
        ):
            super().__init__(n_workers=n_workers, **kwargs)  # type: ignore[no-untyped-call]

    def _update_worker_status(self, op: str, msg: Any) -> None:
        # After `lost-worker-timeout` (15 s) Dask ends the nanny of a worker that did not
        # come back. On a busy machine a start takes longer, and the store that waits for
        # the worker would be let go with all it holds.
        key = "distributed.deploy.lost-worker-timeout"
        patience_s = max(parse_timedelta(dask.config.get(key)), _PATIENCE_S)
        with dask.config.set({key: patience_s}):
            super()._update_worker_status(op, msg)  # type: ignore[no-untyped-call]

    async def _close(self) -> None:
        await super()._close()  # type: ignore[no-untyped-call]
        if self._disk is not None:
            self._disk.cleanup()
            self._disk = None
