"""Bringing replicas to this node's tiers, by the nearest way.

Rules:

1. The order: here already; this node's disk; another node of this host, shared; any other
   holder, by chunks.
2. One generation comes into one tier once at a time; who wants it meanwhile waits.
3. A way that fails is left for the next one; the last error is the task's.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from tensorcast_dask.dataplane.channel import Credentials
from tensorcast_dask.dataplane.transports.base import Context
from tensorcast_dask.exceptions import (
    AlreadyExists,
    NotFound,
    PeerLost,
    TensorCastError,
)
from tensorcast_dask.store.core import now_s
from tensorcast_dask.store.jobs import Once
from tensorcast_dask.store.pulls import PullRun
from tensorcast_dask.store.sharing import Pulled, share
from tensorcast_dask.store.state.replicas import Life, Wanted
from tensorcast_dask.tensors.messages import (
    DoPull,
    Role,
    TaskDone,
    TaskProgress,
    Tier,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.dataplane.segments import MemoryFile
    from tensorcast_dask.store.core import Core
    from tensorcast_dask.store.disk import Disk
    from tensorcast_dask.store.identity import Identity
    from tensorcast_dask.store.jobs import Job
    from tensorcast_dask.tensors.ids import Generation
    from tensorcast_dask.tensors.messages import FromNode

__all__ = ["Movers"]

logger = logging.getLogger(__name__)

_PROGRESS_S = 0.2
_HERE = Pulled(moved_bytes=0, via="here", sources=())


class Movers:
    """Moves bytes for the catalog's orders and for readers.

    Parameters
    ----------
    core : Core
        The state.
    identity : Identity
        Who we are, for the sources.
    disk : Disk, optional
        This node's disk tier.
    tell : callable
        Sends progress to the catalog.
    """

    def __init__(
        self,
        core: Core,
        identity: Identity,
        *,
        disk: Disk | None,
        tell: Callable[[FromNode], None],
    ) -> None:
        self._core = core
        self._identity = identity
        self._disk = disk
        self._tell = tell
        self._once: Once[Pulled] = Once()

    # -------------------------------------------------------------- orders
    def pull(self, order: DoPull, job: Job) -> TaskDone:
        """Carry a `DoPull` out.

        Raises
        ------
        TensorCastError
            When no way led there in time.
        """
        started_s = now_s()
        key = (order.generation, order.tier)
        done = self._once.run(key, lambda: self._bring(order, job), until_s=job.until_s)
        return TaskDone(
            task=order.task,
            moved_bytes=done.moved_bytes,
            seconds=now_s() - started_s,
            via=done.via,
            sources=done.sources,
        )

    def restore(self, generation: Generation, until_s: float) -> None:
        """Bring a replica of this node's disk into memory.

        Raises
        ------
        CapacityError, CorruptFile, Gone, DeadlineExceeded
            When that cannot be done.
        """
        key = (generation, Tier.HOST)
        self._once.run(
            key, lambda: self._from_disk(generation, until_s), until_s=until_s
        )

    def borrow(self, generation: Generation) -> MemoryFile:
        """Read a replica of this node's disk for one reader, into no tier.

        Raises
        ------
        CapacityError
            When the machine has no memory for it either.
        """
        if self._disk is None:
            message = f"generation {generation} is not in memory, and there is no disk"
            raise NotFound(message)
        replica = self._core.table.find(generation)
        self._core.room.check_machine(Tier.HOST, replica.nbytes)
        return self._disk.transient(generation)

    def _from_disk(self, generation: Generation, until_s: float) -> Pulled:
        if self._holds(generation, Tier.HOST):
            return _HERE
        if self._disk is None:
            message = f"generation {generation} is not in memory, and there is no disk"
            raise NotFound(message)
        nbytes = self._disk.restore(generation, until_s=until_s)
        return Pulled(moved_bytes=nbytes, via="disk", sources=())

    def _holds(self, generation: Generation, tier: Tier) -> bool:
        with self._core.lock:
            replica = self._core.table.replicas.get(generation)
            copy = None if replica is None else replica.copy(tier)
            return copy is not None and copy.life is Life.COMMITTED

    # -------------------------------------------------------------- ways
    def _bring(self, order: DoPull, job: Job) -> Pulled:
        if self._holds(order.generation, order.tier):
            return _HERE
        if order.tier is Tier.DISK:
            return self._to_disk(order, job)
        if self._holds(order.generation, Tier.DISK):
            try:
                return self._from_disk(order.generation, job.until_s)
            except TensorCastError as error:
                if not order.sources:
                    raise
                logger.warning("restoring %d failed: %s", order.generation, error)
        return self._from_others(order, job)

    def _to_disk(self, order: DoPull, job: Job) -> Pulled:
        if self._disk is None:
            message = "this node has no disk tier; set tensorcast.node.disk_dir"
            raise NotFound(message)
        brought = _HERE
        if not self._holds(order.generation, Tier.HOST):
            brought = self._from_others(order, job)
        job.check()
        self._disk.save(order.generation)
        if brought is not _HERE:
            self._core.drop(order.generation, Tier.HOST, why="asked for on disk only")
        return brought

    def _from_others(self, order: DoPull, job: Job) -> Pulled:
        sources = tuple(
            location
            for location in order.sources
            if location.card.node != self._identity.node
        )
        wanted = self._wanted(order, job)
        context = self._context(job.until_s)
        origin = order.source_generation or order.generation
        for location in sources if self._mappable(order) else ():
            if location.card.host != self._identity.card.host:
                continue
            if location.card.kind != "store":  # memory of a caller is copied
                continue
            try:
                shared = share(
                    self._core,
                    wanted,
                    location,
                    source_generation=origin,
                    context=context,
                )
            except AlreadyExists:
                raise
            except TensorCastError as error:
                logger.info("sharing %d failed: %s", order.generation, error)
            else:
                if shared is not None:
                    return shared
        if not sources:
            message = (
                f"generation {order.generation} has no source that lives; put it again"
            )
            raise PeerLost(message)
        run = PullRun(
            self._core,
            wanted,
            sources,
            source_generation=origin,
            context=context,
            progress=self._progress(order, job),
        )
        job.on_cancel(run.cancel)
        try:
            return run.run()
        finally:
            job.on_cancel(None)

    def _mappable(self, order: DoPull) -> bool:
        return not self._core.table.tiers[Tier.HOST].in_slab(order.nbytes)

    def _wanted(self, order: DoPull, job: Job) -> Wanted:
        return Wanted(
            generation=order.generation,
            id=order.id,
            version=order.version,
            nbytes=order.nbytes,
            tier=Tier.HOST,
            owner=0,
            deadline_s=job.until_s,
            labels=order.labels,
            published=order.published,
        )

    def _context(self, until_s: float) -> Context:
        settings = self._core.settings
        return Context(
            credentials=Credentials(
                cluster=self._identity.cluster,
                token=self._identity.token,
                tls=self._identity.tls,
                role=Role.PEER,
                host=self._identity.card.host,
                congestion=settings.congestion,
                stall_s=settings.stall_s,
                bandwidth_bytes_per_s=settings.bandwidth_bytes_per_s,
            ),
            until_s=until_s,
        )

    def _progress(self, order: DoPull, job: Job) -> Callable[[int], None]:
        said_s = time.monotonic()

        def arrived(nbytes: int) -> None:
            nonlocal said_s
            job.done_bytes += nbytes
            if time.monotonic() - said_s < _PROGRESS_S:
                return
            said_s = time.monotonic()
            self._tell(
                TaskProgress(
                    task=order.task,
                    done_bytes=job.done_bytes,
                    total_bytes=order.nbytes,
                )
            )

        return arrived
