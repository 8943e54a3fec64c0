"""Parts of the scheduler's process that are clients of its catalog: what they are told, and their end.

Rule: they end before the catalog does, and one that fails to end holds up nobody.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tensorcast_dask.config import Settings
    from tensorcast_dask.tensors.ids import HostId
    from tensorcast_dask.tensors.messages import TlsFiles

__all__ = ["Beside", "Guests"]

log = logging.getLogger(__name__)


class Beside(NamedTuple):
    """How to take part."""

    address: str
    host: HostId
    settings: Settings
    #: The cluster's token.
    token: bytes
    tls: TlsFiles | None


class Guests:
    """How each takes part, and how it is ended.

    Parameters
    ----------
    beside : callable
        Tells how to take part; None when there is no catalog (any more).
    """

    def __init__(self, beside: Callable[[], Beside | None]) -> None:
        self.beside = beside
        self._endings: list[Callable[[], Awaitable[None]]] = []

    def __len__(self) -> int:
        return len(self._endings)

    def add(self, ending: Callable[[], Awaitable[None]]) -> None:
        """Have one ended with the catalog."""
        self._endings.append(ending)

    async def see_off(self) -> None:
        """End them."""
        while self._endings:
            ending = self._endings.pop()
            try:
                await ending()
            except Exception:
                log.exception("ending a client of the catalog")
