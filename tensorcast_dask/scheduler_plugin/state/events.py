"""What the catalog is told, and what it asks for.

The whole talk between the catalog (pure) and its shells (Dask comms, link server, journal
thread). A shell turns what arrives into one event, hands it to `Catalog.handle`, and
carries every instruction out, in order:

    catalog = Catalog(settings, recovered)
    for instruction in catalog.handle(event, now_s=monotonic()):
        ...

Rules:

1. `now_s` is one monotonic clock and never goes back between two calls.
2. `handle` never raises on what a peer sent: every request is answered, every message
   taken or ignored.
3. A shell adds no decision. Instructions are ready to be carried out when they are
   handed over: an answer that depends on a change comes out of the `handle(Journaled)`
   that makes it durable, not before. A shell holds nothing back.
4. A *connection* or *link* is a number that the shell mints for each comm or socket,
   rising. News of an old one never harms its successor.
5. `TimePassed` is told at every `WakeAt` (only the latest counts) and may be told at any
   other time. It does no harm when it is late: a lease that looks lapsed is judged again
   one moment later, so that renewals which lie in a socket are read first.
6. `Persist.seq` rises by one; batches are committed in that order. `Journaled(seq)` says
   that all up to `seq` are on disk, version log and head file included.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

if TYPE_CHECKING:
    from tensorcast_dask.policies.views import Decided, View, Wanted
    from tensorcast_dask.tensors.ids import (
        ArtifactId,
        ClusterId,
        Epoch,
        Generation,
        NodeId,
        RequestId,
        SessionId,
    )
    from tensorcast_dask.tensors.messages import (
        Ensure,
        Fact,
        Fault,
        FromNode,
        Migrate,
        NodeHello,
        OpenSession,
        SessionRequest,
        TlsFiles,
        ToNode,
        Wire,
    )

#: First wait before a lapsed lease is believed: long enough for one turn of the shell's
#: loop to read what its sockets hold.
DOUBT_S: Final = 0.05


class _Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what is only a value."""


# ---------------------------------------------------------------- set-up
class CatalogSettings(_Value, frozen=True, kw_only=True):
    """Limits and secrets that the catalog hands on or keeps to."""

    token: bytes = b""
    tls: TlsFiles | None = None
    chunk_bytes: int = 8 << 20
    small_bytes: int = 1 << 20
    deadline_default_s: float = 600.0
    #: A holder that sends nothing for so long is left for another.
    stall_s: float = 2.0
    #: Time-to-live of a node's lease.
    lease_ttl_s: float = 5.0
    #: After a restart: how long a replica that nobody has claimed yet is waited for.
    recovery_timeout_s: float = 10.0
    #: A session that lost its comm may come back for so long.
    session_grace_s: float = 2.0
    #: Recorded outcomes of a session that is gone are kept for so long.
    outcome_ttl_s: float = 600.0
    #: A plan that is over is kept under its key for so long.
    plan_result_ttl_s: float = 3600.0
    #: Recorded outcomes of one session; the oldest gives way.
    outcomes_per_session: int = 1024
    #: Most of a node's host memory that pins may hold.
    pin_limit_fraction: float = 0.8
    #: Lines that explain keeps of one artifact, node or request.
    story_lines: int = 64
    #: Answered moves that `OperationAsked` and sql still know.
    finished_operations: int = 1000


class Row(_Value, frozen=True, kw_only=True):
    """One record for the journal: the newest of a (kind, key) counts, None takes it away."""

    kind: str
    key: str
    blob: bytes | None


class Issued(_Value, frozen=True, kw_only=True):
    """A version number that is used up, for the version log."""

    #: 16 bytes, `numbers.digest_of(id)`.
    digest: bytes
    version: int


