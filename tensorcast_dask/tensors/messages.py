"""Everything that one process says to another, as types.

Three conversations, each a closed union of frozen structs:

* *store protocol*, `StoreRequest` -> `StoreReply`: a client, instance, worker or peer
  store talks to one store, over its unix socket (descriptors may travel) or its TCP data
  port (bytes travel as frame payloads).
* *link*, `FromNode` <-> `ToNode`: one store (or registering process) and the scheduler
  plugin, over one TCP connection that the store opens.
* *session*, `SessionRequest` -> `Answer`: one program and the scheduler plugin, over one
  Dask comm that the session opens.

Rules:

1. A message is validated as it is decoded; what does not fit is the sender's fault and is
   refused (`decode` raises WrongPeer), never half understood.
2. A request carries `rid`; the same rid asks for the same change and gets the first
   answer again; another payload under it is refused (Mismatch).
3. What could be late carries a generation, an incarnation or an epoch.
4. Unknown fields are ignored, unknown ops are refused: a newer peer may say more, not
   other things. `PROTOCOL` is raised when a meaning changes.
5. Times are durations from receipt (`deadline_s`: seconds that are left), never clock
   readings: hosts do not share a clock.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeAlias, TypeVar

import msgspec

from tensorcast_dask.exceptions import TensorCastError, WrongPeer, error_from_wire
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    ClusterId,
    Epoch,
    Generation,
    HostId,
    Incarnation,
    NodeId,
    RequestId,
    SessionId,
    Version,
)

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
    #: Lanes that its UCX has, the best first; () where it has none, or may not use it.
    ucx: tuple[str, ...] = ()


class TierUse(Wire, frozen=True, kw_only=True):
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


class Location(Wire, frozen=True, kw_only=True):
    """One replica."""

    card: NodeCard
    tier: Tier


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


# ---------------------------------------------------------------- store protocol
class Hello(Message, frozen=True, kw_only=True):
    """First frame on every connection to a store and on every link."""

    protocol: int = PROTOCOL
    cluster: ClusterId = ClusterId("")
    #: Whom the caller expects; "" and 0 mean anyone (probes only).
    node: NodeId = NodeId("")
    incarnation: Incarnation = Incarnation(0)
    role: Role = Role.CLIENT
    pid: int = 0
    host: HostId = HostId("")
    nonce: bytes = b""


class Challenge(Message, frozen=True, kw_only=True):
    """The answerer proves that it holds the token and asks for the same."""

    nonce: bytes
    proof: bytes


class Proof(Message, frozen=True, kw_only=True):
    """The caller's proof."""

    proof: bytes


class Welcome(Message, frozen=True, kw_only=True):
    """The connection is open."""

    card: NodeCard
    cluster: ClusterId
    epoch: Epoch
    chunk_bytes: int
    small_bytes: int  # at most this much lives in a slab and is copied out


class Reserve(Message, frozen=True, kw_only=True):
    """Make room for one replica that the caller will fill.

    Answer: `Reserved`, with a write description when `mapped`.
    """

    rid: RequestId
    generation: Generation
    id: ArtifactId
    version: Version
    nbytes: int
    deadline_s: float
    #: False: the caller has no shared memory with the store and will use `Write`.
    map: bool = True
    labels: dict[str, str] = {}


class Reserved(Message, frozen=True, kw_only=True):
    """Room is made."""

    generation: Generation
    mapped: bool
    #: The segment's pages are already there (a recycled segment).
    warm: bool = False


class Write(Message, frozen=True, kw_only=True):
    """Bytes for a reservation, as payload, at `offset`. Answer: `Done`."""

    rid: RequestId
    generation: Generation
    offset: int


class Fill(Message, frozen=True, kw_only=True):
    """Read the caller's own memory into a reservation: the fastest way into warm pages.

    `spans` is little-endian u64 triples (offset in the segment, address, length), ascending
    and apart; what they leave out becomes zero. Over the unix socket only, and where the
    kernel lets the store read the caller (`process_vm_readv`): UnsupportedPlatform
    otherwise, and nothing is lost. Answer: `Done`.
    """

    rid: RequestId
    generation: Generation
    spans: bytes


class Commit(Message, frozen=True, kw_only=True):
    """The bytes are there; freeze them. Answer: `Done`, or Incomplete while a writer is left.

    With `inline` the payload of this frame is the whole content (small artifacts need no
    `Reserve`): one message a put.
    """

    rid: RequestId
    generation: Generation
    index: bytes
    inline: bool = False
    id: ArtifactId = ArtifactId("")
    version: Version = Version(0)
    labels: dict[str, str] = {}


