"""Bringing replicas to this node's tiers, by the nearest way.

Rules:

1. The order: here already; what a neighbour has on the same device, copied there; another tier
   of this node; another node of this host, shared; any other holder, by chunks.
2. One generation comes into one tier once at a time; who wants it meanwhile waits.
3. Within a node every way leads through host memory; a copy there that nobody asked for goes
   again. From other hosts, and over UCX from other devices of this one, chunks land where they
   are wanted, where the tier takes them.
4. A way that fails is left for the next one; the last error is the task's.
"""

from __future__ import annotations

import itertools
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from tensorcast_dask.dataplane.channel import Credentials
from tensorcast_dask.dataplane.transports.base import Context
from tensorcast_dask.dataplane.transports.idle import Idle
from tensorcast_dask.exceptions import (
    AlreadyExists,
    DeviceError,
    NotFound,
    PeerLost,
    TensorCastError,
)
from tensorcast_dask.store.core import now_s
from tensorcast_dask.store.flights import Flights
from tensorcast_dask.store.jobs import Once
from tensorcast_dask.store.pulls import PullRun
from tensorcast_dask.store.records import Pulled
from tensorcast_dask.store.sharing import share
from tensorcast_dask.store.state.replicas import Life, Wanted
from tensorcast_dask.store.state.tiers import FROM_HOST
from tensorcast_dask.store.targets import Target
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
    from tensorcast_dask.store.identity import Identity
    from tensorcast_dask.store.jobs import Job
    from tensorcast_dask.store.media import Landing, Medium
    from tensorcast_dask.tensors.ids import Generation
    from tensorcast_dask.tensors.messages import FromNode, Location

__all__ = ["Movers"]

logger = logging.getLogger(__name__)

_PROGRESS_S = 0.2
#: Sources that a line of a story names.
_NAMED = 8
_MISSING = {
    Tier.DISK: "tensorcast.node.disk-dir",
    Tier.DEVICE: "tensorcast.node.device-memory",
    Tier.PINNED: "tensorcast.node.device-memory",
}
_HERE = Pulled(moved_bytes=0, via="here", sources=())