class Recovered(_Value, frozen=True, kw_only=True):
    """What the journal found at its start; the epoch is the new one, already on disk."""

    cluster: ClusterId
    epoch: Epoch
    rows: tuple[Row, ...] = ()
    #: Highest number ever issued, by `numbers.digest_of(id)`.
    issued: dict[bytes, int] = {}
    #: Where counters of generations begin: `numbers.begin_of(cluster)`.
    begin: int = 0
    #: Last sequence number that is on disk; the catalog goes on from here.
    seq: int = 0
    #: Rows are known to be missing: nodes are asked for their indexes (`need_index`),
    #: and what they hold is taken back instead of dropped.
    lost: bool = False
    #: What has to be said about the recovery; "" when nothing was lost.
    said: str = ""


# ---------------------------------------------------------------- events
class SessionOpened(_Value, frozen=True, kw_only=True):
    """A session opened, or re-opened, its comm. Answered with `SessionOpen`."""

    connection: int
    opening: OpenSession


class SessionLost(_Value, frozen=True, kw_only=True):
    """A session's comm ended without `CloseSession`."""

    session: SessionId
    connection: int


class Asked(_Value, frozen=True, kw_only=True):
    """A session asks. An `OpenSession` in here is refused: it is `SessionOpened`."""

    session: SessionId
    connection: int
    request: SessionRequest


class NodeJoined(_Value, frozen=True, kw_only=True):
    """A link is proved (Hello/Challenge/Proof are the shell's) and said who it is."""

    link: int
    hello: NodeHello


class NodeSaid(_Value, frozen=True, kw_only=True):
    """A message on a link that has joined."""

    link: int
    message: FromNode


class NodeLinkLost(_Value, frozen=True, kw_only=True):
    """A link ended. The node's lease runs on."""

    link: int


class WorkerGone(_Value, frozen=True, kw_only=True):
    """Dask believes that a worker is gone: its node is unattended until adopted again."""

    address: str


class NodeRetired(_Value, frozen=True, kw_only=True):
    """A node's worker retired and its bytes are elsewhere: it ends, now or when it is back."""

    node: NodeId
    why: str


class Journaled(_Value, frozen=True, kw_only=True):
    """All up to `seq` is on disk. Ends a stall as well."""

    seq: int


class JournalStalled(_Value, frozen=True, kw_only=True):
    """The journal cannot write now (full disk) and tries again by itself."""

    why: str


class JournalBack(_Value, frozen=True, kw_only=True):
    """The journal writes again."""


class PlanDropped(_Value, frozen=True, kw_only=True):
    """Dask knows nothing (more) of the task that would end a run."""

    key: str
    run: int
    why: str


class PolicyLoaded(_Value, frozen=True, kw_only=True):
    """A policy's process has it and waits for questions."""

    life: int


class PolicyDecided(_Value, frozen=True, kw_only=True):
    """A policy's answer to one question."""

    life: int
    number: int
    decided: Decided


class PolicyBroke(_Value, frozen=True, kw_only=True):
    """A policy could not be loaded, raised, or its process ended."""

    life: int
    why: str


class Carried(_Value, frozen=True, kw_only=True):
    """What `AskSelf` came to."""

    number: int
    error: str


class TimePassed(_Value, frozen=True, kw_only=True):
    """Look at the clock."""


Event: TypeAlias = (
    SessionOpened
    | SessionLost
    | Asked
    | NodeJoined
    | NodeSaid
    | NodeLinkLost
    | WorkerGone
    | NodeRetired
    | Journaled
    | JournalStalled
    | JournalBack
    | PlanDropped
    | PolicyLoaded
    | PolicyDecided
    | PolicyBroke
    | Carried
    | TimePassed
)


# ---------------------------------------------------------------- instructions
class Reply(_Value, frozen=True, kw_only=True):
    """Answer a request: to the session's comm of now; dropped when it has none.

    (A session that comes back asks again and gets the recorded answer.)
    """

    session: SessionId
    rid: RequestId
    #: A Fault makes `Answer.fault`; None makes the empty answer.
    value: Wire | Fault | None


class EndSession(_Value, frozen=True, kw_only=True):
    """Close the comm: the session closed itself, or opened another connection."""

    session: SessionId
    connection: int


class ToNodeSend(_Value, frozen=True, kw_only=True):
    """Send a message on a link; dropped when the link is gone."""

    link: int
    message: ToNode


