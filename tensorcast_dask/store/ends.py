"""The shell of adoption: who speaks for this store, whose process is watched, when it ends.

Rules:

1. The worker's control connection is the one on which it adopted. Its process is watched
   by pidfd, which no forked child and no re-used pid can deceive.
2. An adoption takes effect whole: settings, catalog, card. The catalog hears of it by a
   new greeting with the new incarnation.
3. A grant is an HMAC of the cluster token over (node, epoch, worker): only the scheduler
   plugin (and who already holds the token) can make one.
4. Two clusters do not share a store: one that holds replicas refuses another cluster's worker.
   A worker that names no cluster is told which one this is: its scheduler has lost that.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
from typing import TYPE_CHECKING

import msgspec

from tensorcast_dask.dataplane.hosts import PidWatch
from tensorcast_dask.exceptions import Mismatch
from tensorcast_dask.store.core import now_s
from tensorcast_dask.store.state.adoption import (
    Adoption,
    Asked,
    ConnectionEnded,
    EndAsked,
    EndNow,
    Granted,
    Instruction,
    LetGoAsked,
    Lingered,
    Standing,
    TimePassed,
    Unattended,
    WorkerDied,
)
from tensorcast_dask.tensors.ids import Epoch
from tensorcast_dask.tensors.messages import (
    Adopt,
    Adopted,
    Done,
    End,
    LetGo,
    Role,
    StoreReply,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.dataplane.server import Peer
    from tensorcast_dask.store.core import Core
    from tensorcast_dask.store.identity import Identity
    from tensorcast_dask.tensors.ids import NodeId

__all__ = ["Ends", "grant_of"]

logger = logging.getLogger(__name__)


def grant_of(token: bytes, *, node: NodeId, epoch: Epoch, worker: str) -> bytes:
    """Make the scheduler's word that `worker` may take the store of another."""
    said = f"adopt\0{node}\0{epoch}\0{worker}".encode()
    return hmac.new(token, said, hashlib.sha256).digest()


