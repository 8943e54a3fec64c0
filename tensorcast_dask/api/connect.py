"""How a session comes to be: from a client, a cluster or an address; or inside a task.

Rules:

1. Opening installs the plugins where the scheduler has none (`install=False` refuses).
2. A session that made its Dask client closes it; one that was given a client does not.
3. Each worker has one session for its tasks, made at first use, closed with the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import uuid
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.api.connection.catalog import CatalogLink
from tensorcast_dask.api.connection.core import Core
from tensorcast_dask.api.connection.deadlines import deadline
from tensorcast_dask.api.connection.dialling import (
    client_of,
    client_on_loop,
    no_scheduler,
)
from tensorcast_dask.api.connection.stores import Stores
from tensorcast_dask.api.current import forget, remember
from tensorcast_dask.api.session import Session
from tensorcast_dask.config import Settings
from tensorcast_dask.dataplane import auth, hosts
from tensorcast_dask.dataplane.devices.own import OwnDevices
from tensorcast_dask.exceptions import (
    InvalidArgument,
    TensorCastError,
    UnsupportedPlatform,
)
from tensorcast_dask.notebook.formatters import teach
from tensorcast_dask.tensors.ids import HostId, NodeId, SessionId
from tensorcast_dask.tensors.messages import CloseSession

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distributed import Worker as DaskWorker
    from tornado.ioloop import IOLoop

    from tensorcast_dask.config import Tree
    from tensorcast_dask.tensors.messages import TlsFiles

__all__ = ["connect", "session_beside", "session_of_task"]

_OPEN_S: Final = 30.0
_DIAL_S: Final = 5.0


def connect(
    target: Any = None,
    *,
    install: bool = True,
    security: Any = None,
    asynchronous: bool = False,
    deadline: float | None = _OPEN_S,
) -> Any:
    """Open a session with the tensor service of a Dask cluster.

    Parameters
    ----------
    target : distributed.Client, cluster, or str, optional
        A client, anything a client can be made from (a cluster object), or the
        scheduler's address. Without one: the address in TENSORCAST_SCHEDULER or
        DASK_SCHEDULER_ADDRESS, else the cluster that `tensorcast up` runs on this machine.
    install : bool
        Whether to install the plugins where the scheduler has none.
    security : distributed.security.Security, optional
        With an address: the certificates; by default those of Dask's configuration.
    asynchronous : bool
        With an address or cluster: whether the session's calls are awaited.
    deadline : float, optional
        Seconds for all of it.

    Returns
    -------
    Session, or an awaitable of one

    Raises
    ------
    InvalidArgument
        When no target is given and there is none, or it is no address.
    CatalogUnavailable
        When no scheduler with the plugin answers: at once for an unknown host, after
        `session.refused-timeout` where nothing listens, else after `deadline`.
    """
    from distributed import Client

    limit = _check_deadline(deadline)
    target = _known_target() if target is None else target
    if getattr(target, "forked", False):
        message = (
            "a cluster object does not survive fork; connect to its scheduler_address, or "
            "start processes with spawn"
        )
        raise UnsupportedPlatform(message)
    if isinstance(target, Client):
        return target.sync(  # type: ignore[no-untyped-call]
            _open_with_client, target, install=install, owned=False, limit=limit
        )
    if isinstance(target, int | float):
        message = "connect takes a Dask client, a cluster or a scheduler's address"
        raise InvalidArgument(message)
    options: dict[str, Any] = {"set_as_default": False, "asynchronous": asynchronous}
    if security is not None:
        options["security"] = security
    if isinstance(target, str):
        if asynchronous:
            return _dial_and_open(target, options, install=install, limit=limit)
        client = client_of(target, limit, options)
    else:
        within_s = limit.left_s()
        try:
            client = Client(target, timeout=limit.left_s(), **options)  # type: ignore[no-untyped-call]
        except OSError as error:
            raise no_scheduler(error, within_s) from None
    opening = partial(
        _open_with_client,
        client,
        install=install,
        owned=True,
        arguments=getattr(target, "arguments", None),
        limit=limit,
    )
    if client.asynchronous:
        return _or_close(client, opening)
    try:
        return client.sync(opening)
    except BaseException:
        client.close()  # from here it ends its loop's thread too
        raise


def _known_target() -> str:
    """Find the cluster that a call means that names none."""
    import dask.config

    settings = Settings.read()
    named = os.environ.get("TENSORCAST_SCHEDULER")
    named = named or dask.config.get("scheduler-address", None)
    if named:
        return str(named)
    known = hosts.running_up(hosts.run_directory(settings.run_dir))
    if known is None:
        message = (
            "no cluster is named: give a Dask client, a cluster or a scheduler's address, or "
            "start one on this machine with `tensorcast up`"
        )
        raise InvalidArgument(message)
    return str(known["scheduler"])


async def _or_close(client: Any, opening: Callable[[], Awaitable[Session]]) -> Session:
    try:
        return await opening()
    except BaseException:
        await client.close()
        raise


async def _dial_and_open(
    address: str, options: dict[str, Any], *, install: bool, limit: Any
) -> Session:
    client = await client_on_loop(address, limit, options)
    opening = partial(
        _open_with_client, client, install=install, owned=True, limit=limit
    )
    return await _or_close(client, opening)


def _check_deadline(seconds: float | None) -> Any:
    return deadline(seconds, default_s=_OPEN_S)


async def _open_with_client(
    client: Any,
    *,
    install: bool,
    owned: bool,
    limit: Any,
    arguments: Tree | None = None,
) -> Session:
    from tensorcast_dask.deploy import install as install_plugins

    within_s = limit.left_s()
    try:
        await client
    except OSError as error:
        raise no_scheduler(error, within_s) from None
    if install:
        await install_plugins(client)
    settings = Settings.read(arguments)
    session = await _open(
        loop=client.loop,
        address=client.scheduler.address,
        connection_args=client.connection_args,
        client=client,
        host=_own_host(settings),
        devices=OwnDevices(settings.device, settings.run_dir),
        own=None,
        tls=_certificates(client),
        asynchronous=client._asynchronous,  # noqa: SLF001 - how the client was made
        limit=limit,
        after=client.close if owned else None,
    )
    with contextlib.suppress(KeyError):  # it has no dashboard
        session._core.dashboard = client.dashboard_link or ""  # noqa: SLF001 - made here
    remember(session)
    teach()
    return session


def _certificates(client: Any) -> TlsFiles | None:
    if not client.scheduler.address.startswith("tls://"):
        return None
    return auth.tls_files(client.security.get_tls_config_for_role("client"))


def _own_host(settings: Settings) -> HostId:
    try:
        return hosts.host_id(hosts.run_directory(settings.run_dir), settings.host)
    except (OSError, TensorCastError):
        return HostId("")  # no run directory here: everything goes over TCP


async def _open(
    *,
    loop: IOLoop,
    address: str,
    connection_args: dict[str, Any],
    client: Any,
    host: HostId,
    devices: OwnDevices,
    own: NodeId | None,
    tls: TlsFiles | None,
    asynchronous: bool,
    limit: Any,
    after: Callable[[], Any] | None,
) -> Session:
    from distributed.comm.core import connect as dial_comm

    from tensorcast_dask.worker_plugin.serializers import install

    install()

    async def dial() -> Any:
        comm = await dial_comm(address, timeout=_DIAL_S, **connection_args)  # type: ignore[no-untyped-call]
        try:
            await comm.write({"op": "tensorcast-session", "reply": False})
        except BaseException:
            comm.abort()
            raise
        return comm

    name = SessionId(uuid.uuid4().hex)
    link = CatalogLink(dial, name, pid=os.getpid(), host=host, address=address)
    try:
        greeting = await link.open(limit)
    except BaseException:
        await link.close()
        raise
    stores = Stores(greeting, host, own, tls)
    link.on_greeting = stores.greet
    core = Core(
        loop=loop,
        link=link,
        stores=stores,
        client=client,
        host=host,
        devices=devices,
        deadline_default_s=greeting.deadline_default_s,
        asynchronous=asynchronous,
    )

    # A first read finds its connection made; nobody waits for this.
    loop.asyncio_loop.run_in_executor(None, stores.get_ready)  # type: ignore[attr-defined]

    async def close() -> None:
        forget(session)
        await core.in_thread(core.end_lending)
        with contextlib.suppress(TensorCastError):
            await link.call(
                CloseSession(rid=link.next_rid()), type(None), deadline(2.0)
            )
        await link.close()
        for shown in list(core.placements.values()):
            await shown.ended()
        stores.close()
        core.close()

    def lost() -> None:
        forget(session)
        core.end_lending()
        stores.close()
        core.close()

    session = Session(core, close, after, lost)
    return session


async def session_beside(
    address: str,
    *,
    settings: Settings,
    host: HostId,
    own: NodeId | None,
    tls: TlsFiles | None,
) -> Session:
    """Open a session for a part of the cluster itself, on the loop that runs.

    It has a Dask client of its own, is not the one of calls that name none, and installs nothing.

    Parameters
    ----------
    address : str
        The scheduler's.
    settings : Settings
        Those of the worker or scheduler whose part it is.
    host : HostId
        Its host.
    own : NodeId or None
        The node beside it.
    tls : TlsFiles or None
        The certificates by which it takes part.
    """
    from distributed.security import Security

    options: dict[str, Any] = {"set_as_default": False, "asynchronous": True}
    if tls is not None:
        options["security"] = Security(  # type: ignore[no-untyped-call]
            tls_ca_file=tls.ca,
            tls_client_cert=tls.cert,
            tls_client_key=tls.key,
            require_encryption=True,
        )
    limit = deadline(_OPEN_S)
    client = await client_on_loop(address, limit, options)
    opening = partial(
        _open,
        loop=client.loop,
        address=client.scheduler.address,
        connection_args=client.connection_args,
        client=client,
        host=host,
        devices=OwnDevices(settings.device, settings.run_dir),
        own=own,
        tls=tls,
        asynchronous=True,
        limit=limit,
        after=client.close,
    )
    return await _or_close(client, opening)


# -------------------------------------------------------------------- inside tasks
_of_worker: weakref.WeakKeyDictionary[DaskWorker, Session] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def session_of_task() -> Session | None:
    """Give the session of the worker whose task is running; None outside of tasks."""
    if "distributed" not in sys.modules:
        return None
    from distributed import get_worker

    try:
        worker = get_worker()
    except ValueError:
        return None
    with _making:
        session = _of_worker.get(worker)
        if session is None or session.closed:
            session = _of_worker[worker] = _make_for(worker)
        else:
            _look_beside(worker, session)
        return session


def _look_beside(worker: DaskWorker, session: Session) -> None:
    """Tell a worker's session of its store of now: another one, or one that may be mapped now."""
    from tensorcast_dask.worker_plugin.context import keeper_of

    keeper = keeper_of(worker)
    if keeper is not None and keeper.card is not None:
        session._core.stores.attend(keeper.card)  # noqa: SLF001 - made here


def _make_for(worker: DaskWorker) -> Session:
    from distributed.utils import sync

    from tensorcast_dask.worker_plugin.context import node_of

    node = node_of(worker)
    with contextlib.suppress(RuntimeError):
        if asyncio.get_running_loop() is worker.loop.asyncio_loop:  # type: ignore[attr-defined]
            message = (
                "a coroutine task cannot open the worker's first session; call "
                "tensorcast_dask from a plain task once, or open a session with connect"
            )
            raise UnsupportedPlatform(message)
    open_one = partial(
        _open,
        loop=worker.loop,
        address=node.scheduler_address,
        connection_args=node.connection_args,
        client=None,
        host=node.host,
        devices=OwnDevices(node.settings.device, node.settings.run_dir),
        own=node.card.node,
        tls=node.tls,
        asynchronous=False,
        limit=deadline(_OPEN_S),
        after=None,
    )
    session: Session = sync(worker.loop, open_one)
    return session
