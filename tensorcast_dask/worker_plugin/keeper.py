"""One worker's care for its store: the supervision state, driven.

Rules:

1. Events enter through `tell`, on the worker's loop. What blocks runs in a thread.
2. Nothing that fails here reaches Dask: a worker without a store computes on, and `why`
   says what is missing.
3. A worker that is on its way out starts no store and adopts none: it would hold up the end
   of another's.
4. A store that holds artifacts of another cluster is adopted only where the scheduler has
   nothing and takes that cluster's id and token from it; it then sends a plugin of that cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec

from tensorcast_dask.dataplane import hosts
from tensorcast_dask.exceptions import Mismatch, TensorCastError
from tensorcast_dask.worker_plugin import dask_private, news, pressure
from tensorcast_dask.worker_plugin.gateway import GatewayCare
from tensorcast_dask.worker_plugin.state.budgets import oversold
from tensorcast_dask.worker_plugin.state.supervision import (
    Adopt,
    Adopted,
    Closing,
    ControlEnded,
    Event,
    Found,
    Instruction,
    LetGo,
    Look,
    Phase,
    Refused,
    Report,
    Start,
    Started,
    StartFailed,
    Supervision,
    TimePassed,
    WakeAt,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from distributed import Worker

    from tensorcast_dask.config import Settings
    from tensorcast_dask.tensors.ids import NodeId
    from tensorcast_dask.tensors.messages import Adopted as StoreAdopted
    from tensorcast_dask.tensors.messages import LinkTarget, NodeCard
    from tensorcast_dask.worker_plugin.control import Control
    from tensorcast_dask.worker_plugin.device import DeviceCare

__all__ = ["Keeper"]

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Keeper:
    """Keeps one store for one worker.

    Parameters
    ----------
    worker : Worker
        Whose store it is.
    control : Control
        The hand on stores.
    settings : Settings
        The worker's.
    link : LinkTarget
        Where the catalog is.
    mapping : bool
        Whether tasks may map (both memory monitors are replaced).
    device : DeviceCare
        Cares for the device process beside the store.
    """

    def __init__(
        self,
        worker: Worker,
        control: Control,
        *,
        settings: Settings,
        link: LinkTarget,
        mapping: bool,
        device: DeviceCare,
    ) -> None:
        self.worker = worker
        self._device = device
        self.gateway = GatewayCare()
        self.settings = settings
        self.link = link
        self.mapping = mapping
        self._control = control
        self._state = Supervision()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._alarm: asyncio.TimerHandle | None = None
        self._watched = -1
        #: The store that was started here and is not adopted yet.
        self._started = ""
        #: Whether a signal to this process would end the worker, and be seen to.
        self._interruptible = dask_private.waits_for_signals()
        #: Set whenever the store is there or the first search has failed.
        self._settled = asyncio.Event()
        #: The cluster said that it closes: what to do with the store then.
        self._closing: str | None = None
        #: When the plugin was removed from a running worker: the moment of letting go.
        self.depart_at: asyncio.TimerHandle | None = None
        #: Called when the store is let go: nothing is told of it any more.
        self.at_close: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------ to look at
    @property
    def card(self) -> NodeCard | None:
        """The store's card while there is a store."""
        return self._state.card if self._state.phase is Phase.ATTENDING else None

    @property
    def why(self) -> str:
        """Why there is no store; "" while there is one."""
        return self._state.why

    def describe(self) -> dict[str, Any]:
        """Say how it stands, for `debug_state` and the scheduler."""
        card = self.card
        return {
            "phase": str(self._state.phase),
            "node": "" if card is None else card.node,
            "incarnation": 0 if card is None else card.incarnation,
            "why": self._state.why,
            "adoptions": self._state.adoptions,
            "failures": self._state.failures,
            "mapping": self.mapping,
            "device": self._device.describe(),
            "gateway": self.gateway.describe(),
        }

    # ------------------------------------------------------------------ life
    async def start(self, within_s: float) -> None:
        """Begin; return when the node can be used, or the first search failed."""
        self.tell(TimePassed())
        try:
            async with asyncio.timeout(within_s):
                await self._settled.wait()
                if self.card is not None:
                    await self._device.settled.wait()
        except TimeoutError:
            log.warning("worker %s has no store yet", self.worker.address)
        card = self.card
        if card is not None:
            await dask_private.wait_until_listed(
                self.worker, node=card.node, incarnation=card.incarnation
            )

    async def close(self) -> None:
        """Let the store go: as an orphan when the scheduler was lost first."""
        await self.gateway.close()
        self._device.leave()
        if self._alarm is not None:
            self._alarm.cancel()
        self._unwatch()
        leaves = dask_private.stream_is_alive(self.worker) or (
            self._interruptible and not dask_private.waits_for_signals()
        )
        why = "the worker closed" if leaves else "the scheduler is gone"
        self.tell(Closing(orphan=not leaves, why=why))
        while self._tasks:
            await asyncio.wait(self._tasks)

    def use_link(self, link: LinkTarget) -> None:
        """Take news of the catalog's whereabouts, for adoptions from now on."""
        self.link = link
        self._control.use_link(link)

    async def cluster_closes(self, *, end: bool, why: str) -> None:
        """End the store now, or leave it to the next scheduler."""
        self._closing = "end" if end else "keep"
        await self.gateway.close()
        self._device.leave()
        self._unwatch()
        self.tell(Closing(orphan=not end, why=why))
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def adopt_again(self) -> None:
        """Tell the store, and through it the catalog, how things are with the worker now."""
        card = self.card
        if card is not None:
            await self._adopt(card, again=True)

    # ------------------------------------------------------------------ machinery
    def tell(self, event: Event) -> None:
        """Hand an event to the state and carry out what it says."""
        for instruction in self._state.handle(event, now_s=time.monotonic()):
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Look():
                self.spawn(self._look())
            case Start():
                self.spawn(self._start())
            case Adopt(card=card):
                self.spawn(self._adopt(card))
            case LetGo(orphan=orphan, why=why):
                self.spawn(self._let_go(orphan=orphan, why=why))
            case WakeAt(at_s=at_s):
                self._alarm = self._loop.call_later(
                    max(0.0, at_s - time.monotonic()), self.tell, TimePassed()
                )
            case Report(phase=phase, node=node, why=why):
                self._report(phase, node, why)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something on the worker's loop, until the keeper closes."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _report(self, phase: Phase, node: NodeId, why: str) -> None:
        self._settled.set()
        if why and dask_private.is_running(self.worker):
            log.warning("worker %s: %s", self.worker.address, why)
        self.worker.log_event(
            "tensorcast",
            {
                "topic": "worker_store",
                "worker": self.worker.address,
                "phase": str(phase),
                "node": node,
                "why": why,
            },
        )

    async def _look(self) -> None:
        if not dask_private.is_running(self.worker):  # rule 3
            self.tell(Found(cards=()))
            return
        try:
            cards = await asyncio.to_thread(self._control.look)
        except (TensorCastError, OSError) as error:
            log.warning("stores cannot be looked for: %s", error)
            cards = ()
        self.tell(Found(cards=cards))

    async def _start(self) -> None:
        if not dask_private.is_running(self.worker):  # rule 3
            self.tell(StartFailed(why="the worker is closing"))
            return
        try:
            card = await asyncio.to_thread(self._control.start)
        except (TensorCastError, OSError) as error:
            self.tell(StartFailed(why=str(error)))
            return
        self._started = card.node
        self.tell(Started(card=card))

    async def _adopt(self, card: NodeCard, *, again: bool = False) -> None:
        self._unwatch()
        try:
            grant = b"" if again else await self._grant(card)
            adopted = await self._ask(card, grant)
        except (TensorCastError, OSError) as error:
            if again:
                self.tell(ControlEnded(node=card.node, why=str(error)))
            else:
                self.tell(Refused(node=card.node, why=str(error)))
            return
        if again:
            self._state.card = adopted.card
        else:
            self.tell(Adopted(card=adopted.card))
            how = "started" if card.node == self._started else "adopted"
            news.store_attends(
                adopted.card, self._control.settings, self._control.folder, how=how
            )
            self.spawn(self._look_at_the_host())
        if self._state.phase is Phase.ATTENDING:
            self._watch(adopted.card.node)
            if not again:
                self._device.attend(adopted.card, adopted.device_pid)
            if not self.worker.address.startswith(
                "inproc://"
            ):  # else it is the program
                pressure.prefer_this_process()

    async def _look_at_the_host(self) -> None:
        """Warn when all stores of this host may take more than it has."""
        given = await asyncio.to_thread(hosts.budgets, self._control.folder.parent)
        excess = oversold(given, machine_bytes=dask_private.machine_bytes())
        if excess:
            log.warning("worker %s: %s", self.worker.address, excess)

    async def _ask(self, card: NodeCard, grant: bytes) -> StoreAdopted:
        """Adopt a store; one of another cluster together with that cluster (rule 4)."""
        control, mapping = self._control, self.mapping
        try:
            adopted = await _whole(control.adopt, card, mapping=mapping, grant=grant)
        except Mismatch as refusal:
            lost = "cluster" in refusal.data and await dask_private.bring_cluster(
                self.worker
            )
            if not lost:
                raise
            adopted = await _whole(control.adopt, card, mapping=mapping, of_any=True)
            taken = await dask_private.bring_cluster(
                self.worker,
                cluster=adopted.cluster,
                token=adopted.token,
                epoch=adopted.epoch,
            )
            if not taken:
                control.leave()
                raise
            self.use_link(
                msgspec.structs.replace(
                    self.link, cluster=adopted.cluster, token=adopted.token
                )
            )
        return adopted

    async def _grant(self, card: NodeCard) -> bytes:
        """Ask the scheduler for the right to a store that another worker seems to hold."""
        if card.worker in {"", self.worker.address}:
            return b""
        return await dask_private.ask_grant(
            self.worker, node=card.node, holder=card.worker
        )

    async def _let_go(self, *, orphan: bool, why: str) -> None:
        act: Callable[[], None]
        if self._closing == "end":
            act, how = (lambda: self._control.end(why)), "ended"
        else:
            settings = self.settings
            ttl_s = settings.orphan_ttl_s if orphan else settings.released_ttl_s
            act = lambda: self._control.let_go(ttl_s=ttl_s, why=why)  # noqa: E731
            how = f"{'left' if orphan else 'released'} for at most {ttl_s:g} s"
        if self._state.card is not None:
            news.store_left(self._state.card.node, how=how, why=why)
        await _whole(act)

    def _watch(self, node: NodeId) -> None:
        self._watched = self._control.fileno()
        if self._watched >= 0:
            self._loop.add_reader(self._watched, self._ended, node)

    def _unwatch(self) -> None:
        if self._watched >= 0:
            self._loop.remove_reader(self._watched)
            self._watched = -1

    def _ended(self, node: NodeId) -> None:
        """Take note that the connection is readable: between requests that is its end."""
        self._unwatch()
        self._device.leave()
        self._control.leave()
        self.tell(ControlEnded(node=node, why="its connection ended"))


async def _whole(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run what changes a store in a thread, and know how it ended, whoever cancels this task.

    The loop of an interrupted worker cancels all of its tasks and then waits for them.
    """
    # A future of the executor's, which is no task.
    call = functools.partial(function, *args, **kwargs)
    work = asyncio.get_running_loop().run_in_executor(None, call)
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({work})
    return work.result()
