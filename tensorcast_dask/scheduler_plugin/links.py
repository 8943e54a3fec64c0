"""The catalog's side of links: a port for nodes, and a conversation with each.

Rules:

1. Nothing that a stranger sends reaches the catalog: version, cluster and token are
   checked first, under a limit of bytes and a limit of time.
2. A message that is none of ours closes that link alone.
3. What is sent is never waited for. A node that takes nothing while more than
   `MAX_UNSENT_BYTES` wait for it loses its link; it opens another.
4. The port of the last life is tried first, so that nodes find a restarted scheduler.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING, Final

from tensorcast_dask.dataplane.auth import LINK, Answerer, check_hello
from tensorcast_dask.dataplane.framing import pack, read_message
from tensorcast_dask.exceptions import (
    CatalogUnavailable,
    PeerLost,
    TensorCastError,
    WrongPeer,
)
from tensorcast_dask.scheduler_plugin.state.events import (
    NodeJoined,
    NodeLinkLost,
    NodeSaid,
)
from tensorcast_dask.tensors.ids import Incarnation, NodeId
from tensorcast_dask.tensors.messages import (
    Fault,
    FromNode,
    Hello,
    LinkRefused,
    NodeHello,
    Proof,
    SessionIn,
    ToNode,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator

    from tensorcast_dask.scheduler_plugin.state.events import Event
    from tensorcast_dask.tensors.ids import ClusterId

__all__ = ["Links"]

log = logging.getLogger(__name__)

MAX_STRANGER_BYTES: Final = 64 << 10
STRANGER_S: Final = 10.0
MAX_UNSENT_BYTES: Final = 256 << 20


class _Link:
    """One link that has joined."""

    __slots__ = ("closing", "hello", "number", "writer")

    def __init__(
        self, number: int, hello: NodeHello, writer: asyncio.StreamWriter
    ) -> None:
        self.number = number
        self.hello = hello
        self.writer = writer
        #: The catalog closed it: what still arrives is not told.
        self.closing = False


class Links:
    """The port for nodes.

    Parameters
    ----------
    tell : callable
        Hands an event to the catalog and carries out what it says.
    cluster : str
        Id of the cluster that nodes must belong to.
    token : bytes
        What nodes must hold.
    tls : SSLContext, optional
        Where given, nodes must have a certificate of the cluster.
    """

    def __init__(
        self,
        tell: Callable[[Event], None],
        *,
        cluster: ClusterId,
        token: bytes,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tell = tell
        self._cluster = cluster
        self._token = token
        self._tls = tls
        self._numbers = itertools.count(1)
        self._links: dict[int, _Link] = {}
        self._server: asyncio.Server | None = None
        self._talks: set[asyncio.Task[None]] = set()
        self.host = ""
        self.port = 0
        #: Called after a node has joined: with its link and what it said of itself.
        self.on_join: Callable[[int, NodeHello], None] = _nobody_asks
        #: Takes what a node carries of the sessions of its instances.
        self.on_session: Callable[[int, SessionIn], None] = _nobody_carries
        #: Told when a link has ended.
        self.on_end: Callable[[int], None] = _nobody_minds

    def __len__(self) -> int:
        return len(self._links)

    async def listen(self, host: str, ports: tuple[int, int], last_port: int) -> int:
        """Open the port; return its number.

        Raises
        ------
        CatalogUnavailable
            When no port of the range can be had.
        """
        why: OSError | None = None
        for port in _candidates(ports, last_port):
            try:
                self._server = await asyncio.start_server(
                    self._arrived, host or None, port, ssl=self._tls, backlog=1024
                )
            except OSError as error:
                why = error
                continue
            self.host = host
            self.port = self._server.sockets[0].getsockname()[1]
            return self.port
        message = f"no port for nodes on {host or 'any interface'} ({why}); see tensorcast.link.ports"
        raise CatalogUnavailable(message)

    async def _arrived(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None, "links: asyncio runs a connection as a task"
        self._talks.add(task)
        try:
            await self._talk(reader, writer)
        except asyncio.CancelledError:
            pass
        except (PeerLost, TimeoutError, OSError) as error:
            log.debug("a link ended: %s", error)
        except TensorCastError as error:
            log.warning("a link was refused: %s", error)
        except Exception:
            log.exception("a link was closed")
        finally:
            self._talks.discard(task)
            writer.close()

    async def _talk(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async with asyncio.timeout(STRANGER_S):
            hello = await self._let_in(reader, writer)
        link = _Link(next(self._numbers), hello, writer)
        self._links[link.number] = link
        try:
            self._tell(NodeJoined(link=link.number, hello=hello))
            self.on_join(link.number, hello)
            while not link.closing:
                message: FromNode = await read_message(reader, FromNode)  # type: ignore[arg-type]  # a union, decoded as one
                if isinstance(message, SessionIn):
                    self.on_session(link.number, message)
                elif not link.closing:
                    self._tell(NodeSaid(link=link.number, message=message))
        finally:
            del self._links[link.number]
            self.on_end(link.number)
            if not link.closing:
                self._tell(NodeLinkLost(link=link.number))

    async def _let_in(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> NodeHello:
        """Check a stranger (rule 1)."""
        hello = await read_message(reader, Hello, max_body_bytes=MAX_STRANGER_BYTES)
        answerer = Answerer(token=self._token, purpose=LINK)
        try:
            check_hello(
                hello,
                cluster=self._cluster,
                node=NodeId(""),
                incarnation=Incarnation(0),
            )
            writer.write(pack(answerer.challenge(hello)))
            answerer.check(
                await read_message(reader, Proof, max_body_bytes=MAX_STRANGER_BYTES)
            )
        except WrongPeer as error:
            writer.write(pack(LinkRefused(fault=Fault.of(error))))
            raise
        return await read_message(reader, NodeHello, max_body_bytes=MAX_STRANGER_BYTES)

    def send(self, number: int, message: ToNode) -> None:
        """Send a message; nothing happens when the link is gone."""
        link = self._links.get(number)
        if link is None or link.writer.is_closing():
            return
        link.writer.write(pack(message))
        unsent = link.writer.transport.get_write_buffer_size()
        if unsent > MAX_UNSENT_BYTES:
            log.warning("node %s takes nothing; closing its link", link.hello.card.node)
            link.writer.transport.abort()

    def close_link(self, number: int, why: str) -> None:
        """Close a link once what was sent is out."""
        link = self._links.get(number)
        if link is not None:
            log.debug("closing the link of node %s: %s", link.hello.card.node, why)
            link.closing = True
            link.writer.close()

    def joined(self) -> Iterator[tuple[int, NodeHello]]:
        """Iterate over the links that are up, with what their nodes said of themselves."""
        for number, link in list(self._links.items()):
            yield number, link.hello

    async def close(self) -> None:
        """Close the port and every link."""
        if self._server is not None:
            self._server.close()
        for link in list(self._links.values()):
            link.closing = True
            link.writer.close()
        for talk in list(self._talks):
            talk.cancel()
        if self._talks:
            await asyncio.wait(self._talks, timeout=1.0)


def _nobody_asks(_link: int, _hello: NodeHello) -> None:
    """Do nothing."""


def _nobody_carries(_link: int, _message: SessionIn) -> None:
    """Do nothing."""


def _nobody_minds(_link: int) -> None:
    """Do nothing."""


def _candidates(ports: tuple[int, int], last_port: int) -> Iterator[int]:
    """Ports to try, in order."""
    low, high = ports
    if last_port and (high == 0 or low <= last_port <= high):
        yield last_port
    for port in range(low, high + 1):
        if port == 0 or port != last_port:
            yield port