class Abort(Message, frozen=True, kw_only=True):
    """Give a reservation back. Answer: `Done`; unknown generations are fine."""

    rid: RequestId
    generation: Generation


class Open(Message, frozen=True, kw_only=True):
    """Read a committed replica of this node.

    Answer: `Opened`, with a read-only description of its own (`mapped`), or with the bytes
    as payload (small artifacts). Gone / NotFound / Incomplete otherwise. Restores from disk
    when that is where the bytes are, unless `deadline_s` is 0: then it is DeadlineExceeded.
    """

    rid: RequestId
    generation: Generation
    deadline_s: float
    map: bool = True


class Opened(Message, frozen=True, kw_only=True):
    """The answer to `Open`."""

    generation: Generation
    index: bytes
    nbytes: int
    mapped: bool


class ChunkMapAsked(Message, frozen=True, kw_only=True):
    """What does this store have of that generation? Answer: `ChunkMap`."""

    rid: RequestId
    generation: Generation


class ChunkMap(Message, frozen=True, kw_only=True):
    """Which chunks can be served now, and what they must hash to."""

    generation: Generation
    nbytes: int
    chunk_bytes: int
    index: bytes
    #: One bit a chunk, least significant first; b"" means all of them.
    have: bytes = b""
    #: xxh3_64 of each chunk, little-endian u64s; zero where not yet known.
    sums: bytes = b""
    #: Caller-leased memory: which content this is. Chunks of another stamp do not belong to
    #: it (the owner mutated in between): the copy is thrown away and made again.
    stamp: int = 0


class ReadChunk(Message, frozen=True, kw_only=True):
    """One chunk. Answer: `Chunk` with the bytes as payload.

    With `ucx` the bytes follow over the connection's line, `nbytes` of them.
    """

    rid: RequestId
    generation: Generation
    chunk: int
    ucx: bool = False


class Chunk(Message, frozen=True, kw_only=True):
    """Payload: the bytes of the chunk; `sum` is their xxh3_64."""

    generation: Generation
    chunk: int
    sum: int
    stamp: int = 0  # see ChunkMap
    nbytes: int = 0  # what follows over UCX


class ReadRanges(Message, frozen=True, kw_only=True):
    """Byte ranges of a segment, for views.

    `ranges` is little-endian u64 pairs (offset, length). Answer: `Ranges`, payload: the
    ranges one after the other. With `ucx` they follow over the connection's line.
    """

    rid: RequestId
    generation: Generation
    ranges: bytes
    ucx: bool = False


class Ranges(Message, frozen=True, kw_only=True):
    """Payload: the ranges; `sum` is the xxh3_64 of all of it."""

    generation: Generation
    sum: int
    stamp: int = 0  # see ChunkMap
    nbytes: int = 0  # what follows over UCX


class UcxOpen(Message, frozen=True, kw_only=True):
    """A reader opens a line of UCX for this connection, in place of a former one.

    Answer: `UcxOpened`. InvalidArgument where the node has no UCX or may not use it.
    """

    rid: RequestId
    #: Of the reader's own UCX worker. UCX proves nothing: the connection has.
    address: bytes


class UcxOpened(Message, frozen=True, kw_only=True):
    """The holder's end is there; bytes go as tag messages, numbered from 0, in pieces."""

    address: bytes
    piece_bytes: int


class SumsAsked(Message, frozen=True, kw_only=True):
    """Chunk sums, computed now where they are not known. Answer: `ChunkMap`."""

    rid: RequestId
    generation: Generation


class StateAsked(Message, frozen=True, kw_only=True):
    """Answer: `State`."""

    rid: RequestId


class State(Message, frozen=True, kw_only=True):
    """`debug_state()` as JSON text."""

    json: bytes


