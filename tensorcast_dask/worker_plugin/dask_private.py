"""Everything of Dask's workers and nannies that we touch beyond their documentation.

Tried with distributed 2026.7 and 2026.8; `tests/cluster/test_dask_private.py` has a
test for each:

* `worker.monitor.get_process_memory`: what the worker takes for its own memory when it
  pauses, spills, and reports. Replaced on the instance.
* `nanny.periodic_callbacks["memory_monitor"].callback`: what kills a worker above its
  limit; absent when nothing would. `nanny.process.process.pid`: the worker's process.
* `worker.batched_stream.comm`: the stream to the scheduler; whether it is alive tells a
  worker that leaves from one that was left.
* `distributed._signals.handle_signal`, which `dask worker` installs for SIGINT and SIGTERM and
  takes away when one was caught. Without a nanny it then cancels everything instead of
  closing the worker: its stream ends first, as if the scheduler had gone.
* `worker.memory_manager.memory_limit`, `.data.n`, `worker.state.transfer_incoming_bytes_limit`
  and `nanny.memory_manager.memory_limit`: where an automatic limit stands.
* `nanny.env`: the environment of the workers that the nanny starts from now on.
* `worker.handlers`, `nanny.handlers`: operations that they answer.
* `worker.nanny`, `worker.security`, `worker.connection_args`: how others are reached.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from typing import TYPE_CHECKING, Any, Final

import psutil
from distributed.core import Status
from distributed.system import MEMORY_LIMIT

from tensorcast_dask.dataplane import auth

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Nanny, Worker

    from tensorcast_dask.tensors.messages import TlsFiles

__all__ = [
    "ask_grant",
    "ask_nanny",
    "bring_cluster",
    "is_running",
    "lower_nanny_limit",
    "lower_worker_limit",
    "machine_bytes",
    "replace_nanny_check",
    "replace_worker_monitor",
    "stream_is_alive",
    "tell_next_workers",
    "tls_files",
    "told_by_nanny",
    "wait_until_listed",
    "waits_for_signals",
]

log = logging.getLogger(__name__)

NANNY_OP: Final = "tensorcast_nanny"
NANNY_VARIABLE: Final = "TENSORCAST_NANNY"
ASK_S: Final = 1.0
GRANT_OP: Final = "tensorcast_grant"
CLUSTER_OP: Final = "tensorcast_cluster"
LISTED_OP: Final = "tensorcast_listed"


def machine_bytes() -> int:
    """Give the least of physical memory and cgroup limit, as Dask found it."""
    return int(MEMORY_LIMIT)


def is_running(worker: Worker) -> bool:
    """Tell whether a worker is there to stay."""
    return worker.status in {Status.running, Status.paused, Status.init}


def stream_is_alive(worker: Worker) -> bool:
    """Tell whether the stream to the scheduler is up: the worker leaves, and was not left."""
    comm = worker.batched_stream.comm
    return comm is not None and not comm.closed()


def waits_for_signals() -> bool:
    """Tell whether `dask worker` in this process waits for a signal to end it."""
    handler = signal.getsignal(signal.SIGINT)
    return getattr(handler, "__module__", "") == "distributed._signals"


# ------------------------------------------------------------------ memory monitors
def _own_bytes(process: psutil.Process) -> int:
    """Resident bytes of a process that are no file's: maps of artifacts do not count."""
    found = process.memory_info()
    return int(found.rss - found.shared)


def replace_worker_monitor(worker: Worker) -> bool:
    """Have a worker judge itself by resident minus shared; tell whether it now does."""
    monitor = worker.monitor

    def get_process_memory() -> int:
        return _own_bytes(monitor.proc)

    monitor.get_process_memory = get_process_memory  # type: ignore[method-assign]
    return worker.monitor.get_process_memory() == get_process_memory() or (
        worker.monitor.get_process_memory is get_process_memory
    )


def replace_nanny_check(nanny: Nanny) -> bool:
    """Have a nanny judge its worker by resident minus shared; tell whether it now does.

    Dask's own check runs where that is over its limit, so the kill stays Dask's.
    """
    callbacks = nanny.periodic_callbacks
    check = callbacks.get("memory_monitor")
    if check is None:  # nothing would kill the worker
        return True
    if getattr(check.callback, "tensorcast", False):
        return True
    original: Callable[[], Any] = check.callback
    manager = nanny.memory_manager

    def memory_monitor() -> None:
        pid = _worker_pid(nanny)
        limit_bytes = manager.memory_limit
        if pid is None or not limit_bytes:
            return
        try:
            own_bytes = _own_bytes(psutil.Process(pid))
        except psutil.Error:  # the worker has just ended
            return
        if own_bytes > limit_bytes * manager.memory_terminate_fraction:
            original()

    memory_monitor.tensorcast = True  # type: ignore[attr-defined]
    check.callback = memory_monitor
    return callbacks["memory_monitor"].callback is memory_monitor


