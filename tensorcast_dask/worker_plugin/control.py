"""A worker's dealings with stores: find them, start one, adopt it, hold on, let go.

Rules:

1. Every function blocks and is called in a thread; nothing here touches the event loop.
2. A control connection carries one request at a time and is never used for anything
   else: that it is open is what makes the store attended.
3. A worker that lets a store go says so, and for how long it is to live: a store whose
   connection merely ended goes to nobody before the process at its other end is dead,
   which takes a closing worker seconds.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.dataplane import hosts
from tensorcast_dask.dataplane.channel import Channel, Credentials, Prefer
from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.tensors.ids import ClusterId, Incarnation, RequestId
from tensorcast_dask.tensors.messages import (
    PROTOCOL,
    Adopt,
    Adopted,
    Done,
    End,
    LetGo,
    Role,
)
from tensorcast_dask.worker_plugin import pressure

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tensorcast_dask.tensors.ids import HostId
    from tensorcast_dask.tensors.messages import LinkTarget, NodeCard, StoreSettings

__all__ = ["Control", "Identity"]

log = logging.getLogger(__name__)

ADOPT_S: Final = 10.0
LET_GO_S: Final = 2.0


class Identity:
    """Who the worker is, as a store is told.

    Parameters
    ----------
    address, name : str
        Dask's address and name of the worker: labels.
    settings : StoreSettings
        What the store shall keep to.
    link : LinkTarget
        Where the catalog is, and the secrets for it.
    """

    def __init__(
        self, *, address: str, name: str, settings: StoreSettings, link: LinkTarget
    ) -> None:
        self.address = address
        self.name = name
        self.settings = settings
        self.link = link


class Control:
    """One worker's hand on stores.

    Parameters
    ----------
    identity : Identity
        Who asks.
    folder : Path
        The cluster's folder in the run directory.
    start_timeout_s : float
        How long a store may take to start.
    launch : callable
        Starts a store and returns its card: (settings, timeout_s) -> NodeCard.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        folder: Path,
        start_timeout_s: float,
        launch: Callable[[StoreSettings, float], NodeCard],
    ) -> None:
        self._identity = identity
        self.folder = folder
        self._start_timeout_s = start_timeout_s
        self._launch = launch
        self._channel: Channel | None = None
        self._requests = 0

    @property
    def host(self) -> HostId:
        """Identity of this host."""
        return self._identity.settings.host

    @property
    def settings(self) -> StoreSettings:
        """What the store keeps to."""
        return self._identity.settings

    def use_link(self, link: LinkTarget) -> None:
        """Tell stores of another catalog from now on."""
        self._identity.link = link

    def look(self) -> tuple[NodeCard, ...]:
        """List the stores that may be free, those that nobody attends first."""
        identity = self._identity
        found = [
            card
            for card in hosts.cards(self.folder)
            if card.kind == "store"
            and card.protocol == PROTOCOL
            and card.host == identity.settings.host
        ]
        found.sort(key=lambda c: (bool(c.worker), c.name != identity.name, c.node))
        return tuple(found)

    def start(self) -> NodeCard:
        """Start a store.

        Raises
        ------
        TensorCastError
            When none comes up.
        """
        hosts.clean_dead(self.folder)
        with pressure.as_at_start():
            return self._launch(self._identity.settings, self._start_timeout_s)

    def adopt(
        self,
        card: NodeCard,
        *,
        mapping: bool,
        grant: bytes = b"",
        of_any: bool = False,
    ) -> Adopted:
        """Ask for a store and keep the connection; `of_any`: whatever cluster it is of.

        Raises
        ------
        TensorCastError
            When it is another worker's, or does not answer.
        Mismatch
            When it holds artifacts of another cluster (`data` has "cluster").
        """
        until_s = time.monotonic() + ADOPT_S
        channel = Channel.connect(
            _anyone(card),
            credentials=Credentials(role=Role.WORKER, host=self.host),
            prefer=Prefer.UNIX,
            until_s=until_s,
        )
        identity = self._identity
        request = Adopt(
            rid=self._rid(),
            worker=identity.address,
            name=identity.name,
            pid=os.getpid(),
            settings=identity.settings,
            link=_unnamed(identity.link) if of_any else identity.link,
            mapping=mapping,
            grant=grant,
        )
        try:
            adopted = channel.call(request, expect=Adopted, until_s=until_s).message
        except BaseException:
            channel.close()
            raise
        self.leave()
        self._channel = channel
        return adopted

    def fileno(self) -> int:
        """Descriptor of the control connection: readable once it has ended; -1 without one."""
        return -1 if self._channel is None else self._channel.stream.fileno()

    def let_go(self, *, ttl_s: float, why: str) -> None:
        """Release the store: it ends after `ttl_s` unless adopted."""
        self._say(LetGo(rid=self._rid(), ttl_s=ttl_s, why=why))
        self.leave()

    def leave(self) -> None:
        """Close the connection without a word: it is of no use any more."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def end(self, why: str) -> None:
        """End the store."""
        self._say(End(rid=self._rid(), why=why))
        self.leave()

    def _say(self, request: LetGo | End) -> None:
        if self._channel is None:
            return
        try:
            self._channel.call(
                request, expect=Done, until_s=time.monotonic() + LET_GO_S
            )
        except TensorCastError as error:  # gone already, or no longer ours
            log.debug("the store was not told: %s", error)

    def _rid(self) -> RequestId:
        self._requests += 1
        return RequestId(f"{self._identity.address}:{os.getpid()}:{self._requests}")


def _unnamed(link: LinkTarget) -> LinkTarget:
    """Name no cluster: the store keeps its own."""
    return msgspec.structs.replace(link, cluster=ClusterId(""), token=b"")


def _anyone(card: NodeCard) -> NodeCard:
    """Any incarnation of that store will do."""
    return msgspec.structs.replace(card, incarnation=Incarnation(0))
