"""A simulated scheduler: the real catalog, a journal that can lose what it did not sync.

It follows `scheduler_plugin.service`, `.links`, `.sessions`, `.relays` and `.journal`.

Rules:

1. What the catalog is told, it is told in the order of arrival; a busy loop only makes
   that later.
2. A batch is on disk whole or not at all; what was told is on disk, unless a loss is said.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import msgspec

from tensorcast_dask.exceptions import WrongPeer
from tensorcast_dask.scheduler_plugin.state.catalog import Catalog
from tensorcast_dask.scheduler_plugin.state.events import (
    Asked,
    CatalogSettings,
    CloseLink,
    Emit,
    EndSession,
    Event,
    Instruction,
    JournalBack,
    Journaled,
    JournalStalled,
    Log,
    NodeJoined,
    NodeLinkLost,
    NodeSaid,
    Persist,
    Recovered,
    Reply,
    Row,
    SessionLost,
    SessionOpened,
    TimePassed,
    ToNodeSend,
    WakeAt,
)
from tensorcast_dask.scheduler_plugin.state.records import VersionRow
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ClusterId, Epoch, Generation, SessionId
from tests.kit.sim_timeline import Life, Process, Signal

if TYPE_CHECKING:
    from tests.kit.sim_network import End
    from tests.kit.world import World

__all__ = ["SETTINGS", "SimJournal", "SimScheduler"]

SETTINGS = CatalogSettings(
    token=b"t",
    chunk_bytes=4096,
    small_bytes=4096,
    lease_ttl_s=3.0,
    recovery_timeout_s=6.0,
    session_grace_s=2.0,
    outcome_ttl_s=10.0,
    deadline_default_s=8.0,
    story_lines=4,
    plan_result_ttl_s=15.0,  # longer than a program asks again
)


@dataclass(eq=False)
class SimJournal:
    """What is on the scheduler's disk; outlives schedulers."""

    world: World
    rows: list[Row] = field(default_factory=list)
    issued: dict[bytes, int] = field(default_factory=dict)
    epoch: int = 0
    seq: int = 0
    #: Earlier states of the rows, as a damaged file may be found.
    checkpoints: list[int] = field(default_factory=list)
    stalled_until_s: float = 0.0
    queue: deque[Persist] = field(default_factory=deque)
    #: The group that is being written.
    writing: tuple[Persist, ...] = ()
    woken: Signal = field(default_factory=Signal)
    #: Whether each generation that was ever on disk was published there.
    ever: dict[Generation, bool] = field(default_factory=dict)
    #: Requests whose change of an alias, or pin, is on its way to the disk, by batch.
    caused: dict[int, str] = field(default_factory=dict)
    #: Those whose change is on disk.
    done: dict[str, None] = field(default_factory=dict)
    #: How often a scheduler died, with what was not on disk.
    crashes: int = 0
    #: How often rows that were on disk were lost.
    losses: int = 0
    _decoder: ClassVar = msgspec.msgpack.Decoder(VersionRow)

    def submit(self, batch: Persist, cause: str) -> None:
        """Queue a batch; `cause` is the request that was being handled."""
        for row in batch.rows if cause else ():
            if row.kind in ("alias", "pin") and row.blob is not None:
                self.caused[batch.seq] = cause
        self.queue.append(batch)
        self.woken.fire()

    def run(self, scheduler: SimScheduler) -> Process:
        """The journal's thread."""
        world = self.world
        while True:
            if not self.queue:
                self.woken = Signal()
                yield self.woken
            self.writing, self.queue = tuple(self.queue), deque()
            stalled = False
            while world.time.now_s < self.stalled_until_s:
                if not stalled:
                    stalled = True
                    scheduler.tell_soon(JournalStalled(why="no space left on device"))
                yield 0.25
            slow = world.unlucky(world.faults.slow_disk / 4)
            yield world.faults.slow_disk_s / 2 if slow else 0.002
            group = self._sync()
            if world.crash_at_sync():
                return
            if stalled:
                scheduler.tell_soon(JournalBack())
            scheduler.tell_soon(Journaled(seq=group[-1].seq))

    def _sync(self) -> tuple[Persist, ...]:
        group, self.writing = self.writing, ()
        for batch in group:
            self._note(batch)
            cause = self.caused.pop(batch.seq, "")
            assert cause not in self.done, f"request {cause} took effect twice"
            if cause:
                self.done[cause] = None
            self.rows.extend(batch.rows)
            for one in batch.issued:
                known = self.issued.get(one.digest, 0)
                self.issued[one.digest] = max(known, one.version)
            self.epoch = max(self.epoch, batch.epoch)
            self.seq = batch.seq
        return group

    def _note(self, batch: Persist) -> None:
        for row in batch.rows:
            if row.kind == "version" and row.blob is not None:
                one = self._decoder.decode(row.blob)
                was = self.ever.get(one.generation, False)
                self.ever[one.generation] = was or one.published

    def crash(self) -> None:
        """The process dies: what is being written is there or not, what waits is not."""
        self.crashes += 1
        if self.writing and self.world.rng.random() < 0.5:
            self._sync()
        self.writing, self.queue = (), deque()
        self.caused.clear()
        self.checkpoints.append(len(self.rows))

    def start(self, loss: str = "") -> Recovered:
        """Open the journal, one epoch up; `loss` is "", "rows" or "all"."""
        said = ""
        if loss == "rows":
            self.rows = self.rows[: self.world.rng.choice(self.checkpoints)]
            said = "rows are missing"
        elif loss == "all":
            self.rows, self.issued, self.seq = [], {}, 0
            said = "the journal is gone"
            self.epoch += 1000  # it begins with the minutes of the calendar
        if loss:
            self.losses += 1
            self.checkpoints.clear()
            self.done.clear()
        self.epoch += 1
        return Recovered(
            cluster=ClusterId("c1"),
            epoch=Epoch(self.epoch),
            rows=tuple(self.rows),
            issued=dict(self.issued),
            seq=self.seq,
            lost=bool(loss),
            said=said,
        )