class StoreSettings(Wire, frozen=True, kw_only=True):
    """What a store is told at its start and at each adoption. Bytes and seconds."""

    run_dir: str = ""
    cluster_name: str = ""  # the folder under the run directory
    host: HostId = HostId("")  # "" = found out by the store
    host_memory_bytes: int = 0
    reserve_fraction: float = 0.05
    reserve_min_bytes: int = 256 << 20
    own_segment_bytes: int = 1 << 20  # from here on an artifact owns a segment
    slab_bytes: int = 16 << 20
    alloc_step_bytes: int = 64 << 20
    warm_bytes: int = -1  # most that the warm pool keeps; -1 = a quarter of the budget
    chunk_bytes: int = 8 << 20
    connections: int = 0  # per peer; 0 = one for each core, from 2 to 4
    congestion: str = ""  # TCP congestion control; "" = see `dataplane.congestion`
    inflight_bytes: int = 256 << 20
    bandwidth_bytes_per_s: float = 0.0  # cap per connection; 0 = none (tests)
    stall_s: float = 2.0  # a source that sends nothing for so long is left
    ucx: str = "off"  # off, auto (where it has a better lane than TCP) or on
    lease_ttl_s: float = 5.0
    reservation_ttl_s: float = 30.0
    released_ttl_s: float = 10.0
    orphan_ttl_s: float = 300.0
    result_ttl_s: float = 600.0
    data_host: str = ""  # interface of the data port
    data_ports: tuple[int, int] = (0, 0)  # range; (0, 0) = any
    disk_dir: str = ""
    disk_bytes: int = 0
    disk_dir_allow_tmpfs: bool = False
    disk_direct: bool = True
    allow_uids: tuple[int, ...] = ()
    max_descriptors: int = 0  # 0 = what RLIMIT_NOFILE allows
    roles: tuple[str, ...] = ("basic", "gateway", "shard_home")
    labels: dict[str, str] = {}


class TlsFiles(Wire, frozen=True, kw_only=True):
    """Certificates as PEM text; both sides verify."""

    ca: str
    cert: str
    key: str


class LinkTarget(Wire, frozen=True, kw_only=True):
    """Where the scheduler plugin listens for links, and the secrets for it."""

    host: str
    port: int
    cluster: ClusterId
    token: bytes
    epoch: Epoch
    tls: TlsFiles | None = None


class Adopt(Message, frozen=True, kw_only=True):
    """A worker wants this store. Answer: `Adopted`, or StaleOwner naming the holder.

    Granted when no worker holds the store, when the former one is dead (pidfd), or when
    `grant` is an HMAC by the scheduler over (node, epoch, worker) with a higher epoch.
    The connection stays open: it *is* the worker's control connection, and its end is
    news, not death.
    """

    rid: RequestId
    worker: str  # Dask address
    name: str  # Dask name
    pid: int
    settings: StoreSettings
    link: LinkTarget
    mapping: bool = True
    grant: bytes = b""


class Adopted(Message, frozen=True, kw_only=True):
    """The store is the worker's; incarnation is new.

    Cluster, token and epoch are the store's own, told where the worker's link named none: for a
    scheduler that has lost all three.
    """

    card: NodeCard
    replicas: int
    nbytes: int
    cluster: ClusterId = ClusterId("")
    token: bytes = b""
    epoch: Epoch = Epoch(0)


class LetGo(Message, frozen=True, kw_only=True):
    """The worker gives the store up: it ends after `ttl_s` unless adopted again."""

    rid: RequestId
    ttl_s: float
    why: str


class End(Message, frozen=True, kw_only=True):
    """The store ends now; its memory goes with the last reader."""

    rid: RequestId
    why: str


class Done(Message, frozen=True, kw_only=True):
    """Nothing to add."""

    nbytes: int = 0


class Refused(Message, frozen=True, kw_only=True):
    """The request was not carried out."""

    fault: Fault


StoreRequest: TypeAlias = (
    Hello
    | Proof
    | Reserve
    | Write
    | Fill
    | Commit
    | Abort
    | Open
    | ChunkMapAsked
    | ReadChunk
    | ReadRanges
    | UcxOpen
    | SumsAsked
    | StateAsked
    | Adopt
    | LetGo
    | End
)
StoreReply: TypeAlias = (
    Challenge
    | Welcome
    | Reserved
    | Opened
    | ChunkMap
    | Chunk
    | Ranges
    | UcxOpened
    | State
    | Adopted
    | Done
    | Refused
)


# ---------------------------------------------------------------- link
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
    sources: tuple[NodeId, ...] = ()
    result: bytes = b""  # msgpack, by kind of task


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
    labels: dict[str, str] = {}


class DoSave(Message, frozen=True, kw_only=True):
    """Write a replica as safetensors on this host."""

    task: int
    generation: Generation
    path: str
    deadline_s: float
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
)


