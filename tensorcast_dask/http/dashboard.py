"""The gateway on the scheduler's dashboard server, below `/tensorcast/`.

Rules:

1. Dask's server finds the routes by this module's name, as it finds its own.
2. The gateway is made at the first request; what it imports is imported in a thread.
3. It ends with the catalog that it asks.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from tensorcast_dask.dataplane import bearer
from tensorcast_dask.exceptions import CatalogUnavailable, InvalidArgument
from tensorcast_dask.http.gateway import Gateway, Limits
from tensorcast_dask.http.handler import GatewayHandler
from tensorcast_dask.scheduler_plugin.dask_private import EXTENSION

if TYPE_CHECKING:
    from distributed import Scheduler

    from tensorcast_dask.scheduler_plugin.guests import Beside
    from tensorcast_dask.scheduler_plugin.installation import Installation

__all__ = ["DashboardHandler", "routes"]

log = logging.getLogger(__name__)

ROOT: Final = "/tensorcast"

_gateways: WeakKeyDictionary[Scheduler, _Made] = WeakKeyDictionary()


class DashboardHandler(GatewayHandler):
    """Answers out of the gateway of the scheduler whose server this is."""

    def initialize(self, dask_server: Any = None) -> None:  # noqa: ANN401 - Dask hands its server
        """Begin a request."""
        super().initialize()
        self._scheduler: Scheduler = dask_server

    async def gateway(self) -> Gateway:
        """Give it, made at first use.

        Raises
        ------
        CatalogUnavailable
            When the scheduler has no catalog (any more).
        """
        installed: Installation | None = self._scheduler.extensions.get(EXTENSION)
        beside = None if installed is None else installed.guests.beside()
        if installed is None or beside is None:
            message = "the scheduler has no catalog (any more)"
            raise CatalogUnavailable(message)
        known = _gateways.get(self._scheduler)
        if known is None or known.secret != beside.token or known.failed:
            making = asyncio.create_task(asyncio.to_thread(_make, beside))
            made = known = _gateways[self._scheduler] = _Made(beside.token, making)
            making.add_done_callback(lambda _: _is_guest(made, installed))
        try:
            return await asyncio.shield(known.making)
        except InvalidArgument as error:  # of a setting, which is nobody's business
            log.error("the dashboard's gateway cannot be made: %s", error)  # noqa: TRY400
            message = "this gateway cannot work; the scheduler's log says why"
            raise CatalogUnavailable(message) from None


class _Made(NamedTuple):
    """A gateway, made or being made."""

    #: The cluster's token at that time.
    secret: bytes
    making: asyncio.Task[Gateway]

    @property
    def failed(self) -> bool:
        """Whether it could not be made."""
        return self.making.done() and self.making.exception() is not None

    async def end(self) -> None:
        """End it."""
        gateway = await self.making
        await gateway.close()


def _is_guest(made: _Made, installed: Installation) -> None:
    if not made.failed:
        installed.guests.add(made.end)


def _make(beside: Beside) -> Gateway:
    from tensorcast_dask.api.connect import session_beside  # noqa: PLC0415 - rule 2

    settings = beside.settings
    open_session = partial(
        session_beside,
        beside.address,
        settings=settings,
        host=beside.host,
        own=None,
        tls=beside.tls,
    )
    path = settings.http_token_file
    token = bearer.of_file(path) if path else bearer.derived(beside.token)
    return Gateway(open_session, token=token, limits=Limits.of(settings), root=ROOT)


routes: list[tuple[str, type[DashboardHandler], dict[str, Any]]] = [
    (r"tensorcast/(?:openapi\.json|v1(?:/.*)?)", DashboardHandler, {})
]
