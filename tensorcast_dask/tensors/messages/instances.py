"""What an instance, its store, the catalog and whoever calls it say to each other.

An attached instance has one connection. It asks the store as anybody does, one answer for a
request, in order. Besides, either end may say something at any time: `Call`, `CallEnded` and
what is listed in `ToInstance`; that is never answered in line.
"""

from __future__ import annotations

from typing import Final

from tensorcast_dask.tensors.ids import (
    ArtifactId,
    ClusterId,
    Generation,
    RequestId,
    SessionId,
    Version,
)
from tensorcast_dask.tensors.messages.shared import Fault, Message, NodeCard, Wire
from tensorcast_dask.tensors.messages.signals import RequestLoad

__all__ = [
    "REPAIRS",
    "Attach",
    "Attached",
    "BeginLending",
    "Call",
    "CallAnswered",
    "CallDropped",
    "CallEnded",
    "CallInstance",
    "CallerHere",
    "Changed",
    "Dial",
    "Dialled",
    "DoDetach",
    "InstanceRecord",
    "InstanceSeen",
    "InstanceState",
    "Instances",
    "InstancesAsked",
    "InstancesHere",
    "Lend",
    "LendEnded",
    "Load",
    "Mutating",
    "Part",
    "PartAsked",
    "Replaced",
    "Seen",
    "SessionIn",
    "SessionOut",
    "Unlend",
]


#: What an instance that holds half of an update still does.
REPAIRS: Final = frozenset({"transform_into", "manifest", "evict_local"})


class InstanceRecord(Wire, frozen=True, kw_only=True):
    """An instance, as it says of itself."""

    name: str
    #: One life of it; minted by the instance.
    attachment: str
    #: Minted by the catalog when it first heard of this life; of two lives under one name
    #: the higher counts. 0 while it has not heard of it.
    term: int = 0
    #: When it began, by its host's monotonic clock, which all processes of the host share.
    since_s: float = 0.0
    #: How often it has attached: of what two nodes tell of one life, the later is so.
    times: int = 0
    pid: int = 0
    labels: dict[str, str] = {}
    #: Functions that can be called by name.
    functions: tuple[str, ...] = ()
    #: Of the engine's contract, what it offers.
    engine: tuple[str, ...] = ()
    #: Why it must not be used: it holds half of an update. "" while it can be.
    poisoned: str = ""
    #: What was written into its memory last: artifact id -> version.
    holds: dict[str, int] = {}


# ---------------------------------------------------------------- instance -> store
class Attach(Message, frozen=True, kw_only=True):
    """A process of this host becomes an instance of this node. Answer: `Attached`.

    Over the unix socket only. The connection is the instance's from here on. An earlier life
    under the name is told `Replaced`; one that was let go is StaleOwner ever after.
    """

    rid: RequestId
    record: InstanceRecord


class Attached(Message, frozen=True, kw_only=True):
    """It is attached; `Seen` follows when the catalog lists it."""

    card: NodeCard
    cluster: ClusterId
    #: Whether the catalog listens now, and which of its greetings that is.
    up: bool
    greeting: int = 0
    #: What the store reads when it serves lent memory by itself.
    chunk_bytes: int


class Changed(Message, frozen=True, kw_only=True):
    """The instance says anew what it is. Answer: `Done`."""

    rid: RequestId
    record: InstanceRecord


class Load(Message, frozen=True, kw_only=True):
    """Load that the engine pushes, whole: see `InstanceLoad`. No answer."""

    values: dict[str, float]
    ttl_s: float = 10.0
    draining: bool = False
    requests: tuple[RequestLoad, ...] = ()


class CallEnded(Message, frozen=True, kw_only=True):
    """What a `Call` came to. No answer."""

    number: int
    value: bytes = b""
    fault: Fault | None = None


class SessionIn(Message, frozen=True, kw_only=True):
    """One packed message of a session that the store carries to the catalog. No answer.

    The first is an `OpenSession`; an empty one ends the session.
    """

    session: SessionId
    raw: bytes
    #: Of the catalog, after which it is said: what was meant for an earlier one is not carried.
    greeting: int = 0


class BeginLending(Message, frozen=True, kw_only=True):
    """The process is about to lend: its store makes it a node of the catalog. Answer: `Done`."""

    rid: RequestId


class Lend(Message, frozen=True, kw_only=True):
    """Memory of this process becomes a caller-leased replica here. Answer: `Done`.

    `spans` as in `Fill`; where they leave entries out, or where the kernel does not let the
    store read the process, the instance is asked for bytes (`PartAsked`).
    """

    rid: RequestId
    generation: Generation
    id: ArtifactId
    version: Version
    index: bytes
    spans: bytes
    #: False: some entries are not where `spans` could say.
    whole: bool = True
    labels: dict[str, str] = {}
    #: Memory on a device: its UUID, and handles and spans as in `Opened.slabs`.
    device: str = ""
    slabs: tuple[bytes, ...] = ()
    slab_spans: bytes = b""