# ---------------------------------------------------------------- session
class OpenSession(Message, frozen=True, kw_only=True):
    """First message of a session; answered by `SessionOpen`."""

    rid: RequestId
    session: SessionId
    pid: int
    host: HostId
    protocol: int = PROTOCOL
    #: Requests below this number are answered and may be forgotten.
    settled: int = 0


class SessionOpen(Wire, frozen=True, kw_only=True):
    """The catalog's greeting: what a session needs to talk to stores."""

    cluster: ClusterId
    epoch: Epoch
    token: bytes
    nodes: tuple[NodeCard, ...]
    chunk_bytes: int
    small_bytes: int
    deadline_default_s: float
    #: Where processes that register memory open their link.
    link_host: str = ""
    link_port: int = 0
    tls: TlsFiles | None = None
    recovery: str = ""  # what a recovery had to say; "" when nothing was lost
    stall_s: float = 2.0  # a holder that sends nothing for so long is left for another


class Create(Message, frozen=True, kw_only=True):
    """Take a name for a new version. Answer: `Created`.

    `version`: 0 = the first version of a new id, -1 = the next one, n = that one.
    AlreadyExists when it is taken (data: generation, version, index_digest, nbytes).
    The creation is the session's; it is rolled back when the session ends or `ttl_s`
    passes without a sign of life.

    With `commit` it goes on as if a `CommitCreated` under that request id, with
    `commit_deadline_s`, had come right behind it: one message less for a small put. Whoever
    does not know whether that happened sends the `CommitCreated` itself.
    """

    rid: RequestId
    id: ArtifactId
    nbytes: int
    index: bytes
    index_digest: str
    tensors: int
    version: int = 0
    owner: Owner = Owner.SYSTEM
    labels: dict[str, str] = {}
    node: NodeId = NodeId("")  # wanted node; "" = by policy
    host: HostId = HostId("")  # the caller's host: nodes there are preferred
    replicas: int = 1
    ttl_s: float = 60.0
    commit: RequestId = RequestId("")
    commit_deadline_s: float = 0.0


class Created(Wire, frozen=True, kw_only=True):
    """The name is the caller's to fill."""

    version: Version
    generation: Generation
    node: NodeCard
    why: str  # how the node was chosen


class CommitCreated(Message, frozen=True, kw_only=True):
    """The bytes are at the node; make the version exist. Answer: `ArtifactInfo`.

    Answered after the node has announced its replica, the wanted number of replicas has
    been made (or the shortfall noted in `degraded`), and the journal has committed.
    """

    rid: RequestId
    generation: Generation
    deadline_s: float


class AbortCreated(Message, frozen=True, kw_only=True):
    """Give the name back. Answer: nothing."""

    rid: RequestId
    generation: Generation


class KeepCreating(Message, frozen=True, kw_only=True):
    """A creation is alive (long puts, `create`)."""

    rid: RequestId
    generation: Generation
    ttl_s: float


class Resolve(Message, frozen=True, kw_only=True):
    """Which generation does a name mean now? Answer: `ArtifactInfo`.

    `version` 0: the newest published, or the newest committed while none is published;
    `published`: only a published one (`latest`). `id` may be an alias or a view's id.
    """

    rid: RequestId
    id: ArtifactId
    version: int = 0
    published: bool = False


class Describe(Message, frozen=True, kw_only=True):
    """The encoded index of a generation. Answer: `Described`."""

    rid: RequestId
    generation: Generation


class Described(Wire, frozen=True, kw_only=True):
    """An index."""

    info: ArtifactInfo
    index: bytes


class Locate(Message, frozen=True, kw_only=True):
    """Where are the replicas? Answer: `Located`. Gone, NotFound, DataLost otherwise."""

    rid: RequestId
    generation: Generation


class Located(Wire, frozen=True, kw_only=True):
    """Replicas that are believed alive, best first for the asking session's host."""

    info: ArtifactInfo
    locations: tuple[Location, ...]


class Ensure(Message, frozen=True, kw_only=True):
    """Bring a replica to a node: prefetch, replicate, a read where the bytes are not.

    Answer: `Moved`. Concurrent requests for one (generation, node, tier) join.
    `node` "" = any node of `host`, else any other host than the holders'.
    """

    rid: RequestId
    generation: Generation
    node: NodeId
    deadline_s: float
    tier: Tier = Tier.HOST
    host: HostId = HostId("")
    why: str = "prefetch"  # prefetch | replicate | read | migrate


