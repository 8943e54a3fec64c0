"""Everything of Dask's scheduler that we touch and that its documentation does not offer.

Tried with distributed 2026.7 and 2026.8; `tests/cluster/test_dask_private.py` has a test for each:

* `scheduler.handlers`: a dict from the name of an operation to what answers it. A handler
  whose first parameter is named `comm` is given the comm itself.
* `scheduler.extensions`: a dict; what is in it belongs to the scheduler's life.
* `scheduler.worker_plugins`, `scheduler.nanny_plugins`: pickled plugins by name, sent to
  every worker that registers and every nanny that starts.
* `scheduler.retire_workers`, and the handler of that name: replaced on the instance.
* `scheduler.security`: Dask's certificates.
* `scheduler.http_application`: the dashboard's server, which takes routes while it runs, and
  `distributed.http.utils.get_handlers`, which reads them from a module by its name.
* `scheduler.unrunnable`: tasks that no worker may run, with the time since when;
  `TaskState.annotations` and `worker_restrictions` of them; `set_restrictions`, and
  `transitions` from `no-worker` to `processing`, by which they go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from distributed.http.utils import get_handlers

from tensorcast_dask.dataplane import auth

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from distributed import Scheduler

    from tensorcast_dask.tensors.messages import TlsFiles

__all__ = [
    "EXTENSION",
    "NODE",
    "Stuck",
    "add_handler",
    "add_routes",
    "is_under_way",
    "link_tls",
    "own_tls",
    "replace_retire",
    "send_to",
    "ship",
    "stuck_tasks",
    "tell_workers",
    "tls_files",
]

log = logging.getLogger(__name__)

EXTENSION: Final = "tensorcast"


#: Annotation of a task that names its node.
NODE: Final = "tensorcast-node"


class Stuck(NamedTuple):
    """A task that waits for a worker of its node."""

    key: str
    node: str
    workers: frozenset[str]
    waited_s: float


def stuck_tasks(scheduler: Scheduler) -> list[Stuck]:
    """Give the tasks with a node of ours that no worker may run."""
    now_s = time.monotonic()
    return [
        Stuck(
            str(ts.key),
            str(ts.annotations[NODE]),
            frozenset(ts.worker_restrictions or ()),
            now_s - since_s,
        )
        for ts, since_s in scheduler.unrunnable.items()
        if ts.annotations and NODE in ts.annotations
    ]


def send_to(scheduler: Scheduler, key: str, workers: list[str] | None) -> None:
    """Have a stuck task run at one of these workers, or (None) anywhere."""
    scheduler.set_restrictions({key: workers})
    scheduler.transitions({key: "processing"}, stimulus_id=f"tensorcast-{time.time()}")  # noqa: TID251 - a label


def is_under_way(scheduler: Scheduler, key: str) -> bool:
    """Say whether a task is still to end."""
    task = scheduler.tasks.get(key)
    return task is not None and task.state not in {"memory", "erred", "forgotten"}


def add_handler(scheduler: Scheduler, op: str, handler: Callable[..., Any]) -> None:
    """Have the scheduler answer one more operation."""
    scheduler.handlers[op] = handler


def add_routes(scheduler: Scheduler, module: str) -> None:
    """Have the dashboard's server answer the routes of a module."""
    routes = get_handlers(server=scheduler, modules=[module])
    scheduler.http_application.add_handlers(".*$", routes)


async def ship(
    scheduler: Scheduler,
    *,
    worker_plugin: tuple[str, bytes],
    nanny_plugin: tuple[str, bytes],
) -> None:
    """Hand plugins to all present and future nannies and workers.

    Both tables are written before anybody is told. So a process that registers meanwhile
    gets its plugin with the answer to its registration, by the broadcast, or both ways (the
    plugins take a second arrival for nothing new); none is missed. Nannies that are
    starting are waited for by Dask's own registration. A process that dies meanwhile does
    no harm.
    """
    nanny_name, nanny_bytes = nanny_plugin
    worker_name, worker_bytes = worker_plugin
    scheduler.nanny_plugins[nanny_name] = nanny_bytes
    scheduler.worker_plugins[worker_name] = worker_bytes
    await asyncio.gather(
        _to_nannies(scheduler, nanny_name, nanny_bytes),
        scheduler.broadcast(
            msg={"op": "plugin-add", "plugin": worker_bytes, "name": worker_name},
            on_error="return",
        ),
    )


async def _to_nannies(scheduler: Scheduler, name: str, plugin: bytes) -> None:
    try:
        await scheduler.register_nanny_plugin(
            comm=None, plugin=plugin, name=name, idempotent=False
        )
    except OSError as error:  # one of them died; the others were told
        log.info("not every nanny was told of our plugin: %s", error)


async def tell_workers(
    scheduler: Scheduler,
    op: str,
    *,
    workers: list[str],
    within_s: float,
    **facts: object,
) -> None:
    """Call a handler of ours in some workers; who does not answer in time is left."""
    here = [address for address in workers if address in scheduler.workers]
    if not here:
        return
    try:
        async with asyncio.timeout(within_s):
            await scheduler.broadcast(
                msg={"op": op, **facts}, workers=here, on_error="return"
            )
    except (TimeoutError, OSError) as error:
        log.debug("not all workers were told %s: %s", op, error)


def replace_retire(
    scheduler: Scheduler,
    wrap: Callable[[Callable[..., Awaitable[Any]]], Callable[..., Awaitable[Any]]],
) -> None:
    """Put our step before Dask's own retiring of workers, for every way to ask for it."""
    replaced = wrap(scheduler.retire_workers)
    scheduler.retire_workers = replaced  # type: ignore[method-assign,assignment]
    scheduler.handlers["retire_workers"] = replaced


def link_tls(scheduler: Scheduler) -> ssl.SSLContext | None:
    """Give the context in which the scheduler itself listens; None without TLS."""
    if not scheduler.address.startswith("tls://"):
        return None
    found = scheduler.security.get_listen_args("scheduler")  # type: ignore[no-untyped-call]
    context: ssl.SSLContext = found["ssl_context"]
    return context


def own_tls(scheduler: Scheduler) -> TlsFiles | None:
    """Give the scheduler's own certificates as PEM text; None without TLS."""
    if not scheduler.address.startswith("tls://"):
        return None
    found = scheduler.security.get_tls_config_for_role("scheduler")  # type: ignore[no-untyped-call]
    return auth.tls_files(found)


def tls_files(scheduler: Scheduler) -> TlsFiles | None:
    """Give the certificates that the cluster's Security names for clients, as PEM text."""
    if not scheduler.address.startswith("tls://"):
        return None
    found = scheduler.security.get_tls_config_for_role("client")  # type: ignore[no-untyped-call]
    return auth.tls_files(found)
