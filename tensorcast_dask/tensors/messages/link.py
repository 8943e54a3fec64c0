"""The link: one store (or registering process) and the scheduler plugin."""

from __future__ import annotations

from typing import TypeAlias

from tensorcast_dask.tensors.ids import (
    ArtifactId,
    ClusterId,
    Epoch,
    Generation,
    NodeId,
    RequestId,
    Version,
)
from tensorcast_dask.tensors.messages.instances import (
    DoDetach,
    InstanceSeen,
    InstancesHere,
    SessionIn,
    SessionOut,
)
from tensorcast_dask.tensors.messages.plans import DoRun
from tensorcast_dask.tensors.messages.policies import DoWeigh
from tensorcast_dask.tensors.messages.shared import (
    Fault,
    Location,
    Message,
    NodeCard,
    ReplicaRecord,
    Tier,
    TierUse,
)
from tensorcast_dask.tensors.messages.signals import InstanceGone, InstanceLoad
from tensorcast_dask.tensors.messages.store import Challenge, Hello, Proof

__all__ = [
    "DoCancel",
    "DoDrop",
    "DoEnd",
    "DoLinger",
    "DoLoad",
    "DoMark",
    "DoPull",
    "DoSave",
    "DropGranted",
    "FromNode",
    "Inventory",
    "LinkRefused",
    "MayDrop",
    "NodeHello",
    "NodeWelcome",
    "Renew",
    "Renewed",
    "ReplicaDropped",
    "ReplicaReady",
    "TaskDone",
    "TaskProgress",
    "TaskSeen",
    "ToNode",
]


class NodeHello(Message, frozen=True, kw_only=True):
    """After Hello/Challenge/Proof: who this node is. Answer: `NodeWelcome` or `LinkRefused`."""

    card: NodeCard
    cluster: ClusterId
    epoch: Epoch  # highest catalog epoch that this node has seen
    counter: int = 0  # highest generation that it holds, so that none is minted twice
    uses: dict[Tier, TierUse] = {}


class NodeWelcome(Message, frozen=True, kw_only=True):
    """The node is in the catalog; its lease runs."""

    cluster: ClusterId
    epoch: Epoch
    lease_ttl_s: float
    need_index: bool = False


class LinkRefused(Message, frozen=True, kw_only=True):
    """The node may not join; `retry` says whether to try again."""

    fault: Fault
    retry: bool = True


class Inventory(Message, frozen=True, kw_only=True):
    """What the node holds; several messages, the last has `more` false. Answered by drops."""

    replicas: tuple[ReplicaRecord, ...]
    more: bool = False


class Renew(Message, frozen=True, kw_only=True):
    """Renew the node's lease."""

    seq: int
    uses: dict[Tier, TierUse] = {}
    #: Reads by programs since the last renewal, of those that were read most.
    reads: dict[Generation, int] = {}


class Renewed(Message, frozen=True, kw_only=True):
    """The lease runs `lease_ttl_s` from when renewal `seq` was *sent*."""

    seq: int
    lease_ttl_s: float


class ReplicaReady(Message, frozen=True, kw_only=True):
    """A replica is complete and frozen."""

    record: ReplicaRecord
    #: It shares the memory of another node of this host.
    shared_with: NodeId = NodeId("")


class ReplicaDropped(Message, frozen=True, kw_only=True):
    """A replica is no more."""

    generation: Generation
    tier: Tier
    why: str


class MayDrop(Message, frozen=True, kw_only=True):
    """May this node drop its last copy (all tiers) of these? Answer: `DropGranted`."""

    rid: RequestId
    generations: tuple[Generation, ...]


class DropGranted(Message, frozen=True, kw_only=True):
    """These may go: the catalog no longer lists them at this node."""

    rid: RequestId
    generations: tuple[Generation, ...]


class TaskProgress(Message, frozen=True, kw_only=True):
    """A task moves."""

    task: int
    done_bytes: int
    total_bytes: int


