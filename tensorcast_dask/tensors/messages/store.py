"""The store protocol: a client, instance, worker or peer store talks to one store."""

from __future__ import annotations

from typing import TypeAlias

from tensorcast_dask.tensors.ids import (
    ArtifactId,
    ClusterId,
    Epoch,
    Generation,
    HostId,
    Incarnation,
    NodeId,
    RequestId,
    Version,
)
from tensorcast_dask.tensors.messages.devices import (
    AttachDevice,
    DeviceOrder,
    NextOrder,
    OrderOver,
)
from tensorcast_dask.tensors.messages.instances import (
    Attach,
    Attached,
    BeginLending,
    Call,
    CallAnswered,
    CallDropped,
    CallEnded,
    CallerHere,
    CallInstance,
    Changed,
    Dial,
    Dialled,
    Lend,
    LendEnded,
    Load,
    Mutating,
    Part,
    PartAsked,
    Replaced,
    Seen,
    SessionIn,
    SessionOut,
    Unlend,
)
from tensorcast_dask.tensors.messages.shared import (
    PROTOCOL,
    Fault,
    Message,
    NodeCard,
    Role,
    Wire,
)

__all__ = [
    "Abort",
    "Adopt",
    "Adopted",
    "Challenge",
    "Chunk",
    "ChunkMap",
    "ChunkMapAsked",
    "Commit",
    "Done",
    "End",
    "Fill",
    "FromInstance",
    "Hello",
    "LetGo",
    "LinkTarget",
    "Open",
    "Opened",
    "Proof",
    "Ranges",
    "ReadChunk",
    "ReadRanges",
    "Refused",
    "Reserve",
    "Reserved",
    "SendSlab",
    "State",
    "StateAsked",
    "StoreReply",
    "StoreRequest",
    "StoreSettings",
    "SumsAsked",
    "TlsFiles",
    "ToInstance",
    "UcxOpen",
    "UcxOpened",
    "Welcome",
    "Write",
]


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
    #: UUID of the device where the bytes are to lie; "" = host memory.
    device: str = ""


class Reserved(Message, frozen=True, kw_only=True):
    """Room is made."""

    generation: Generation
    mapped: bool
    #: The segment's pages are already there (a recycled segment).
    warm: bool = False
    #: The slab on the device; the description is what holds it, and says who has it open.
    handle: bytes = b""


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
    #: UUID of a device: the copy there is handed out by handle; NotFound where there is none.
    device: str = ""
    #: The reader keeps the slab open; else it copies and closes it at once.
    share: bool = False
    #: The reader can read another process's memory.
    lent: bool = False


class Opened(Message, frozen=True, kw_only=True):
    """The answer to `Open`."""

    generation: Generation
    index: bytes
    nbytes: int
    mapped: bool
    #: The slab on the device; the description is what holds it, and says who has it open.
    handle: bytes = b""
    #: Memory of an instance, where `Open.lent` allows it: whose, where (as in `Fill`), and
    #: which content; a reader that cannot read it asks for chunks instead.
    pid: int = 0
    spans: bytes = b""
    stamp: int = 0
    #: Memory that is lent on the reader's device: its handles; a span is then (place in the
    #: segment, which handle, place in that memory, length), and counts by the stamp.
    slabs: tuple[bytes, ...] = ()


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


class SendSlab(Message, frozen=True, kw_only=True):
    """A node wants a copy that lies on the device, on its own device.

    Answer: `ChunkMap`, with all sums. From then on the connection is that of both nodes' device
    processes: the reader's says `UcxOpen`, then `ReadChunk` for chunk after chunk, until it
    hangs up. NotFound, Gone where there is no such copy; InvalidArgument where the
    node's device process has no UCX or may not use it.
    """

    rid: RequestId
    generation: Generation


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
    #: The device process that is attached; 0 = none.
    device_pid: int = 0
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


FromInstance: TypeAlias = (
    Attach
    | Changed
    | Load
    | CallEnded
    | SessionIn
    | BeginLending
    | Lend
    | Mutating
    | Unlend
    | Part
)
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
    | SendSlab
    | AttachDevice
    | NextOrder
    | OrderOver
    | SumsAsked
    | StateAsked
    | Adopt
    | LetGo
    | End
    | CallInstance
    | Dial
    | FromInstance
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
    | DeviceOrder
    | State
    | Adopted
    | Attached
    | CallAnswered
    | Dialled
    | Done
    | Refused
)
#: What is said to an instance at any time; answers to its own requests come between.
ToInstance: TypeAlias = (
    Call
    | CallDropped
    | CallerHere
    | Seen
    | SessionOut
    | Replaced
    | PartAsked
    | LendEnded
)
