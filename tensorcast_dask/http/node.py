"""A node's gateway, as its worker begins it: found by its name, since it stands floors above a plugin."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from tensorcast_dask.api.connect import session_beside
from tensorcast_dask.dataplane import auth, bearer
from tensorcast_dask.http.gateway import Gateway, Limits
from tensorcast_dask.http.server import Server

if TYPE_CHECKING:
    from tensorcast_dask.worker_plugin.context import NodeHandle

__all__ = ["begin"]


async def begin(node: NodeHandle, *, host: str, ports: tuple[int, int]) -> Server:
    """Begin to answer beside a node; on the worker's loop.

    Parameters
    ----------
    node : NodeHandle
        Beside which.
    host : str
        Interface to listen at.
    ports : tuple of int
        First and last that may be taken.
    """
    settings = node.settings
    token = (
        await asyncio.to_thread(bearer.of_file, settings.http_token_file)
        if settings.http_token_file
        else bearer.derived(node.token)
    )
    open_session = partial(
        session_beside,
        node.scheduler_address,
        settings=settings,
        host=node.host,
        own=node.card.node,
        tls=node.tls,
    )
    limits = Limits.of(settings)
    gateway = Gateway(open_session, token=token, limits=limits)
    tls = None if node.tls is None else auth.https_tls(node.tls)
    server = Server(gateway, most=limits.connections, tls=tls)
    try:
        await server.listen(host, ports)
    except BaseException:
        await gateway.close()
        raise
    return server
