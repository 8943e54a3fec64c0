"""One tornado handler for all that is asked, on a gateway's own server or the dashboard's.

Rules:

1. Who may not ask is told so before the body is read; a body has a bound before its first byte.
2. Errors are JSON of the product's tree, whatever raised them.
3. Bytes of a tensor never go through the event loop whole: a thread sends them out of the map. Under
   TLS, whose state the loop holds, they go in pieces, one after the other was taken.
4. A stream whose reader has gone, or takes nothing, is ended; nothing is kept for it. A look that
   nobody waits for any more is let go; what is done for who has gone keeps its place to its end.
5. Neither headers nor bodies are logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final

from tornado.iostream import SSLIOStream, StreamClosedError
from tornado.web import HTTPError, RequestHandler, stream_request_body

from tensorcast_dask.exceptions import RequestError, TensorCastError, Unknown
from tensorcast_dask.http.desk import Conditions, packed
from tensorcast_dask.http.state import routes
from tensorcast_dask.http.state.access import Asker, refusal
from tensorcast_dask.http.state.statuses import RefusedError, answer_of, status_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable

    from tensorcast_dask.http.desk import Answer
    from tensorcast_dask.http.gateway import Gateway

__all__ = ["MAX_BODY_BYTES", "GatewayHandler"]

log = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 1 << 20
_PIECE_BYTES: Final = 1 << 18
#: What is sent through the loop although a thread could.
_SMALL_BYTES: Final = 1 << 16
_PROXIES: Final = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")


@stream_request_body
class GatewayHandler(RequestHandler):
    """Answers out of a gateway."""

    SUPPORTED_METHODS: tuple[str, ...] = (
        "GET",
        "HEAD",
        "POST",
        "PUT",
        "PATCH",
        "DELETE",
        "OPTIONS",
    )

    _asked: routes.Asked
    _gateway: Gateway

    def initialize(self) -> None:
        """Begin a request."""
        self._body = bytearray()
        self._gone = asyncio.get_running_loop().create_future()
        self._inside = False
        self._working = False

    async def gateway(self) -> Gateway:
        """Give the gateway that answers here."""
        raise NotImplementedError

    def set_default_headers(self) -> None:
        """Say nothing of the server, and nothing that a browser could guess from."""
        self.clear_header("Server")
        self.set_header("X-Content-Type-Options", "nosniff")

    def compute_etag(self) -> None:
        """Give none: answers that have one set it."""

    # ------------------------------------------------------------ before the body
    async def prepare(self) -> None:
        """Look who asks for what (rule 1)."""
        try:
            gateway = self._gateway = await self.gateway()
            request = self.request
            assert request.method is not None, "a request has a method"
            path = request.path.removeprefix(gateway.root)
            self._asked = routes.find(request.method, path, request.query)
            refused = refusal(self._asker(), self._asked.route.need, gateway.token)
            if refused is not None:
                raise RefusedError(refused.status, refused.message)
            self._bound_body()
            gateway.requests.take()
            self._inside = True
        except TensorCastError as error:
            self._fail(error)

    def _asker(self) -> Asker:
        headers = self.request.headers
        connection: Any = self.request.connection
        peer = connection.context.address  # not what a header claims
        return Asker(
            peer=str(peer[0]) if isinstance(peer, tuple) else "",
            host=headers.get("Host", ""),
            origin=headers.get("Origin", ""),
            site=headers.get("Sec-Fetch-Site", ""),
            authorization=headers.get("Authorization", ""),
            forwarded=any(name in headers for name in _PROXIES),
        )

    def _bound_body(self) -> None:
        most = MAX_BODY_BYTES if self._asked.route.method == "POST" else 0
        said = self.request.headers.get("Content-Length", "0")
        if said.isdecimal() and int(said) > most:
            message = f"this takes a body of at most {most} bytes"
            raise RefusedError(413, message)
        connection: Any = self.request.connection
        connection.set_max_body_size(most)

    def data_received(self, chunk: bytes) -> None:
        """Take a piece of the body, whose length has its bound."""
        self._body += chunk

    # ------------------------------------------------------------ the answer
    async def get(self, *_: str) -> None:  # type: ignore[mutable-override]
        """Answer."""
        await self._respond()

    head = post = put = patch = delete = options = get  # type: ignore[mutable-override]

    async def _respond(self) -> None:
        try:
            room = self._gateway.enter(self._asked.route.form)
        except TensorCastError as error:
            self._fail(error)
            return
        self._working = True
        try:
            await self._send(await self._answer())
        except TensorCastError as error:
            self._fail(error)
        except StreamClosedError:
            log.debug("a caller has gone")
        finally:
            self._working = False
            if room is not None:
                room.give()
            self._leave()

    async def _answer(self) -> Answer:
        answer = self._gateway.answer(self._asked, self._conditions())
        work = asyncio.ensure_future(self._gateway.on_loop(answer))
        route = self._asked.route
        try:
            if route.method == "GET" and route.form is not routes.Form.BYTES:
                both = {work, self._gone}
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise StreamClosedError
            return await work
        finally:
            work.cancel()

    def _conditions(self) -> Conditions:
        headers = self.request.headers
        return Conditions(
            method=self.request.method or "",
            range=headers.get("Range", ""),
            if_range=headers.get("If-Range", ""),
            if_none_match=headers.get("If-None-Match", ""),
            body=bytes(self._body),
        )

    async def _send(self, answer: Answer) -> None:
        self.set_status(answer.status)
        for name, value in answer.headers.items():
            self.set_header(name, value)
        if answer.events is not None:
            await self._send_events(answer.events)
        elif answer.memory is not None:
            await self._send_memory(answer.memory)
        else:
            self.finish(answer.body or None)

    # ------------------------------------------------------------ bytes
    async def _send_memory(self, memory: memoryview) -> None:
        connection: Any = self.request.connection
        if len(memory) <= _SMALL_BYTES or isinstance(connection.stream, SSLIOStream):
            await self._send_pieces(memory)
            return
        self.set_header("Connection", "close")
        await self._taken(self.flush())
        stream = self.detach()
        sock = stream.socket.dup()  # the loop lets go of its own
        stream.close()
        await self._gateway.send(sock, memory)

    async def _send_pieces(self, memory: memoryview) -> None:
        for start in range(0, len(memory), _PIECE_BYTES):
            self.write(bytes(memory[start : start + _PIECE_BYTES]))
            await self._taken(self.flush())
        self.finish()

    async def _taken(self, flushed: Awaitable[None]) -> None:
        """Wait until what was written has left; a reader that takes nothing is left."""
        try:
            async with asyncio.timeout(self._gateway.stall_s):
                await flushed
        except TimeoutError:
            self.detach().close()
            raise StreamClosedError from None

    # ------------------------------------------------------------ events
    async def _send_events(self, events: AsyncGenerator[bytes, None]) -> None:
        self.set_header("Content-Type", "text/event-stream")
        self.set_header("Cache-Control", "no-store")
        coming: asyncio.Task[bytes | None] | None = None
        try:
            await self._taken(self.flush())
            while self.request.method != "HEAD":
                coming = asyncio.create_task(self._next(events))
                await asyncio.wait(
                    {coming, self._gone}, return_when=asyncio.FIRST_COMPLETED
                )
                if self._gone.done():
                    return
                event = await coming
                if event is None:
                    break
                self.write(event)
                await self._taken(self.flush())
            self.finish()
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.wait({coming})
            with contextlib.suppress(TensorCastError):
                await self._gateway.on_loop(_ended(events))

    async def _next(self, events: AsyncGenerator[bytes, None]) -> bytes | None:
        return await self._gateway.on_loop(_anext(events))

    def on_connection_close(self) -> None:
        """Learn that the caller has gone."""
        if not self._working:
            self._leave()
        if not self._gone.done():
            self._gone.set_result(None)

    # ------------------------------------------------------------ errors
    def _fail(self, error: TensorCastError) -> None:
        if self._finished:
            return
        if self._headers_written:  # a stream: its end is all that can be said
            self.detach().close()
            return
        self.clear()
        answer = packed(answer_of(error), status=status_of(error))
        self.set_status(answer.status)
        for name, value in answer.headers.items():
            self.set_header(name, value)
        if answer.status == 401:
            self.set_header("WWW-Authenticate", "Bearer")
        if answer.status == 503:
            self.set_header("Retry-After", "1")
        self.finish(answer.body or None)

    def write_error(self, status_code: int, **info: Any) -> None:  # noqa: ANN401
        """Say what tornado refuses, or what failed, as every error is said (rule 2)."""
        failure = info.get("exc_info", (None, None))[1]
        if isinstance(failure, HTTPError):
            self._fail(RefusedError(status_code, "the request cannot be read"))
        elif isinstance(failure, TensorCastError):
            self._fail(failure)
        else:
            self._fail(Unknown("the gateway failed at this request; see its log"))

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:  # noqa: ANN401
        """Log what failed, without the request (rule 5)."""
        if not isinstance(value, HTTPError | RequestError | StreamClosedError):
            log.error("the gateway failed", exc_info=(typ, value, tb))

    def on_finish(self) -> None:
        """Leave."""
        self._leave()

    def _leave(self) -> None:
        if self._inside:
            self._inside = False
            self._gateway.requests.give()


async def _anext(events: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(events, None)


async def _ended(events: AsyncGenerator[bytes, None]) -> None:
    """End a stream; one that is running was cancelled, and ends by itself."""
    if not getattr(events, "ag_running", False):
        await events.aclose()