class Movers:
    """Moves bytes for the catalog's orders and for readers.

    Parameters
    ----------
    core : Core
        The state.
    identity : Identity
        Who we are, for the sources.
    tell : callable
        Sends progress to the catalog.
    """

    def __init__(
        self,
        core: Core,
        identity: Identity,
        *,
        tell: Callable[[FromNode], None],
    ) -> None:
        self._core = core
        self._identity = identity
        self._tell = tell
        self._once: Once[Pulled] = Once()
        #: Lines of UCX between pulls.
        self.idle: Idle[Any] = Idle()
        self._flights = Flights()

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
            seconds=done.seconds or now_s() - started_s,
            via=done.via,
            left=done.left,
            sources=done.sources,
            shares=done.shares,
        )

    def restore(self, generation: Generation, until_s: float) -> None:
        """Bring a replica from another tier of this node into host memory.

        Raises
        ------
        CapacityError, CorruptFile, Gone, DeadlineExceeded
            When that cannot be done.
        """
        key = (generation, Tier.HOST)
        self._once.run(
            key, lambda: self._from_here(generation, until_s), until_s=until_s
        )

    def borrow(self, generation: Generation) -> MemoryFile:
        """Read a replica of another tier of this node for one reader, into no tier.

        Raises
        ------
        CapacityError
            When the machine has no memory for it either.
        """
        tier = self._elsewhere(generation)
        replica = self._core.table.find(generation)
        self._core.room.check_machine(Tier.HOST, replica.nbytes)
        return self._core.room.media[tier].transient(generation)

    def _from_here(self, generation: Generation, until_s: float) -> Pulled:
        if self._holds(generation, Tier.HOST):
            return _HERE
        tier = self._elsewhere(generation)
        medium = self._core.room.media[tier]
        nbytes = medium.restore(generation, until_s=until_s)
        return Pulled(moved_bytes=nbytes, via=tier, sources=())

    def _elsewhere(self, generation: Generation) -> Tier:
        """Return the tier that a replica which is not in host memory is taken from.

        Raises
        ------
        NotFound
            When no tier has it.
        """
        for tier in FROM_HOST:
            if tier in self._core.room.media and self._holds(generation, tier):
                return tier
        message = f"generation {generation} is in no tier of this node"
        raise NotFound(message)

    def _holds(self, generation: Generation, tier: Tier) -> bool:
        with self._core.lock:
            replica = self._core.table.replicas.get(generation)
            copy = None if replica is None else replica.copy(tier)
            return copy is not None and copy.life is Life.COMMITTED

    # -------------------------------------------------------------- ways
    def _bring(self, order: DoPull, job: Job) -> Pulled:
        if order.tier is Tier.HOST:
            return self._to_host(order, job)
        if self._holds(order.generation, order.tier):
            return _HERE
        medium = self._medium(order.tier)
        straight = self._nearby(order, medium, job) or self._straight(
            order, medium, job
        )
        if straight is not None:
            return straight
        # Host memory may be where somebody else wants it at the same time (rule 2).
        brought = self._once.run(
            (order.generation, Tier.HOST),
            lambda: self._to_host(order, job),
            until_s=job.until_s,
        )
        job.check()
        nbytes = medium.save(order.generation, until_s=job.until_s)
        if brought is _HERE:
            return Pulled(moved_bytes=nbytes, via=order.tier, sources=())
        if self._core.table.tiers[order.tier].row.over is None:
            self._core.room.evict(order.generation, Tier.HOST)
        most_bytes = max(nbytes, brought.moved_bytes)
        return msgspec.structs.replace(brought, moved_bytes=most_bytes)

    def _nearby(self, order: DoPull, medium: Medium, job: Job) -> Pulled | None:
        """Copy what a neighbour has in the same tier, without host memory, where that can be."""
        for location in self._sources(order):
            same_host = location.card.host == self._identity.card.host
            if not same_host or location.tier is not order.tier:
                continue
            way = partial(
                medium.nearby,
                self._wanted(order, job, order.tier),
                location,
                source_generation=order.source_generation or order.generation,
                context=self._context(job.until_s),
            )
            found = _tried(way, order, job, doing="copying it nearby")
            if found is not None:
                return found
        return None

    def _straight(self, order: DoPull, medium: Medium, job: Job) -> Pulled | None:
        """Pull to where it is wanted, without host memory, where that is best."""
        comes = self._once.runs((order.generation, Tier.HOST))
        known = comes or order.generation in self._core.table.replicas
        if known or not self._mappable(order):
            return None
        wanted = self._wanted(order, job, order.tier)
        landing = medium.landing(wanted)
        if landing is None:
            return None
        here, sources = self._identity.card.host, self._sources(order)
        if sources and all(at.card.host != here for at in sources):
            return self._pull(order, sources, wanted, landing, job)
        lined = tuple(at for at in sources if _has_lane(at))
        if not lined or landing.direct() is None or self._core.settings.ucx == "off":
            return None
        try:
            return self._pull(order, lined, wanted, landing, job)
        except AlreadyExists:
            raise
        except TensorCastError as error:
            logger.warning("pulling %d straight failed: %s", order.generation, error)
            job.tell(f"pulling it straight failed: {error.message}")
            job.check()
            return None

    def _to_host(self, order: DoPull, job: Job) -> Pulled:
        if self._holds(order.generation, Tier.HOST):
            return _HERE
        try:
            self._elsewhere(order.generation)
        except NotFound:
            return self._from_others(order, job)
        try:
            return self._from_here(order.generation, job.until_s)
        except TensorCastError as error:
            if not order.sources:
                raise
            logger.warning("restoring %d failed: %s", order.generation, error)
            job.tell(f"restoring it from this node failed: {error.message}")
        return self._from_others(order, job)

    def _medium(self, tier: Tier) -> Medium:
        core = self._core
        medium, stock = core.room.media.get(tier), core.table.tiers.get(tier)
        if stock is not None and not stock.row.capacity_bytes:
            message = f"the device of this node is lost, and its tier {tier} with it; its worker starts it again"
            raise DeviceError(message)
        if medium is None:
            message = f"this node has no {tier} tier; set {_MISSING[tier]} for it"
            raise NotFound(message)
        return medium

    def _from_others(self, order: DoPull, job: Job) -> Pulled:
        sources = self._sources(order)
        wanted = self._wanted(order, job, Tier.HOST)
        context = self._context(job.until_s)
        origin = order.source_generation or order.generation
        for location in sources if self._mappable(order) else ():
            if location.card.host != self._identity.card.host:
                continue
            if location.card.kind != "store":  # memory of a caller is copied
                continue
            way = partial(
                share,
                self._core,
                wanted,
                location,
                source_generation=origin,
                context=context,
            )
            shared = _tried(way, order, job, doing="sharing its memory")
            if shared is not None:
                return shared
        if not sources:
            message = (
                f"generation {order.generation} has no source that lives; put it again"
            )
            raise PeerLost(message)
        return self._pull(order, sources, wanted, Target(self._core, wanted), job)

    def _sources(self, order: DoPull) -> tuple[Location, ...]:
        ours = self._identity.node
        return tuple(at for at in order.sources if at.card.node != ours)

    def _pull(
        self,
        order: DoPull,
        sources: tuple[Location, ...],
        wanted: Wanted,
        landing: Landing,
        job: Job,
    ) -> Pulled:
        run = PullRun(
            self._core,
            wanted,
            sources,
            source_generation=order.source_generation or order.generation,
            landing=landing,
            context=self._context(job.until_s),
            flights=self._flights,
            progress=self.counted(job, order.nbytes),
            tell=job.tell,
        )
        names = (at.card.name or at.card.node[:8] for at in sources)
        job.tell(f"asks {', '.join(itertools.islice(names, _NAMED))} for its bytes")
        job.on_cancel(run.cancel)
        try:
            return run.run()
        finally:
            job.on_cancel(None)

    def _mappable(self, order: DoPull) -> bool:
        return not self._core.table.tiers[Tier.HOST].in_slab(order.nbytes)

    def _wanted(self, order: DoPull, job: Job, tier: Tier) -> Wanted:
        return Wanted(
            generation=order.generation,
            id=order.id,
            version=order.version,
            nbytes=order.nbytes,
            tier=tier,
            owner=0,
            deadline_s=job.until_s,
            labels=order.labels,
            published=order.published,
        )

    def credentials(self) -> Credentials:
        """Give what other stores are met with."""
        settings = self._core.settings
        return Credentials(
            cluster=self._identity.cluster,
            token=self._identity.token,
            tls=self._identity.tls,
            role=Role.PEER,
            host=self._identity.card.host,
            congestion=settings.congestion,
            stall_s=settings.stall_s,
            bandwidth_bytes_per_s=settings.bandwidth_bytes_per_s,
        )

    def _context(self, until_s: float) -> Context:
        return Context(credentials=self.credentials(), until_s=until_s, idle=self.idle)

    def counted(self, job: Job, total_bytes: int) -> Callable[[int], None]:
        """Give what counts the bytes of a task, and tells the catalog from time to time."""
        said_s = time.monotonic()

        def arrived(nbytes: int) -> None:
            nonlocal said_s
            job.done_bytes += nbytes
            if time.monotonic() - said_s < _PROGRESS_S:
                return
            said_s = time.monotonic()
            self._tell(
                TaskProgress(
                    task=job.task, done_bytes=job.done_bytes, total_bytes=total_bytes
                )
            )

        return arrived


def _has_lane(location: Location) -> bool:
    """Say whether a holder's device may be reached over UCX by more than TCP."""
    return location.tier is Tier.DEVICE and location.card.ucx[:1] not in {(), ("tcp",)}


def _tried(
    way: Callable[[], Pulled | None], order: DoPull, job: Job, *, doing: str
) -> Pulled | None:
    """Take a way that spares a pull; None where it is none, or fails, which is told."""
    try:
        return way()
    except AlreadyExists:
        raise
    except TensorCastError as error:
        logger.info("%s failed for %d: %s", doing, order.generation, error)
        job.tell(f"{doing} failed: {error.message}")
        return None
