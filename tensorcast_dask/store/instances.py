"""The shell of instances: their connections, calls to them, memory that they lend.

Rules:

1. `Attachments` decides under the core's lock, and under it the catalog is told: in the order in
   which things came about. What is said to an instance is sent outside of it, one frame at a time.
2. The death of an instance is seen by pidfd at the next tick, and by the end of its connection
   at once; a child that it forked may hold the connection open.
3. Words of the catalog go out through one thread of their own: the link's must not wait for an
   instance that stands still. One that takes nothing for a while is let go.
4. What an instance lends is a node of its own in the catalog, whose link this store keeps and
   whose readers it answers.
"""

from __future__ import annotations

import itertools
import logging
import queue
import socket
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.dataplane import faults
from tensorcast_dask.dataplane.hosts import PidWatch
from tensorcast_dask.dataplane.server import Peer, Reply
from tensorcast_dask.exceptions import (
    DeadlineExceeded,
    InvalidArgument,
    PeerLost,
    TensorCastError,
)
from tensorcast_dask.store.core import now_s
from tensorcast_dask.store.loans import Loans
from tensorcast_dask.store.state.instances import (
    Answer,
    Attachments,
    HangUp,
    Instruction,
    Say,
    Tell,
)
from tensorcast_dask.tensors.messages import (
    Attach,
    Attached,
    BeginLending,
    CallEnded,
    CallerHere,
    CallInstance,
    Changed,
    Dial,
    Dialled,
    DoDetach,
    Done,
    Fault,
    InstanceSeen,
    InstancesHere,
    Lend,
    Load,
    Mutating,
    Part,
    SessionIn,
    SessionOut,
    Unlend,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.dataplane.framing import Payload
    from tensorcast_dask.dataplane.lending import Lending
    from tensorcast_dask.store.core import Core
    from tensorcast_dask.store.devices import Devices
    from tensorcast_dask.store.identity import Identity
    from tensorcast_dask.tensors.ids import NodeId
    from tensorcast_dask.tensors.messages import (
        CallAnswered,
        FromInstance,
        NodeCard,
        ToInstance,
    )

__all__ = ["InstanceDesk"]

logger = logging.getLogger(__name__)

_NOTE: Final = "attachment"
#: How long an instance may take nothing of what the catalog says.
_TAKES_S: Final = 2.0


@dataclass(slots=True, eq=False)
class _Wait:
    """Somebody who waits for an outcome."""

    done: threading.Lock = field(default_factory=threading.Lock)
    outcome: CallAnswered | Fault | None = None

    def end(self, outcome: CallAnswered | Fault) -> None:
        """End the wait."""
        self.outcome = outcome
        self.done.release()


@dataclass(slots=True, eq=False)
class _Attached:
    """The connection of one instance."""

    peer: Peer
    watch: PidWatch
    loans: Loans


class InstanceDesk:
    """Everything that this store has to do with instances.

    Parameters
    ----------
    core : Core
        Its lock, and how the catalog is told.
    identity : Identity
        Who we are and where the catalog is.
    devices : Devices
        The device process of this node.
    """

    def __init__(self, core: Core, identity: Identity, devices: Devices) -> None:
        self._core = core
        self._identity = identity
        self._devices = devices
        self.attachments = Attachments()
        self._here: dict[str, _Attached] = {}
        self._askers = itertools.count(1)
        #: Told of outcomes.
        self._waits: dict[int, Callable[[CallAnswered | Fault], None]] = {}
        #: What the catalog's word leads to.
        self._words: queue.SimpleQueue[list[Instruction] | None] = queue.SimpleQueue()
        self._sayer = threading.Thread(
            target=self._run_sayer, name="tensorcast-instances", daemon=True
        )

    # -------------------------------------------------------------- requests
    def handle(
        self,
        request: CallInstance | Dial | FromInstance,
        payload: Payload,
        peer: Peer,
    ) -> Reply:
        """Carry one request out."""
        match request:
            case CallInstance():
                return Reply(message=self.call(request))
            case Dial():
                return self._dial(request, peer)
            case Attach():
                return Reply(message=self._attach(request, peer))
            case _:
                return self._of_instance(request, payload, peer)

    def _of_instance(
        self,
        request: Changed
        | Load
        | CallEnded
        | SessionIn
        | BeginLending
        | Lend
        | Mutating
        | Unlend
        | Part,
        payload: Payload,
        peer: Peer,
    ) -> Reply:
        attachment: str = peer.notes.get(_NOTE, "")
        here = self._here.get(attachment)
        if here is None:
            message = f"{type(request).__name__} is an instance's word; attach first"
            raise InvalidArgument(message)
        nothing = Reply(message=None)
        match request:
            case CallEnded():
                self._decide(partial(self.attachments.ended, attachment, request))
                return nothing
            case Load():
                with self._core.lock:
                    self.attachments.pushed(attachment, request, now_s=now_s())
                return nothing
            case Changed():
                record = request.record
                self._decide(partial(self.attachments.changed, attachment, record))
                return Reply(message=Done())
            case SessionIn():
                self._decide(partial(self.attachments.carried, attachment, request))
                return nothing
            case Part():
                here.loans.part_came(request, payload)
                return nothing
            case BeginLending() | Lend() | Mutating() | Unlend():
                known = self.attachments.record(attachment)
                if known is not None:
                    here.loans.take(request, known)
                return Reply(message=Done())

    # -------------------------------------------------------------- attaching
    def _attach(self, request: Attach, peer: Peer) -> Attached:
        if not peer.unix:
            message = "a process attaches on its own host only, over the unix socket"
            raise InvalidArgument(message)
        watch = PidWatch.of_peer(peer.stream.sock)
        attachment = request.record.attachment
        record = msgspec.structs.replace(request.record, pid=peer.pid or watch.pid)
        self._gone(attachment, "it attached anew")
        with self._core.lock:
            try:
                done = self._told(self.attachments.attach(record))
            except TensorCastError:
                watch.close()
                raise
            loans = Loans(
                attachment,
                watch,
                core=self._core,
                identity=self._identity,
                devices=self._devices,
                say=lambda message: self._say(attachment, message),
                say_later=lambda message: self._words.put(
                    [Say(attachment=attachment, message=message)]
                ),
            )
            self._here[attachment] = _Attached(peer, watch, loans)
            peer.notes[_NOTE] = attachment
            up, greeting = self.attachments.up, self.attachments.greeting
        # Who was there before is told first; the answer to this one follows.
        self._do(done)
        self._count()
        logger.info("instance %r attached, process %d", record.name, record.pid)
        return Attached(
            card=self._identity.card,
            cluster=self._identity.cluster,
            up=up,
            greeting=greeting,
            chunk_bytes=self._core.settings.chunk_bytes,
        )

    def _count(self) -> None:
        with self._core.lock:
            self._identity.has_instances(len(self.attachments))

    def _gone(self, attachment: str, why: str, peer: Peer | None = None) -> None:
        """End an attachment; with `peer` only where it is over that connection still."""
        with self._core.lock:
            here = self._here.get(attachment)
            if here is None or (peer is not None and here.peer is not peer):
                return
            del self._here[attachment]
            done = self._told(self.attachments.gone(attachment, why))
        self._do(done)
        self._clear(here, why)

    def _clear(self, here: _Attached, why: str) -> None:
        """End what an instance that is gone has left."""
        here.peer.notes.pop(_NOTE, None)
        here.peer.close()
        here.loans.close(why)
        here.watch.close()
        self._count()

    def closed(self, peer: Peer) -> None:
        """Take the news that a connection ended."""
        attachment = peer.notes.get(_NOTE, "")
        if attachment:
            self._gone(attachment, "its connection ended", peer)

    def tick(self) -> None:
        """Look at the clock, and who has died."""
        dead = [name for name, here in list(self._here.items()) if here.watch.is_gone()]
        for attachment in dead:
            self._gone(attachment, "its process ended")
        self._decide(lambda: self.attachments.tick(now_s=now_s()))

    # -------------------------------------------------------------- calls
    def call(self, request: CallInstance) -> CallAnswered:
        """Call an instance and wait for the outcome."""
        wait = _Wait()
        wait.done.acquire()
        asker = self.begin(request, wait.end)
        try:
            faults.point("instance.asked", detail=request.function)
            if not wait.done.acquire(timeout=min(request.deadline_s, 1e6)):
                self.give_up(asker)
                wait.done.acquire()
        finally:
            self._waits.pop(asker, None)
        outcome = wait.outcome
        assert outcome is not None, "store: a wait ends with an outcome"
        if isinstance(outcome, Fault):
            raise outcome.error()
        return outcome

    def begin(
        self, request: CallInstance, ended: Callable[[CallAnswered | Fault], None]
    ) -> int:
        """Call an instance; what it comes to goes to `ended`, in whichever thread.

        Gives the number to give it up by, when its time is over.
        """
        asker = next(self._askers)
        with self._core.lock:
            done = self.attachments.call(asker, request)
            self._waits[asker] = ended
        self._do(done)
        return asker

    def give_up(self, asker: int) -> None:
        """Wait no longer for a call."""
        self._decide(partial(self.attachments.gave_up, asker))

    def _dial(self, request: Dial, peer: Peer) -> Reply:
        """Connect a caller of this host with an instance, and be out of their way."""
        if not peer.unix:
            message = "only over the unix socket can a socket be handed over"
            raise InvalidArgument(message)
        with self._core.lock:
            attachment = self.attachments.find(request)
            here = self._here.get(attachment)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours:
            try:
                if here is None:
                    message = "the instance is just going; ask for it again"
                    raise PeerLost(message)
                with here.peer.sending:
                    here.peer.stream.send(
                        CallerHere(), fds=(ours.fileno(),), until_s=now_s() + _TAKES_S
                    )
            except TensorCastError:
                theirs.close()
                raise
        dialled = Dialled(attachment=attachment)
        return Reply(message=dialled, fds=(theirs.detach(),))

    # -------------------------------------------------------------- instructions
    def _decide(self, decide: Callable[[], list[Instruction]]) -> None:
        """Have the machine decide, and carry out what it says."""
        with self._core.lock:
            done = self._told(decide())
        self._do(done)

    def _told(self, done: list[Instruction]) -> list[Instruction]:
        """Tell the catalog what it is to be told; give the rest. Under the lock (rule 1)."""
        for instruction in done:
            if isinstance(instruction, Tell):
                self._core.tell(instruction.message)
        return [one for one in done if not isinstance(one, Tell)]

    def _do(self, told: list[Instruction]) -> None:
        for instruction in told:
            match instruction:
                case Answer():
                    self._waits.pop(instruction.asker)(instruction.outcome)
                case Say():
                    self._say(instruction.attachment, instruction.message)
                case Tell():
                    self._core.tell(instruction.message)
                case HangUp():
                    with self._core.lock:
                        here = self._here.pop(instruction.attachment, None)
                    if here is not None:
                        self._clear(here, "it was let go")

    def _say(
        self, attachment: str, message: ToInstance, until_s: float | None = None
    ) -> None:
        here = self._here.get(attachment)
        if here is None:
            return
        try:
            with here.peer.sending:
                here.peer.stream.send(message, until_s=until_s or now_s() + _TAKES_S)
        except (PeerLost, DeadlineExceeded) as error:
            # Half a frame may be out: the connection is of no more use.
            logger.warning("an instance takes nothing: %s", error)
            here.peer.close()

    # -------------------------------------------------------------- the catalog
    def start(self) -> None:
        """Begin to carry words of the catalog."""
        self._sayer.start()

    def stop(self, *, within_s: float) -> None:
        """End every connection: whoever had it looks for another node."""
        for attachment in list(self._here):
            self._gone(attachment, "the node ends")
        self._words.put(None)
        if self._sayer.ident is not None:
            self._sayer.join(within_s)

    def greeted(self) -> InstancesHere:
        """Say who is here; sessions are opened anew by their instances."""
        with self._core.lock:
            here = self.attachments.all_here()
            self._words.put(self.attachments.greeted())
        for one in list(self._here.values()):
            one.loans.aim()
        return here

    def link_down(self) -> None:
        """Note that the catalog does not listen."""
        with self._core.lock:
            self._words.put(self.attachments.left())

    def told(self, message: InstanceSeen | DoDetach | SessionOut) -> None:
        """Take a word of the catalog, in the link's thread (rule 3)."""
        with self._core.lock:
            match message:
                case InstanceSeen():
                    done = self.attachments.seen(message.attachment, message.term)
                case DoDetach():
                    done = self.attachments.let_go(message.attachment, message.why)
                case _:
                    done = self.attachments.answered(message)
            self._words.put(self._told(done))

    def _run_sayer(self) -> None:
        while (told := self._words.get()) is not None:
            try:
                self._do(told)
            except Exception:
                logger.exception("a word of the catalog was not carried")

    # -------------------------------------------------------------- lent memory
    def lending(self, node: NodeId) -> Lending | None:
        """Find who answers the readers of an instance's memory."""
        here = self._here.get(node)
        return None if here is None else here.loans.lending

    def guest(self, node: NodeId) -> NodeCard | None:
        """Give the card of an instance that lends, for its readers."""
        lending = self.lending(node)
        return None if lending is None else lending.card

    @property
    def calls(self) -> int:
        """How many callers wait."""
        return len(self._waits)