class Moved(Wire, frozen=True, kw_only=True):
    """Where the replica now is and what it took."""

    location: Location
    moved_bytes: int
    seconds: float
    via: str
    sources: tuple[NodeId, ...] = ()


class Migrate(Message, frozen=True, kw_only=True):
    """Copy, verify, switch the catalog, free the source. Answer: `Moved`."""

    rid: RequestId
    generation: Generation
    source: NodeId
    node: NodeId
    deadline_s: float
    tier: Tier = Tier.HOST


class Release(Message, frozen=True, kw_only=True):
    """Drop one node's replica, or end a caller's lease.

    Never the last copy of a system-owned version (Mismatch). Answer: nothing.
    """

    rid: RequestId
    generation: Generation
    node: NodeId = NodeId("")
    deadline_s: float = 60.0


class Publish(Message, frozen=True, kw_only=True):
    """Make a version visible to `latest`. Answer: `ArtifactInfo`. Idempotent."""

    rid: RequestId
    generation: Generation


class Destroy(Message, frozen=True, kw_only=True):
    """End a version (`generation`), or all of an id. Answer: `Destroyed`. Idempotent.

    Answered after the journal has committed and every reachable holder has dropped it
    (or lost its lease): no later read finds it.
    """

    rid: RequestId
    id: ArtifactId
    generation: Generation = Generation(0)
    deadline_s: float = 60.0


class Destroyed(Wire, frozen=True, kw_only=True):
    """What this request ended; nothing where it was gone already.

    A repeat under the same `rid` gets the first answer while the catalog lives; its
    successor only knows that nothing is there, and says so.
    """

    versions: tuple[Version, ...]


class Pin(Message, frozen=True, kw_only=True):
    """Promise not to evict, for `ttl_s`, at one node or at all that hold it.

    CapacityError when the pinned bytes of a node would pass its pin limit. Answer: `Pinned`.
    """

    rid: RequestId
    generation: Generation
    ttl_s: float
    node: NodeId = NodeId("")


class Pinned(Wire, frozen=True, kw_only=True):
    """A pin."""

    pin: int
    nodes: tuple[NodeId, ...]


class Unpin(Message, frozen=True, kw_only=True):
    """Take a pin back (`pin`), or all of a generation (`pin` 0). Answer: nothing.

    A pin that is not there any more is no error.
    """

    rid: RequestId
    generation: Generation
    pin: int = 0


class SetAlias(Message, frozen=True, kw_only=True):
    """Move a name by compare-and-set. Answer: `AliasState`.

    `expect`: generation of the alias that the caller saw; 0 = must not exist; -1 = any.
    Mismatch (data: generation) otherwise. `generation` 0 removes the alias.
    """

    rid: RequestId
    name: ArtifactId
    generation: Generation  # of the artifact version
    expect: int = -1


class AliasState(Wire, frozen=True, kw_only=True):
    """An alias after a move; `alias_generation` goes up with each."""

    name: ArtifactId
    alias_generation: int
    info: ArtifactInfo | None


class RegisterView(Message, frozen=True, kw_only=True):
    """Make a view findable by its id. Answer: `ArtifactInfo`. Idempotent."""

    rid: RequestId
    id: ArtifactId  # the view's deterministic id, or the name the caller gave
    generation: Generation  # of the base
    view: bytes
    index_digest: str
    nbytes: int
    tensors: int


class LoadFile(Message, frozen=True, kw_only=True):
    """Import a model file that a node's host can read. Answer: `ArtifactInfo`."""

    rid: RequestId
    id: ArtifactId
    path: str
    deadline_s: float
    version: int = 0
    node: NodeId = NodeId("")
    host: HostId = HostId("")
    labels: dict[str, str] = {}
    replicas: int = 1


class SaveFile(Message, frozen=True, kw_only=True):
    """Write a version as safetensors on a holder's host. Answer: `Moved`."""

    rid: RequestId
    generation: Generation
    path: str
    deadline_s: float
    node: NodeId = NodeId("")
    host: HostId = HostId("")
    metadata: dict[str, str] = {}
    max_shard_bytes: int = 0


class ListArtifacts(Message, frozen=True, kw_only=True):
    """Page through the catalog by id. Answer: `Listed`."""

    rid: RequestId
    prefix: str = ""
    labels: dict[str, str] = {}
    after: str = ""  # "<id>\x00<version>" of the last one seen
    limit: int = 1000
    all_versions: bool = False