class Mutating(Message, frozen=True, kw_only=True):
    """The owner writes (odd stamp), or has written (even). Answer: `Done`."""

    rid: RequestId
    generation: Generation
    stamp: int


class Unlend(Message, frozen=True, kw_only=True):
    """It is lent no more. Answer: `Done`; unknown generations are fine."""

    rid: RequestId
    generation: Generation


class Part(Message, frozen=True, kw_only=True):
    """Payload: what `PartAsked` asked for, or a fault. No answer."""

    number: int
    fault: Fault | None = None


# ---------------------------------------------------------------- store -> instance
class Call(Message, frozen=True, kw_only=True):
    """Carry a function out; `CallEnded` tells how it ended.

    `key`, where there is one, names this call for ever: a repeat gets the first outcome.
    """

    number: int
    function: str
    args: bytes
    key: str = ""
    deadline_s: float
    trace: str = ""  # the span that it follows from, `tensors.traces`


class CallDropped(Message, frozen=True, kw_only=True):
    """Nobody waits for a call any more: where it has not begun it must not."""

    number: int


class Seen(Message, frozen=True, kw_only=True):
    """The catalog listens, or does not; under which term it lists the instance (0: not yet)."""

    up: bool = True
    term: int = 0
    #: How often it has greeted this store: with another number sessions are opened anew.
    greeting: int = 0


class SessionOut(Message, frozen=True, kw_only=True):
    """One packed `Answer` of the catalog."""

    session: SessionId
    raw: bytes


class CallerHere(Message, frozen=True, kw_only=True):
    """Somebody of this host will call over the socket that comes with it (`dataplane.direct`)."""


class Replaced(Message, frozen=True, kw_only=True):
    """Another process has the name now: the connection ends, for good."""

    why: str


class PartAsked(Message, frozen=True, kw_only=True):
    """Give bytes of lent memory; `Part` brings them."""

    number: int
    generation: Generation
    offset: int
    nbytes: int


class LendEnded(Message, frozen=True, kw_only=True):
    """The artifact was destroyed or released: it is lent no more."""

    generation: Generation
    why: str


# ---------------------------------------------------------------- caller -> store
class CallInstance(Message, frozen=True, kw_only=True):
    """Call a function of an instance of this node. Answer: `CallAnswered`.

    NotFound where no instance has the name; OwnerGone where `attachment` names a life that
    is over; Unknown where it ended while the call may have been under way.
    """

    rid: RequestId
    instance: str
    function: str
    args: bytes
    deadline_s: float
    attachment: str = ""
    key: str = ""


class Dial(Message, frozen=True, kw_only=True):
    """Be connected with an instance of this host. Answer: `Dialled`, with a socket.

    Over it go `CallInstance` and its answers, one after the other. Errors are those of
    `CallInstance`; InvalidArgument over TCP.
    """

    rid: RequestId
    instance: str
    attachment: str


class Dialled(Message, frozen=True, kw_only=True):
    """The socket that comes with it leads to the instance."""

    attachment: str


class CallAnswered(Message, frozen=True, kw_only=True):
    """What the function returned, packed as `tensors.values` does."""

    value: bytes


# ---------------------------------------------------------------- store <-> catalog
class InstancesHere(Message, frozen=True, kw_only=True):
    """Instances of this node: new ones, changed ones; `whole`: all that there are.

    Those without a term are answered `InstanceSeen`.
    """

    records: tuple[InstanceRecord, ...]
    whole: bool = False
    #: Attachments that are over, and why.
    gone: dict[str, str] = {}


class InstanceSeen(Message, frozen=True, kw_only=True):
    """The catalog lists an instance."""

    attachment: str
    term: int


class DoDetach(Message, frozen=True, kw_only=True):
    """An instance is another's by now: let it go."""

    attachment: str
    why: str


# ---------------------------------------------------------------- session -> catalog
class InstancesAsked(Message, frozen=True, kw_only=True):
    """Answer: `Instances`."""

    rid: RequestId


class InstanceState(Wire, frozen=True, kw_only=True):
    """An instance as the catalog sees it."""

    record: InstanceRecord
    card: NodeCard
    #: Last numbers that it pushed, and how old they are; none before the first.
    load: dict[str, float] = {}
    load_age_s: float | None = None
    #: It takes nothing new.
    draining: bool = False


class Instances(Wire, frozen=True, kw_only=True):
    """All instances of live nodes, ordered by name."""

    instances: tuple[InstanceState, ...]
