"""What the catalog remembers, one class a noun.

Rules:

1. A record is plain data; the part of the catalog that owns it changes it, nobody else.
2. What must outlive the scheduler has a `...Row` twin, packed into one journal row. What
   has none (leases, links, tasks) is found out anew after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from tensorcast_dask.scheduler_plugin.state.events import Row
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    Generation,
    HostId,
    Incarnation,
    NodeId,
    SessionId,
    Version,
)
from tensorcast_dask.tensors.messages import (
    ArtifactInfo,
    NodeCard,
    Owner,
    Stage,
    Tier,
    TierUse,
)

#: Tiers from the nearest to the farthest: the order in which a reader wants them.
NEAREST: Final = (Tier.DEVICE, Tier.PINNED, Tier.HOST, Tier.DISK)

NO_NODE: Final = NodeId("")
NO_HOST: Final = HostId("")
NO_VERSION: Final = Version(0)

#: Published, spare, pinned until; None: what the node knows is not known.
Told: TypeAlias = tuple[bool, bool, float] | None


# ---------------------------------------------------------------- in memory
@dataclass(slots=True, kw_only=True)
class Replica:
    """What one node holds of one version."""

    node: NodeId
    #: Never empty: a replica without a tier is taken out.
    tiers: tuple[Tier, ...]
    #: Not claimed by the node's current life (restart, lapsed lease, new incarnation);
    #: never listed, never counted as a copy.
    suspect: bool = False
    #: What the node was last told by `DoMark`.
    told: Told = (False, False, 0.0)

    @property
    def nearest(self) -> Tier:
        """The tier that a reader is sent to."""
        return min(self.tiers, key=NEAREST.index)


@dataclass(slots=True, kw_only=True)
class VersionRecord:
    """One life of one version of one artifact."""

    id: ArtifactId
    version: Version
    generation: Generation
    owner: Owner
    nbytes: int
    tensors: int
    index_digest: str
    index: bytes
    labels: dict[str, str]
    #: Distinct hosts that the caller wants it on.
    replicas: int = 1
    #: True until `CommitCreated`; only then is there a row for it.
    creating: bool = True
    #: Never goes back to False.
    published: bool = False
    degraded: str = ""
    content_digest: str = ""
    #: By node, in order of arrival; exactly the records of `Replicas.by_node`.
    holders: dict[NodeId, Replica] = field(default_factory=dict)
    #: It was said that no copy is left; taken back when a node brings one.
    said_lost: bool = False
    #: Who held the last copy, once there is no holder.
    last_holder: NodeId = NO_NODE


@dataclass(slots=True, kw_only=True)
class AliasRecord:
    """A movable name."""

    name: ArtifactId
    #: Generation of the version it means; may have been destroyed since.
    target: Generation
    target_id: ArtifactId
    #: Goes up with each move, also over removals.
    alias_generation: int


@dataclass(slots=True, kw_only=True)
class ViewRecord:
    """A derived artifact: described, not stored."""

    id: ArtifactId
    base: Generation
    view: bytes
    index_digest: str
    nbytes: int
    tensors: int


@dataclass(slots=True, kw_only=True)
class PinRecord:
    """A promise not to evict."""

    pin: int
    generation: Generation
    #: "" = wherever it lies.
    node: NodeId
    until_s: float


@dataclass(slots=True, kw_only=True)
class NodeRecord:
    """One store, or one registering process."""

    node: NodeId
    card: NodeCard
    #: 0 while no link is open. At most one link speaks for a node.
    link: int = 0
    #: The lease runs. Only live nodes are listed, placed on, or asked.
    live: bool = False
    lease_until_s: float = 0.0
    #: The lease looked lapsed once; judged again a moment later.
    doubted: bool = False
    #: Has a worker. Unattended nodes are read from, not placed on.
    attended: bool = True
    draining: bool = False
    #: Why it was told to end: told so again should it come back.
    ended: str = ""
    #: Why it is not live.
    gone: str = "it was not heard of since the scheduler started"
    #: Its inventory is not complete yet.
    claiming: bool = False
    #: What the inventory has brought so far.
    claimed: dict[Generation, tuple[Tier, ...]] = field(default_factory=dict)
    #: It has leave to drop these, and has not said yet that it did (or joined anew).
    granted: dict[Generation, None] = field(default_factory=dict)
    uses: dict[Tier, TierUse] = field(default_factory=dict)
    #: What it was told that its replicas are worth, on this link.
    weights: dict[Generation, float] = field(default_factory=dict)
    #: Given out by placement since `uses` was last told, by tier.
    promised_bytes: dict[Tier, int] = field(default_factory=dict)

    @property
    def host(self) -> HostId:
        """Host identity."""
        return self.card.host

    @property
    def incarnation(self) -> Incarnation:
        """The adoption that speaks now."""
        return self.card.incarnation

    @property
    def label(self) -> str:
        """How messages name it."""
        short = self.node[:8]
        return f"{self.card.name} ({short})" if self.card.name else short

    @property
    def is_store(self) -> bool:
        """False for a process that serves its own registered memory."""
        return self.card.kind == "store"


@dataclass(slots=True, kw_only=True)
class SessionRecord:
    """One program."""

    session: SessionId
    host: HostId
    pid: int = 0
    #: 0 while its comm is down.
    connection: int = 0
    #: Creations in the order they were asked for.
    creations: dict[Generation, None] = field(default_factory=dict)
    #: Raised by one at each (re)opening, so that a timer can tell that it came back.
    openings: int = 0


# ---------------------------------------------------------------- rows
class VersionRow(msgspec.Struct, array_like=True, frozen=True):
    """A committed version, without its index."""

    id: ArtifactId = ArtifactId("")
    version: Version = Version(0)
    generation: Generation = Generation(0)
    owner: Owner = Owner.SYSTEM
    nbytes: int = 0
    tensors: int = 0
    index_digest: str = ""
    content_digest: str = ""
    labels: dict[str, str] = {}
    replicas: int = 1
    published: bool = False
    degraded: str = ""
    holders: tuple[tuple[NodeId, tuple[Tier, ...]], ...] = ()


class CreatingRow(msgspec.Struct, array_like=True, frozen=True):
    """A creation, so that a put outlives a restart in the middle of it."""

    record: VersionRow
    session: SessionId
    node: NodeId
    ttl_s: float


class AliasRow(msgspec.Struct, array_like=True, frozen=True):
    """An alias; target 0 = removed, kept for its generation."""

    name: ArtifactId = ArtifactId("")
    target: Generation = Generation(0)
    target_id: ArtifactId = ArtifactId("")
    alias_generation: int = 0


class ViewRow(msgspec.Struct, array_like=True, frozen=True):
    """A view."""

    id: ArtifactId = ArtifactId("")
    base: Generation = Generation(0)
    view: bytes = b""
    index_digest: str = ""
    nbytes: int = 0
    tensors: int = 0


class PinRow(msgspec.Struct, array_like=True, frozen=True):
    """A pin; after a restart it runs for its whole time again."""

    pin: int = 0
    generation: Generation = Generation(0)
    node: NodeId = NodeId("")
    ttl_s: float = 0.0


class NodeRow(msgspec.Struct, array_like=True, frozen=True):
    """A node that was seen, so that a loss can name it."""

    card: NodeCard


_ENCODER: Final = msgspec.msgpack.Encoder()


def row_of(record: VersionRecord) -> VersionRow:
    """Make what the journal keeps of a version."""
    return VersionRow(
        record.id,
        record.version,
        record.generation,
        record.owner,
        record.nbytes,
        record.tensors,
        record.index_digest,
        record.content_digest,
        record.labels,
        record.replicas,
        record.published,
        record.degraded,
        tuple((one.node, one.tiers) for one in record.holders.values()),
    )


def version_row(record: VersionRecord) -> Row:
    """Pack a version for the journal."""
    blob = _ENCODER.encode(row_of(record))
    return Row(kind="version", key=str(record.generation), blob=blob)


def version_of(row: VersionRow, index: bytes, *, creating: bool) -> VersionRecord:
    """Make a version again from its row, without its holders."""
    return VersionRecord(
        id=row.id,
        version=row.version,
        generation=row.generation,
        owner=row.owner,
        nbytes=row.nbytes,
        tensors=row.tensors,
        index_digest=row.index_digest,
        index=index,
        labels=row.labels,
        replicas=row.replicas,
        creating=creating,
        published=row.published,
        degraded=row.degraded,
        content_digest=row.content_digest,
    )


def gone_rows(record: VersionRecord) -> tuple[Row, Row]:
    """Make the rows that take a version away."""
    key = str(record.generation)
    return (
        Row(kind="version", key=key, blob=None),
        Row(kind="index", key=key, blob=None),
    )


def packed(kind: str, key: str, row: msgspec.Struct) -> Row:
    """Pack any other row."""
    return Row(kind=kind, key=key, blob=_ENCODER.encode(row))


# ---------------------------------------------------------------- answers
def info_of(
    record: VersionRecord, *, lost: bool, view: ViewRecord | None = None
) -> ArtifactInfo:
    """Describe a version, or a view of it, for a caller."""
    if record.creating:
        stage = Stage.CREATING
    elif lost:
        stage = Stage.LOST
    else:
        stage = Stage.PUBLISHED if record.published else Stage.COMMITTED
    if view is None:
        return ArtifactInfo(
            id=record.id,
            version=record.version,
            generation=record.generation,
            stage=stage,
            owner=record.owner,
            nbytes=record.nbytes,
            tensors=record.tensors,
            index_digest=record.index_digest,
            labels=record.labels,
            degraded=record.degraded,
        )
    return ArtifactInfo(
        id=view.id,
        version=record.version,
        generation=record.generation,
        stage=stage,
        owner=record.owner,
        nbytes=view.nbytes,
        tensors=view.tensors,
        index_digest=view.index_digest,
        labels=record.labels,
        degraded=record.degraded,
        base=record.id,
        view=view.view,
    )
