"""One worker's care for the device process beside its store.

Rules:

1. There is one only where a device budget is set. It is the store's, not the worker's: an
   adopted store may have one, which is watched like one that was started here.
2. One that ends is started again, after longer and longer pauses; where the machine has no
   such device that is said once.
3. Nothing that fails here touches the store: it goes on without a device.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any

from tensorcast_dask.dataplane.hosts import PidWatch
from tensorcast_dask.exceptions import TensorCastError, UnsupportedPlatform
from tensorcast_dask.tensors.messages import DeviceStart
from tensorcast_dask.worker_plugin import news
from tensorcast_dask.worker_plugin.state.tries import Tries

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.config import Settings
    from tensorcast_dask.tensors.messages import DeviceTold, NodeCard

__all__ = ["DeviceCare"]

log = logging.getLogger(__name__)


class DeviceCare:
    """Keeps a device process beside one store.

    Parameters
    ----------
    name : str
        The worker's name in Dask: workers with numbers share devices in turn.
    settings : Settings
        The worker's.
    launch : callable
        Starts a device process: (DeviceStart, timeout_s) -> DeviceTold.
    """

    def __init__(
        self,
        name: str,
        *,
        settings: Settings,
        launch: Callable[[DeviceStart, float], DeviceTold],
    ) -> None:
        self._turn = int(name) if name.isdecimal() else 0
        self._settings = settings
        self._launch = launch
        self._tries = Tries()
        self._task: asyncio.Task[None] | None = None
        #: Why there is no device; "" while there is one, or none is wanted.
        self.why = ""
        #: Set once the first attempt has ended.
        self.settled = asyncio.Event()
        if not self.wanted:
            self.settled.set()

    @property
    def wanted(self) -> bool:
        """Whether a device budget is set."""
        return self._settings.node.device_memory > 0

    def attend(self, card: NodeCard, pid: int) -> None:
        """Care for the device process of a store that was adopted; `pid` is 0 for none."""
        self.leave()
        if self.wanted:
            self._task = asyncio.create_task(self._care(card, pid))

    def leave(self) -> None:
        """Care no more: the store is another's, or gone. Its device process is its own."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def _care(self, card: NodeCard, pid: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                pid = pid or await self._start(card)
            except UnsupportedPlatform as error:
                self._missing(error)
                return
            except (TensorCastError, OSError) as error:
                self._missing(error)
            else:
                began_s = loop.time()
                self.why = ""
                self.settled.set()
                await _end_of(pid)
                self._tries.lived(loop.time() - began_s)
                log.warning("the device process %d of store %s ended", pid, card.node)
            pid = 0
            await asyncio.sleep(self._tries.failed())

    def _missing(self, error: Exception) -> None:
        self.why = str(error)
        self.settled.set()
        log.warning("the node has no device: %s", error)

    async def _start(self, card: NodeCard) -> int:
        settings, node = self._settings, self._settings.node
        told = DeviceStart(
            card=card,
            devices=str(settings.device),
            run_dir=settings.run_dir,
            ordinal=node.device_number,
            turn=0 if "CUDA_VISIBLE_DEVICES" in os.environ else self._turn,
            memory=node.device_memory,
            ucx=settings.ucx != "off",
        )
        found = await asyncio.to_thread(self._launch, told, settings.start_timeout_s)
        news.device_attends(found)
        return found.pid

    def describe(self) -> dict[str, Any]:
        """Say how it stands."""
        return {"wanted": self.wanted, "why": self.why}


async def _end_of(pid: int) -> None:
    """Wait until a process has ended."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    watch = PidWatch(pid)
    try:
        if not watch.is_gone():
            loop.add_reader(watch.fileno(), ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(watch.fileno())
    finally:
        watch.close()
