"""Where new bytes go, and why there: a policy, without memory of its own.

Rules:

1. Only live, attended stores with an open link that are not being drained are chosen.
2. Nodes with room come before full ones, then those of the caller's host (bytes there are
   mapped, not moved), then those with more room, in sixteenths of their capacity; of
   equals one that has warm pages for the bytes (`docs/facts.md`: they are worth more than
   any other choice), then the one with most room, then the one that sorts first.
3. A node that could not hold the bytes if it were empty is never chosen.
4. What the catalog knows of free memory is as old as the last renewal: the store decides
   in the end, so a full node is chosen when there is no better one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from tensorcast_dask.exceptions import CapacityError, Mismatch, PeerLost
from tensorcast_dask.scheduler_plugin.state.nodes import Nodes
from tensorcast_dask.scheduler_plugin.state.records import NodeRecord
from tensorcast_dask.tensors.ids import HostId, NodeId
from tensorcast_dask.tensors.messages import Owner, Tier

__all__ = ["capacity_bytes", "choose", "free_bytes", "place"]

#: Differences of room below this part of a node's capacity are no reason to choose it.
_ROOM_STEPS: Final = 16


def capacity_bytes(node: NodeRecord) -> int:
    """Bytes that a node could hold in host memory when it held nothing else."""
    use = node.uses.get(Tier.HOST)
    return use.capacity_bytes if use is not None else 0


def free_bytes(node: NodeRecord) -> int:
    """Bytes that a node could take now, evicting what may be evicted."""
    use = node.uses.get(Tier.HOST)
    if use is None:
        return 0
    held = use.used_bytes - use.evictable_bytes + use.reserved_bytes
    return use.capacity_bytes - held - use.lingering_bytes - node.promised_bytes


def _warm_bytes(node: NodeRecord) -> int:
    use = node.uses.get(Tier.HOST)
    return use.warm_bytes if use is not None else 0


def choose(
    nodes: Iterable[NodeRecord],
    *,
    nbytes: int,
    host: HostId,
    only_host: bool = False,
    avoid_nodes: Collection[NodeId] = (),
    avoid_hosts: Collection[HostId] = (),
) -> tuple[NodeRecord, str]:
    """Choose a node for a replica, and say why.

    Parameters
    ----------
    nodes : iterable of NodeRecord
        All nodes.
    nbytes : int
        Size of the replica.
    host : HostId
        The caller's host, "" when it does not matter.
    only_host : bool
        Choose on that host or not at all.
    avoid_nodes, avoid_hosts : collection
        Never chosen.

    Raises
    ------
    CapacityError
        When no node is left, or none could hold so much.
    """
    live = [node for node in nodes if node.live and node.link and node.is_store]
    able = [
        node
        for node in live
        if node.attended
        and not node.draining
        and node.node not in avoid_nodes
        and node.host not in avoid_hosts
        and (not only_host or node.host == host)
    ]
    if not able:
        raise _nobody(live, nbytes, elsewhere=bool(avoid_hosts))
    big = [node for node in able if capacity_bytes(node) >= nbytes]
    if not big:
        most = max(capacity_bytes(node) for node in able)
        message = (
            f"{nbytes} bytes fit into no node; the largest holds {most}. Raise "
            "tensorcast.node.host-memory or split the artifact"
        )
        raise CapacityError(message, {"nbytes": nbytes, "largest": most})

    def rank(node: NodeRecord) -> tuple[bool, bool, int, bool, int, str]:
        free = free_bytes(node)
        room = free * _ROOM_STEPS // max(1, capacity_bytes(node))
        cold = _warm_bytes(node) < nbytes
        return (free < nbytes, node.host != host, -room, cold, -free, node.node)

    best = min(big, key=rank)
    where = "on the caller's host" if host and best.host == host else "in the cluster"
    why = f"most free memory {where}: {max(free_bytes(best), 0)} of {capacity_bytes(best)} bytes"
    if len(able) == 1:
        why = f"the only node that can take it, {where}"
    return best, why


def _nobody(live: list[NodeRecord], nbytes: int, *, elsewhere: bool) -> CapacityError:
    """Give the error for bytes that no node is there for."""
    if not live:
        why = "no node is running"
    elif elsewhere:
        why = (
            "no other host has a node for them (with its worker, and not being drained)"
        )
    else:
        why = "every node is unattended, is being drained or holds them already"
    message = f"no node can take the bytes: {why}; start a worker, or wait for one"
    return CapacityError(message, {"nbytes": nbytes})


def place(
    nodes: Nodes, wanted: NodeId, *, nbytes: int, host: HostId, owner: Owner
) -> tuple[NodeRecord, str]:
    """Choose the node that gets the first replica, and say why.

    Raises
    ------
    NotFound, PeerLost, Mismatch, CapacityError
        When the wanted one cannot, or none can.
    """
    if not wanted:
        if owner is Owner.CALLER:
            message = "a registration names the process that serves the memory"
            raise Mismatch(message)
        return choose(nodes.records.values(), nbytes=nbytes, host=host)
    node = nodes.live(wanted)
    if not node.link:
        message = f"node {node.label} has lost its link; try again when it is back"
        raise PeerLost(message, {"node": node.node})
    if node.is_store != (owner is Owner.SYSTEM):
        kind = "a store" if node.is_store else "a registering process"
        message = f"node {node.label} is {kind} and cannot own these bytes"
        raise Mismatch(message, {"node": node.node})
    if node.is_store:
        return choose([node], nbytes=nbytes, host=node.host)[0], "asked for by name"
    return node, "it registers its own memory"
