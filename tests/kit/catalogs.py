"""A catalog at a desk: programs and nodes that talk to it, a journal, a clock by hand.

Rules:

1. Every event goes through `Desk.tell`, which runs the oracles after it.
2. A `FakeNode` does what a store promises on its link: it announces what it holds, obeys
   orders (a number once), asks before it drops. `obedient=False` leaves orders in `inbox`.
3. `Desk.restart` keeps only what the journal had, nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

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
    RunQuery,
    SessionLost,
    SessionOpened,
    TimePassed,
    ToNodeSend,
    WakeAt,
)
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.dtypes import dtype
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
from tensorcast_dask.tensors.specs import Index, TensorSpec
from tests.kit import oracles

__all__ = ["Desk", "FakeNode", "Program", "index_of"]

W = TypeVar("W")
MIB = 1 << 20


def index_of(nbytes: int) -> Index:
    """An index of one uint8 tensor."""
    return Index.of([TensorSpec("t", dtype("uint8"), (nbytes,))])


@dataclass
class FakeNode:
    """What a store does on its link."""

    desk: Desk
    node: NodeId
    host: HostId
    capacity_bytes: int = 64 * MIB
    kind: str = "store"
    incarnation: int = 1
    obedient: bool = True
    link: int = 0
    held: dict[Generation, m.ReplicaRecord] = field(default_factory=dict)
    inbox: list[m.ToNode] = field(default_factory=list)
    seen: dict[int, m.TaskDone] = field(default_factory=dict)
    marks: dict[Generation, m.DoMark] = field(default_factory=dict)
    granted: list[Generation] = field(default_factory=list)
    thanked: list[int] = field(default_factory=list)
    refused: m.LinkRefused | None = None
    welcome: m.NodeWelcome | None = None
    fail_next: m.Fault | None = None
    leaves: str = ""
    renewals: int = 0
    epoch_seen: int = 0

    @property
    def card(self) -> m.NodeCard:
        return m.NodeCard(
            node=self.node,
            incarnation=Incarnation(self.incarnation),
            host=self.host,
            socket=f"/run/{self.node}",
            name=f"w-{self.node}",
            worker=f"tcp://{self.node}" if self.kind == "store" else "",
            kind=self.kind,
        )

    def uses(self) -> dict[m.Tier, m.TierUse]:
        used = sum(one.nbytes for one in self.held.values())
        use = m.TierUse(capacity_bytes=self.capacity_bytes, used_bytes=used)
        return {m.Tier.HOST: use}

    def join(self, *, cluster: str | None = None, announce: bool = True) -> FakeNode:
        self.link = self.desk.next_link()
        self.desk.links[self.link] = self
        self.refused = self.welcome = None
        hello = m.NodeHello(
            card=self.card,
            cluster=ClusterId(self.desk.cluster if cluster is None else cluster),
            epoch=Epoch(self.epoch_seen),
            counter=max(self.held, default=0),
            uses=self.uses(),
        )
        self.desk.tell(NodeJoined(link=self.link, hello=hello))
        if announce and self.refused is None:
            self.announce()
        return self

    def announce(self) -> None:
        need = self.welcome is not None and self.welcome.need_index
        records = [
            one if need else msgspec.structs.replace(one, index=b"")
            for one in self.held.values()
        ]
        half = len(records) // 2
        self.say(m.Inventory(replicas=tuple(records[:half]), more=True))
        self.say(m.Inventory(replicas=tuple(records[half:])))

    def say(self, message: m.FromNode) -> None:
        self.desk.tell(NodeSaid(link=self.link, message=message))

    def renew(self) -> None:
        self.renewals += 1
        self.say(m.Renew(seq=self.renewals, uses=self.uses()))

    def lose_link(self) -> None:
        link, self.link = self.link, 0
        self.desk.links.pop(link, None)
        self.desk.tell(NodeLinkLost(link=link))

    def hold(self, record: m.ReplicaRecord) -> None:
        self.held[record.generation] = record
        self.say(m.ReplicaReady(record=record))

    def _gone(self, generation: Generation, tier: m.Tier) -> None:
        if self.link:
            self.say(m.ReplicaDropped(generation=generation, tier=tier, why="evicted"))

    # ---------------------------------------------------------------- orders
    def receive(self, message: m.ToNode) -> None:
        match message:
            case m.NodeWelcome():
                self.welcome = message
                self.epoch_seen = max(self.epoch_seen, message.epoch)
            case m.LinkRefused():
                self.refused = message
            case m.DoMark():
                self.marks[message.generation] = message
            case m.DropGranted():
                for generation in message.generations:
                    gone = self.held.pop(generation, None)
                    if gone is not None:
                        self.desk.later(partial(self._gone, generation, gone.tier))
                self.granted.extend(message.generations)
            case _:
                self.receive_order(message)

    def receive_order(self, message: m.ToNode) -> None:
        match message:
            case m.TaskSeen():
                self.thanked.append(message.task)
            case m.DoCancel():
                self.inbox = [
                    one for one in self.inbox if getattr(one, "task", 0) != message.task
                ]
            case m.DoPull() | m.DoDrop() | m.DoLoad() | m.DoSave():
                done = self.seen.get(message.task)
                if done is not None:
                    self.desk.later(lambda: self.say(done))
                elif self.obedient:
                    self.desk.later(lambda: self.obey(message))
                else:
                    self.inbox.append(message)
            case _:
                self.inbox.append(message)

    def obey_all(self) -> None:
        inbox, self.inbox = self.inbox, []
        for message in inbox:
            self.obey(message)

    def obey(self, message: m.ToNode) -> None:
        match message:
            case m.DoPull():
                self._end(message.task, self._pulled(message))
            case m.DoDrop():
                self.held.pop(message.generation, None)
                self._end(message.task, m.TaskDone(task=message.task))
            case m.DoLoad():
                self._end(message.task, self._loaded(message))
            case m.DoSave():
                self._end(message.task, m.TaskDone(task=message.task, moved_bytes=7))
            case _:
                pass

    def _end(self, task: int, done: m.TaskDone) -> None:
        if self.fail_next is not None:
            done = m.TaskDone(task=task, fault=self.fail_next)
            self.fail_next = None
        self.seen[task] = done
        if self.link:
            self.say(done)

    def _pulled(self, order: m.DoPull) -> m.TaskDone:
        wanted = order.source_generation or order.generation
        for source in order.sources:
            peer = self.desk.nodes[source.card.node]
            record = peer.held.get(wanted)
            if record is not None and peer.link and self.fail_next is None:
                mine = msgspec.structs.replace(
                    record,
                    generation=order.generation,
                    version=order.version,
                    tier=order.tier,
                    published=order.published,
                    owner=m.Owner.SYSTEM,
                )
                self.hold(mine)
                return m.TaskDone(
                    task=order.task,
                    moved_bytes=record.nbytes,
                    seconds=0.1,
                    via="tcp",
                    left=self.leaves,
                    sources=(peer.node,),
                )
        fault = m.Fault(kind="PeerLost", message="no source answers")
        return m.TaskDone(task=order.task, fault=fault)

    def _loaded(self, order: m.DoLoad) -> m.TaskDone:
        index = index_of(len(order.path))
        if self.fail_next is None:
            self.hold(
                self.desk.record(order.generation, order.id, order.version, index)
            )
        return m.TaskDone(task=order.task, result=index.encode())


@dataclass
class Program:
    """A session."""

    desk: Desk
    session: SessionId
    host: HostId
    connection: int = 0
    count: int = 0
    answers: dict[RequestId, object] = field(default_factory=dict)
    asked: dict[RequestId, m.SessionRequest] = field(default_factory=dict)

    def open(self, *, settled: int = 0) -> Program:
        self.connection = self.desk.next_link()
        opening = m.OpenSession(
            rid=self.rid(),
            session=self.session,
            pid=1,
            host=self.host,
            settled=settled,
        )
        self.desk.tell(SessionOpened(connection=self.connection, opening=opening))
        return self

    def rid(self) -> RequestId:
        self.count += 1
        return RequestId(f"{self.session}-{self.count}")

    def lose_comm(self) -> None:
        self.desk.tell(SessionLost(session=self.session, connection=self.connection))

    def ask(self, request: m.SessionRequest) -> RequestId:
        self.asked[request.rid] = request
        self.desk.tell(
            Asked(session=self.session, connection=self.connection, request=request)
        )
        return request.rid

    def answered(self, rid: RequestId) -> bool:
        return rid in self.answers

    def call(self, request: m.SessionRequest, kind: type[W]) -> W:
        """Ask, have the journal write, and return the answer or raise its error."""
        self.ask(request)
        self.desk.flush()
        assert request.rid in self.answers, f"no answer to {request}"
        return self.result(request.rid, kind)

    def result(self, rid: RequestId, kind: type[W]) -> W:
        value = self.answers[rid]
        if isinstance(value, m.Fault):
            raise value.error()
        assert isinstance(value, kind), value
        return value

    # ---------------------------------------------------------------- put
    def create(self, name: str, *, nbytes: int = 100, **more: object) -> m.Created:
        index = index_of(nbytes)
        ask = m.Create(
            rid=self.rid(),
            id=ArtifactId(name),
            nbytes=index.nbytes,
            index=index.encode(),
            index_digest=index.digest(),
            tensors=1,
            **more,  # type: ignore[arg-type]
        )
        return self.call(ask, m.Created)

    def fill(self, name: str, created: m.Created, *, nbytes: int = 100) -> None:
        index = index_of(nbytes)
        node = self.desk.nodes[created.node.node]
        record = self.desk.record(
            created.generation, name, created.version, index, node.kind
        )
        made = self.desk.catalog.names.versions.get(created.generation)
        labels = {} if made is None else made.labels
        node.hold(msgspec.structs.replace(record, labels=labels))

    def put(
        self,
        name: str,
        *,
        nbytes: int = 100,
        deadline_s: float = 10.0,
        at_once: bool = False,
        **more: object,
    ) -> m.ArtifactInfo:
        """Put; `at_once` has the creation bring its commit with it."""
        if at_once:
            rid = self.rid()
            brings = {"commit": rid, "commit_deadline_s": deadline_s}
            created = self.create(name, nbytes=nbytes, **brings, **more)
            self.fill(name, created, nbytes=nbytes)
            self.desk.flush()
            return self.result(rid, m.ArtifactInfo)
        created = self.create(name, nbytes=nbytes, **more)
        self.fill(name, created, nbytes=nbytes)
        ask = m.CommitCreated(
            rid=self.rid(), generation=created.generation, deadline_s=deadline_s
        )
        return self.call(ask, m.ArtifactInfo)

    def resolve(
        self, name: str, version: int = 0, *, published: bool = False
    ) -> m.ArtifactInfo:
        ask = m.Resolve(
            rid=self.rid(), id=ArtifactId(name), version=version, published=published
        )
        return self.call(ask, m.ArtifactInfo)

    def locate(self, generation: Generation) -> list[NodeId]:
        ask = m.Locate(rid=self.rid(), generation=generation)
        found = self.call(ask, m.Located)
        return [one.card.node for one in found.locations]

    def publish(self, generation: Generation) -> m.ArtifactInfo:
        return self.call(
            m.Publish(rid=self.rid(), generation=generation), m.ArtifactInfo
        )

    def destroy(self, name: str, generation: int = 0) -> tuple[Version, ...]:
        ask = m.Destroy(
            rid=self.rid(), id=ArtifactId(name), generation=Generation(generation)
        )
        return self.call(ask, m.Destroyed).versions


class Desk:
    """A catalog, its journal and its clock."""

    def __init__(
        self,
        *,
        recovered: Recovered | None = None,
        cluster: str = "c1",
        settings: CatalogSettings | None = None,
        auto: bool = True,
    ) -> None:
        self.cluster = cluster
        self.settings = settings or CatalogSettings(token=b"t")
        self.recovered = recovered or Recovered(
            cluster=ClusterId(cluster), epoch=Epoch(1)
        )
        self.catalog = Catalog(self.settings, self.recovered)
        self.auto = auto
        self.now_s = 1000.0
        self.wake_s: float | None = None
        self.rows: list[Row] = list(self.recovered.rows)
        self.issued: dict[bytes, int] = dict(self.recovered.issued)
        self.queue: list[Persist] = []
        self.durable = self.recovered.seq
        self.epoch = self.recovered.epoch
        self.links: dict[int, FakeNode] = {}
        self.nodes: dict[NodeId, FakeNode] = {}
        self.programs: dict[SessionId, Program] = {}
        self.logs: list[Log] = []
        self.emitted: list[Emit] = []
        self.queries: list[RunQuery] = []
        self.ended: list[EndSession] = []
        self.stalled = False
        self._links = itertools.count(1)
        self._later: list[Callable[[], None]] = []
        self._telling = False
        self.told = oracles.Told()
        #: Carries out what concerns policies (`tests.kit.policies`).
        self.on_policy: Callable[[Instruction], None] = lambda _: None

    # ---------------------------------------------------------------- making
    def next_link(self) -> int:
        return next(self._links)

    def node(self, name: str, host: str = "", **more: object) -> FakeNode:
        node = FakeNode(
            self,
            NodeId(name),
            HostId(host or f"h-{name}"),
            **more,  # type: ignore[arg-type]
        )
        self.nodes[node.node] = node
        return node.join()

    def program(self, name: str = "s", host: str = "h-client") -> Program:
        program = Program(self, SessionId(name), HostId(host))
        self.programs[program.session] = program
        return program.open()

    def record(
        self,
        generation: Generation,
        name: str,
        version: int,
        index: Index,
        kind: str = "",
    ) -> m.ReplicaRecord:
        return m.ReplicaRecord(
            generation=generation,
            id=ArtifactId(name),
            version=Version(version),
            tier=m.Tier.HOST,
            nbytes=index.nbytes,
            index_digest=index.digest(),
            index=index.encode(),
            owner=m.Owner.CALLER if kind == "instance" else m.Owner.SYSTEM,
        )

    # ---------------------------------------------------------------- running
    def later(self, act: Callable[[], None]) -> None:
        self._later.append(act)

    def tell(self, event: Event) -> list[Instruction]:
        out = self.catalog.handle(event, now_s=self.now_s)
        for instruction in out:
            self._carry_out(instruction)
        oracles.check_catalog(self.catalog, self.told)
        if not self._telling:
            self._telling = True
            try:
                self._settle()
            finally:
                self._telling = False
        return out

    def _settle(self) -> None:
        while True:
            if self._later:
                self._later.pop(0)()
            elif self.auto and self.queue and not self.stalled:
                self.commit()
            else:
                return

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Reply():
                self.told.answered(self.catalog, instruction, self.durable)
                program = self.programs.get(instruction.session)
                if program is not None:
                    program.answers[instruction.rid] = instruction.value
            case ToNodeSend():
                node = self.links.get(instruction.link)
                if node is not None:
                    node.receive(instruction.message)
            case CloseLink():
                node = self.links.pop(instruction.link, None)
                if node is not None and node.link == instruction.link:
                    node.link = 0
            case Persist():
                self.queue.append(instruction)
            case _:
                self._note(instruction)

    def _note(self, instruction: Instruction) -> None:
        match instruction:
            case WakeAt():
                self.wake_s = instruction.at_s
            case Log():
                self.logs.append(instruction)
            case Emit():
                self.emitted.append(instruction)
            case RunQuery():
                self.queries.append(instruction)
            case EndSession():
                self.ended.append(instruction)
            case _:
                self.on_policy(instruction)

    def commit(self) -> None:
        """The journal writes all that it was given."""
        for batch in self.queue:
            self.rows.extend(batch.rows)
            for one in batch.issued:
                known = self.issued.get(one.digest, 0)
                self.issued[one.digest] = max(known, one.version)
            self.epoch = Epoch(max(self.epoch, batch.epoch))
            self.durable = batch.seq
        self.queue = []
        self.tell(Journaled(seq=self.durable))

    def flush(self) -> None:
        """Let the journal write until nothing is left to write."""
        while self.queue and not self.stalled:
            self.commit()

    def stall(self, why: str = "disk full") -> None:
        self.stalled = True
        self.tell(JournalStalled(why=why))

    def unstall(self) -> None:
        self.stalled = False
        self.tell(JournalBack())
        self.flush()

    def pass_time(self, seconds: float, *, renewing: bool = True) -> None:
        """Let time pass in the steps that the catalog asks for."""
        end_s = self.now_s + seconds
        next_renew_s = self.now_s
        third_s = self.settings.lease_ttl_s / 3
        while self.now_s < end_s:
            at_s = min(
                end_s,
                self.now_s + third_s,
                max(self.wake_s, self.now_s) if self.wake_s else end_s,
            )
            self.now_s = max(at_s, self.now_s + 1e-6)
            if self.wake_s is not None and self.now_s >= self.wake_s:
                self.wake_s = None
            if renewing and self.now_s >= next_renew_s:
                next_renew_s = self.now_s + third_s
                for node in list(self.links.values()):
                    if node.link:
                        node.renew()
            self.tell(TimePassed())

    # ---------------------------------------------------------------- ends
    def restart(self, *, lost: bool = False, epoch: int = 0) -> Desk:
        """A new life on what the journal had; nodes and programs are not told."""
        kept = Recovered(
            cluster=ClusterId(self.cluster),
            epoch=Epoch(epoch or self.epoch + 1),
            rows=() if lost else tuple(self.rows),
            issued={} if lost else dict(self.issued),
            seq=0 if lost else self.durable,
            lost=lost,
            said="the journal is lost" if lost else "",
        )
        desk = Desk(
            recovered=kept, cluster=self.cluster, settings=self.settings, auto=self.auto
        )
        desk.now_s = self.now_s + 1.0
        for node in self.nodes.values():
            node.desk, node.link = desk, 0
            desk.nodes[node.node] = node
        for program in self.programs.values():
            program.desk = desk
            desk.programs[program.session] = program
        return desk
