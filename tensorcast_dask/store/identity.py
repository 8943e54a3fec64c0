"""Who this store is: its card, its cluster, its secrets.

Rules:

1. The card on disk is what `card` says, written whole at each change once it is shown.
2. Token and certificates live in memory only; they came over the start pipe or with an
   adoption and are never written or logged.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import msgspec

from tensorcast_dask.dataplane import hosts
from tensorcast_dask.exceptions import Mismatch
from tensorcast_dask.tensors.ids import ClusterId, Epoch, Incarnation, NodeId
from tensorcast_dask.tensors.messages import NodeCard

if TYPE_CHECKING:
    from pathlib import Path

    from tensorcast_dask.tensors.ids import HostId
    from tensorcast_dask.tensors.messages import (
        Adopt,
        LinkTarget,
        StoreSettings,
        TlsFiles,
    )

__all__ = ["Identity"]


class Identity:
    """The identity of one store process.

    Parameters
    ----------
    node : NodeId
        Minted by the starter or by `main`.
    host : HostId
        Identity of this host.
    folder : Path
        The store's folder in the run directory.
    settings : StoreSettings
        Labels and roles.
    link : LinkTarget, optional
        The cluster, where it is known from the start.
    """

    def __init__(
        self,
        *,
        node: NodeId,
        host: HostId,
        folder: Path,
        settings: StoreSettings,
        link: LinkTarget | None = None,
    ) -> None:
        self.node = node
        self.folder = folder
        self._writing = threading.Lock()
        self._shown = False
        self.link = link
        #: Highest epoch of a catalog seen.
        self.epoch = Epoch(0) if link is None else link.epoch
        self.card = NodeCard(
            node=node,
            incarnation=Incarnation(0),
            host=host,
            socket=hosts.socket_path(folder),
            pid=os.getpid(),
            pid_start=hosts.process_start(os.getpid()),
            roles=settings.roles,
            labels=settings.labels,
            host_memory_bytes=settings.host_memory_bytes,
            tls=link is not None and link.tls is not None,
        )

    @property
    def cluster(self) -> ClusterId:
        """Return the cluster's id; "" while there is none."""
        return ClusterId("") if self.link is None else self.link.cluster

    @property
    def token(self) -> bytes:
        """Return the cluster's token; b"" while there is none."""
        return b"" if self.link is None else self.link.token

    @property
    def tls(self) -> TlsFiles | None:
        """Return the cluster's certificates."""
        return None if self.link is None else self.link.tls

    def takes_ucx(self, mode: str) -> bool:
        """Say whether bytes may go over UCX: never beside TLS, of which UCX has none."""
        return mode != "off" and self.tls is None

    def check_cluster(self, link: LinkTarget, *, holds: bool) -> None:
        """Return when a worker with `link` may adopt.

        Raises
        ------
        Mismatch
            When this store holds replicas of another cluster.
        """
        if not (self.cluster and link.cluster) or link.cluster == self.cluster:
            return
        if holds:
            message = (
                f"this store holds artifacts of cluster {self.cluster}, the worker is of "
                f"{link.cluster}; end the store, or give the worker the journal of its cluster"
            )
            raise Mismatch(message, {"cluster": self.cluster})

    def adopted(self, request: Adopt, incarnation: Incarnation) -> NodeCard:
        """Become the asking worker's; the new card."""
        link = request.link
        if link.cluster or self.link is None:
            self.link = link
        else:  # a catalog that lost its journal takes the cluster from us
            self.link = msgspec.structs.replace(
                link, cluster=self.link.cluster, token=self.link.token
            )
        self.epoch = max(self.epoch, link.epoch)
        return self._write(
            incarnation=incarnation,
            name=request.name,
            worker=request.worker,
            mapping=request.mapping,
            labels=request.settings.labels,
            roles=request.settings.roles,
            host_memory_bytes=request.settings.host_memory_bytes,
            tls=self.tls is not None,
        )

    def greeted(self, cluster: ClusterId, epoch: Epoch) -> None:
        """Note what the catalog said of itself."""
        self.epoch = max(self.epoch, epoch)
        if self.link is not None:
            self.link = msgspec.structs.replace(
                self.link, cluster=cluster, epoch=self.epoch
            )

    def moved(self, host: str, port: int) -> None:
        """Note where the catalog listens now."""
        if self.link is not None:
            self.link = msgspec.structs.replace(self.link, host=host, port=port)

    def unattended(self) -> NodeCard:
        """Have no worker any more; the new card."""
        return self._write(worker="")

    def listens(self, host: str, port: int) -> NodeCard:
        """Note where the data port is; the new card."""
        return self._write(data_host=host, data_port=port)

    def has_instances(self, count: int) -> NodeCard:
        """Note how many instances are attached; the new card."""
        return self._write(instances=count)

    def offers(self, lanes: tuple[str, ...]) -> NodeCard:
        """Note which lanes of UCX are to be had here; the new card."""
        return self._write(ucx=lanes)

    def show(self) -> None:
        """Write the card, and from now on each change: who reads it may connect."""
        self._shown = True
        self._write()

    def hide(self) -> None:
        """Take the card away: nobody is to connect any more."""
        with self._writing:
            self._shown = False
            (self.folder / hosts.CARD_NAME).unlink(missing_ok=True)

    def _write(self, **changes: object) -> NodeCard:
        with self._writing:
            self.card = msgspec.structs.replace(self.card, **changes)
            if self._shown:
                hosts.write_card(self.folder, self.card)
            return self.card
