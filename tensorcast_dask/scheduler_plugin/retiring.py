"""Retiring workers: bytes move before Dask lets the worker go.

Rules:

1. Every way to retire (explicit, `scale`, adaptive, a worker's own graceful close) passes
   through `wrap`.
2. Draining takes at most `drain.timeout`, and never stops a retirement: what could not move
   stays readable at its store for `store.orphan_ttl`, and is said.
3. When no other node is left, as when a cluster closes, nothing is moved.
4. A store whose bytes all moved ends; its worker is on its way out and starts no other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from tensorcast_dask.scheduler_plugin import dask_private
from tensorcast_dask.scheduler_plugin.state.events import WorkerGone
from tensorcast_dask.tensors.messages import Drained, DrainNode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distributed import Scheduler

    from tensorcast_dask.config import Settings
    from tensorcast_dask.scheduler_plugin.service import CatalogService
    from tensorcast_dask.tensors.messages import NodeCard

__all__ = ["Retiring"]

log = logging.getLogger(__name__)

#: For so long adaptive scaling leaves a worker alone whose bytes had nowhere to go.
SPARED_S: Final = 60.0


#: Has a worker adopt its own store again.
READOPT_OP: Final = "tensorcast_readopt"


class _Owner(Protocol):
    scheduler: Scheduler
    service: CatalogService | None
    settings: Settings | None

    def keep(self, card: NodeCard, why: str) -> None:
        """Have a node live on once this worker leaves it."""

    def end(self, card: NodeCard, why: str) -> None:
        """Have a node end."""


class _Left(NamedTuple):
    """A node after its draining."""

    card: NodeCard
    empty: bool


class Retiring:
    """The step before Dask's own."""

    def __init__(self, owner: _Owner) -> None:
        self._owner = owner
        #: Workers that could not be drained, and until when they are spared.
        self._spared: dict[str, float] = {}

    def may_go(self, workers: list[Any]) -> list[Any]:
        """Filter candidates for downscaling."""
        now_s = time.monotonic()
        self._spared = {w: until for w, until in self._spared.items() if until > now_s}
        return [worker for worker in workers if worker.address not in self._spared]

    def wrap(
        self, retire: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Awaitable[Any]]:
        """Give what is called in place of Dask's `retire_workers`."""

        async def retire_workers(
            workers: list[str] | None = None,
            *,
            names: list[Any] | None = None,
            **options: Any,  # noqa: ANN401
        ) -> Any:  # noqa: ANN401
            given = {key: options.pop(key) for key in _DASKS & options.keys()}
            going = self._addresses(workers, names, options)
            by_name = workers is not None and not set(going) & set(workers)
            if by_name and set(going) == set(self._owner.scheduler.workers):
                # A cluster object closes by names, which Dask itself passes over here: it
                # closes the workers itself. When all of them go nothing can be moved.
                return {}
            drained = await self._drain(going)
            result = await retire(workers=going, **given)
            await self._finish(drained, result)
            return result

        return retire_workers

    def _addresses(
        self,
        workers: list[str] | None,
        names: list[Any] | None,
        options: dict[str, Any],
    ) -> list[str]:
        """Who is meant; chosen by Dask's own rule when nobody is named."""
        scheduler = self._owner.scheduler
        if workers is not None:
            # Clusters name workers by their names here; Dask passes over whom it does not know.
            known = [scheduler.aliases.get(worker, worker) for worker in workers]
            return [str(address) for address in known if address in scheduler.workers]
        if names is not None:
            wanted = {str(name) for name in names}
            return [
                address
                for address, state in scheduler.workers.items()
                if str(state.name) in wanted
            ]
        return list(scheduler.workers_to_close(**options))

    async def _drain(self, going: list[str]) -> dict[str, _Left]:
        """Move what the workers' nodes alone hold; how it went, by worker."""
        service, settings = self._owner.service, self._owner.settings
        if service is None or settings is None:
            return {}
        cards = {card.worker: card for card in service.cards().values()}
        leaving = [address for address in going if address in cards]
        if not cards.keys() - set(leaving) - {""}:
            return {}  # rule 3
        for address in leaving:  # none of them is a place for another's bytes
            service.tell(WorkerGone(address=address))
        left = await asyncio.gather(
            *(self._drain_one(service, settings, cards[address]) for address in leaving)
        )
        return dict(zip(leaving, left, strict=True))

    async def _drain_one(
        self, service: CatalogService, settings: Settings, card: NodeCard
    ) -> _Left:
        answer = await service.ask(
            lambda rid: DrainNode(
                rid=rid,
                node=card.node,
                deadline_s=settings.drain_timeout_s,
                end=False,
            )
        )
        empty = isinstance(answer, Drained) and not answer.stayed
        if not empty:
            log.warning("worker %s retires with bytes left: %s", card.worker, answer)
            self._spared[card.worker] = time.monotonic() + SPARED_S
        return _Left(card=card, empty=empty)

    async def _finish(self, drained: dict[str, _Left], retired: Any) -> None:  # noqa: ANN401
        """End the stores that were emptied, keep the others for a while (rules 2 and 4)."""
        if self._owner.service is None or not isinstance(retired, dict):
            return
        stayed = [address for address in drained if address not in retired]
        for address, left in drained.items():
            if address not in retired:
                continue
            if left.empty:
                self._owner.end(left.card, "its worker retired")
            else:
                self._owner.keep(left.card, "its worker retired with bytes left")
        # Dask kept these: they take placements again.
        await dask_private.tell_workers(
            self._owner.scheduler, READOPT_OP, workers=stayed, within_s=5.0
        )


#: Options of Dask's `retire_workers` that choose nobody.
_DASKS: Final = {"close_workers", "remove", "stimulus_id"}
