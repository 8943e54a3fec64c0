"""What a simulated store has to do with instances: their connections, calls, memory that they lend.

It follows `store.instances` and `store.loans`; who is attached, and who waits, is the product's.

Rules:

1. One connection is served one message after the other; a store's death ends them all.
2. A death is seen at the next tick, or when the connection ends.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensorcast_dask.exceptions import (
    CatalogUnavailable,
    InvalidArgument,
    TensorCastError,
)
from tensorcast_dask.store.state.instances import (
    Answer,
    Attachments,
    HangUp,
    Instruction,
    Say,
    Tell,
)
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ClusterId, Generation
from tests.kit.sim_lender import SimLender
from tests.kit.sim_store import CHUNK_BYTES
from tests.kit.sim_timeline import Life, Process, Signal, Wait

if TYPE_CHECKING:
    from tests.kit.sim_instance import SimInstance
    from tests.kit.sim_network import End
    from tests.kit.sim_node import SimNode

__all__ = ["SimDesk"]

TICK_S = 0.25
Outcome = m.CallAnswered | m.Fault


@dataclass(eq=False)
class _Peer:
    """One connection."""

    end: End
    instance: SimInstance
    inbox: deque[Any] = field(default_factory=deque)
    came: Signal = field(default_factory=Signal)

    def take(self, message: object) -> None:
        self.inbox.append(message)
        self.came.fire()


@dataclass(eq=False)
class _Here:
    """One attachment."""

    peer: _Peer
    lender: SimLender | None = None


class SimDesk:
    """All instances of one node."""

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.attachments = Attachments()
        self.here: dict[str, _Here] = {}
        self.waits: dict[int, Callable[[Outcome], None]] = {}
        self._askers = itertools.count(1)

    # -------------------------------------------------------------- connections
    def accept(self, end: End, instance: SimInstance) -> None:
        """Serve a connection."""
        peer = _Peer(end, instance)
        end.on_message, end.on_closed = peer.take, lambda: peer.take(None)
        self.node.world.time.spawn(self.node.life, self._serve(peer))

    def _serve(self, peer: _Peer) -> Process:
        while True:
            if not peer.inbox:
                peer.came = Signal()
                yield peer.came
            message = peer.inbox.popleft()
            if message is None:
                self._gone(peer.instance.attachment, "its connection ended", peer)
                return
            try:
                reply = yield from self._handle(message, peer)
            except TensorCastError as error:
                reply = m.Refused(fault=m.Fault.of(error))
            if reply is not None:
                peer.end.send(reply)

    def _handle(self, message: Any, peer: _Peer) -> Generator[Wait, bool, Any]:
        attachment = peer.instance.attachment
        if isinstance(message, m.Attach):
            return self._attach(message, peer)
        here = self.here.get(attachment)
        if here is None or here.peer is not peer:
            raise InvalidArgument("attach first")
        match message:
            case m.CallEnded():
                self._do(self.attachments.ended(attachment, message))
            case m.Load():
                self.attachments.pushed(attachment, message, now_s=self.node.now_s())
            case m.SessionIn():
                self._do(self.attachments.carried(attachment, message))
            case _:
                return (yield from self._asked(message, here))
        return None

    def _asked(self, message: Any, here: _Here) -> Generator[Wait, bool, m.Done]:
        instance = here.peer.instance
        match message:
            case m.Changed():
                done = self.attachments.changed(instance.attachment, message.record)
                self._do(done)
            case m.BeginLending():
                yield from self._begin_lending(here)
            case m.Lend():
                self._begin(here)
                lent = instance.lent.get(message.generation)
                if lent is not None and here.lender is not None:
                    here.lender.serve(lent)
            case m.Unlend() if here.lender is not None:
                here.lender.forget(message.generation)
        return m.Done()

    def _attach(self, message: m.Attach, peer: _Peer) -> m.Attached:
        attachment = message.record.attachment
        self._gone(attachment, "it attached anew")
        done = self.attachments.attach(message.record)
        self.here[attachment] = _Here(peer)
        self._do(done)
        if len(self.here) == 1:
            self._tick()
        return m.Attached(
            card=self.node.card,
            cluster=ClusterId("c1"),
            up=self.attachments.up,
            greeting=self.attachments.greeting,
            chunk_bytes=CHUNK_BYTES,
        )

    def _tick(self) -> None:
        for attachment, here in list(self.here.items()):
            if not here.peer.instance.life.alive:
                self._gone(attachment, "its process ended")
        self._do(self.attachments.tick(now_s=self.node.now_s()))
        if self.here:
            self.node.after(TICK_S, self._tick)

    def _gone(self, attachment: str, why: str, peer: _Peer | None = None) -> None:
        here = self.here.get(attachment)
        if here is None or (peer is not None and here.peer is not peer):
            return
        del self.here[attachment]
        self._do(self.attachments.gone(attachment, why))
        self._clear(here)

    def _clear(self, here: _Here) -> None:
        here.peer.end.close()
        if here.lender is not None:
            here.lender.close()

    def die(self) -> None:
        """End with the store: what it lends for others is served no more."""
        for here in self.here.values():
            self.node.world.network.break_one(here.peer.end.connection)
            if here.lender is not None:
                here.lender.die()

    # -------------------------------------------------------------- lending
    def _begin(self, here: _Here) -> SimLender:
        if here.lender is None:
            instance = here.peer.instance

            def ended(generation: Generation) -> None:
                word = m.LendEnded(generation=generation, why="destroyed")
                self._say(instance.attachment, word)

            here.lender = SimLender(
                self.node.world,
                instance.attachment,
                self.node.host,
                Life(f"{instance.attachment} at {self.node.name}"),
                owner=instance.life,
                on_end=ended,
            )
            self.node.world.lenders.append(here.lender)
        return here.lender

    def _begin_lending(self, here: _Here) -> Process:
        lender, waited_s = self._begin(here), 0.0
        while not lender.up:
            if waited_s > 10.0:
                raise CatalogUnavailable("not greeted in time")
            waited_s += 0.1
            yield 0.1

    # -------------------------------------------------------------- calls
    def call(self, request: m.CallInstance) -> Generator[Wait, bool, Outcome]:
        """Call an instance, and wait for the outcome.

        Raises
        ------
        TensorCastError
            When it was not handed to it.
        """
        came: list[Outcome] = []
        ended = Signal()

        def end(outcome: Outcome) -> None:
            came.append(outcome)
            ended.fire()

        asker = self.begin(request, end)
        if not (yield ended, request.deadline_s):
            self.give_up(asker)
        assert came, f"{self.node.name}: a call waits without end"
        return came[0]

    def begin(self, request: m.CallInstance, ended: Callable[[Outcome], None]) -> int:
        """Call an instance; what it comes to goes to `ended`."""
        asker = next(self._askers)
        done = self.attachments.call(asker, request)
        self.waits[asker] = ended
        self._do(done)
        return asker

    def give_up(self, asker: int) -> None:
        """Wait no longer for a call."""
        self._do(self.attachments.gave_up(asker))

    def dial(self, request: m.CallInstance) -> SimInstance:
        """Find who is meant, for a caller of this host."""
        return self.here[self.attachments.find(request)].peer.instance

    # -------------------------------------------------------------- instructions
    def _do(self, told: list[Instruction]) -> None:
        for one in told:
            match one:
                case Answer():
                    self.waits.pop(one.asker)(one.outcome)
                case Say():
                    self._say(one.attachment, one.message)
                case Tell():
                    self.node.tell(one.message)
                case HangUp():
                    here = self.here.pop(one.attachment, None)
                    if here is not None:
                        self._clear(here)

    def _say(self, attachment: str, message: m.ToInstance) -> None:
        here = self.here.get(attachment)
        if here is not None:
            here.peer.end.send(message)

    # -------------------------------------------------------------- the catalog
    def greeted(self) -> m.InstancesHere:
        """Say who is here."""
        told = self.attachments.all_here()
        self._do(self.attachments.greeted())
        return told

    def link_down(self) -> None:
        """Note that the catalog does not listen."""
        self._do(self.attachments.left())

    def told(self, message: m.InstanceSeen | m.DoDetach | m.SessionOut) -> None:
        """Take a word of the catalog."""
        match message:
            case m.InstanceSeen():
                self._do(self.attachments.seen(message.attachment, message.term))
            case m.DoDetach():
                self._do(self.attachments.let_go(message.attachment, message.why))
            case m.SessionOut():
                self._do(self.attachments.answered(message))
