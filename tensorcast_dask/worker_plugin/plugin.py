"""The worker plugin: beside every Dask worker, a store.

Rules:

1. `setup` never raises: Dask would keep the worker, and a user's tasks with it, in a
   half-installed state. What failed is kept, reported and shown; the node takes no placements.
2. However often the plugin arrives (registrations race with joining workers), a worker
   has one keeper, set up once. A plugin of another catalog replaces it.
3. A plugin that is removed from a running worker lets its store go a moment later, so
   that its successor finds the same store.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

import msgspec
from dask.system import CPU_COUNT
from distributed.comm.addressing import get_address_host
from distributed.diagnostics.plugin import WorkerPlugin

from tensorcast_dask.config import Settings, Tree, hosts_own, local_tree, merged
from tensorcast_dask.dataplane import hosts
from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.tensors.ids import HostId
from tensorcast_dask.worker_plugin import context, dask_private, news, serializers
from tensorcast_dask.worker_plugin.control import Control, Identity
from tensorcast_dask.worker_plugin.device import DeviceCare
from tensorcast_dask.worker_plugin.keeper import Keeper
from tensorcast_dask.worker_plugin.state.budgets import (
    excess_of,
    is_auto_limit,
    lowered_limit_bytes,
    node_budget_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Worker

    from tensorcast_dask.tensors.messages import (
        DeviceStart,
        DeviceTold,
        LinkTarget,
        NodeCard,
        StoreSettings,
    )

__all__ = ["WORKER_PLUGIN_NAME", "NodePlugin"]

log = logging.getLogger(__name__)

WORKER_PLUGIN_NAME: Final = "tensorcast-worker"
CLOSING_OP: Final = "tensorcast_closing"
READOPT_OP: Final = "tensorcast_readopt"
STATE_OP: Final = "tensorcast_state"
#: How long a removed plugin's store waits for the next plugin of the same worker.
SUCCESSION_S: Final = 1.0
#: How long a worker waits for its nanny's plugin before it starts without maps.
NANNY_S: Final = 2.0
#: When it asks again after that.
NANNY_AGAIN_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0)


class NodePlugin(WorkerPlugin):
    """What Dask registers in workers.

    Parameters
    ----------
    version : str
        Release of the scheduler's catalog.
    cluster_name : str
        Names the folder under the run directory.
    link : LinkTarget
        Where the catalog is, and the secrets for it.
    tree, arguments : dict
        The scheduler's settings, and the arguments over them.
    launch : callable
        Starts a store: (settings, timeout_s) -> NodeCard.
    launch_device : callable
        Starts a device process: (DeviceStart, timeout_s) -> DeviceTold.
    measure : callable
        Tells on the worker's metrics what a callable says: (Worker, describe) -> what ends that.
    """

    name = WORKER_PLUGIN_NAME

    def __init__(
        self,
        *,
        version: str,
        cluster_name: str,
        link: LinkTarget,
        tree: Tree,
        arguments: Tree,
        launch: Callable[[StoreSettings, float], NodeCard],
        launch_device: Callable[[DeviceStart, float], DeviceTold],
        measure: Callable[[Worker, Callable[[], dict[str, Any]]], Callable[[], None]],
    ) -> None:
        self._version = version
        self._cluster_name = cluster_name
        self._link = link
        self._tree = tree
        self._arguments = arguments
        self._launch = launch
        self._launch_device = launch_device
        self._measure = measure
        #: Why `setup` failed; "" when it did not.
        self.failure = ""

    # ------------------------------------------------------------------ hooks
    async def setup(self, worker: Worker) -> None:
        """Find or start a store (rules 1 and 2)."""
        worker.handlers[STATE_OP] = self.tell_state
        worker.handlers[CLOSING_OP] = self.cluster_closes
        worker.handlers[READOPT_OP] = self.adopt_again
        self._worker = worker
        serializers.install()
        try:
            await self._setup(worker)
        except asyncio.CancelledError:  # the worker was interrupted before it was there
            keeper = context.keeper_of(worker)
            if keeper is not None:
                await _leave(worker, keeper)
            raise
        except Exception as error:  # rule 1
            self.failure = f"{type(error).__name__}: {error}"
            known = isinstance(error, TensorCastError | OSError)
            log.warning(
                "worker %s gets no node: %s",
                worker.address,
                self.failure,
                exc_info=not known,
            )
            worker.log_event(
                "tensorcast",
                {
                    "topic": "worker_failed",
                    "worker": worker.address,
                    "why": self.failure,
                },
            )

    async def teardown(self, worker: Worker) -> None:
        """Let the store go."""
        keeper = context.keeper_of(worker)
        if keeper is None:
            return
        if dask_private.is_running(worker):  # rule 3
            loop = asyncio.get_running_loop()
            keeper.depart_at = loop.call_later(
                SUCCESSION_S, lambda: loop.create_task(_leave(worker, keeper))
            )
            return
        await _leave(worker, keeper)

    # ------------------------------------------------------------------ answers
    async def tell_state(self) -> dict[str, Any]:
        """Answer `tensorcast_state`."""
        keeper = context.keeper_of(self._worker)
        state: dict[str, Any] = {"failure": self.failure, "version": self._version}
        if keeper is not None:
            state |= keeper.describe()
        return state

    async def cluster_closes(self, end: bool, why: str) -> None:  # noqa: FBT001
        """Answer `tensorcast_closing`: the scheduler closes, and with it the cluster."""
        keeper = context.keeper_of(self._worker)
        if keeper is not None:
            await keeper.cluster_closes(end=end, why=why)

    async def adopt_again(self) -> None:
        """Answer `tensorcast_readopt`: the catalog had thought this worker gone."""
        keeper = context.keeper_of(self._worker)
        if keeper is not None:
            await keeper.adopt_again()

    # ------------------------------------------------------------------ set-up
    async def _setup(self, worker: Worker) -> None:
        keeper = context.keeper_of(worker)
        if keeper is not None:
            if keeper.depart_at is not None:
                keeper.depart_at.cancel()
                keeper.depart_at = None
            if keeper.link.cluster == self._link.cluster:
                tls = dask_private.tls_files(worker)
                keeper.use_link(msgspec.structs.replace(self._link, tls=tls))
                return
            await _leave(worker, keeper)
        settings = Settings.of(
            merged(self._tree, hosts_own(local_tree()), self._arguments)
        )
        link = msgspec.structs.replace(self._link, tls=dask_private.tls_files(worker))
        confirmed, was_auto, limit_bytes = await self._monitors(worker)
        identity = await asyncio.to_thread(
            self._identity, worker, settings, link, limit_bytes
        )
        if was_auto and limit_bytes:
            lowered_bytes = lowered_limit_bytes(
                limit_bytes, identity.settings.host_memory_bytes
            )
            dask_private.lower_worker_limit(worker, lowered_bytes)
            news.limit_lowered(limit_bytes, lowered_bytes)
        keeper = Keeper(
            worker,
            Control(
                identity,
                folder=hosts.cluster_folder(
                    hosts.run_directory(settings.run_dir), self._cluster_name
                ),
                start_timeout_s=settings.start_timeout_s,
                launch=self._launch,
            ),
            settings=settings,
            link=link,
            mapping=confirmed,
            device=DeviceCare(
                identity.name, settings=settings, launch=self._launch_device
            ),
        )
        context.remember(worker, keeper)
        keeper.at_close = self._measure(worker, keeper.describe)
        await keeper.start(settings.start_timeout_s)
        card = keeper.card
        if card is not None:
            node = context.node_of(worker)
            await keeper.gateway.begin(node, settings.node, card)
        if not confirmed:
            keeper.spawn(_confirm_later(worker, keeper))

    def _identity(
        self,
        worker: Worker,
        settings: Settings,
        link: LinkTarget,
        limit_bytes: int | None,
    ) -> Identity:
        """Work out who the worker is and what its store may take."""
        name = str(worker.name)
        host = hosts.host_id(hosts.run_directory(settings.run_dir), settings.host)
        if settings.separate_hosts:
            host = HostId(f"{host}/{name}")
        machine_bytes = dask_private.machine_bytes()
        excess = excess_of(settings.node.host_memory, machine_bytes=machine_bytes)
        if excess:
            log.warning("worker %s: %s", worker.address, excess)
        budget_bytes = node_budget_bytes(
            settings.node.host_memory,
            machine_bytes=machine_bytes,
            share=worker.state.nthreads / CPU_COUNT,
            limit_bytes=limit_bytes,
        )
        inproc = worker.address.startswith("inproc://")
        return Identity(
            address=worker.address,
            name=name,
            settings=settings.for_store(
                host_memory_bytes=budget_bytes,
                cluster_name=self._cluster_name,
                host=host,
                data_host="127.0.0.1" if inproc else get_address_host(worker.address),
            ),
            link=link,
        )

    async def _monitors(self, worker: Worker) -> tuple[bool, bool, int | None]:
        """Replace the memory checks: whether both are, whether the limit was Dask's, and it."""
        replaced = dask_private.replace_worker_monitor(worker)
        limit_bytes = worker.memory_manager.memory_limit
        if not worker.nanny:
            auto = is_auto_limit(
                limit_bytes,
                machine_bytes=dask_private.machine_bytes(),
                threads=worker.state.nthreads,
                cores=CPU_COUNT,
            )
            return replaced, auto, limit_bytes
        facts = dask_private.told_by_nanny(worker)
        if facts is None:
            facts = await _ask_nanny(worker, within_s=NANNY_S)
        if facts is None:
            return False, False, limit_bytes
        # The nanny knows the limit from before it was lowered.
        return (
            replaced and bool(facts["replaced"]),
            bool(facts["auto"]),
            facts["limit_bytes"],
        )


async def _ask_nanny(worker: Worker, *, within_s: float) -> dict[str, Any] | None:
    """Ask until the nanny's plugin answers."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + within_s
    while True:
        facts = await dask_private.ask_nanny(worker)
        if facts is not None or loop.time() >= until_s:
            return facts
        await asyncio.sleep(0.1)


async def _confirm_later(worker: Worker, keeper: Keeper) -> None:
    """Wait for a nanny plugin that comes late, then let tasks map."""
    for pause_s in NANNY_AGAIN_S:
        await asyncio.sleep(pause_s)
        if not dask_private.is_running(worker):
            return
        facts = await dask_private.ask_nanny(worker) if worker.nanny else None
        if facts is not None and facts["replaced"]:
            keeper.mapping = True
            await keeper.adopt_again()
            return
    log.warning(
        "worker %s: its nanny judges it by mapped memory too; tasks get copies",
        worker.address,
    )


async def _leave(worker: Worker, keeper: Keeper) -> None:
    context.forget(worker)
    keeper.at_close()
    await keeper.close()
