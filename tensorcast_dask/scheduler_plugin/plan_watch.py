"""What Dask would leave undone of a plan: tasks whose worker went, runs whose tasks went.

Rules:

1. A task that is pinned to a worker which is gone waits for ever in Dask. It is sent to the
   worker that its node has now; after a while, when the node has none, to any: the step then
   finds out itself, and says it typed.
2. A run whose last task Dask does not know (the scheduler was restarted, a worker died under
   it too often, its caller died before it had handed it over) is told to the catalog.
3. Both are looked at every `TURN_S`; with no plan about that costs nothing to speak of.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from tornado.ioloop import PeriodicCallback

from tensorcast_dask.scheduler_plugin import dask_private
from tensorcast_dask.scheduler_plugin.state.events import PlanDropped
from tensorcast_dask.tensors.ids import NodeId

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Scheduler

    from tensorcast_dask.scheduler_plugin.service import CatalogService

__all__ = ["DROPPED_S", "HANDED_OVER_OP", "WORKERLESS_S", "PlanWatch"]

log = logging.getLogger(__name__)

#: Waits until Dask has the tasks of a run.
HANDED_OVER_OP: Final = "tensorcast_handed_over"
TURN_S: Final = 0.5
#: How long a task waits for its node's next worker.
WORKERLESS_S: Final = 15.0
#: How long it waits for a node that is not there at all.
NODELESS_S: Final = 3.0
#: How long the last task of a run may be unknown to Dask: it may be on its way.
DROPPED_S: Final = 10.0


class PlanWatch:
    """Looks after the tasks of plans.

    Parameters
    ----------
    scheduler : Scheduler
        Dask's.
    service : callable
        Gives the catalog of now, or None.
    """

    def __init__(
        self, scheduler: Scheduler, service: Callable[[], CatalogService | None]
    ) -> None:
        self._scheduler = scheduler
        self._service = service
        #: Since when the last task of a run is unknown.
        self._missing: dict[int, float] = {}
        self._turns = PeriodicCallback(self.look, TURN_S * 1000)

    def start(self) -> None:
        """Begin to look."""
        dask_private.add_handler(self._scheduler, HANDED_OVER_OP, self.handed_over)
        self._turns.start()

    def stop(self) -> None:
        """Look no more."""
        self._turns.stop()

    async def handed_over(self, key: str, run: int) -> bool:
        """Answer `HANDED_OVER_OP`: from then on the run needs its program no more."""
        until_s = time.monotonic() + DROPPED_S
        while time.monotonic() < until_s:
            service = self._service()
            if service is None:
                return False
            tasks = {
                report
                for name, number, report in service.catalog.plans.running()
                if (name, number) == (key, run)
            }
            if not tasks or tasks & self._scheduler.tasks.keys():
                return True
            await asyncio.sleep(0.005)
        return False

    def look(self) -> None:
        """Look once."""
        service = self._service()
        if service is None:
            return
        now_s = time.monotonic()
        for stuck in dask_private.stuck_tasks(self._scheduler):
            self._help(service, stuck)
        runs = service.catalog.plans.running()
        self._missing = {
            run: since_s
            for run, since_s in self._missing.items()
            if any(run == one for _, one, _ in runs)
        }
        for key, run, report in runs:
            if dask_private.is_under_way(self._scheduler, report):
                self._missing.pop(run, None)
            elif now_s - self._missing.setdefault(run, now_s) > DROPPED_S:
                why = "Dask knows nothing of its tasks (any more)"
                service.tell(PlanDropped(key=key, run=run, why=why))

    def _help(self, service: CatalogService, stuck: dask_private.Stuck) -> None:
        cards = {card.node: card for card in service.attended()}
        card = cards.get(NodeId(stuck.node))
        record = service.catalog.nodes.records.get(NodeId(stuck.node))
        live = record is not None and record.live
        if card is not None and card.worker in self._scheduler.workers:
            if card.worker not in stuck.workers:
                log.info(
                    "task %s goes to %s, its node's worker", stuck.key, card.worker
                )
                dask_private.send_to(self._scheduler, stuck.key, [card.worker])
            return
        if stuck.waited_s > (WORKERLESS_S if live else NODELESS_S):
            log.info(
                "task %s goes anywhere: node %s has no worker", stuck.key, stuck.node
            )
            dask_private.send_to(self._scheduler, stuck.key, None)
