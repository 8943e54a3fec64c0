"""Policies: what decides, in plain Python. `docs/policies.md` says how to write one.

A policy is any object with a `role` and a `decide`; these are the ones that ship.
"""

from __future__ import annotations

from tensorcast_dask.policies.eviction import Lru, ValueAware
from tensorcast_dask.policies.placement import Pack, Spread
from tensorcast_dask.policies.rebalance import Rebalance
from tensorcast_dask.policies.replication import Popular, ReplicaFloor
from tensorcast_dask.policies.views import (
    ArtifactView,
    Copy,
    InstanceView,
    Migrate,
    MoveRequest,
    NodeView,
    Policy,
    RequestView,
    Role,
    View,
    Wanted,
)

__all__ = [
    "ArtifactView",
    "Copy",
    "InstanceView",
    "Lru",
    "Migrate",
    "MoveRequest",
    "NodeView",
    "Pack",
    "Policy",
    "Popular",
    "Rebalance",
    "ReplicaFloor",
    "RequestView",
    "Role",
    "Spread",
    "ValueAware",
    "View",
    "Wanted",
]
