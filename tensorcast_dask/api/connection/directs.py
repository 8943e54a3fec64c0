"""Sockets to instances of this host, lent one call at a time."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any, Protocol

from tensorcast_dask.dataplane.direct import Direct
from tensorcast_dask.tensors.messages import Dial, Dialled

if TYPE_CHECKING:
    from tensorcast_dask.api.connection.deadlines import Deadline
    from tensorcast_dask.dataplane.framing import Frame
    from tensorcast_dask.tensors.messages import (
        CallInstance,
        NodeCard,
        StoreRequest,
    )

__all__ = ["Directs"]


class _Asks(Protocol):
    """What is used of `Stores`."""

    def ask(
        self, card: NodeCard, request: StoreRequest, expect: type[Any], limit: Deadline
    ) -> Frame[Any]:
        """Ask a store."""


class Directs:
    """Sockets that the stores of this host have handed over.

    Parameters
    ----------
    stores : Stores
        Who asks for them.
    """

    def __init__(self, stores: _Asks) -> None:
        self._stores = stores
        self._lock = threading.Lock()
        #: Those that nobody uses now, by the life that they lead to.
        self._idle: dict[str, list[Direct]] = {}

    def take(
        self, card: NodeCard, request: CallInstance, limit: Deadline
    ) -> Direct | None:
        """Take one; None where none can be had.

        Raises
        ------
        NotFound, OwnerGone
            When this life of the instance is over.
        """
        with self._lock:
            idle = self._idle.get(request.attachment)
            if idle:
                return idle.pop()
        dial = Dial(
            rid=request.rid,
            instance=request.instance,
            attachment=request.attachment,
        )
        frame = self._stores.ask(card, dial, Dialled, limit)
        if not frame.fds:
            return None
        return Direct(socket.socket(fileno=frame.take_fd()))

    def give(self, attachment: str, direct: Direct) -> None:
        """Give one back."""
        with self._lock:
            self._idle.setdefault(attachment, []).append(direct)

    def forget(self, attachment: str) -> None:
        """Close those that lead to a life that is over."""
        with self._lock:
            gone = self._idle.pop(attachment, [])
        for direct in gone:
            direct.close()

    def close(self) -> None:
        """Close them all."""
        for attachment in list(self._idle):
            self.forget(attachment)
