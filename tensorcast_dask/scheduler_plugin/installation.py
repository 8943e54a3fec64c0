"""The one catalog of one scheduler: opened, told of Dask's news, closed.

Rules:

1. Nothing is offered before everything works: handlers and plugins come last.
2. Workers are told that they close before their stores are: none starts a new store
   in place of one that was ended on purpose.
3. Cluster id and token are minted once. They live with the journal, and in the cluster's
   folder of this host, where a scheduler that lost its journal finds them.
4. A worker is given another's store only when Dask has removed that one.
5. A longer wait is for one parting: of the worker that a node has when it is granted. Whoever
   adopts the store later leaves as if nothing had been.
6. A scheduler that found neither journal nor id, and has made nothing yet, becomes the cluster
   of the first store with artifacts that a worker finds: it begins again, as after a lost journal.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

import msgspec
from distributed.comm.addressing import get_address_host
from distributed.core import Status

from tensorcast_dask.config import Settings, Tree, local_tree, merged
from tensorcast_dask.dataplane import bearer
from tensorcast_dask.dataplane.hosts import cluster_folder, host_id, run_directory
from tensorcast_dask.exceptions import CatalogUnavailable, Mismatch
from tensorcast_dask.scheduler_plugin import dask_private
from tensorcast_dask.scheduler_plugin.endings import at_the_end
from tensorcast_dask.scheduler_plugin.folder import (
    forget_cluster,
    fresh_epoch,
    name_cluster,
    take_cluster,
    write_link,
)
from tensorcast_dask.scheduler_plugin.guests import Beside, Guests
from tensorcast_dask.scheduler_plugin.journal import Journal
from tensorcast_dask.scheduler_plugin.plan_watch import PlanWatch
from tensorcast_dask.scheduler_plugin.retiring import Retiring
from tensorcast_dask.scheduler_plugin.service import CatalogService
from tensorcast_dask.scheduler_plugin.sessions import SESSION_OP, Comm
from tensorcast_dask.scheduler_plugin.state.events import (
    CatalogSettings,
    Emit,
    NodeRetired,
    WorkerGone,
)
from tensorcast_dask.scheduler_plugin.tables import Tables
from tensorcast_dask.tensors.ids import HostId, Incarnation, NodeId
from tensorcast_dask.tensors.messages import DoLinger, LinkTarget
from tensorcast_dask.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distributed import Scheduler

    from tensorcast_dask.scheduler_plugin.state.catalog import Catalog
    from tensorcast_dask.tensors.ids import Epoch
    from tensorcast_dask.tensors.messages import NodeCard

__all__ = ["ABOUT_OP", "TOPIC", "About", "Installation", "Ship", "Show", "Sign"]

log = logging.getLogger(__name__)

#: Asks whether there is a catalog, and which; None from a scheduler without one.
ABOUT_OP: Final = "tensorcast_about"
#: Dask topic on which the catalog's events are told.
TOPIC: Final = "tensorcast"
#: How long a cluster that closes waits for its stores to hear of it.
END_S: Final = 1.5
#: Asks for the right to take a store whose worker Dask has removed.
GRANT_OP: Final = "tensorcast_grant"
#: Brings the cluster of a store to a scheduler that has lost it.
CLUSTER_OP: Final = "tensorcast_cluster"
#: Waits until the catalog lists a node.
LISTED_OP: Final = "tensorcast_listed"
#: How long a worker that starts waits for that.
LISTED_S: Final = 5.0
_CLOSING_OP: Final = "tensorcast_closing"
#: Floors above this one: found by its name, as Dask finds its own.
_HTTP_ROUTES: Final = "tensorcast_dask.http.dashboard"


class _Due(NamedTuple):
    """What a node is to be told, and of which adoption that was said."""

    word: DoLinger
    incarnation: Incarnation


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler's catalog tells the plugins that it hands to workers."""

    version: str
    #: Names the folder under the run directory of every host.
    cluster_name: str
    link: LinkTarget
    #: The scheduler's settings as written, and what was given as arguments over them.
    tree: Tree
    arguments: Tree


#: Makes the pickled worker and nanny plugins, each with its name.
Ship: TypeAlias = "Callable[[About], tuple[tuple[str, bytes], tuple[str, bytes]]]"


class Show(Protocol):
    """Shows a catalog where Dask shows its own: in its dashboard, or among its metrics."""

    def __call__(
        self, scheduler: Scheduler, catalog: Callable[[], Catalog | None]
    ) -> Callable[[], None]:
        """Show them; what is returned takes them away."""


class Sign(Protocol):
    """Makes the scheduler's word that a worker may take the store of another."""

    def __call__(
        self, token: bytes, *, node: NodeId, epoch: Epoch, worker: str
    ) -> bytes:
        """Sign with the cluster's token."""


