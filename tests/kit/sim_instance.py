"""A simulated instance: a process that is attached to a store, called, lends memory, has a session.

It follows `instance.attachment`, `.line` and `.artifacts`; what was asked under a key (`Calls`) and the
session (`CarriedSession`) are the product's.

Rules:

1. One thread reads and carries calls out. While a function works it hears nothing; while it waits
   for its node it hears everything.
2. Other threads of the process ask and say at any time.
3. A process dies whole.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensorcast_dask.dataplane.carried import CarriedSession
from tensorcast_dask.exceptions import (
    DeadlineExceeded,
    PeerLost,
    StaleOwner,
    TensorCastError,
)
from tensorcast_dask.instance.state.calls import Calls
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors import values
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    Generation,
    HostId,
    NodeId,
    RequestId,
)
from tests.kit.sim_lender import Lent
from tests.kit.sim_store import index_of
from tests.kit.sim_timeline import Life, Process, Signal, Wait

if TYPE_CHECKING:
    from tests.kit.sim_network import End
    from tests.kit.world import World

__all__ = ["FUNCTIONS", "SimInstance", "what_of"]

#: What it offers; the last one is of the engine's contract, and mends or spoils.
FUNCTIONS = ("work", "find", "transform_into")
NAMES = ("x", "y", "lent")
SIZES = (100, 4096, 3 * 4096)
RETRY_S = 1.0
ANSWER_S = 10.0

Asking = Generator[Wait, bool, Any]


def what_of(args: bytes) -> str:
    """Give the name of what a call is to do: its only argument."""
    given: Any = values.unpack(args, lambda reference: reference)
    name: str = given[0][0]
    return name


@dataclass(eq=False)
class _Waiter:
    """Somebody who waits for an answer."""

    done: Signal = field(default_factory=Signal)
    value: Any = None

    def give(self, value: object) -> None:
        self.value = value
        self.done.fire()


@dataclass(eq=False)
class SimInstance:
    """One process."""

    world: World
    attachment: str
    name: str
    host: str
    term: int = 0
    fenced: str = ""
    closing: bool = False
    attached: bool = False
    #: When its node was lost, or found again, last.
    moved_s: float = 0.0
    line: End | None = None
    #: What came and was not heard yet; None is the end of the connection.
    inbox: deque[object] = field(default_factory=deque)
    #: Calls that came with no store between, and whom to answer.
    direct: deque[tuple[m.CallInstance, End]] = field(default_factory=deque)
    came: Signal = field(default_factory=Signal)
    waiters: deque[_Waiter] = field(default_factory=deque)
    lent: dict[Generation, Lent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.life = Life(self.attachment)
        self.calls = Calls(keep=8)
        session = f"instance-{self.attachment}"
        self.session = CarriedSession(self._carry, session, HostId(self.host))
        self.died_s = float("inf")
        self.since_s = self.world.time.now_s
        self.times = 0

    # -------------------------------------------------------------- life
    def start(self) -> None:
        """Attach, be called, do something of its own."""
        self.world.time.spawn(self.life, self._run())
        self.world.time.spawn(self.life, self._work())

    def die(self) -> None:
        """End at once."""
        self.life.alive = False
        self.died_s = self.world.time.now_s
        if self.line is not None:
            self.world.network.break_one(self.line.connection)

    def detach(self) -> None:
        """Leave the node in order."""
        self.closing = True
        self.came.fire()

    @property
    def over(self) -> bool:
        """Whether it is no instance any more, for good."""
        return self.closing or bool(self.fenced) or not self.life.alive

    def record(self) -> m.InstanceRecord:
        """Say what it is."""
        return m.InstanceRecord(
            name=self.name,
            attachment=self.attachment,
            term=self.term,
            since_s=self.since_s,
            times=self.times,
            functions=FUNCTIONS[:2],
            engine=FUNCTIONS[2:],
            poisoned=self.calls.poisoned,
        )

    # -------------------------------------------------------------- the thread
    def _run(self) -> Process:
        while not self.over:
            if self._connect():
                try:
                    yield from self._converse()
                except TensorCastError as error:
                    self.world.time.note(self.attachment, f"{error}")
                    if isinstance(error, StaleOwner):
                        self.fenced = self.fenced or error.message
                self._lost()
            if not self.over:
                yield RETRY_S
        self.world.time.note(self.attachment, f"is over: {self.fenced or 'it leaves'}")

    def _connect(self) -> bool:
        """Open a line to the store of this host that has the fewest instances."""
        there = [one for one in self.world.alive() if one.host == self.host]
        if not there:
            return False
        node = min(there, key=lambda one: (len(one.desk.attachments), one.name))
        ours, theirs = self.world.network.connect(
            (self.host, self.attachment), (node.host, f"{node.name}<{self.attachment}")
        )
        ours.on_message, ours.on_closed = self._comes, lambda: self._comes(None)
        self.line = ours
        self.times += 1
        node.desk.accept(theirs, self)
        return True

    def _comes(self, message: object) -> None:
        self.inbox.append(message)
        self.came.fire()

    def _converse(self) -> Asking:
        rid = RequestId(f"{self.attachment}:attach")
        ask = m.Attach(rid=rid, record=self.record())
        attached = yield from self._ask_store(ask, ANSWER_S, thread=True)
        self.attached, self.moved_s = True, self.world.time.now_s
        for lent in list(self.lent.values()):
            yield from self._ask_store(self._lend(lent), 30.0, thread=True)
        if attached.up:
            self.session.heard_of(up=True, greeting=attached.greeting)
        while not self.over:
            while self.inbox:  # what was said so far: a call may be dropped
                self._hear(self.inbox.popleft())
            call = self.calls.next(now_s=self.world.time.now_s)
            if call is not None:
                self._tell((yield from self._ended(call)))
            elif self.direct:
                yield from self._serve(*self.direct.popleft())
            else:
                self.came = Signal()
                yield self.came

    def _lost(self) -> None:
        """Close the line, after what the store said last was heard."""
        line, self.line = self.line, None
        for message in list(self.inbox):
            if isinstance(message, m.Replaced):
                self.fenced = message.why
        self.inbox.clear()
        self.attached, self.moved_s = False, self.world.time.now_s
        if line is not None:
            line.close()
        waiting = list(self.waiters)
        self.waiters.clear()
        for waiter in waiting:
            waiter.give(PeerLost("this process is not attached to a node now"))
        self.session.heard_of(up=False)
        self.calls.forget_waiting()

    def _hear(self, message: object) -> None:
        match message:
            case None:
                self.inbox.appendleft(None)  # whoever reads next hears it too
                raise PeerLost("the connection ended")
            case m.Call():
                self.calls.asked(message, now_s=self.world.time.now_s)
            case m.CallDropped():
                self.calls.dropped(message.number)
            case m.SessionOut():
                self.session.heard(message.raw)
            case m.Seen():
                self.session.heard_of(up=message.up, greeting=message.greeting)
                self.term = message.term or self.term
            case m.Replaced():
                self.fenced = message.why
            case m.LendEnded():
                self.lent.pop(message.generation, None)
            case _:
                self.waiters.popleft().give(message)

    # -------------------------------------------------------------- the line
    def _tell(self, message: Any) -> None:
        if self.line is None or not self.line.open:
            raise PeerLost("nobody listens")
        self.line.send(message)

    def _carry(self, message: m.SessionIn) -> bool:
        try:
            self._tell(message)
        except PeerLost:
            return False
        return True

    def _ask_store(self, ask: Any, within_s: float, *, thread: bool = False) -> Asking:
        waiter = _Waiter()
        self._tell(ask)
        self.waiters.append(waiter)
        answer = yield from self._wait(waiter, within_s, thread=thread)
        if isinstance(answer, m.Refused):
            raise answer.fault.error()
        return answer

    def _wait(self, waiter: _Waiter, within_s: float, *, thread: bool) -> Asking:
        until_s = self.world.time.now_s + within_s
        while thread and not waiter.done.fired:
            if self.inbox:
                self._hear(self.inbox.popleft())
                continue
            left_s = until_s - self.world.time.now_s
            self.came = Signal()
            if left_s <= 0 or not (yield self.came, left_s):
                break
        if not thread and not waiter.done.fired:
            yield waiter.done, within_s
        if not waiter.done.fired:
            raise DeadlineExceeded("no answer came in time")
        if isinstance(waiter.value, TensorCastError):
            raise waiter.value
        return waiter.value

    def ask_catalog(
        self, request: Any, kind: type, within_s: float, *, thread: bool = False
    ) -> Asking:
        """Ask in the session, and return the value.

        Raises
        ------
        TensorCastError
            What the catalog answered, or that it did not.
        """
        waiter = _Waiter()
        self.world.watch.asked(self, request)
        self.session.ask(request, waiter.give)
        try:
            answer = yield from self._wait(waiter, within_s, thread=thread)
        except TensorCastError:
            self.session.forget(request.rid)
            raise
        if answer.fault is not None:
            raise answer.fault.error()
        return m.decode(answer.value, kind)

    # -------------------------------------------------------------- calls
    def _ended(self, call: m.Call) -> Asking:
        ended = self.calls.known(call)
        if ended is None:
            try:
                ended = yield from self._outcome(call)
            except TensorCastError as error:
                fault = m.Fault.of(error)
                data = {**fault.data, "carried_out": True}
                fault = m.Fault(kind=fault.kind, message=fault.message, data=data)
                ended = m.CallEnded(number=call.number, fault=fault)
            self.calls.ended(call, ended)
        return ended

    def _outcome(self, call: m.Call) -> Asking:
        rng = self.world.rng
        yield rng.choice((0.001, 0.02, 0.5))
        if call.function == "find":
            name = ArtifactId(rng.choice(NAMES))
            ask = m.Resolve(rid=self.session.next_rid(), id=name)
            try:
                yield from self.ask_catalog(ask, m.ArtifactInfo, 2.0, thread=True)
            except PeerLost:
                raise
            except TensorCastError:
                pass  # it is not there, or nobody says in time
        self.world.watch.carried_out(self, call)
        yield rng.choice((0.001, 0.02, 0.5))
        if call.function == "transform_into":
            self.calls.poisoned = "half an update" if rng.random() < 0.5 else ""
            with contextlib.suppress(TensorCastError):  # the next attachment tells it
                yield from self._changed(thread=True)
        return m.CallEnded(number=call.number, value=b"v")

    def _changed(self, *, thread: bool = False) -> Asking:
        if self.attached:
            changed = m.Changed(rid=self.session.next_rid(), record=self.record())
            yield from self._ask_store(changed, ANSWER_S, thread=thread)

    def directly(self, end: End) -> None:
        """Take a caller who has nobody between."""

        def asked(message: Any) -> None:
            self.direct.append((message, end))
            self.came.fire()

        end.on_message = asked

    def _serve(self, request: m.CallInstance, end: End) -> Asking:
        if not end.open:
            return  # it gave up, or died
        call = m.Call(
            number=0,
            function=request.function,
            args=request.args,
            key=request.key,
            deadline_s=request.deadline_s,
        )
        ended = yield from self._ended(call)
        if ended.fault is not None:
            end.send(m.Refused(fault=ended.fault))
        else:
            end.send(m.CallAnswered(value=ended.value))

    # -------------------------------------------------------------- other threads
    def _work(self) -> Process:
        rng = self.world.rng
        while not self.over and not self.world.quiet:
            yield rng.choice((0.05, 0.3, 1.0, 3.0))
            act = rng.choice(
                (self._register, self._register, self._find, self._push, self._release)
            )
            try:
                yield from act()
            except TensorCastError as error:
                self.world.time.note(self.attachment, f"{act.__name__}: {error}")

    def _find(self) -> Asking:
        name = ArtifactId(self.world.rng.choice(NAMES))
        ask = m.Resolve(rid=self.session.next_rid(), id=name)
        yield from self.ask_catalog(ask, m.ArtifactInfo, 3.0)

    def _push(self) -> Asking:
        self._tell(m.Load(values={"queue": 1.0}))
        yield 0.0

    def _lend(self, lent: Lent) -> m.Lend:
        record = lent.record
        return m.Lend(
            rid=self.session.next_rid(),
            generation=record.generation,
            id=record.id,
            version=record.version,
            index=record.index,
            spans=b"",
        )

    def _register(self) -> Asking:
        nbytes = self.world.rng.choice(SIZES)
        index, digest = index_of(nbytes)
        begin = m.BeginLending(rid=self.session.next_rid())
        yield from self._ask_store(begin, ANSWER_S)
        create = m.Create(
            rid=self.session.next_rid(),
            id=ArtifactId("lent"),
            nbytes=nbytes,
            index=index,
            index_digest=digest,
            tensors=1,
            version=-1,
            owner=m.Owner.CALLER,
            node=NodeId(self.attachment),
            host=HostId(self.host),
            ttl_s=6.0,
        )
        made = yield from self.ask_catalog(create, m.Created, ANSWER_S)
        record = m.ReplicaRecord(
            generation=made.generation,
            id=ArtifactId("lent"),
            version=made.version,
            tier=m.Tier.HOST,
            nbytes=nbytes,
            index_digest=digest,
            owner=m.Owner.CALLER,
            index=index,
        )
        lent = self.lent[made.generation] = Lent.of(record)
        self.world.watch.lends(made.generation, lent)
        try:
            yield from self._ask_store(self._lend(lent), ANSWER_S)
            commit = m.CommitCreated(
                rid=self.session.next_rid(), generation=made.generation, deadline_s=6.0
            )
            yield from self.ask_catalog(commit, m.ArtifactInfo, 6.0)
        except TensorCastError:
            yield from self._given_back(made.generation)
            raise
        yield from lent.mutate([self.world.rng.choice((0.0, 0.01)) for _ in range(3)])

    def _given_back(self, generation: Generation) -> Asking:
        self.lent.pop(generation, None)
        unlend = m.Unlend(rid=self.session.next_rid(), generation=generation)
        abort = m.AbortCreated(rid=self.session.next_rid(), generation=generation)
        with contextlib.suppress(TensorCastError):
            yield from self._ask_store(unlend, 5.0)
        with contextlib.suppress(TensorCastError):
            yield from self.ask_catalog(abort, type(None), 5.0)

    def _release(self) -> Asking:
        if not self.lent:
            return
        generation = next(iter(self.lent))
        del self.lent[generation]
        over = m.Release(
            rid=self.session.next_rid(), generation=generation, deadline_s=4.0
        )
        try:
            yield from self.ask_catalog(over, type(None), 4.0)
        except TensorCastError:
            unlend = m.Unlend(rid=self.session.next_rid(), generation=generation)
            yield from self._ask_store(unlend, ANSWER_S)
