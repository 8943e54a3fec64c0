"""What a policy is, what it sees, and what it may decide.

Rules:

1. A policy suggests. Whoever carries a decision out checks it again against the truth of that
   moment: a policy can be slow, wrong or of yesterday, and nothing is lost by it.
2. A view is a value: it has no methods that ask anybody, and no clock but `now_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Protocol, TypeAlias

import msgspec

__all__ = [
    "Action",
    "ArtifactView",
    "Copy",
    "Decided",
    "InstanceView",
    "Migrate",
    "MoveRequest",
    "NodeView",
    "Policy",
    "RequestView",
    "Role",
    "View",
    "Wanted",
]


class Role(StrEnum):
    """What a policy decides."""

    #: What goes first when a tier is full: a weight for each generation.
    EVICT = "evict"
    #: Whether a new artifact is taken: None, or why not.
    ADMIT = "admit"
    #: Where a new artifact goes: a node, or None for the default.
    PLACE = "place"
    #: Which further copies there are to be: `Copy` and `Migrate`.
    REPLICATE = "replicate"
    #: What moves where, so that load is even: `Migrate` and `MoveRequest`.
    REBALANCE = "rebalance"


class _Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of what is only a value."""


# ---------------------------------------------------------------- what is seen
class NodeView(_Value, frozen=True, kw_only=True):
    """A node with a live store."""

    node: str
    host: str
    name: str = ""
    labels: dict[str, str] = {}
    capacity_bytes: int = 0
    #: What it could take, evicting what may be evicted.
    free_bytes: int = 0
    warm_bytes: int = 0
    #: Has a worker and is not being drained: takes new bytes.
    placeable: bool = True


class ArtifactView(_Value, frozen=True, kw_only=True):
    """One version of an artifact that the cluster owns."""

    id: str
    version: int
    generation: int
    nbytes: int
    #: Copies that were asked for, on different hosts.
    wanted: int = 1
    #: Nodes with a copy.
    holders: tuple[str, ...] = ()
    hosts: int = 0
    published: bool = False
    pinned: bool = False
    #: The version that its name means now.
    current: bool = True
    reads_per_s: float = 0.0
    #: Seconds that it took, or would take, to get it again from another node; None where
    #: nothing was measured.
    refetch_s: float | None = None
    labels: dict[str, str] = {}


class RequestView(_Value, frozen=True, kw_only=True):
    """One request (session) of an instance."""

    request: str
    tokens: int
    last_active_s: float
    migrations: int = 0
    running: bool = False
    migrating: bool = False


class InstanceView(_Value, frozen=True, kw_only=True):
    """An instance, as of its last push."""

    instance: str
    node: str = ""
    epoch: int = 0
    values: dict[str, float] = {}
    #: Its push still stands.
    fresh: bool = True
    draining: bool = False
    requests: tuple[RequestView, ...] = ()


class View(_Value, frozen=True, kw_only=True):
    """The system, as a policy sees it."""

    now_s: float
    nodes: tuple[NodeView, ...] = ()
    #: Those with too few copies first, then the most read; at most 512.
    artifacts: tuple[ArtifactView, ...] = ()
    #: (from, to, bytes a second), as measured.
    links: tuple[tuple[str, str, float], ...] = ()
    instances: tuple[InstanceView, ...] = ()


class Wanted(_Value, frozen=True, kw_only=True):
    """A new artifact that is to be admitted or placed."""

    id: str
    nbytes: int
    host: str = ""
    replicas: int = 1
    labels: dict[str, str] = {}


# ---------------------------------------------------------------- what is decided
class Copy(_Value, frozen=True, kw_only=True, tag=True):
    """Have a further copy at a node."""

    generation: int
    node: str
    why: str = ""


class Migrate(_Value, frozen=True, kw_only=True, tag=True):
    """Have a copy move from one node to another."""

    generation: int
    source: str
    node: str
    why: str = ""


class MoveRequest(_Value, frozen=True, kw_only=True, tag=True):
    """Have a request move from one instance to another.

    The epochs are those of the instances that were seen: whoever carries the move out compares
    them (`Rebalance.still_holds`).
    """

    request: str
    source: str
    target: str
    source_epoch: int = 0
    target_epoch: int = 0
    why: str = ""


Action: TypeAlias = Copy | Migrate | MoveRequest


class Decided(_Value, frozen=True, kw_only=True):
    """A policy's answer, whichever its role."""

    node: str = ""
    refusal: str = ""
    weights: dict[int, float] = {}
    actions: tuple[Action, ...] = ()


class Policy(Protocol):
    """Something that decides.

    Attributes
    ----------
    role : Role
        What.
    """

    role: Role

    def decide(
        self, view: View, wanted: Wanted | None = None
    ) -> str | Mapping[int, float] | Iterable[Action] | None:
        """Decide, from nothing but what is given; `wanted` is of admit and place."""