class Installation:
    """The one catalog of one scheduler.

    Parameters
    ----------
    scheduler : Scheduler
        Dask's.
    ship, sign, show, measure : callable
        See `CatalogPlugin`.
    arguments : dict
        Settings over those of the scheduler's own configuration.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        ship: Ship,
        sign: Sign,
        show: Show,
        measure: Show,
        arguments: Tree,
    ) -> None:
        self.scheduler = scheduler
        self._ship = ship
        self._sign = sign
        self._show = show
        self._measure = measure
        self._hide: list[Callable[[], None]] = []
        self._arguments = arguments
        self._ready = asyncio.Event()
        self._failure: BaseException | None = None
        self._closed = False
        #: Set at the next greeting of any node.
        self._news = asyncio.Event()
        #: What nodes are to be told once they are there, or left by their workers.
        self._due: dict[NodeId, _Due] = {}
        self.service: CatalogService | None = None
        self.settings: Settings | None = None
        self.about: About | None = None
        self._folder: Path | None = None
        self._host = HostId("")
        #: The cluster's id is new: this scheduler found none.
        self._minted = False
        #: The beginning as another cluster, and which.
        self._renaming: asyncio.Task[None] | None = None
        self._renamed = ""
        self.retiring = Retiring(self)
        #: Clients of the catalog in this process: ended before it is.
        self.guests = Guests(self._beside)
        self._watch = PlanWatch(scheduler, lambda: self.service)

    # ------------------------------------------------------------------ start
    async def start(self) -> None:
        """Open journal, catalog and ports, then hand the plugins on."""
        try:
            await self._start()
        except BaseException as error:
            self._failure = error
            if self.service is not None:
                await self.service.stop(keep=True)
            raise
        finally:
            self._ready.set()

    async def _start(self) -> None:
        scheduler = self.scheduler
        tree = local_tree()
        settings = self.settings = Settings.of(merged(tree, self._arguments))
        name = settings.cluster or scheduler.address
        run_dir = run_directory(settings.run_dir)
        folder = self._folder = await asyncio.to_thread(cluster_folder, run_dir, name)
        self._host = host_id(run_dir, settings.host)
        await self._serve(settings, folder)
        about = About(
            version=__version__,
            cluster_name=name,
            link=await self._listen(settings, folder),
            tree=tree,
            arguments=self._arguments,
        )
        dask_private.add_handler(scheduler, ABOUT_OP, self.tell_about)
        dask_private.add_handler(scheduler, GRANT_OP, self.grant)
        dask_private.add_handler(scheduler, CLUSTER_OP, self.take_cluster)
        dask_private.add_handler(scheduler, LISTED_OP, self.wait_until_listed)
        dask_private.replace_retire(scheduler, self.retiring.wrap)
        await self._offer(about)
        self._watch.start()
        if settings.http_dashboard:
            dask_private.add_routes(scheduler, _HTTP_ROUTES)
        self._show_all(settings)

    def _show_all(self, settings: Settings) -> None:
        """Show the catalog where Dask shows its own; without it everything else works."""

        def catalog() -> Catalog | None:
            return None if self.service is None else self.service.catalog

        for show in (self._measure, *[self._show] * settings.dashboard_pages):
            try:
                self._hide.append(show(self.scheduler, catalog))
            except Exception:
                log.exception("the catalog cannot be shown in Dask's dashboard")

    async def _serve(self, settings: Settings, folder: Path) -> None:
        """Make the catalog."""
        self.service = await self._open(settings, folder)
        self.service.begin(self._host)

    async def _offer(self, about: About) -> None:
        """Let sessions and workers in."""
        assert self.service is not None, "installation: offered nothing"
        self.about = about
        dask_private.add_handler(self.scheduler, SESSION_OP, self._session)
        worker_plugin, nanny_plugin = self._ship(about)
        await dask_private.ship(
            self.scheduler, worker_plugin=worker_plugin, nanny_plugin=nanny_plugin
        )

    async def _begin_as(self, cluster: str, token: bytes, epoch: int) -> None:
        """Begin again as the cluster that a store is of (rule 6)."""
        service, about = self.service, self.about
        settings, folder = self.settings, self._folder
        if service is None or about is None or settings is None or folder is None:
            return
        log.warning(
            "no journal, and a store of cluster %s: this is that cluster", cluster
        )
        self._ready.clear()
        self.service = None
        try:
            await service.stop(keep=False)
            await asyncio.to_thread(take_cluster, folder, cluster, token, epoch)
            await self._serve(settings, folder)
            port = about.link.port  # where the store that was found looks for us
            link = await self._listen(settings, folder, port=port)
            await self._offer(msgspec.structs.replace(about, link=link))
        except Exception as error:
            log.exception("the catalog cannot begin as cluster %s", cluster)
            self._failure = error
        finally:
            self._ready.set()

    async def _open(self, settings: Settings, folder: Path) -> CatalogService:
        """Open the journal and make the catalog of what it holds."""
        temporary = settings.journal == "temporary"
        where = str(folder / "catalog.duckdb") if temporary else settings.journal
        held: list[CatalogService] = []

        def notify(event: Any) -> None:  # noqa: ANN401
            # The journal has nothing to say before a batch was submitted by the service.
            held[0].tell_soon(event)

        journal = await asyncio.to_thread(
            Journal.open,
            where,
            notify=notify,
            temporary=temporary,
            fresh_epoch=fresh_epoch(folder, wall_s=time.time()),  # noqa: TID251
        )
        found = journal.recovered.cluster
        recovered, token = await asyncio.to_thread(name_cluster, journal, folder)
        self._minted = not (found or recovered.lost)
        scheduler = self.scheduler
        tables = Tables()
        journal.on_commit(tables.absorb)
        service = CatalogService(
            CatalogSettings(
                token=token,
                tls=dask_private.tls_files(scheduler),
                chunk_bytes=settings.chunk_bytes,
                small_bytes=settings.own_segment_bytes,
                deadline_default_s=settings.deadline_default_s,
                stall_s=settings.stall_s,
                lease_ttl_s=settings.lease_ttl_s,
                recovery_timeout_s=settings.recovery_timeout_s,
                session_grace_s=settings.session_grace_s,
                outcome_ttl_s=settings.outcome_ttl_s,
                plan_result_ttl_s=settings.plan_result_ttl_s,
                pin_limit_fraction=settings.pin_limit_fraction,
            ),
            recovered,
            journal=journal,
            tables=tables,
            tls=dask_private.link_tls(scheduler),
            emit=self._emit,
        )
        service.links.on_join = lambda link, hello: self._joined(link, hello.card)
        held.append(service)
        return service

    async def _listen(
        self, settings: Settings, folder: Path, *, port: int = 0
    ) -> LinkTarget:
        """Open the port for nodes and say where it is."""
        service = self.service
        assert service is not None, "installation: listens for a catalog"
        host = settings.link_host or _host_of(self.scheduler.address)
        port = await service.links.listen(
            host, settings.link_ports, port or service.journal.link_port
        )
        await asyncio.to_thread(service.journal.remember_link_port, port)
        catalog = service.catalog
        link = LinkTarget(
            host=host,
            port=port,
            cluster=catalog.cluster,
            token=catalog.settings.token,
            epoch=catalog.epoch,
        )
        await asyncio.to_thread(write_link, folder, link)
        await asyncio.to_thread(bearer.keep, folder, bearer.derived(link.token))
        return link

    async def join(self, version: str) -> None:
        """Wait until the catalog is there.

        Raises
        ------
        CatalogUnavailable
            When it could not be started.
        Mismatch
            When it is of another release.
        """
        await self._ready.wait()
        if self._failure is not None:
            message = f"the scheduler's catalog could not be started: {self._failure}"
            raise CatalogUnavailable(message) from self._failure
        assert self.about is not None, "plugin: ready without a catalog"
        if version != self.about.version:
            message = (
                f"the scheduler runs tensorcast_dask {self.about.version}, this is "
                f"{version}; use the same release, or restart the scheduler"
            )
            raise Mismatch(message)

    # ------------------------------------------------------------------ hooks
    async def _session(self, comm: Comm, **_: object) -> Status:
        """Answer `SESSION_OP`: hand a comm to the catalog, or close it where there is none."""
        await self._ready.wait()
        if self.service is None:
            comm.abort()
            return Status.dont_reply
        return await self.service.sessions.handle(comm)

    async def tell_about(self) -> dict[str, Any]:
        """Answer `ABOUT_OP`: which catalog this is."""
        await self._ready.wait()
        if self.about is None or self.service is None:
            return {"version": __version__, "ready": False}
        return {
            "version": self.about.version,
            "ready": True,
            "cluster": self.about.link.cluster,
            "cluster_name": self.about.cluster_name,
            "epoch": self.about.link.epoch,
            "nodes": len(self.service.links),
            "sessions": len(self.service.sessions),
        }

    async def grant(self, node: str, holder: str, worker: str) -> bytes:
        """Answer `GRANT_OP`: the signed grant, or nothing (rule 4)."""
        workers = self.scheduler.workers
        if self.about is None or worker not in workers or holder in workers:
            return b""
        link = self.about.link
        return self._sign(
            link.token, node=NodeId(node), epoch=link.epoch, worker=worker
        )

    async def take_cluster(self, cluster: str, token: bytes, epoch: int) -> bool:
        """Answer `CLUSTER_OP`: be the cluster of a store, or not (rule 6)."""
        if self._renamed:
            return cluster in {"", self._renamed}
        names = None if self.service is None else self.service.catalog.names
        if not self._minted or names is None or names.artifacts or names.aliases:
            return False
        if cluster:
            self._renamed = cluster
            begin = self._begin_as(cluster, token, epoch)
            self._renaming = asyncio.get_running_loop().create_task(begin)
        return True

    async def wait_until_listed(self, node: str, incarnation: int) -> bool:
        """Answer `LISTED_OP`: a worker is ready when its node can be used."""
        try:
            async with asyncio.timeout(LISTED_S):
                while not self._is_listed(node, incarnation):
                    news = self._news
                    await news.wait()
        except TimeoutError:
            return False
        return True

    def _is_listed(self, node: str, incarnation: int) -> bool:
        if self.service is None:
            return False
        return any(
            card.node == node and card.incarnation >= incarnation
            for card in self.service.cards().values()
        )

    def _emit(self, emit: Emit) -> None:
        self.scheduler.log_event(TOPIC, {"topic": emit.topic, **emit.facts})

    def worker_gone(self, address: str) -> None:
        """Dask believes a worker gone."""
        if self.service is not None and not self._closed:
            self.service.tell(WorkerGone(address=address))

    def restarting(self) -> None:
        """All workers are about to be restarted; the bytes beside them stay."""
        if self.service is not None:
            for card in self.service.attended():
                self.keep(card, "the workers restart")

    def keep(self, card: NodeCard, why: str) -> None:
        """Have a node live on for `orphan_ttl` from when this worker leaves it (rule 5)."""
        assert self.settings is not None, "installation: kept nothing before its start"
        linger = DoLinger(ttl_s=self.settings.orphan_ttl_s, why=why)
        self._due[card.node] = _Due(linger, card.incarnation)
        if self.service is not None:
            for link, there in self.service.cards().items():
                if there.node == card.node:
                    self._joined(link, there)

    def end(self, card: NodeCard, why: str) -> None:
        """Have a node end, now or when it is next heard of."""
        if self.service is not None:
            self.service.tell(NodeRetired(node=card.node, why=why))

    def _joined(self, link: int, card: NodeCard) -> None:
        """Tell a node what is due, if anything is.

        A store greets the catalog anew when its worker lets it go: only then is there a
        rest of its life to extend.
        """
        if self.service is None:
            return
        self._news.set()
        self._news = asyncio.Event()
        due = self._due.get(card.node)
        if due is None:
            return
        if card.incarnation > due.incarnation or not card.worker:
            del self._due[card.node]
            if card.incarnation == due.incarnation:
                self.service.links.send(link, due.word)

    def _beside(self) -> Beside | None:
        """Tell a client in this process how to take part; None when there is no catalog."""
        service, settings = self.service, self.settings
        if service is None or settings is None or self._closed:
            return None
        return Beside(
            address=self.scheduler.address,
            host=self._host,
            settings=settings,
            token=service.catalog.settings.token,
            tls=dask_private.own_tls(self.scheduler),
        )

    async def before_close(self) -> None:
        """Tell workers, then stores, that the cluster closes (rule 3)."""
        if self.service is None or self.settings is None or self._closed:
            return
        self._closed = True
        await self.guests.see_off()
        end = self.settings.ends_stores
        why = "the cluster was closed" if end else "the scheduler restarts"
        await dask_private.tell_workers(
            self.scheduler,
            _CLOSING_OP,
            workers=list(self.scheduler.workers),
            within_s=2.0,
            end=end,
            why=why,
        )
        if not end:
            for link in self.service.cards():
                self.service.linger(link, self.settings.orphan_ttl_s, why)
            return
        await self.service.end_nodes(why, within_s=END_S)

    async def close(self) -> None:
        """Close the catalog."""
        self._closed = True
        self._watch.stop()
        await self.guests.see_off()
        while self._hide:
            hide = self._hide.pop()
            try:
                hide()
            except Exception:
                log.exception("what shows the catalog did not end; the catalog does")
        if self.service is None or self.settings is None:
            return
        temporary = self.settings.journal in {"temporary", ":memory:"}
        service, self.service = self.service, None
        keep = not (temporary and self.settings.ends_stores)
        await service.stop(keep=keep)
        if not keep and self._folder is not None:
            await at_the_end(forget_cluster, self._folder)


def _host_of(address: str) -> str:
    if address.startswith("inproc://"):
        return "127.0.0.1"
    return str(get_address_host(address))