class TaskDone(Message, frozen=True, kw_only=True):
    """A task ended; sent again after a reconnect until `TaskSeen`."""

    task: int
    fault: Fault | None = None
    moved_bytes: int = 0
    seconds: float = 0.0
    #: For explain: where the bytes came from and how ("shm", "tcp", "disk", "here").
    via: str = ""
    #: Why a better way was left on the way; "" where none was.
    left: str = ""
    sources: tuple[NodeId, ...] = ()
    #: Bytes that came from each of `sources`; () where that is not known.
    shares: tuple[int, ...] = ()
    result: bytes = b""  # msgpack, by kind of task
    #: What the node has to tell of it, for stories: seconds ago, and what.
    lines: tuple[tuple[float, str], ...] = ()


class TaskSeen(Message, frozen=True, kw_only=True):
    """The catalog has the outcome; the store may forget it."""

    task: int


class DoPull(Message, frozen=True, kw_only=True):
    """Bring a replica to this node's tier, from any of `sources` (best first)."""

    task: int
    generation: Generation
    id: ArtifactId
    version: Version
    nbytes: int
    tier: Tier
    sources: tuple[Location, ...]
    deadline_s: float
    trace: str = ""  # the span that it follows from, `tensors.traces`
    labels: dict[str, str] = {}
    published: bool = False
    #: Under which generation the sources hold these bytes; 0 = the same. Another one when a
    #: registration's present content is copied as a version of the cluster's own.
    source_generation: Generation = Generation(0)


class DoDrop(Message, frozen=True, kw_only=True):
    """Drop a generation: all of it (`tier` None) or one tier. `final`: it is destroyed."""

    task: int
    generation: Generation
    tier: Tier | None = None
    final: bool = False
    why: str = ""


class DoMark(Message, frozen=True, kw_only=True):
    """What the catalog knows of a replica that the store must act on."""

    generation: Generation
    published: bool = False
    spare: bool = False  # other hosts hold it: it may be asked for (`MayDrop`)
    pinned_s: float = 0.0  # not to be evicted for so long; inf = until unpinned


class DoLoad(Message, frozen=True, kw_only=True):
    """Read a model file (or sharded model) of this host into a replica.

    `TaskDone.result` is the encoded index. The catalog commits when it is ready.
    """

    task: int
    generation: Generation
    id: ArtifactId
    version: Version
    path: str
    deadline_s: float
    trace: str = ""  # the span that it follows from, `tensors.traces`
    labels: dict[str, str] = {}


class DoSave(Message, frozen=True, kw_only=True):
    """Write a replica as safetensors on this host."""

    task: int
    generation: Generation
    path: str
    deadline_s: float
    trace: str = ""  # the span that it follows from, `tensors.traces`
    metadata: dict[str, str] = {}
    max_shard_bytes: int = 0


class DoCancel(Message, frozen=True, kw_only=True):
    """Stop a task; it ends with DeadlineExceeded or as done."""

    task: int


class DoLinger(Message, frozen=True, kw_only=True):
    """Extend what is left of an unattended store's life."""

    ttl_s: float
    why: str


class DoEnd(Message, frozen=True, kw_only=True):
    """The store ends."""

    why: str


FromNode: TypeAlias = (
    Hello
    | Proof
    | NodeHello
    | Inventory
    | Renew
    | ReplicaReady
    | ReplicaDropped
    | MayDrop
    | TaskProgress
    | TaskDone
    | InstancesHere
    | InstanceLoad
    | InstanceGone
    | SessionIn
)
ToNode: TypeAlias = (
    Challenge
    | NodeWelcome
    | LinkRefused
    | Renewed
    | DropGranted
    | TaskSeen
    | DoPull
    | DoDrop
    | DoMark
    | DoLoad
    | DoSave
    | DoCancel
    | DoLinger
    | DoEnd
    | InstanceSeen
    | DoDetach
    | SessionOut
    | DoWeigh
    | DoRun
)
