"""The store's side of the link: greet, announce, take orders.

Rules:

1. The link's thread decides and hands on; what takes time runs as a job, drops in one
   thread of their own in the catalog's order. So a lease is renewed whatever moves.
2. After each greeting everything is said anew: who we are, what we hold, what ended.
3. While the link is down the address is looked up again in `link.json` beside the stores'
   folders: a scheduler that came back elsewhere is found without a worker.
4. Leave to drop is given by `DropGranted` alone, and acted on also when nobody waits for
   it any more: the catalog no longer lists those replicas.
5. What was to be dropped and is not when the catalog greets anew is void: our inventory
   says that we hold it, and the catalog says again what is still to go.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.dataplane import faults, tracing
from tensorcast_dask.dataplane.link import Link, LinkCallbacks
from tensorcast_dask.store.core import now_s
from tensorcast_dask.store.records import record_of
from tensorcast_dask.store.state.replicas import Life
from tensorcast_dask.tensors.ids import RequestId
from tensorcast_dask.tensors.messages import (
    DoCancel,
    DoDetach,
    DoDrop,
    DoEnd,
    DoLinger,
    DoLoad,
    DoMark,
    DoPull,
    DoRun,
    DoSave,
    DoWeigh,
    DropGranted,
    FromNode,
    InstanceSeen,
    Inventory,
    MayDrop,
    NodeHello,
    NodeWelcome,
    Renew,
    ReplicaRecord,
    SessionOut,
    TaskDone,
    TaskSeen,
    Tier,
    ToNode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tensorcast_dask.exceptions import TensorCastError
    from tensorcast_dask.store.core import Core
    from tensorcast_dask.store.ends import Ends
    from tensorcast_dask.store.files import Files
    from tensorcast_dask.store.identity import Identity
    from tensorcast_dask.store.instances import InstanceDesk
    from tensorcast_dask.store.jobs import Job, Jobs
    from tensorcast_dask.store.movers import Movers
    from tensorcast_dask.store.plans import PlanDesk
    from tensorcast_dask.store.state.replicas import Replica
    from tensorcast_dask.tensors.ids import Generation

__all__ = ["LINK_NAME", "Catalog"]

logger = logging.getLogger(__name__)

LINK_NAME: Final = "link.json"
_INVENTORY_BATCH: Final = 512


class _Address(msgspec.Struct):
    """Where the scheduler plugin listens now; written by it."""

    host: str
    port: int
    cluster: str


class Catalog:
    """The link of one store.

    Parameters
    ----------
    core : Core
        The state.
    identity : Identity
        Who we are and where the catalog is.
    ends : Ends
        Adoption and the end.
    jobs : Jobs
        Runs the catalog's tasks.
    movers : Movers
        Carries pulls out.
    files : Files
        Carries loads and saves out.
    desk : InstanceDesk
        Instances of this node.
    plans : PlanDesk
        Runs of plans that this store drives.
    """

    def __init__(
        self,
        core: Core,
        identity: Identity,
        *,
        ends: Ends,
        jobs: Jobs,
        movers: Movers,
        files: Files,
        desk: InstanceDesk,
        plans: PlanDesk,
    ) -> None:
        self._desk = desk
        self._plans = plans
        self._core = core
        self._identity = identity
        self._ends = ends
        self._jobs = jobs
        self._movers = movers
        self._files = files
        self._address: Path = identity.folder.parent / LINK_NAME
        self._greeted = False
        #: How often a catalog was told what we hold; orders of an earlier one are void.
        self._greetings = 0
        self._rids = itertools.count(1)
        #: Who waits for an answer to `MayDrop`; the answers that came.
        self._asked: dict[RequestId, threading.Event] = {}
        self._answered: set[RequestId] = set()
        self._drops: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._dropper = threading.Thread(
            target=self._run_drops, name="tensorcast-drops", daemon=True
        )
        self._link = Link(
            LinkCallbacks(
                hello=self._hello,
                on_up=self._on_up,
                on_message=self._on_message,
                on_down=self._on_down,
                renew=self._renew,
            ),
            target=identity.link,
        )
        core.tell = self.tell
        core.lease_left_s = self.lease_left_s
        core.room.ask_leave = self._ask_leave

    # -------------------------------------------------------------- life
    def start(self) -> None:
        """Begin to connect."""
        self._dropper.start()
        self._link.start()

    def renew(self) -> None:
        """Tell the catalog now what the tiers hold."""
        self._link.hasten()

    def relink(self) -> None:
        """Greet the catalog anew: the card, or the catalog, is another one."""
        self._link.aim(self._identity.link)

    def stop(self, *, within_s: float) -> None:
        """Say what is still to be said and end the link."""
        self._drops.put(None)
        if self._dropper.ident is not None:
            self._dropper.join(within_s)
        self._link.stop(within_s=within_s)

    @property
    def up(self) -> bool:
        """Whether the catalog listens."""
        return self._link.up

    def lease_left_s(self) -> float:
        """Return what is left of the node's lease; infinite while never greeted."""
        return self._link.lease_left_s if self._greeted else float("inf")

    def tell(self, message: FromNode) -> None:
        """Send, or drop: what is not said now is in the next inventory."""
        self._link.send(message)

    # -------------------------------------------------------------- greeting
    def _hello(self) -> NodeHello:
        identity = self._identity
        with self._core.lock:
            return NodeHello(
                card=identity.card,
                cluster=identity.cluster,
                epoch=identity.epoch,
                counter=self._core.table.highest,
                uses=self._core.uses(),
            )

    def _on_up(self, welcome: NodeWelcome) -> Iterator[FromNode]:
        self._greeted = True
        self._identity.greeted(welcome.cluster, welcome.epoch)
        outcomes = self._jobs.greeted(welcome.epoch)
        held = self._held()
        logger.info("greeted by catalog epoch %d; %d copies", welcome.epoch, len(held))
        for at in range(0, max(1, len(held)), _INVENTORY_BATCH):
            yield Inventory(
                replicas=tuple(
                    self._record(replica, tier, with_index=welcome.need_index)
                    for replica, tier in held[at : at + _INVENTORY_BATCH]
                ),
                more=at + _INVENTORY_BATCH < len(held),
            )
        yield from outcomes
        yield self._desk.greeted()
        self._plans.heard_of(up=True)

    def _held(self) -> list[tuple[Replica, Tier]]:
        """List what is held at this instant; what changes after it is told after it."""
        with self._core.lock:
            self._greetings += 1
            return [
                (replica, copy.tier)
                for replica in self._core.table.replicas.values()
                for copy in replica.copies
                if copy.life is Life.COMMITTED
            ]

    def _record(
        self, replica: Replica, tier: Tier, *, with_index: bool
    ) -> ReplicaRecord:
        return record_of(
            replica,
            tier,
            chunk_bytes=self._core.settings.chunk_bytes,
            with_index=with_index,
        )

    def _renew(self, seq: int) -> Renew:
        with self._core.lock:
            reads = self._core.counts.take()
        return Renew(seq=seq, uses=self._core.uses(), reads=reads)

    def _on_down(self, error: TensorCastError) -> None:
        logger.debug("no link: %s", error)
        self._desk.link_down()
        self._plans.heard_of(up=False)
        for waiting in list(self._asked.values()):
            waiting.set()
        target = self._identity.link
        found = self._read_address()
        if target is None or found is None:
            return
        if (found.host, found.port) != (target.host, target.port):
            self._identity.moved(found.host, found.port)
            self._link.aim(self._identity.link)

    def _read_address(self) -> _Address | None:
        try:
            found = msgspec.json.decode(self._address.read_bytes(), type=_Address)
        except (OSError, msgspec.DecodeError):
            return None
        mine = self._identity.cluster
        return found if not mine or found.cluster == mine else None

    # -------------------------------------------------------------- leave to drop
    def _ask_leave(self, generations: list[Generation], until_s: float) -> bool:
        rid = RequestId(f"{self._identity.node}-{next(self._rids)}")
        waiting = self._asked[rid] = threading.Event()
        try:
            if self._link.send(MayDrop(rid=rid, generations=tuple(generations))):
                waiting.wait(max(0.0, until_s - now_s()))
            return rid in self._answered
        finally:
            del self._asked[rid]
            self._answered.discard(rid)

    def _granted(self, message: DropGranted, greeting: int) -> None:
        with self._core.lock:
            if greeting != self._greetings:
                return
            for generation in message.generations:
                self._core.drop(generation, why="evicted: other nodes hold it")
        waiting = self._asked.get(message.rid)
        if waiting is not None:
            self._answered.add(message.rid)
            waiting.set()

    # -------------------------------------------------------------- orders
    def _on_message(self, message: ToNode) -> None:
        match message:
            case DoPull() | DoLoad() | DoSave():
                self._start(message)
            case DoDrop():
                if not self._jobs.repeat(message.task):
                    self._drops.put(partial(self._drop, message, self._greetings))
            case DropGranted():
                self._drops.put(partial(self._granted, message, self._greetings))
            case DoMark() | DoWeigh():
                self._mark(message)
            case DoCancel():
                self._jobs.cancel(message.task)
            case TaskSeen():
                self._jobs.seen(message.task)
            case DoLinger() | DoEnd():
                self._end(message)
            case _:
                self._of_others(message)

    def _of_others(self, message: ToNode) -> None:
        """Hand on what concerns instances and plans."""
        match message:
            case SessionOut():
                if not self._plans.heard(message):
                    self._desk.told(message)
            case InstanceSeen() | DoDetach():
                self._desk.told(message)
            case DoRun():
                self._plans.ordered(message)
            case _:
                logger.warning("not expected here: %s", type(message).__name__)

    def _end(self, order: DoLinger | DoEnd) -> None:
        if isinstance(order, DoEnd):
            self._ends.end(order.why)
        else:
            self._ends.linger(order.ttl_s, order.why)

    def _start(self, order: DoPull | DoLoad | DoSave) -> None:
        def run(job: Job) -> TaskDone:
            name = type(order).__name__.removeprefix("Do").lower()
            job.tell(f"has begun to {name} it")
            with tracing.span(
                f"store {name}", order.trace, generation=order.generation
            ):
                match order:
                    case DoPull():
                        return self._movers.pull(order, job)
                    case DoLoad():
                        return self._files.load(order, job)
                    case DoSave():
                        return self._files.save(order, job)

        self._jobs.start(order.task, deadline_s=order.deadline_s, run=run)

    def _mark(self, message: DoMark | DoWeigh) -> None:
        with self._core.lock:
            if isinstance(message, DoWeigh):
                self._core.table.weights = dict(message.weights)
                return
            ends_s = now_s() + message.pinned_s if message.pinned_s > 0 else 0.0
            self._core.table.mark(
                message.generation,
                published=message.published,
                spare=message.spare,
                pin_ends_s=ends_s,
            )

    def _drop(self, order: DoDrop, greeting: int) -> None:
        faults.point("destroy.before_drop", detail=str(order.generation))
        with self._core.lock:
            if greeting != self._greetings:
                return
            self._core.drop(
                order.generation,
                order.tier,
                why=order.why or ("destroyed" if order.final else "dropped"),
                final=order.final,
            )
            self._jobs.ended(TaskDone(task=order.task))

    def _run_drops(self) -> None:
        while (act := self._drops.get()) is not None:
            try:
                act()
            except Exception:
                logger.exception("a drop failed")
