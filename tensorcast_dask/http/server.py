"""The gateway of a node: a port of its own, on the gateway's loop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application

from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.http.handler import MAX_BODY_BYTES, GatewayHandler

if TYPE_CHECKING:
    import ssl
    from socket import socket

    from tornado.iostream import IOStream

    from tensorcast_dask.http.gateway import Gateway

__all__ = ["Server"]

_MAX_HEADER_BYTES: Final = 1 << 14
_IDLE_S: Final = 60.0
_BODY_S: Final = 30.0


class _NodeHandler(GatewayHandler):
    """Answers out of the gateway that its application was made for."""

    async def gateway(self) -> Gateway:
        found: Gateway = self.application.settings["gateway"]
        return found


class _Bounded(HTTPServer):
    """Takes so many connections at once; more are closed unread."""

    most: int
    taken = 0

    def handle_stream(self, stream: IOStream, address: Any) -> None:  # noqa: ANN401
        if self.taken >= self.most:
            stream.close()
            return
        self.taken += 1
        super().handle_stream(stream, address)

    def on_close(self, server_conn: object) -> None:
        self.taken -= 1
        super().on_close(server_conn)


class Server:
    """Listens for a gateway.

    Parameters
    ----------
    gateway : Gateway
        Who answers.
    most : int
        Connections at once.
    tls : SSLContext or None
        For the port.
    """

    def __init__(
        self, gateway: Gateway, *, most: int, tls: ssl.SSLContext | None
    ) -> None:
        self._gateway = gateway
        self._most = most
        self._tls = tls
        self._server: _Bounded | None = None
        self.url = ""

    async def listen(self, host: str, ports: tuple[int, int]) -> str:
        """Open the port; give the address to ask. On any loop.

        Raises
        ------
        InvalidArgument
            When no port of the range can be had.
        """
        return await self._gateway.on_loop(self._listen(host, ports))

    async def _listen(self, host: str, ports: tuple[int, int]) -> str:
        sockets = _bound(host, ports)
        application = Application(
            [(r".*", _NodeHandler)], gateway=self._gateway, log_function=_no_log
        )
        self._server = _Bounded(
            application,
            ssl_options=self._tls,
            max_header_size=_MAX_HEADER_BYTES,
            max_body_size=MAX_BODY_BYTES,
            idle_connection_timeout=_IDLE_S,
            body_timeout=_BODY_S,
        )
        self._server.most = self._most
        self._server.add_sockets(sockets)
        port = sockets[0].getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if self._tls is None else "https"
        self.url = f"{scheme}://{shown}:{port}"
        return self.url

    async def close(self) -> None:
        """Take nobody any more and leave who is there, then end the gateway."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await self._gateway.on_loop(self._close())
        await self._gateway.close()

    async def _close(self) -> None:
        if self._server is not None:
            self._server.stop()
            await self._server.close_all_connections()


def _bound(host: str, ports: tuple[int, int]) -> list[socket]:
    why: OSError | None = None
    for port in range(ports[0], ports[1] + 1):
        try:
            return bind_sockets(port, host)
        except OSError as error:
            why = error
    message = (
        f"no port for the gateway on {host} ({why}); see tensorcast.node.http-ports"
    )
    raise InvalidArgument(message)


def _no_log(_: object) -> None:
    """Leave the log to what goes wrong."""
