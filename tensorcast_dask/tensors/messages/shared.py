"""Values that stand in messages of more than one conversation."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

from tensorcast_dask.exceptions import TensorCastError, error_from_wire
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    Generation,
    HostId,
    Incarnation,
    NodeId,
    Version,
)

__all__ = [
    "PROTOCOL",
    "ArtifactInfo",
    "Fact",
    "Fault",
    "Location",
    "Message",
    "NodeCard",
    "Owner",
    "ReplicaRecord",
    "Role",
    "Stage",
    "Tier",
    "TierUse",
    "Wire",
]

PROTOCOL: Final = 1


class Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A value inside a message."""


class Message(Wire, frozen=True, kw_only=True, tag_field="op", tag=True):
    """A message of its own; `op` on the wire is the class name."""


# ---------------------------------------------------------------- shared values
class Tier(StrEnum):
    """Where bytes lie, nearest first."""

    DEVICE = "device"
    PINNED = "pinned"
    HOST = "host"
    DISK = "disk"


class Owner(StrEnum):
    """Who manages the memory."""

    SYSTEM = "system"
    CALLER = "caller"


class Stage(StrEnum):
    """Life of one artifact version in the catalog."""

    CREATING = "creating"
    COMMITTED = "committed"
    PUBLISHED = "published"
    LOST = "lost"
    DESTROYED = "destroyed"


class Role(StrEnum):
    """Who opens a connection to a store."""

    CLIENT = "client"
    WORKER = "worker"
    INSTANCE = "instance"
    PEER = "peer"
    DEVICE = "device"
    PROBE = "probe"


Fact: TypeAlias = str | int | float | bool | None


class Fault(Wire, frozen=True, kw_only=True):
    """An error on the wire."""

    kind: str
    message: str
    data: dict[str, Fact] = {}

    @classmethod
    def of(cls, error: TensorCastError) -> Fault:
        """Describe an error for the wire."""
        return cls(kind=error.kind, message=error.message, data=error.data)

    def error(self) -> TensorCastError:
        """Make the error again on this side."""
        return error_from_wire(self.kind, self.message, self.data)


class NodeCard(Wire, frozen=True, kw_only=True):
    """How to find and recognise a node; also what stands in its run directory."""

    node: NodeId
    incarnation: Incarnation
    host: HostId
    #: Path of the unix socket; of use only on the same host.
    socket: str
    #: Where the TCP data port listens; port 0 while it does not.
    data_host: str = ""
    data_port: int = 0
    #: Label: the Dask worker's name and address now, "" while unattended.
    name: str = ""
    worker: str = ""
    pid: int = 0
    pid_start: int = 0  # clock ticks since boot, field 22 of /proc/<pid>/stat
    protocol: int = PROTOCOL
    roles: tuple[str, ...] = ("basic", "gateway", "shard_home")
    labels: dict[str, str] = {}
    #: "store", or "instance" for a process that serves its own registered memory.
    kind: str = "store"
    #: False while Dask's memory monitors would count our maps: tasks get copies.
    mapping: bool = True
    tls: bool = False
    #: The host memory that it may take; what all of a host's may take is looked at by workers.
    host_memory_bytes: int = 0
    #: Lanes that its UCX has, the best first; () where it has none, or may not use it.
    ucx: tuple[str, ...] = ()
    #: How many instances are attached, as far as the card was written anew since.
    instances: int = 0

    def __repr__(self) -> str:
        return f"<node {self.name or self.kind!r} {self.node[:8]}>"


class TierUse(Wire, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Bytes of one tier of one node."""

    capacity_bytes: int = 0
    used_bytes: int = 0  # committed replicas, by unique storage
    reserved_bytes: int = 0  # being filled
    pinned_bytes: int = 0
    evictable_bytes: int = 0
    warm_bytes: int = 0  # free segments kept faulted in
    lingering_bytes: int = 0  # destroyed here, still mapped by a reader
    shared_bytes: int = 0  # mapped from another node of this host, not counted in used
    replicas: int = 0
    #: UUID of the device, for the tiers `device` and `pinned`.
    device: str = ""


class Location(Wire, frozen=True, kw_only=True):
    """One replica."""

    card: NodeCard
    tier: Tier

    def __repr__(self) -> str:
        return f"<{self.tier} of {self.card!r}>"


class ArtifactInfo(Wire, frozen=True, kw_only=True):
    """What the catalog says about one artifact version."""

    id: ArtifactId
    version: Version
    generation: Generation
    stage: Stage
    owner: Owner
    nbytes: int  # length of the segment
    tensors: int
    #: Digest of the encoded index: equal digests mean equal names, dtypes and shapes.
    index_digest: str = ""
    labels: dict[str, str] = {}
    degraded: str = ""  # why, when fewer replicas than asked
    tier: Tier | None = None  # where the put that gave it brought the bytes
    #: For a derived artifact: its base and the encoded view; `generation` is the base's.
    base: ArtifactId = ArtifactId("")
    view: bytes = b""


class ReplicaRecord(Wire, frozen=True, kw_only=True):
    """One replica as its store announces it; enough to rebuild a lost catalog."""

    generation: Generation
    id: ArtifactId
    version: Version
    tier: Tier
    nbytes: int
    index_digest: str
    content_digest: str = ""  # "" until the chunk sums are known
    published: bool = False
    labels: dict[str, str] = {}
    owner: Owner = Owner.SYSTEM
    #: The encoded index; sent where the catalog asked for it (`NodeWelcome.need_index`).
    index: bytes = b""