class CloseLink(_Value, frozen=True, kw_only=True):
    """Close a link once what was sent on it is out (refused, ended, or superseded)."""

    link: int
    why: str


class Persist(_Value, frozen=True, kw_only=True):
    """Commit these rows and numbers, and tell `Journaled(seq)`."""

    seq: int
    rows: tuple[Row, ...]
    issued: tuple[Issued, ...] = ()
    #: Not 0: the head file says this epoch from here on (a node had seen a higher one).
    epoch: int = 0
    #: No answer waits for it: it may lie for a moment and ride with a later batch.
    lazy: bool = False


class WakeAt(_Value, frozen=True, kw_only=True):
    """Tell `TimePassed` at this reading of the clock. Replaces an earlier one."""

    at_s: float


class Log(_Value, frozen=True, kw_only=True):
    """Write a line to the log. `level`: debug, info, warning or error."""

    level: str
    text: str


class Emit(_Value, frozen=True, kw_only=True):
    """Tell whoever watches (a Dask topic, the `events` table)."""

    #: created, committed, published, destroyed, lost, moved, dropped, leftover,
    #: node_joined, node_ended, node_lapsed, node_refused, recovered, session_ended, ...
    topic: str
    facts: dict[str, Fact]


class OperationFacts(_Value, frozen=True, kw_only=True):
    """One operation, for the `operations` and `transfers` tables."""

    rid: RequestId
    session: SessionId
    kind: str
    status: str
    id: ArtifactId
    generation: Generation
    node: NodeId
    done_bytes: int
    total_bytes: int
    seconds: float
    via: str
    message: str


class NodeFacts(_Value, frozen=True, kw_only=True):
    """One node, for the `nodes` and `leases` tables."""

    node: NodeId
    name: str
    host: str
    worker: str
    kind: str
    incarnation: int
    attended: bool
    live: bool
    lease_left_s: float
    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int


class InstanceFacts(_Value, frozen=True, kw_only=True):
    """One instance, for the `instances` table; what has no one value is JSON."""

    name: str
    node: NodeId
    node_name: str
    attachment: str
    term: int
    pid: int
    functions: str
    engine: str
    labels: str
    holds: str
    poisoned: str
    draining: bool
    load: str
    load_age_s: float | None


class Snapshot(_Value, frozen=True, kw_only=True):
    """What sql shows that no row holds: small, and true at one instant."""

    nodes: tuple[NodeFacts, ...]
    instances: tuple[InstanceFacts, ...]
    operations: tuple[OperationFacts, ...]
    #: Versions that are being created: (id, version, generation, nbytes).
    creating: tuple[tuple[ArtifactId, int, Generation, int], ...]


class RunQuery(_Value, frozen=True, kw_only=True):
    """Run one SELECT (`tables.Tables.run`) off the loop; answer `Rows` or a Fault.

    The tables see what the journal has committed, so nothing is told that could be
    forgotten.
    """

    session: SessionId
    rid: RequestId
    sql: str
    limit: int
    snapshot: Snapshot
    #: Seconds after which nobody waits for the answer any more.
    within_s: float = math.inf


class StartPolicy(_Value, frozen=True, kw_only=True):
    """Start a process that loads a policy; tell `PolicyLoaded` or `PolicyBroke`."""

    life: int
    name: str
    blob: bytes


class AskPolicy(_Value, frozen=True, kw_only=True):
    """Have it decide; tell `PolicyDecided` or `PolicyBroke`."""

    life: int
    number: int
    view: View
    wanted: Wanted | None


class EndPolicy(_Value, frozen=True, kw_only=True):
    """Kill its process, whatever it does."""

    life: int


class AskSelf(_Value, frozen=True, kw_only=True):
    """Ask for a change in the scheduler's own session (it fills `rid` in); tell `Carried`."""

    number: int
    request: Ensure | Migrate


Instruction: TypeAlias = (
    Reply
    | EndSession
    | ToNodeSend
    | CloseLink
    | Persist
    | WakeAt
    | Log
    | Emit
    | RunQuery
    | StartPolicy
    | AskPolicy
    | EndPolicy
    | AskSelf
)
