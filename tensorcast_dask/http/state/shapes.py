"""What answers are made of; the OpenAPI document is written from these.

Rules:

1. Every field is always there.
2. Generations and epochs are text: many readers of JSON know no number but a double.
3. No answer has a token, a setting, a path of a socket, or a label that is a secret by its name.
"""

from __future__ import annotations

import msgspec

from tensorcast_dask.tensors.signals import Reading

__all__ = [
    "Artifact",
    "ArtifactPage",
    "Changes",
    "Error",
    "Failed",
    "Instance",
    "Instances",
    "Node",
    "Nodes",
    "Plan",
    "PlanListed",
    "Plans",
    "Replica",
    "Shape",
    "Signal",
    "Signals",
    "StepEnded",
    "Tensor",
    "TierRoom",
    "WholeArtifact",
]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what stands in an answer."""


class Error(Shape, frozen=True, kw_only=True):
    """An error of the product's tree (docs/errors.md)."""

    kind: str
    branch: str
    message: str
    retryable: bool
    data: dict[str, str | int | float | bool | None]


class Failed(Shape, frozen=True, kw_only=True):
    """Every answer whose status is 400 or more."""

    error: Error


class Artifact(Shape, frozen=True, kw_only=True):
    """One version of an artifact, or a view of it."""

    id: str
    version: int
    generation: str
    stage: str
    owner: str
    bytes: int
    tensors: int
    labels: dict[str, str]
    degraded: str
    base: str


class ArtifactPage(Shape, frozen=True, kw_only=True):
    """Some artifacts, by id; `after` asks for the next ones, and is "" at the end."""

    artifacts: list[Artifact]
    after: str


class Tensor(Shape, frozen=True, kw_only=True):
    """One tensor: its bytes are C order, little-endian."""

    name: str
    dtype: str
    shape: list[int]
    bytes: int
    etag: str


class Replica(Shape, frozen=True, kw_only=True):
    """Where bytes are."""

    node: str
    name: str
    host: str
    tier: str


class WholeArtifact(Shape, frozen=True, kw_only=True):
    """One version with its tensors and replicas."""

    artifact: Artifact
    tensors: list[Tensor]
    replicas: list[Replica]


class TierRoom(Shape, frozen=True, kw_only=True):
    """Bytes of one tier of one node."""

    capacity_bytes: int
    used_bytes: int
    reserved_bytes: int
    pinned_bytes: int
    evictable_bytes: int
    replicas: int


class Node(Shape, frozen=True, kw_only=True):
    """A node; `worker` is the Dask address of its worker, "" without one."""

    node: str
    name: str
    host: str
    worker: str
    kind: str
    roles: list[str]
    labels: dict[str, str]
    attended: bool
    lease_left_s: float
    tiers: dict[str, TierRoom]


class Nodes(Shape, frozen=True, kw_only=True):
    """All nodes whose lease runs."""

    nodes: list[Node]


class Instance(Shape, frozen=True, kw_only=True):
    """A process that is attached to a node."""

    name: str
    node: str
    labels: dict[str, str]
    functions: list[str]
    engine: list[str]
    holds: dict[str, int]
    load: dict[str, float]
    load_age_s: float | None
    draining: bool
    poisoned: str


class Instances(Shape, frozen=True, kw_only=True):
    """All of them."""

    instances: list[Instance]


class Signal(Shape, frozen=True, kw_only=True):
    """A fact about the running system (docs/signals.md)."""

    name: str
    value: Reading
    as_of: float
    staleness: float
    epoch: str
    freshness: str


class Signals(Shape, frozen=True, kw_only=True):
    """Signals at one instant; `more`: ask with a longer prefix."""

    signals: list[Signal]
    events: list[Signal]
    more: bool


class Changes(Shape, frozen=True, kw_only=True):
    """The data of one server-sent event `changes`; the first has all that there is."""

    changed: list[Signal]
    gone: list[str]
    events: list[Signal]
    missed: bool


class StepEnded(Shape, frozen=True, kw_only=True):
    """How a step of a plan ended; `value` is null for what only Python can read."""

    status: str
    node: str
    bytes: int
    seconds: float
    attempts: int
    error: Error | None
    value: object


class Plan(Shape, frozen=True, kw_only=True):
    """A run of a plan; `steps` has those that have ended."""

    key: str
    status: str
    message: str
    error: Error | None
    steps: dict[str, StepEnded]


class PlanListed(Shape, frozen=True, kw_only=True):
    """A run, counted."""

    key: str
    status: str
    steps: int
    done: int
    failed: int
    skipped: int
    cancelled: int


class Plans(Shape, frozen=True, kw_only=True):
    """Runs that are known."""

    plans: list[PlanListed]
    more: bool
