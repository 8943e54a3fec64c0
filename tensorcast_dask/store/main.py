"""The store process: put together, made ready, kept until it has to end.

Rules:

1. It never forks, and imports neither Dask nor an array library (`ucxx`, where it is
   switched on, brings numpy).
2. The card is written when everything else is ready: who reads it may connect.
3. Its stdio is its log; SIGTERM is an end message, SIGINT and SIGHUP are nothing.
4. At its end its folder goes, with all that was in it; its memory goes with its last reader.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from tensorcast_dask.dataplane import hosts
from tensorcast_dask.dataplane.auth import server_tls
from tensorcast_dask.dataplane.congestion import congestion_for
from tensorcast_dask.dataplane.segments import ignore_sigio
from tensorcast_dask.dataplane.server import Limits, Server
from tensorcast_dask.dataplane.transports import ucx_line
from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.store.catalog import Catalog
from tensorcast_dask.store.core import Core
from tensorcast_dask.store.device_media import media_of
from tensorcast_dask.store.devices import Devices
from tensorcast_dask.store.disk import measured, open_disk
from tensorcast_dask.store.ends import Ends
from tensorcast_dask.store.files import Files
from tensorcast_dask.store.identity import Identity
from tensorcast_dask.store.instances import InstanceDesk
from tensorcast_dask.store.jobs import Jobs
from tensorcast_dask.store.launch import LOG_NAME, StoreStart, folder_of
from tensorcast_dask.store.machine import Machine
from tensorcast_dask.store.movers import Movers
from tensorcast_dask.store.plans import PlanDesk
from tensorcast_dask.store.report import debug_state
from tensorcast_dask.store.serve import Requests
from tensorcast_dask.store.shelf import Shelf
from tensorcast_dask.store.sums import Sums
from tensorcast_dask.tensors.messages import Welcome, decode

if TYPE_CHECKING:
    from pathlib import Path

    from tensorcast_dask.tensors.messages import FromNode

__all__ = ["Store", "main"]

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.1
_STOP_S: Final = 2.0
_STALL_S: Final = 30.0
#: Records are many and in no cycles: looking through them often finds nothing.
_GC_THRESHOLDS: Final = (20_000, 20, 50)
_LOOPBACK: Final = "127.0.0.1"


class Store:
    """One store, in this process.

    Parameters
    ----------
    told : StoreStart
        Settings and secrets.
    folder : Path
        Its folder in the run directory.
    """

    def __init__(self, told: StoreStart, *, folder: Path) -> None:
        settings = measured(told.settings)
        host = settings.host or hosts.host_id(folder.parents[1])
        self._folder = folder
        self.identity = Identity(
            node=told.node, host=host, folder=folder, settings=settings, link=told.link
        )
        self.core = Core(
            settings,
            shelf=Shelf(max_descriptors=settings.max_descriptors),
            machine=Machine(),
        )
        self.ends = Ends(
            self.core,
            self.identity,
            free_ttl_s=told.free_ttl_s or float("inf"),
            own=told.own,
        )
        self._sums = Sums(self.core)
        self._disk = open_disk(
            self.core, settings, told.node, cluster=self.identity.cluster
        )
        self.jobs = Jobs(self._tell)
        self.devices = Devices(self.core)
        self.devices.media = media_of(self.devices, self.core)
        self.ends.device_pid = lambda: self.devices.pid
        self.desk = InstanceDesk(self.core, self.identity, self.devices)
        movers = Movers(
            self.core,
            self.identity,
            tell=self._tell,
        )
        self._idle = movers.idle
        self.plans = PlanDesk(
            self.core, self.identity, self.desk, credentials=movers.credentials
        )
        self.catalog = Catalog(
            self.core,
            self.identity,
            ends=self.ends,
            jobs=self.jobs,
            movers=movers,
            files=Files(self.core, movers),
            desk=self.desk,
            plans=self.plans,
        )
        self._server = Server(
            Requests(
                self.core,
                sums=self._sums,
                ends=self.ends,
                state=self._state,
                movers=movers,
                devices=self.devices,
                desk=self.desk,
                ucx=self._takes_ucx,
            ),
            welcome=self._welcome,
            token=lambda: self.identity.token,
            limits=self._limits(),
            allow_uids=settings.allow_uids,
            guests=self.desk.guest,
        )
        self._listening: object = None
        self.ends.changed = self._changed
        self.devices.changed = self.catalog.renew

    def _tell(self, message: FromNode) -> None:
        self.core.tell(message)  # the link puts itself there

    def _state(self) -> bytes:
        return debug_state(
            self.core,
            identity=self.identity,
            ends=self.ends,
            connections=lambda: self._server.connections,
            transfers=lambda: self.jobs.running,
            lease_left_s=self.catalog.lease_left_s,
            desk=self.desk,
            driven=lambda: self.plans.driven,
        )

    def _welcome(self) -> Welcome:
        settings = self.core.settings
        return Welcome(
            card=self.identity.card,
            cluster=self.identity.cluster,
            epoch=self.identity.epoch,
            chunk_bytes=settings.chunk_bytes,
            small_bytes=settings.own_segment_bytes - 1,
        )

    # -------------------------------------------------------------- life
    def start(self) -> None:
        """Listen, connect, and write the card."""
        self._server.listen_unix(self.identity.card.socket)
        self._look_for_ucx()
        self._listen()
        self._server.start()
        self._sums.start()
        self.desk.start()
        self.plans.start()
        self.catalog.start()
        self.identity.show()

    def _listen(self) -> None:
        """Open the data port, where there is a cluster to prove; again for new certificates."""
        settings, tls = self.core.settings, self.identity.tls
        if self.identity.link is None:
            return
        host = settings.data_host or _LOOPBACK
        wanted = (host, settings.data_ports, tls)
        if wanted == self._listening:
            return
        port = self._server.listen_tcp(
            host,
            ports=settings.data_ports,
            tls=None if tls is None else server_tls(tls),
            congestion=settings.congestion or congestion_for(host),
        )
        self._listening = wanted
        self.identity.listens(host, port)

    def _takes_ucx(self) -> bool:
        return self.identity.takes_ucx(self.core.settings.ucx)

    def _look_for_ucx(self) -> None:
        """Publish this machine's lanes; loading UCX takes a second, so only where it may be used."""
        mode, lanes = self.core.settings.ucx, tuple[str, ...]()
        if self._takes_ucx():
            try:
                lanes = ucx_line.offered()
            except TensorCastError as error:
                logger.warning("transfers go over TCP: %s", error)
            else:
                logger.info("%s offers %s", ucx_line.version(), lanes)
        elif mode != "off":
            logger.warning(
                "transfer.ucx is %s, but UCX has no TLS: it is not used", mode
            )
        if lanes != self.identity.card.ucx and self._takes_ucx() == bool(lanes):
            self.identity.offers(lanes)
            self.catalog.relink()

    def _limits(self) -> Limits:
        settings = self.core.settings
        return Limits(
            stall_s=max(_STALL_S, settings.stall_s),
            bandwidth_bytes_per_s=settings.bandwidth_bytes_per_s,
        )

    def _changed(self) -> None:
        settings = self.core.settings
        self._server.configure(limits=self._limits(), allow_uids=settings.allow_uids)
        try:
            self._listen()
        except TensorCastError:
            logger.exception("the data port cannot be opened")
        self.catalog.relink()
        if self._takes_ucx() != bool(self.identity.card.ucx):
            threading.Thread(target=self._look_for_ucx, daemon=True).start()

    def run(self) -> None:
        """Look at the clock until it is time to end."""
        while not (self.ends.ending.wait(_TICK_S) or self.ends.signalled):
            self.core.tick()
            self.devices.tick()
            self.ends.tick()
            self.desk.tick()
            self._idle.tick()
        signalled = self.ends.signalled
        logger.info("ending: %s", f"signal {signalled}" if signalled else self.ends.why)

    def stop(self) -> None:
        """End everything and leave nothing behind."""
        with contextlib.suppress(OSError):
            self.identity.hide()
        self.plans.stop(within_s=_STOP_S)
        self.desk.stop(within_s=_STOP_S)
        self.catalog.stop(within_s=_STOP_S)
        self._server.stop(within_s=_STOP_S)
        self._idle.close()
        self._sums.stop(within_s=_STOP_S)
        self.ends.close()
        if self._disk is not None:
            self._disk.end(remove=True)
        hosts.remove_folder(self._folder)
        with contextlib.suppress(OSError):  # the cluster's folder, after the last of it
            self._folder.parent.rmdir()


def _take_stdio(folder: Path) -> None:
    """Make the log our stdout and stderr, and nothing our stdin."""
    log = os.open(
        folder / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    logging.basicConfig(
        level=os.environ.get("TENSORCAST_LOG", "INFO"),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def _signals(ends: Ends) -> None:
    def end(number: int, _: object) -> None:
        # In the main thread, which may be inside of `ending`: setting that would wait for
        # a lock that this very thread holds.
        ends.signalled = number

    ignore_sigio()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)


def main() -> None:
    """Run a store that is told what to be over stdin."""
    started_s = time.perf_counter()
    told = decode(sys.stdin.buffer.read(), StoreStart)
    folder = folder_of(told.settings, told.node)
    _take_stdio(folder)
    try:
        store = Store(told, folder=folder)
        _signals(store.ends)
        store.start()
    except BaseException:
        logger.exception("the store cannot start")
        raise
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    gc.enable()
    logger.info(
        "store %s, pid %d, ready in %.0f ms",
        told.node,
        os.getpid(),
        (time.perf_counter() - started_s) * 1e3,
    )
    store.run()
    store.stop()
    # Threads of readers may still hang in the kernel; nothing of ours is left to do.
    logging.shutdown()
    os._exit(0)
