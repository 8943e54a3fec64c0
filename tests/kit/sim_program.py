"""A simulated program: a session that follows the rules of `api.connection.catalog`.

Rules:

1. A broken comm is opened again; every request without an answer is sent again under its
   old id, and what is below the lowest of them is said to be settled.
2. Each request ends: by its answer, or, after its deadline and a grace, as *unknown*.
3. Answers to one request are all alike, however often it was said.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import HostId, RequestId, SessionId
from tests.kit.sim_lender import SimLender
from tests.kit.sim_timeline import Life, Signal, Wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kit.sim_network import End
    from tests.kit.world import World

__all__ = ["SILENT", "Asking", "SimProgram"]

RETRY_S = 0.2
GRACE_S = 5.0
#: What a caller sees when no answer came.
SILENT = m.Fault(kind="Unknown", message="no answer came")

_VALUES: dict[type, type] = {
    m.Create: m.Created,
    m.CommitCreated: m.ArtifactInfo,
    m.Resolve: m.ArtifactInfo,
    m.Publish: m.ArtifactInfo,
    m.RegisterView: m.ArtifactInfo,
    m.Locate: m.Located,
    m.Ensure: m.Moved,
    m.Migrate: m.Moved,
    m.Destroy: m.Destroyed,
    m.Pin: m.Pinned,
    m.SetAlias: m.AliasState,
    m.DrainNode: m.Drained,
    m.ListArtifacts: m.Listed,
    m.LoadFile: m.ArtifactInfo,
    m.SaveFile: m.Moved,
    m.InstancesAsked: m.Instances,
    m.OpenPlan: m.PlanState,
}


@dataclass(eq=False)
class Asking:
    """One request and what became of it."""

    request: Any
    answered: Signal = field(default_factory=Signal)
    answer: m.Answer | None = None


@dataclass(eq=False)
class SimProgram:
    """One session."""

    world: World
    name: str
    host: str
    count: int = 0
    comm: End | None = None
    greeted: bool = False
    closing: bool = False
    pending: dict[RequestId, Asking] = field(default_factory=dict)
    #: What this program maps, and how it is unmapped.
    mapped: dict[int, Callable[[], None]] = field(default_factory=dict)
    #: Ends of store connections: called when it dies.
    connections: dict[int, Callable[[], None]] = field(default_factory=dict)

    #: What this process registers is served by it.
    lender: SimLender | None = None

    def __post_init__(self) -> None:
        self.life = Life(self.name)
        self.session = SessionId(self.name)
        self._connect()

    def rid(self) -> RequestId:
        """Mint the id of a request."""
        self.count += 1
        return RequestId(f"{self.name}:{self.count}")

    def die(self) -> None:
        """End at once."""
        self.life.alive = False
        for unmap in self.mapped.values():
            unmap()
        for cut in self.connections.values():
            cut()
        if self.lender is not None:
            self.lender.die()
        if self.comm is not None:
            self.world.network.break_one(self.comm.connection)

    def lending(self) -> SimLender:
        """Give the side of this process that lends, made at first use."""
        if self.lender is None:
            name = f"lend-{self.name}"
            self.lender = SimLender(self.world, name, self.host, self.life)
            self.world.lenders.append(self.lender)
        return self.lender

    # -------------------------------------------------------------- comm
    def _connect(self) -> None:
        if self.life.alive and (self.pending or not self.closing):
            self.world.dial_session(self, self._connected)

    def _connected(self, end: End | None) -> None:
        if end is None or not self.life.alive:
            self.world.time.after(RETRY_S, self._connect)
            return
        self.comm, self.greeted = end, False
        end.on_message = lambda message: self._hear(end, message)
        end.on_closed = lambda: self._closed(end)
        rid = self.rid()
        settled = min(int(one.rpartition(":")[2]) for one in (rid, *self.pending))
        end.send(
            m.OpenSession(
                rid=rid,
                session=self.session,
                pid=1,
                host=HostId(self.host),
                settled=settled,
            )
        )

    def _closed(self, end: End) -> None:
        if self.comm is end:
            self.comm, self.greeted = None, False
            self.world.time.after(RETRY_S, self._connect)

    def _hear(self, end: End, message: object) -> None:
        if self.comm is not end or not self.life.alive:
            return
        assert isinstance(message, m.Answer)
        if not self.greeted:
            assert message.fault is None, message
            self.greeted = True
            for waiting in list(self.pending.values()):
                end.send(waiting.request)
            return
        self.world.watch.answered(self, message)
        asking = self.pending.pop(message.rid, None)
        if asking is not None:
            asking.answer = message
            asking.answered.fire()

    # -------------------------------------------------------------- requests
    def ask(self, request: Any, deadline_s: float = 8.0) -> Generator[Wait, bool, Any]:
        """Ask, and return the value or the Fault."""
        asking = self.pending[request.rid] = Asking(request)
        self.world.watch.asked(self, request)
        if self.comm is not None and self.greeted:
            self.comm.send(request, times=self.world.network.twice())
        asked_s = self.world.time.now_s
        if not (yield asking.answered, deadline_s + GRACE_S):
            self.pending.pop(request.rid, None)
            assert self.world.disturbed_until_s > asked_s, (
                f"nothing was in the way, and yet no answer came in time to {request}"
            )
            if self.comm is not None and self.greeted:
                self.comm.send(m.CancelAsked(rid=self.rid(), asked=request.rid))
            return SILENT
        assert asking.answer is not None
        return self._value(request, asking.answer)

    @staticmethod
    def _value(request: object, answer: m.Answer) -> object:
        if answer.fault is not None:
            return answer.fault
        kind = _VALUES.get(type(request))
        return None if kind is None else m.decode(answer.value, kind)

    def close(self) -> Generator[Wait, bool, None]:
        """End the session in order."""
        self.closing = True
        yield from self.ask(m.CloseSession(rid=self.rid()))
