"""Sessions of instances, which speak over their node's link: to the catalog they are comms.

Rules:

1. A session that a node carries is taken by the same handler as one over Dask: the same
   greeting, the same answers, the same grace when it is lost.
2. It ends with its link, or when the node says so (an empty message). The instance opens it
   again over the next link, under the same id.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tensorcast_dask.tensors.messages import SessionOut

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tensorcast_dask.scheduler_plugin.sessions import Comm
    from tensorcast_dask.tensors.ids import SessionId
    from tensorcast_dask.tensors.messages import SessionIn, ToNode

__all__ = ["Relays"]


class _Relayed:
    """What is used of a Dask comm, over a link."""

    def __init__(self, send: Callable[[SessionOut], None], session: SessionId) -> None:
        self._send = send
        self._session = session
        self._came: asyncio.Queue[bytes] = asyncio.Queue()
        self._ended = False

    @property
    def peer_address(self) -> str:
        """Who is at the other end."""
        return f"instance session {self._session}"

    def put(self, raw: bytes) -> None:
        """Take what came over the link."""
        self._came.put_nowait(raw)

    async def read(self) -> object:
        """Receive one message."""
        raw = b"" if self._ended else await self._came.get()
        if not raw:
            self._ended = True
            message = "the node carries this session no more"
            raise OSError(message)
        return raw

    async def write(self, message: object) -> object:
        """Send one message."""
        assert isinstance(message, bytes), "relays: sessions write packed messages"
        self._send(SessionOut(session=self._session, raw=message))
        return None

    async def close(self) -> None:
        """Close; whoever reads is told."""
        self.abort()

    def abort(self) -> None:
        """Close at once."""
        self.put(b"")


class Relays:
    """All sessions that nodes carry.

    Parameters
    ----------
    handle : callable
        Takes a comm over until it ends.
    send : callable
        Sends a message on a link.
    """

    def __init__(
        self,
        handle: Callable[[Comm], Awaitable[object]],
        send: Callable[[int, ToNode], None],
    ) -> None:
        self._handle = handle
        self._send = send
        self._comms: dict[tuple[int, SessionId], _Relayed] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, link: int, message: SessionIn) -> None:
        """Hand a message to its session, which it may begin."""
        key = (link, message.session)
        comm = self._comms.get(key)
        if comm is None:
            if not message.raw:
                return
            comm = self._comms[key] = _Relayed(
                lambda out: self._send(link, out), message.session
            )
            task = asyncio.ensure_future(self._run(key, comm))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        comm.put(message.raw)

    async def _run(self, key: tuple[int, SessionId], comm: _Relayed) -> None:
        try:
            await self._handle(comm)
        finally:
            if self._comms.get(key) is comm:
                del self._comms[key]

    def link_ended(self, link: int) -> None:
        """End every session that the link carried."""
        for key in [one for one in self._comms if one[0] == link]:
            self._comms.pop(key).abort()