class Listed(Wire, frozen=True, kw_only=True):
    """One page."""

    infos: tuple[ArtifactInfo, ...]
    after: str = ""  # "" = the end


class NodesAsked(Message, frozen=True, kw_only=True):
    """Answer: `Nodes`."""

    rid: RequestId


class NodeState(Wire, frozen=True, kw_only=True):
    """A node as the catalog sees it."""

    card: NodeCard
    uses: dict[Tier, TierUse]
    attended: bool
    lease_left_s: float


class Nodes(Wire, frozen=True, kw_only=True):
    """All nodes whose lease runs, ordered by name."""

    nodes: tuple[NodeState, ...]


class ExplainAsked(Message, frozen=True, kw_only=True):
    """Why is it as it is? `ref`: an artifact id, a request id, or a node. Answer: `Explained`."""

    rid: RequestId
    ref: str


class Explained(Wire, frozen=True, kw_only=True):
    """Sentences, oldest first: (seconds ago, what)."""

    lines: tuple[tuple[float, str], ...]


class Query(Message, frozen=True, kw_only=True):
    """One SELECT over the catalog's tables. Answer: `Rows`."""

    rid: RequestId
    sql: str
    limit: int = 10_000
    deadline_s: float = 600.0


class Rows(Wire, frozen=True, kw_only=True):
    """A result set; values are plain (dates and times as text, blobs as hex)."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Fact, ...], ...]
    truncated: bool = False


class OperationAsked(Message, frozen=True, kw_only=True):
    """How does the request `asked` stand? Answer: `OperationState`."""

    rid: RequestId
    asked: RequestId


class OperationState(Wire, frozen=True, kw_only=True):
    """Status of one operation: waiting, running, done, failed, cancelled, unknown."""

    status: str
    done_bytes: int = 0
    total_bytes: int = 0
    message: str = ""


class CancelAsked(Message, frozen=True, kw_only=True):
    """Stop the request `asked`; it is answered DeadlineExceeded("cancelled"). Answer: nothing."""

    rid: RequestId
    asked: RequestId


class DrainNode(Message, frozen=True, kw_only=True):
    """Move what a node alone holds to others, then end it. Answer: `Drained`."""

    rid: RequestId
    node: NodeId
    deadline_s: float
    end: bool = True


class Drained(Wire, frozen=True, kw_only=True):
    """The receipt."""

    moved: tuple[Generation, ...]
    moved_bytes: int
    stayed: tuple[tuple[Generation, str], ...]  # and why


class CatalogStateAsked(Message, frozen=True, kw_only=True):
    """`debug_state()` of the catalog as JSON. Answer: `State`-like `StateJson`."""

    rid: RequestId


class StateJson(Wire, frozen=True, kw_only=True):
    """JSON text."""

    json: bytes


class CloseSession(Message, frozen=True, kw_only=True):
    """The session ends: its creations are rolled back, its pins stay. Answer: nothing."""

    rid: RequestId


# ---------------------------------------------------------------- plans
class StepStatus(StrEnum):
    """How a step of a plan ended."""

    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"  # a step before it failed
    CANCELLED = "cancelled"


class RunStatus(StrEnum):
    """How a run of a plan stands."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    #: Nobody carries it on: its Dask tasks are gone. It can be resumed.
    INTERRUPTED = "interrupted"


class StepOutcome(Wire, frozen=True, kw_only=True):
    """How a step ended; the first that is recorded counts."""

    status: StepStatus
    #: Class of the value on the wire; "pickle" for what a function returned, "" for none.
    kind: str = ""
    value: bytes = b""
    #: Where it ran.
    node: str = ""
    moved_bytes: int = 0
    #: From its first attempt to its end.
    seconds: float = 0.0
    attempts: int = 0
    fault: Fault | None = None


class OpenPlan(Message, frozen=True, kw_only=True):
    """Open a run under a key, or find the run that is there. Answer: `PlanState`.

    Mismatch when the key is another plan's. The key is on disk before the answer, so
    before the first effect.
    """

    rid: RequestId
    key: str
    digest: str
    #: JSON of the plan.
    spec: bytes
    #: Functions and arguments by step, pickled; opaque here.
    payloads: dict[str, bytes] = {}
    deadline_s: float
    #: Each step looks once.
    poll: bool = False
    #: Name of the Dask task that ends the run.
    report: str = ""


