"""The session: one program and the scheduler plugin."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from tensorcast_dask.tensors.ids import (
    ArtifactId,
    ClusterId,
    Epoch,
    Generation,
    HostId,
    NodeId,
    RequestId,
    SessionId,
    Version,
)
from tensorcast_dask.tensors.messages.instances import InstancesAsked
from tensorcast_dask.tensors.messages.plans import (
    BeginStep,
    EndPlan,
    EndStep,
    OpenPlan,
    PlanAsked,
    ResumePlan,
    StepEffect,
)
from tensorcast_dask.tensors.messages.policies import (
    InstallPolicy,
    PoliciesAsked,
    RemovePolicy,
    SetQuota,
)
from tensorcast_dask.tensors.messages.shared import (
    PROTOCOL,
    ArtifactInfo,
    Fact,
    Fault,
    Location,
    Message,
    NodeCard,
    Owner,
    Tier,
    TierUse,
    Wire,
)
from tensorcast_dask.tensors.messages.signals import HistoryAsked, SignalsAsked
from tensorcast_dask.tensors.messages.store import TlsFiles

__all__ = [
    "READS",
    "AbortCreated",
    "AliasState",
    "Answer",
    "CancelAsked",
    "CatalogStateAsked",
    "CloseSession",
    "CommitCreated",
    "Create",
    "Created",
    "Describe",
    "Described",
    "Destroy",
    "Destroyed",
    "DrainNode",
    "Drained",
    "Ensure",
    "ExplainAsked",
    "Explained",
    "KeepCreating",
    "ListArtifacts",
    "Listed",
    "LoadFile",
    "Locate",
    "Located",
    "Migrate",
    "Moved",
    "NodeState",
    "Nodes",
    "NodesAsked",
    "OpenSession",
    "OperationAsked",
    "OperationState",
    "Pin",
    "Pinned",
    "Publish",
    "Query",
    "RegisterView",
    "Release",
    "Resolve",
    "Rows",
    "SaveFile",
    "SessionOpen",
    "SessionRequest",
    "SetAlias",
    "StateJson",
    "Unpin",
]


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
    #: UUID of the device where the bytes are: a node of the caller's host with it, or none.
    device: str = ""
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
    #: UUID of one device, for the tiers `device` and `pinned`; "" = any.
    device: str = ""


class Moved(Wire, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Where the replica now is and what it took; of a save, what was written."""

    location: Location
    moved_bytes: int
    seconds: float
    via: str
    sources: tuple[NodeId, ...] = ()
    #: Of a save: the file or index that stands for the model, and every file of it.
    path: str = ""
    files: tuple[str, ...] = ()


class Migrate(Message, frozen=True, kw_only=True):
    """Copy, verify, switch the catalog, free the source. Answer: `Moved`."""

    rid: RequestId
    generation: Generation
    source: NodeId
    node: NodeId
    deadline_s: float
    tier: Tier = Tier.HOST
    device: str = ""


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

    def __str__(self) -> str:
        lines = [[str(cell) for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = [map(str.ljust, line, widths) for line in lines]
        return "\n".join("  ".join(line).rstrip() for line in shown)


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
    | InstancesAsked
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
    | SignalsAsked
    | HistoryAsked
    | InstallPolicy
    | RemovePolicy
    | PoliciesAsked
    | SetQuota
)


class Answer(Wire, frozen=True, kw_only=True):
    """The answer to one session request: a fault, or a value of the type it documents."""

    rid: RequestId
    fault: Fault | None = None
    value: msgspec.Raw = msgspec.Raw(b"\xc0")


#: Requests that change nothing, by name: when the scheduler goes away nothing is in doubt.
READS: Final = frozenset(
    {
        "Resolve",
        "Describe",
        "Locate",
        "ListArtifacts",
        "NodesAsked",
        "InstancesAsked",
        "ExplainAsked",
        "Query",
        "OperationAsked",
        "CatalogStateAsked",
        "PlanAsked",
        "SignalsAsked",
        "HistoryAsked",
    }
)
