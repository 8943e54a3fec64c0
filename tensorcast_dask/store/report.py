"""`debug_state()` of a store: everything that must be at its baseline when idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tensorcast_dask.store.core import now_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.store.core import Core
    from tensorcast_dask.store.ends import Ends
    from tensorcast_dask.store.identity import Identity
    from tensorcast_dask.store.instances import InstanceDesk

__all__ = ["debug_state"]


def debug_state(
    core: Core,
    *,
    identity: Identity,
    ends: Ends,
    connections: Callable[[], int],
    transfers: Callable[[], int],
    lease_left_s: Callable[[], float],
    desk: InstanceDesk,
    driven: Callable[[], int],
) -> bytes:
    """Describe the store as JSON text.

    `busy` holds what is zero when idle; `generations` the table; the rest is standing.
    """
    with core.lock:
        table = core.table
        at_s = now_s()
        uses = {str(tier): msgspec.to_builtins(u) for tier, u in core.uses().items()}
        for tier, stock in table.tiers.items():
            # `omit_defaults` leaves zeros out on the wire; here they are wanted.
            uses[str(tier)] = {
                "capacity_bytes": 0,
                "used_bytes": 0,
                "reserved_bytes": 0,
                "pinned_bytes": 0,
                "evictable_bytes": 0,
                "warm_bytes": 0,
                "lingering_bytes": 0,
                "shared_bytes": 0,
                "replicas": 0,
                **uses[str(tier)],
                "held_bytes": stock.held_bytes,
                "slabs": len(stock.slabs.segments),
            }
        report: dict[str, object] = {
            "node": identity.node,
            "incarnation": ends.adoption.incarnation,
            "standing": str(ends.adoption.standing),
            "ends_in_s": _finite(ends.adoption.ends_s - at_s),
            "worker": identity.card.worker,
            "cluster": identity.cluster,
            "epoch": identity.epoch,
            "lease_left_s": _finite(lease_left_s()),
            "resident_bytes": sum(s.used_bytes for s in table.tiers.values()),
            "logical_bytes": sum(
                r.nbytes for r in table.replicas.values() if r.committed
            ),
            "tiers": uses,
            "busy": {
                "reservations": len(table.fillings),
                "pins": sum(ends_s > at_s for ends_s in table.pins.values()),
                "leases": sum(table.leased.values()),
                "transfers": transfers(),
                "requests": core.results.running,
                "calls": desk.calls,
                "plans": driven(),
            },
            "instances": len(desk.attachments),
            "device_pid": ends.device_pid(),
            "connections": connections(),
            "segments": len(core.shelf),
            "generations": {
                str(generation): [
                    f"{copy.tier}:{copy.life.name.lower()}" for copy in replica.copies
                ]
                for generation, replica in table.replicas.items()
            },
        }
    return msgspec.json.encode(report)


def _finite(seconds: float) -> float | None:
    return None if seconds == float("inf") else seconds