class PlanState(Wire, frozen=True, kw_only=True):
    """A run of a plan."""

    key: str
    #: This run; a resumed one has another number.
    run: int
    digest: str
    status: RunStatus
    #: The request made this run: whoever asked has to carry it out.
    started: bool = False
    left_s: float = 0.0
    poll: bool = False
    #: Why it is not done.
    message: str = ""
    fault: Fault | None = None
    outcomes: dict[str, StepOutcome] = {}
    #: Only where they were asked for.
    spec: bytes = b""
    payloads: dict[str, bytes] = {}


class PlanAsked(Message, frozen=True, kw_only=True):
    """How does a run stand? Answer: `PlanState`, at its end or after `wait_s`."""

    rid: RequestId
    key: str
    wait_s: float = 0.0
    #: With the plan and its payloads.
    whole: bool = False


class ResumePlan(Message, frozen=True, kw_only=True):
    """Go on with a run that ended before it was done. Answer: `PlanState`, whole.

    What is done stays done. `run` is the one that was seen to end: of several who ask, one
    is told `started`.
    """

    rid: RequestId
    key: str
    run: int
    deadline_s: float
    poll: bool = False
    report: str = ""


class EndPlan(Message, frozen=True, kw_only=True):
    """A run is over, or (`cancel`, with `run` 0 whichever runs) is to be. Answer: `PlanState`."""

    rid: RequestId
    key: str
    run: int
    cancel: bool = False


class BeginStep(Message, frozen=True, kw_only=True):
    """May this step run? Answer: `StepState`. StaleOwner when its run is over."""

    rid: RequestId
    key: str
    run: int
    step: str
    node: str = ""


class StepState(Wire, frozen=True, kw_only=True):
    """What a step has come to, or how long it may take."""

    outcome: StepOutcome | None = None
    left_s: float = 0.0
    poll: bool = False


class StepEffect(Message, frozen=True, kw_only=True):
    """One change of a step, carried out once however often it is asked for.

    The change is known by its run, step and place among the step's changes (`number`), not
    by its content: the first answer that is no fault stands. Answer: that of the change.
    """

    rid: RequestId
    key: str
    run: int
    step: str
    number: int
    #: From 1; a higher one tries a change again that ended in a fault.
    attempt: int
    #: A `SessionRequest`, packed; its own `rid` is of no account.
    request: bytes


class EndStep(Message, frozen=True, kw_only=True):
    """A step has ended. Answer: the `StepOutcome` that is recorded, which may be another."""

    rid: RequestId
    key: str
    run: int
    step: str
    outcome: StepOutcome


SessionRequest: TypeAlias = (
    OpenSession
    | Create
    | CommitCreated
    | AbortCreated
    | KeepCreating
    | Resolve
    | Describe
    | Locate
    | Ensure
    | Migrate
    | Release
    | Publish
    | Destroy
    | Pin
    | Unpin
    | SetAlias
    | RegisterView
    | LoadFile
    | SaveFile
    | ListArtifacts
    | NodesAsked
    | ExplainAsked
    | Query
    | OperationAsked
    | CancelAsked
    | DrainNode
    | CatalogStateAsked
    | CloseSession
    | OpenPlan
    | PlanAsked
    | ResumePlan
    | EndPlan
    | BeginStep
    | StepEffect
    | EndStep
)


class Answer(Wire, frozen=True, kw_only=True):
    """The answer to one session request: a fault, or a value of the type it documents."""

    rid: RequestId
    fault: Fault | None = None
    value: msgspec.Raw = msgspec.Raw(b"\xc0")


# ---------------------------------------------------------------- codec
T = TypeVar("T")

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODERS: Final[dict[object, msgspec.msgpack.Decoder[object]]] = {}


def encode(message: Wire) -> bytes:
    """Pack one message or value."""
    return _ENCODER.encode(message)


def decode(raw: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Unpack and check one message of a union, or one value.

    Parameters
    ----------
    raw : bytes-like
        What `encode` made.
    kind : type
        A struct, or one of the unions of this module.

    Raises
    ------
    WrongPeer
        When the bytes are no such message.
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.msgpack.Decoder(kind)
    try:
        value = decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = (
            f"the peer sent what is no message of this protocol ({error}); closing"
        )
        raise WrongPeer(message) from error
    return value  # type: ignore[return-value]
