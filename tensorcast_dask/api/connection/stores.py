"""Channels from this process to the stores of nodes.

Rules:

1. Everything here blocks and is thread-safe; it runs in the caller's thread or in
   `Core.in_thread`, never on an event loop.
2. Which nodes are on this host is claimed by their cards and proved by the channel.
3. What is kept (cards, indices, hints where a generation was) may be old: it is used to
   ask, never to answer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tensorcast_dask.api.connection.directs import Directs
from tensorcast_dask.dataplane import maps
from tensorcast_dask.dataplane.channel import ChannelPool, Credentials
from tensorcast_dask.exceptions import TensorCastError, UnsupportedPlatform
from tensorcast_dask.tensors.messages import (
    NodeCard,
    Role,
    SessionOpen,
)
from tensorcast_dask.tensors.specs import Index

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tensorcast_dask.api.connection.deadlines import Deadline
    from tensorcast_dask.dataplane.framing import Frame
    from tensorcast_dask.tensors.ids import HostId, NodeId
    from tensorcast_dask.tensors.messages import (
        StoreRequest,
        TlsFiles,
    )

__all__ = ["Stores"]

R = TypeVar("R")
_MAX_PAYLOAD_BYTES: Final = 1 << 30
_KEPT_INDICES: Final = 1024
_KEPT_HINTS: Final = 4096


class Stores:
    """Ask stores.

    Parameters
    ----------
    greeting : SessionOpen
        Cluster, token and nodes.
    host : HostId
        This process's host.
    own : NodeId, optional
        The node beside this worker; it is asked first.
    tls : TlsFiles, optional
        This process's certificates; the catalog's for clients where it has none.
    """

    def __init__(
        self,
        greeting: SessionOpen,
        host: HostId,
        own: NodeId | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self.host = host
        self.own = own
        self._tls = tls
        self._lock = threading.Lock()
        self._greeting = greeting
        self._cards: dict[NodeId, NodeCard] = {}
        #: Sockets to instances of this host.
        self.directs = Directs(self)
        self._pool = ChannelPool(self._credentials())
        self.indices: OrderedDict[int, Index] = OrderedDict()
        self._hints: OrderedDict[int, NodeId] = OrderedDict()
        self.learn(greeting.nodes)

    @property
    def small_bytes(self) -> int:
        """At most this much travels inside a message."""
        return self._greeting.small_bytes

    @property
    def chunk_bytes(self) -> int:
        """Chunk of a transfer over TCP."""
        return self._greeting.chunk_bytes

    @property
    def stall_s(self) -> float:
        """How long a holder may be silent where another one has the bytes too."""
        return self._greeting.stall_s

    def greet(self, greeting: SessionOpen) -> None:
        """Take over what a new scheduler said."""
        self._greeting = greeting
        self._pool.renew(self._credentials())
        self.learn(greeting.nodes)

    def _credentials(self) -> Credentials:
        greeting = self._greeting
        return Credentials(
            cluster=greeting.cluster,
            token=greeting.token,
            tls=self._tls or greeting.tls,
            role=Role.CLIENT,
            host=self.host,
        )

    def learn(self, cards: Iterable[NodeCard]) -> None:
        """Remember cards; the newest incarnation of a node counts."""
        with self._lock:
            for card in cards:
                known = self._cards.get(card.node)
                if known is None or known.incarnation <= card.incarnation:
                    self._cards[card.node] = card

    def attend(self, card: NodeCard) -> None:
        """Take note of the store beside this worker."""
        self.learn((card,))
        self.own = card.node

    def local(self) -> list[NodeCard]:
        """Give stores that say they are on this host, this worker's own first."""
        with self._lock:
            cards = [
                card
                for card in self._cards.values()
                if card.host == self.host and card.kind == "store"
            ]
        return sorted(cards, key=lambda card: (card.node != self.own, card.node))

    def get_ready(self) -> None:
        """Do now what the first read would have to do.

        Open a connection to each node of this host that can be reached now, and declare
        the calls that make maps.
        """
        with contextlib.suppress(UnsupportedPlatform):
            maps.get_ready()
        for card in self.local():
            with contextlib.suppress(TensorCastError), self._pool.channel(card):
                pass

    def ask(
        self,
        card: NodeCard,
        request: StoreRequest,
        expect: type[R],
        limit: Deadline,
        *,
        payload: Any = None,
        into: Any = None,
        stall_s: float | None = None,
    ) -> Frame[R]:
        """One request to one store, which may be silent for at most `stall_s`.

        Returns
        -------
        Frame
            The caller owns its descriptors.
        """
        return self._pool.call(
            card,
            request,
            expect=expect,
            payload=payload,
            into=into,
            max_payload_bytes=_MAX_PAYLOAD_BYTES,
            until_s=time.monotonic() + limit.answer_within_s(),
            stall_s=stall_s,
        )

    @property
    def pool(self) -> ChannelPool:
        """The channels themselves, for transfers of many chunks."""
        return self._pool

    # ------------------------------------------------------------ memory of this session
    def remember_index(self, generation: int, raw: bytes) -> Index:
        """Decode and keep an index."""
        index = Index.decode(raw)
        with self._lock:
            self.indices[generation] = index
            while len(self.indices) > _KEPT_INDICES:
                self.indices.popitem(last=False)
        return index

    def index(self, generation: int, raw: bytes) -> Index:
        """Give the index of a generation, decoded once."""
        return self.indices.get(generation) or self.remember_index(generation, raw)

    def remember_place(self, generation: int, node: NodeId) -> None:
        """Note that a generation was found at a node."""
        with self._lock:
            self._hints[generation] = node
            self._hints.move_to_end(generation)
            while len(self._hints) > _KEPT_HINTS:
                self._hints.popitem(last=False)

    def forget_place(self, generation: int) -> None:
        """Note that it is not there any more."""
        with self._lock:
            self._hints.pop(generation, None)

    def place(self, generation: int) -> NodeCard | None:
        """Give the card of the node where a generation was last found on this host."""
        with self._lock:
            node = self._hints.get(generation)
            return None if node is None else self._cards.get(node)

    def close(self) -> None:
        """Close every channel."""
        self.directs.close()
        self._pool.close()