def _worker_pid(nanny: Nanny) -> int | None:
    process = nanny.process.process if nanny.process is not None else None
    return None if process is None else process.pid


# ------------------------------------------------------------------ limits
def lower_worker_limit(worker: Worker, limit_bytes: int) -> None:
    """Set a lower memory limit, and what the worker had derived from it."""
    manager = worker.memory_manager
    if not manager.memory_limit or manager.memory_limit <= limit_bytes:
        return
    ratio = limit_bytes / manager.memory_limit
    manager.memory_limit = limit_bytes
    data = manager.data
    if hasattr(data, "n") and hasattr(data, "evict"):  # Dask's SpillBuffer
        data.n = data.n * ratio
    incoming = worker.state.transfer_incoming_bytes_limit
    if incoming:
        worker.state.transfer_incoming_bytes_limit = int(incoming * ratio)


def lower_nanny_limit(nanny: Nanny, limit_bytes: int) -> None:
    """Set a lower memory limit, for this check and for workers started from now on."""
    manager = nanny.memory_manager
    if manager.memory_limit and manager.memory_limit > limit_bytes:
        manager.memory_limit = limit_bytes


# ------------------------------------------------------------------ talk
def tell_next_workers(nanny: Nanny, facts: dict[str, Any]) -> None:
    """Hand facts to the workers that the nanny starts from now on."""
    nanny.env[NANNY_VARIABLE] = json.dumps(facts | {"nanny": nanny.address})


def told_by_nanny(worker: Worker) -> dict[str, Any] | None:
    """Give what the nanny told this worker at its start; None when it told nothing."""
    try:
        facts = json.loads(os.environ.get(NANNY_VARIABLE, ""))
    except ValueError:
        return None
    return facts if facts["nanny"] == worker.nanny else None


async def ask_nanny(worker: Worker) -> dict[str, Any] | None:
    """Ask the nanny what our plugin has done there; None while it has not run.

    A nanny answers nobody before its worker has started: the wait has a bound.
    """
    try:
        async with (
            asyncio.timeout(ASK_S),
            worker.rpc(worker.nanny) as nanny,  # type: ignore[arg-type]  # its address
        ):
            answer = await getattr(nanny, NANNY_OP)()
    except (OSError, TimeoutError) as error:
        log.debug("the nanny does not answer: %s", error)
        return None
    return answer if isinstance(answer, dict) else None


async def ask_grant(worker: Worker, *, node: str, holder: str) -> bytes:
    """Ask the scheduler whether the holder of a store is gone for Dask; b"" = no."""
    try:
        answer = await getattr(worker.scheduler, GRANT_OP)(
            node=node, holder=holder, worker=worker.address
        )
    except OSError as error:
        log.debug("the scheduler does not answer: %s", error)
        return b""
    return answer if isinstance(answer, bytes) else b""


async def bring_cluster(
    worker: Worker, *, cluster: str = "", token: bytes = b"", epoch: int = 0
) -> bool:
    """Bring the scheduler the cluster of a store; with "" ask whether it would take one."""
    try:
        answer = await getattr(worker.scheduler, CLUSTER_OP)(
            cluster=cluster, token=token, epoch=epoch
        )
    except OSError as error:
        log.debug("the scheduler does not answer: %s", error)
        return False
    return answer is True


async def wait_until_listed(worker: Worker, *, node: str, incarnation: int) -> bool:
    """Wait until the catalog lists the worker's node, or for as long as it thinks fit."""
    try:
        answer = await getattr(worker.scheduler, LISTED_OP)(
            node=node, incarnation=incarnation
        )
    except OSError as error:
        log.debug("the scheduler does not answer: %s", error)
        return False
    return bool(answer)


def tls_files(worker: Worker) -> TlsFiles | None:
    """Give the worker's own certificates as PEM text; None where the cluster has no TLS."""
    if not worker.scheduler.address.startswith("tls://"):
        return None
    found = worker.security.get_tls_config_for_role("worker")  # type: ignore[no-untyped-call]
    return auth.tls_files(found)
