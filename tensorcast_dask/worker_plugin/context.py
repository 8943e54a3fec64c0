"""What code that runs in a worker can know of its node.

Rule: `node_of` tells what is true now. After the store was replaced it names the new one;
callers keep no handle for longer than one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from tensorcast_dask.exceptions import CatalogUnavailable, PeerLost

if TYPE_CHECKING:
    from distributed import Worker

    from tensorcast_dask.config import Settings
    from tensorcast_dask.tensors.ids import ClusterId, HostId
    from tensorcast_dask.tensors.messages import NodeCard, TlsFiles
    from tensorcast_dask.worker_plugin.keeper import Keeper

__all__ = ["NodeHandle", "forget", "keeper_of", "node_of", "remember"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHandle:
    """One worker's node, now."""

    card: NodeCard
    cluster: ClusterId
    #: The cluster's token.
    token: bytes
    settings: Settings
    #: Dask's `Security` of the worker.
    security: Any
    tls: TlsFiles | None
    host: HostId
    scheduler_address: str
    #: Options for `distributed.comm.connect` to the scheduler.
    connection_args: dict[str, Any]


#: Keepers of the workers of this process. Workers share a process in tests and notebooks.
_KEEPERS: WeakKeyDictionary[Worker, Keeper] = WeakKeyDictionary()


def remember(worker: Worker, keeper: Keeper) -> None:
    """Make a worker's keeper known to its tasks."""
    _KEEPERS[worker] = keeper


def forget(worker: Worker) -> None:
    """Drop the keeper of a worker that closes."""
    _KEEPERS.pop(worker, None)


def keeper_of(worker: Worker) -> Keeper | None:
    """Give who looks after the worker's store; None where our plugin has not run."""
    return _KEEPERS.get(worker)


def node_of(worker: Worker) -> NodeHandle:
    """Give the node of a worker.

    Raises
    ------
    CatalogUnavailable
        When the worker has no plugin of ours.
    PeerLost
        When the worker has no store now; the message says why.
    """
    keeper = _KEEPERS.get(worker)
    if keeper is None:
        message = (
            "this worker has no tensorcast plugin; connect to the cluster once, or start "
            "the scheduler with --preload tensorcast_dask.deploy"
        )
        raise CatalogUnavailable(message)
    card = keeper.card
    if card is None:
        message = f"this worker has no store now: {keeper.why}"
        raise PeerLost(message)
    return NodeHandle(
        card=card,
        cluster=keeper.link.cluster,
        token=keeper.link.token,
        settings=keeper.settings,
        security=worker.security,
        tls=keeper.link.tls,
        host=card.host,
        scheduler_address=worker.scheduler.address,
        connection_args=worker.connection_args,
    )
