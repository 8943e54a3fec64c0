"""The shell of runs that this store drives: one thread, a session of its own, calls of instances.

Rules:

1. `Drive` decides; here its words are sent, and what comes back is handed to it, one event at a
   time under one lock, in whichever thread brings it: the link's decides on small plans itself.
   What may wait (a call, a large plan, the clock) is done by a thread of this desk.
2. The session goes over the link. What the catalog has not answered when the link ends is asked
   again over the next one.
3. A call of an instance of this node waits in no thread; one of another node waits in one of a few.
4. A run that fails here is given back with the reason: the catalog tells its caller.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.dataplane import faults
from tensorcast_dask.dataplane.carried import CarriedSession
from tensorcast_dask.dataplane.channel import ChannelPool, Credentials
from tensorcast_dask.exceptions import PeerLost, TensorCastError
from tensorcast_dask.store.state.driving import Drive
from tensorcast_dask.store.state.driving_words import GiveUp, Make, Say
from tensorcast_dask.tensors.messages import CallAnswered, EndPlan, Fault, SessionOut

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.store.core import Core
    from tensorcast_dask.store.identity import Identity
    from tensorcast_dask.store.instances import InstanceDesk
    from tensorcast_dask.store.state.driving_words import Instruction
    from tensorcast_dask.tensors.messages import (
        Answer,
        CallInstance,
        DoRun,
        NodeCard,
        SessionIn,
    )
    from tensorcast_dask.tensors.wants import Ticket

__all__ = ["PlanDesk"]

logger = logging.getLogger(__name__)

#: A plan whose text is longer is not begun by the link's thread.
_SMALL_BYTES: Final = 16 << 10
#: Calls of other nodes' instances at once.
_FAR: Final = 32
_GRACE_S: Final = 2.0


class PlanDesk:
    """Every run that this store drives.

    Parameters
    ----------
    core : Core
        How the catalog is told.
    identity : Identity
        Who we are.
    desk : InstanceDesk
        Instances of this node.
    credentials : callable
        Gives what other stores are met with.
    """

    def __init__(
        self,
        core: Core,
        identity: Identity,
        desk: InstanceDesk,
        credentials: Callable[[], Credentials],
    ) -> None:
        self._core = core
        self._identity = identity
        self._desk = desk
        self._credentials = credentials
        name = f"{identity.node}-plans-{secrets.token_hex(4)}"
        self._session = CarriedSession(self._carry, name, identity.card.host)
        #: Guards all below.
        self._lock = threading.RLock()
        self._drives: dict[Ticket, Drive] = {}
        #: When the thread looks at the clock.
        self._look_s = float("inf")
        #: Calls of this node's instances: who asks, by run and number.
        self._askers: dict[tuple[Ticket, int], int] = {}
        self._acts: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name="tensorcast-plans", daemon=True
        )
        self._far: ThreadPoolExecutor | None = None
        self._pool: ChannelPool | None = None

    # -------------------------------------------------------------- life
    def start(self) -> None:
        """Begin to drive what comes."""
        self._thread.start()

    def stop(self, *, within_s: float) -> None:
        """Drive no more; the catalog gives the runs to others."""
        self._acts.put(None)
        if self._thread.ident is not None:
            self._thread.join(within_s)
        if self._far is not None:
            self._far.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            self._pool.close()

    @property
    def driven(self) -> int:
        """How many runs are driven here."""
        return len(self._drives)

    # -------------------------------------------------------------- the link's thread
    def ordered(self, order: DoRun) -> None:
        """Take a run."""
        if len(order.spec) <= _SMALL_BYTES:
            self._take(order)
        else:
            self._acts.put(partial(self._take, order))

    def heard_of(self, *, up: bool) -> None:
        """Take the news that the catalog listens anew, or does not."""
        self._session.heard_of(up=up)

    def heard(self, message: SessionOut) -> bool:
        """Take an answer of the catalog; False when it is for somebody else."""
        if message.session != self._session.session:
            return False
        self._session.heard(message.raw)
        return True

    def _carry(self, message: SessionIn) -> bool:
        self._core.tell(message)
        return True

    # -------------------------------------------------------------- the plans' thread
    def _run(self) -> None:
        while True:
            try:
                act = self._acts.get(timeout=self._wait_s())
            except queue.Empty:
                act = self._tick
            if act is None:
                return
            try:
                act()
            except Exception:
                logger.exception("a plan was not carried on")

    def _wait_s(self) -> float | None:
        with self._lock:
            times = [drive.next_s() for drive in self._drives.values()]
            self._look_s = min(times, default=float("inf"))
            return max(0.0, self._look_s - time.monotonic()) if times else None

    def _tick(self) -> None:
        with self._lock:
            for drive in list(self._drives.values()):
                self._tell(drive, partial(drive.tick, now_s=time.monotonic()))

    # -------------------------------------------------------------- events
    def _take(self, order: DoRun) -> None:
        try:
            drive = Drive(
                order,
                node=self._identity.node,
                host=self._identity.card.host,
                now_s=time.monotonic(),
            )
        except TensorCastError as error:
            logger.warning("plan %r cannot be driven: %s", order.key, error)
            self._give_back(order.key, order.run, error.message)
            return
        with self._lock:
            if drive.ticket in self._drives:
                return  # said again
            self._drives[drive.ticket] = drive
            self._tell(drive, drive.begin)

    def _tell(self, drive: Drive, event: Callable[[], list[Instruction]]) -> None:
        """Hand an event to a run and carry out what it says."""
        with self._lock:
            if self._drives.get(drive.ticket) is not drive:
                return  # it is over
            try:
                for instruction in event():
                    self._do(drive, instruction)
            except Exception as error:
                logger.exception("plan %r fails here", drive.ticket.key)
                why = f"the node that drove it failed: {error}"
                self._give_back(drive.ticket.key, drive.ticket.run, why)
                drive.over = True
            if drive.over:
                del self._drives[drive.ticket]
            elif drive.next_s() < self._look_s:
                self._acts.put(_nothing)  # the thread looks anew how long it may wait

    def _give_back(self, key: str, run: int, why: str) -> None:
        left = EndPlan(rid=self._session.next_rid(), key=key, run=run, left=why)
        self._session.ask(left, _nothing)

    def _do(self, drive: Drive, instruction: Instruction) -> None:
        match instruction:
            case Say(number=number, request=request):
                faults.point("plan.said", detail=type(request).__name__)
                rid = self._session.next_rid(drive.ticket.trace)
                request = msgspec.structs.replace(request, rid=rid)
                self._session.ask(request, partial(self._answered, drive, number))
            case Make():
                self._acts.put(partial(self._make, drive, instruction))
            case GiveUp(number=number):
                self._acts.put(partial(self._give_up, drive, number))

    def _answered(self, drive: Drive, number: int, answer: Answer) -> None:
        def event() -> list[Instruction]:
            faults.point("plan.heard", detail=drive.ticket.key)
            return drive.answered(number, answer, now_s=time.monotonic())

        self._tell(drive, event)

    # -------------------------------------------------------------- calls
    def _make(self, drive: Drive, call: Make) -> None:
        ended = partial(self._called, drive, call.number)
        rid = self._session.next_rid(drive.ticket.trace)
        request = msgspec.structs.replace(call.request, rid=rid)
        if call.card.node != self._identity.node:
            if self._far is None:
                self._far = ThreadPoolExecutor(_FAR, "tensorcast-calls")
            self._far.submit(self._call_far, call.card, request, ended)
            return
        key = drive.ticket, call.number
        self._askers[key] = 0
        try:
            asker = self._desk.begin(request, ended)
        except TensorCastError as error:
            ended(Fault.of(error))
            return
        with self._lock:
            if key in self._askers:  # it has not ended already
                self._askers[key] = asker

    def _called(self, drive: Drive, number: int, outcome: CallAnswered | Fault) -> None:
        """Take what a call came to, in whichever thread."""

        def event() -> list[Instruction]:
            came = outcome.error() if isinstance(outcome, Fault) else outcome.value
            return drive.called(number, came, now_s=time.monotonic())

        with self._lock:
            self._askers.pop((drive.ticket, number), None)
            self._tell(drive, event)

    def _give_up(self, drive: Drive, number: int) -> None:
        asker = self._askers.get((drive.ticket, number), 0)
        if asker:
            self._desk.give_up(asker)

    def _call_far(
        self,
        card: NodeCard,
        request: CallInstance,
        ended: Callable[[CallAnswered | Fault], None],
    ) -> None:
        within_s = request.deadline_s + _GRACE_S
        try:
            frame = self._met().call(
                card,
                request,
                expect=CallAnswered,
                until_s=time.monotonic() + within_s,
                stall_s=within_s,
            )
        except TensorCastError as error:
            ended(Fault.of(error))
        except Exception as error:
            logger.exception("a call failed")
            ended(Fault.of(PeerLost(f"the call could not be made: {error}")))
        else:
            frame.close()
            ended(frame.message)

    def _met(self) -> ChannelPool:
        ours = self._credentials()
        if self._pool is None:
            self._pool = ChannelPool(ours)
        elif self._pool.credentials != ours:
            self._pool.renew(ours)
        return self._pool


def _nothing(_: Answer | None = None) -> None:
    """Wait for nothing."""
