"""The scheduler plugin: Dask's hooks on one side, the catalog on the other.

Rules:

1. However many plugins are registered, by preload or by clients, at once or one after
   the other, a scheduler has one catalog: the first to come in makes it, the others wait
   for it and share it. Another release of this package is refused, with both named.
2. `start` raises when the catalog cannot work: with a preload that ends the scheduler,
   loudly, instead of leaving a cluster that forgets.
3. What Dask says of workers is a belief; only the catalog's leases decide about nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from distributed.diagnostics.plugin import SchedulerPlugin

from tensorcast_dask.scheduler_plugin import dask_private
from tensorcast_dask.scheduler_plugin.installation import Installation
from tensorcast_dask.version import __version__

if TYPE_CHECKING:
    from distributed import Scheduler

    from tensorcast_dask.config import Tree
    from tensorcast_dask.scheduler_plugin.installation import Ship, Show, Sign

__all__ = ["PLUGIN_NAME", "CatalogPlugin"]

PLUGIN_NAME: Final = "tensorcast"


class CatalogPlugin(SchedulerPlugin):
    """What Dask registers.

    Parameters
    ----------
    ship : callable
        Makes the pickled worker and nanny plugins from an `About`, as two pairs of name and bytes.
    sign : callable
        Makes the grant by which a worker may take another's store.
    show : callable
        Shows the catalog's pages in Dask's dashboard, and gives what takes them away.
    measure : callable
        The same for its numbers, on Dask's metrics.
    arguments : dict, optional
        Settings over those of the scheduler's own configuration.
    """

    name = PLUGIN_NAME
    idempotent = True

    def __init__(
        self,
        *,
        ship: Ship,
        sign: Sign,
        show: Show,
        measure: Show,
        arguments: Tree | None = None,
    ) -> None:
        self._ship = ship
        self._sign = sign
        self._show = show
        self._measure = measure
        self._arguments = arguments or {}
        self._installed: Installation | None = None

    async def start(self, scheduler: Scheduler) -> None:
        """Make the catalog, or join the one that is there (rule 1)."""
        installed = scheduler.extensions.get(dask_private.EXTENSION)
        if installed is None:
            installed = Installation(
                scheduler,
                ship=self._ship,
                sign=self._sign,
                show=self._show,
                measure=self._measure,
                arguments=self._arguments,
            )
            scheduler.extensions[dask_private.EXTENSION] = installed
            self._installed = installed
            try:
                await installed.start()
            except BaseException:
                del scheduler.extensions[dask_private.EXTENSION]
                raise
            return
        self._installed = installed
        await installed.join(__version__)

    def restart(self, scheduler: Scheduler) -> None:  # noqa: ARG002
        """Keep the bytes over `Client.restart`."""
        if self._installed is not None:
            self._installed.restarting()

    def remove_worker(
        self,
        scheduler: Scheduler,  # noqa: ARG002
        worker: str,
        *,
        stimulus_id: str,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002, ANN401
    ) -> None:
        """Pass on that Dask believes a worker gone."""
        if self._installed is not None:
            self._installed.worker_gone(worker)

    def valid_workers_downscaling(
        self,
        scheduler: Scheduler,  # noqa: ARG002
        workers: list[Any],
    ) -> list[Any]:
        """Keep adaptive scaling from workers whose bytes had nowhere to go just now."""
        if self._installed is None:
            return list(workers)
        return self._installed.retiring.may_go(workers)

    async def before_close(self) -> None:
        """End the stores, or have them wait for the next scheduler."""
        if self._installed is not None:
            await self._installed.before_close()

    async def close(self) -> None:
        """Close the catalog; the journal is complete afterwards."""
        if self._installed is not None:
            await self._installed.close()