@dataclass(eq=False)
class _Relay:
    """One session that a link carries; for the rest it is a comm like any other."""

    scheduler: SimScheduler
    link: int
    session: SessionId
    #: Of the comm; 0 before its first message, -1 when that was none.
    number: int = 0

    def send(self, answer: m.Answer) -> None:
        end = self.scheduler.links.get(self.link)
        if end is not None:
            end.send(m.SessionOut(session=self.session, raw=m.encode(answer)))

    def close(self) -> None:
        self.scheduler.relays.pop((self.link, self.session), None)


class SimScheduler:
    """One life of the scheduler."""

    def __init__(self, world: World, recovered: Recovered) -> None:
        self.world = world
        self.life = Life(f"scheduler-{recovered.epoch}")
        self.catalog = Catalog(SETTINGS, recovered)
        self.links: dict[int, End] = {}
        self.sessions: dict[int, End | _Relay] = {}
        self.relays: dict[tuple[int, SessionId], _Relay] = {}
        self.by_session: dict[SessionId, int] = {}
        self.numbers = 0
        self.alarm = 0
        #: The request that is being handled, "" otherwise.
        self.cause = ""
        #: The loop does nothing before.
        self.busy_until_s = 0.0
        self.events: deque[Event] = deque()
        self.logs: list[Log] = []
        self.emitted: list[Emit] = []
        world.time.spawn(self.life, world.journal.run(self))
        self._handle(TimePassed())

    # -------------------------------------------------------------- in
    def tell_soon(self, event: Event) -> None:
        """Hand an event over, in its turn."""
        self.events.append(event)
        late_s = max(0.0, self.busy_until_s - self.world.time.now_s)
        self.world.time.after(late_s, self._go_on)

    def _go_on(self) -> None:
        if self.life.alive and self.events:
            self.tell(self.events.popleft())

    def tell(self, event: Event) -> None:
        """Have the catalog absorb an event, and carry out what it says."""
        if isinstance(event, SessionOpened):
            self.by_session[event.opening.session] = event.connection
        self.cause = event.request.rid if isinstance(event, Asked) else ""
        self._handle(event)
        self.world.stepped(self)

    def _handle(self, event: Event) -> None:
        if not isinstance(event, Asked | NodeSaid | TimePassed):
            self.world.time.note("catalog", event)
        for instruction in self.catalog.handle(event, now_s=self.world.time.now_s):
            self._carry_out(instruction)

    # -------------------------------------------------------------- comms
    def link(self, end: End) -> None:
        """A node opened a link."""
        self.numbers += 1
        number = self.numbers
        self.links[number] = end

        def said(message: object) -> None:
            if number not in self.links:
                return
            if isinstance(message, m.NodeHello):
                self.tell_soon(NodeJoined(link=number, hello=message))
            elif isinstance(message, m.SessionIn):
                self._carried(number, message)
            else:
                self.tell_soon(NodeSaid(link=number, message=message))  # type: ignore[arg-type]  # what nodes send

        def closed() -> None:
            if self.links.pop(number, None) is not None:
                self._relays_ended(number)
                self.tell_soon(NodeLinkLost(link=number))

        end.on_message, end.on_closed = said, closed

    def _carried(self, link: int, message: m.SessionIn) -> None:
        """Take what a node carries of a session (`Relays`)."""
        key = link, message.session
        relay = self.relays.get(key)
        if not message.raw:
            if relay is not None:
                self._relay_lost(relay)
            return
        if relay is None:
            relay = self.relays[key] = _Relay(self, *key)
        if relay.number:
            if relay.number > 0:
                request: m.SessionRequest = m.decode(message.raw, m.SessionRequest)  # type: ignore[arg-type]  # a union
                asked = Asked(
                    session=relay.session, connection=relay.number, request=request
                )
                self.tell_soon(asked)
            return
        try:
            opening = m.decode(message.raw, m.OpenSession)
        except WrongPeer:
            # The comm is closed by its task; until then it takes what comes, in vain.
            relay.number = -1
            late_s = max(0.0, self.busy_until_s - self.world.time.now_s)
            self.world.time.after(late_s + 0.001, lambda: self._relay_lost(relay))
            return
        self.numbers += 1
        relay.number = self.numbers
        self.sessions[relay.number] = relay
        self.tell_soon(SessionOpened(connection=relay.number, opening=opening))

    def _relay_lost(self, relay: _Relay) -> None:
        relay.close()
        if self.sessions.pop(relay.number, None) is not None:
            if self.by_session.get(relay.session) == relay.number:
                del self.by_session[relay.session]
            lost = SessionLost(session=relay.session, connection=relay.number)
            self.tell_soon(lost)

    def _relays_ended(self, link: int) -> None:
        for relay in list(self.relays.values()):
            if relay.link == link:
                self._relay_lost(relay)

    def session(self, end: End) -> None:
        """A program opened a comm."""
        self.numbers += 1
        number = self.numbers
        self.sessions[number] = end
        who = SessionId("")

        def said(message: object) -> None:
            nonlocal who
            if number not in self.sessions:
                return
            if isinstance(message, m.OpenSession):
                who = message.session
                self.tell_soon(SessionOpened(connection=number, opening=message))
            else:
                self.tell_soon(
                    Asked(session=who, connection=number, request=message)  # type: ignore[arg-type]  # what programs send
                )

        def closed() -> None:
            if self.sessions.pop(number, None) is not None:
                if self.by_session.get(who) == number:
                    del self.by_session[who]
                self.tell_soon(SessionLost(session=who, connection=number))

        end.on_message, end.on_closed = said, closed

    # -------------------------------------------------------------- out
    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Reply():
                self._reply(instruction)
            case ToNodeSend(link=link, message=message):
                self._send(link, message)
            case CloseLink(link=link):
                self._relays_ended(link)
                _close(self.links.pop(link, None))
            case EndSession(connection=connection):
                _close(self.sessions.pop(connection, None))
            case Persist():
                self.world.journal.submit(instruction, self.cause)
            case WakeAt(at_s=at_s):
                self._wake_at(at_s)
            case Log():
                self.logs.append(instruction)
            case Emit():
                self.emitted.append(instruction)
            case _:
                raise AssertionError(instruction)

    def _send(self, link: int, message: m.ToNode) -> None:
        end = self.links.get(link)
        if end is not None:
            repeatable = isinstance(message, m.DoPull | m.DoDrop | m.DoMark)
            end.send(message, times=self.world.network.twice() if repeatable else 1)

    def _reply(self, reply: Reply) -> None:
        self.world.watch.told(self, reply)
        number = self.by_session.get(reply.session)
        end = None if number is None else self.sessions.get(number)
        if end is None:
            return
        if isinstance(reply.value, m.Fault):
            answer = m.Answer(rid=reply.rid, fault=reply.value)
        elif reply.value is None:
            answer = m.Answer(rid=reply.rid)
        else:
            raw = msgspec.Raw(m.encode(reply.value))
            answer = m.Answer(rid=reply.rid, value=raw)
        end.send(answer)

    def _wake_at(self, at_s: float) -> None:
        self.alarm += 1
        alarm = self.alarm

        def ring() -> None:
            if self.alarm == alarm:
                self.tell_soon(TimePassed())

        self.world.time.at(at_s, ring)

    # -------------------------------------------------------------- end
    def die(self) -> None:
        """End at once."""
        self.life.alive = False
        self.world.journal.crash()
        for end in [*self.links.values(), *self.sessions.values()]:
            if not isinstance(end, _Relay):
                self.world.network.break_one(end.connection)
        self.links.clear()
        self.sessions.clear()
        self.relays.clear()


def _close(end: End | _Relay | None) -> None:
    if end is not None:
        end.close()
