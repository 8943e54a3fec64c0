"""Where new bytes go, and why there: a policy, without memory of its own.

Rules:

1. Only live, attended stores with an open link that are not being drained are chosen.
2. Nodes with room come before full ones, then those of the caller's host (bytes there are
   mapped, not moved), then those with more room, in sixteenths of their capacity; of
   equals one that has warm pages for the bytes (`docs/facts.md`: they are worth more than
   any other choice), then the one with most room, then the one that sorts first.
3. All of this is asked of one tier, and where one device is asked for, of its node alone.
   A node that could not hold the bytes if it were empty is never chosen.
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
from tensorcast_dask.tensors.messages import Owner, Tier, TierUse

__all__ = ["capacity_bytes", "choose", "free_bytes", "offers", "place", "promise"]

#: Differences of room below this part of a node's capacity are no reason to choose it.
_ROOM_STEPS: Final = 16
_NONE: Final = TierUse()


def offers(node: NodeRecord, tier: Tier, device: str = "") -> bool:
    """Whether a node has a tier, and where one is named that device."""
    use = node.uses.get(tier, _NONE)
    return use.capacity_bytes > 0 and device in ("", use.device)


def capacity_bytes(node: NodeRecord, tier: Tier = Tier.HOST) -> int:
    """Bytes that a node could hold in a tier when it held nothing else."""
    return node.uses.get(tier, _NONE).capacity_bytes


def free_bytes(node: NodeRecord, tier: Tier = Tier.HOST) -> int:
    """Bytes that a node could take now, evicting what may be evicted."""
    use = node.uses.get(tier, _NONE)
    held = use.used_bytes - use.evictable_bytes + use.reserved_bytes
    promised = node.promised_bytes.get(tier, 0)
    return use.capacity_bytes - held - use.lingering_bytes - promised


def promise(node: NodeRecord, tier: Tier, nbytes: int) -> None:
    """Count bytes that were sent to a node since it last told its use."""
    node.promised_bytes[tier] = node.promised_bytes.get(tier, 0) + nbytes


def choose(
    nodes: Iterable[NodeRecord],
    *,
    nbytes: int,
    host: HostId,
    tier: Tier = Tier.HOST,
    device: str = "",
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
    tier : Tier
        Where the bytes are to lie.
    device : str
        UUID of the device that is asked for; "" = any.
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
    if device or tier is not Tier.HOST:
        able = [node for node in able if offers(node, tier, device)]
        if not able:
            raise _no_tier(tier, device)
    big = [node for node in able if capacity_bytes(node, tier) >= nbytes]
    if not big:
        most = max(capacity_bytes(node, tier) for node in able)
        message = (
            f"{nbytes} bytes fit into no node's {tier} tier; the largest holds {most}. "
            "Raise tensorcast.node.host-memory (or device-memory) or split the artifact"
        )
        raise CapacityError(message, {"nbytes": nbytes, "largest": most})

    def rank(node: NodeRecord) -> tuple[bool, bool, int, bool, int, str]:
        free = free_bytes(node, tier)
        room = free * _ROOM_STEPS // max(1, capacity_bytes(node, tier))
        cold = node.uses.get(tier, _NONE).warm_bytes < nbytes
        return (free < nbytes, node.host != host, -room, cold, -free, node.node)

    best = min(big, key=rank)
    where = "on the caller's host" if host and best.host == host else "in the cluster"
    free = max(free_bytes(best, tier), 0)
    why = f"most free memory {where}: {free} of {capacity_bytes(best, tier)} bytes"
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


def _no_tier(tier: Tier, device: str) -> CapacityError:
    """Give the error for a tier that no node has."""
    what = f"has device {device}" if device else f"has a {tier} tier"
    setting = "disk-dir" if tier is Tier.DISK else "device-memory"
    message = f"no node that may be chosen {what}; set tensorcast.node.{setting} for its workers"
    return CapacityError(message, {"tier": str(tier), "device": device})


def place(
    nodes: Nodes,
    wanted: NodeId,
    *,
    nbytes: int,
    host: HostId,
    owner: Owner,
    device: str = "",
) -> tuple[NodeRecord, str]:
    """Choose the node that gets the first replica, on a device where one is named; say why.

    Raises
    ------
    NotFound, PeerLost, Mismatch, CapacityError
        When the wanted one cannot, or none can.
    """
    if not wanted:
        if owner is Owner.CALLER:
            message = "a registration names the process that serves the memory"
            raise Mismatch(message)
        return choose(
            nodes.records.values(),
            nbytes=nbytes,
            host=host,
            tier=Tier.DEVICE if device else Tier.HOST,
            device=device,
            only_host=bool(device),
        )
    node = nodes.live(wanted)
    if not node.link:
        message = f"node {node.label} has lost its link; try again when it is back"
        raise PeerLost(message, {"node": node.node})
    if node.is_store != (owner is Owner.SYSTEM):
        kind = "a store" if node.is_store else "a registering process"
        message = f"node {node.label} is {kind} and cannot own these bytes"
        raise Mismatch(message, {"node": node.node})
    if node.is_store:
        tier = Tier.DEVICE if device else Tier.HOST
        chosen, _ = choose(
            [node], nbytes=nbytes, host=node.host, tier=tier, device=device
        )
        return chosen, "asked for by name, or by a policy"
    return node, "it registers its own memory"