class Ends:
    """Adoption and the end of one store.

    Parameters
    ----------
    core : Core
        The state; its lock guards the adoption too.
    identity : Identity
        Who this store is; changed by an adoption.
    free_ttl_s : float
        How long a store waits for its first worker.
    own : tuple of str
        Fields of the settings that no worker changes.
    """

    def __init__(
        self,
        core: Core,
        identity: Identity,
        *,
        free_ttl_s: float,
        own: tuple[str, ...] = (),
    ) -> None:
        self._core = core
        self._own = own
        self._identity = identity
        self.adoption = Adoption(
            orphan_ttl_s=core.settings.orphan_ttl_s, free_ends_s=now_s() + free_ttl_s
        )
        self._watch: PidWatch | None = None
        #: The signal that ends it; 0 while there was none.
        self.signalled = 0
        #: Set when the store has to end.
        self.ending = threading.Event()
        self.why = ""
        #: The device process that is attached; 0 = none.
        self.device_pid: Callable[[], int] = int
        #: Called after each change of who the store belongs to; relinks.
        self.changed: Callable[[], None] = _nothing

    # -------------------------------------------------------------- requests
    def ask(self, request: Adopt | LetGo | End, peer: Peer) -> StoreReply:
        """Carry one request out.

        Raises
        ------
        StaleOwner
            When the caller has no right to it.
        Mismatch
            When it is a worker of another cluster.
        """
        match request:
            case Adopt():
                return self._adopt(request, peer)
            case LetGo():
                default_s = self._core.settings.released_ttl_s
                ttl_s = request.ttl_s if request.ttl_s > 0 else default_s
                self._handle(LetGoAsked(link=peer.number, ttl_s=ttl_s))
            case End():
                control = peer.role is Role.WORKER
                self._handle(
                    EndAsked(link=peer.number, why=request.why, control=control)
                )
        return Done()

    def _adopt(self, request: Adopt, peer: Peer) -> Adopted:
        core, identity = self._core, self._identity
        kept = {name: getattr(core.settings, name) for name in self._own}
        settings = msgspec.structs.replace(request.settings, **kept)
        request = msgspec.structs.replace(request, settings=settings)
        with core.lock:
            held = bool(core.table.replicas)
            identity.check_cluster(request.link, holds=held)
            event = Asked(
                link=peer.number,
                worker=request.worker,
                pid=request.pid,
                grant_epoch=self._granted_epoch(request),
                holder_dead=self._watch is not None and self._watch.is_gone(),
            )
            told = self.adoption.handle(event, now_s=now_s())
            incarnation = self.adoption.incarnation
            self._watch_process(peer)
            core.adjust(request.settings)
            self.adoption.orphan_ttl_s = request.settings.orphan_ttl_s
            card = identity.adopted(request, incarnation)
            use = core.table.replicas
            answer = Adopted(
                card=card,
                replicas=len(use),
                nbytes=sum(replica.nbytes for replica in use.values()),
                device_pid=self.device_pid(),
            )
            if not request.link.cluster:
                answer = msgspec.structs.replace(
                    answer,
                    cluster=identity.cluster,
                    token=identity.token,
                    epoch=identity.epoch,
                )
        logger.info("adopted by %s, incarnation %d", request.worker, incarnation)
        self._do(told)
        return answer

    def _granted_epoch(self, request: Adopt) -> Epoch:
        """Return the epoch of a grant that is genuine; 0 without one."""
        token = self._identity.token
        if not request.grant or not token:
            return Epoch(0)
        epoch = request.link.epoch
        wanted = grant_of(
            token, node=self._identity.node, epoch=epoch, worker=request.worker
        )
        if hmac.compare_digest(wanted, request.grant):
            return epoch
        message = "the grant is not of this cluster's scheduler; adopt without it"
        raise Mismatch(message)

    def _watch_process(self, peer: Peer) -> None:
        old, self._watch = self._watch, PidWatch.of_peer(peer.stream.sock)
        if old is not None:
            old.close()

    # -------------------------------------------------------------- news
    def connection_ended(self, number: int) -> None:
        """Hear that a connection is gone; most are nobody's control connection."""
        self._handle(ConnectionEnded(link=number))

    def linger(self, ttl_s: float, why: str) -> None:
        """Extend what is left of an unattended store."""
        logger.info("the catalog extends this to %g s: %s", ttl_s, why)
        self._handle(Lingered(ttl_s=ttl_s))

    def end(self, why: str) -> None:
        """End the store at the catalog's word."""
        self._handle(EndAsked(link=0, why=why))

    def tick(self) -> None:
        """Look at the clock and at the worker's process."""
        with self._core.lock:
            held = self.adoption.standing is Standing.HELD
            gone = held and self._watch is not None and self._watch.is_gone()
            incarnation = self.adoption.incarnation
        if gone:
            self._handle(WorkerDied(incarnation=incarnation))
        self._handle(TimePassed())

    def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.close()

    # -------------------------------------------------------------- instructions
    def _handle(
        self,
        event: LetGoAsked
        | EndAsked
        | ConnectionEnded
        | Lingered
        | TimePassed
        | WorkerDied,
    ) -> None:
        with self._core.lock:
            told = self.adoption.handle(event, now_s=now_s())
        self._do(told)

    def _do(self, told: list[Instruction]) -> None:
        for instruction in told:
            match instruction:
                case Granted():
                    self.changed()
                case Unattended():
                    logger.info(
                        "unattended: %s; ends in %g s unless adopted",
                        instruction.why,
                        instruction.ttl_s,
                    )
                    self._identity.unattended()
                    self.changed()
                case EndNow():
                    self.why = instruction.why
                    self.ending.set()


def _nothing() -> None:
    """Do nothing; nobody listens yet."""
