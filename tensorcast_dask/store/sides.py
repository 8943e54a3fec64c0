"""The sources of one pull: how each is reached, its connections, what is to be asked of it.

Rules:

1. The ways to a source are tried from the best to the last, plain sockets. One that failed is
   not tried again in this pull.
2. Over UCX between devices both have the bytes on a device; over UCX never beside TLS, which it
   has not got.
"""

from __future__ import annotations

import queue
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tensorcast_dask.tensors.messages import Location, Tier

if TYPE_CHECKING:
    import threading

    from tensorcast_dask.dataplane.transports.base import Source
    from tensorcast_dask.exceptions import TensorCastError

__all__ = ["UCX", "Lane", "Side", "sockets_to", "ways_to"]

#: Schemes over UCX, and what people call them; `device` is from slab to slab.
UCX: Final = {"device": "UCX between devices", "ucx": "UCX"}


@dataclass(eq=False, slots=True)
class Lane:
    """One connection to one source."""

    source: Side
    thread: threading.Thread | None = None
    connection: Source | None = None
    #: Chunks given to it and not handed over.
    owes: deque[int] = field(default_factory=deque)
    stolen: bool = False

    @property
    def scheme(self) -> str:
        """How it is connected, or would be."""
        return self.source.scheme if self.connection is None else self.connection.scheme


@dataclass(eq=False, slots=True)
class Side:
    """One source: its lanes and what is to be asked of it."""

    number: int
    location: Location
    #: How its lanes connect, and what is left when that fails.
    ways: list[str]
    #: Chunks to ask for; None ends a lane.
    todo: queue.SimpleQueue[int | None] = field(default_factory=queue.SimpleQueue)
    lanes: list[Lane] = field(default_factory=list)
    closing: bool = False
    error: TensorCastError | None = None

    @property
    def scheme(self) -> str:
        """How its lanes connect now."""
        return self.ways[0]

    def leave(self, scheme: str, why: str) -> str:
        """Take the next way, where this one was not left already; say so."""
        if self.scheme != scheme:
            return ""
        self.ways = self.ways[1:]
        now = UCX.get(self.scheme, self.scheme)
        node = self.location.card.node
        return f"{now} in place of {UCX[scheme]} from node {node}: {why}"

    def anew(self) -> Side:
        """Begin again, with the ways that are left: lanes of before keep to their own side."""
        return Side(self.number, self.location, self.ways)


def ways_to(location: Location, *, ucx: bool, device: bool) -> list[str]:
    """Name the transports to a source, the best first.

    Parameters
    ----------
    location : Location
        The source.
    ucx : bool
        Whether UCX may be used here.
    device : bool
        Whether the bytes are wanted on a device that has UCX.
    """
    ways = [sockets_to(location)]
    if ucx and location.card.ucx:
        straight = device and location.tier is Tier.DEVICE
        ways = [*(UCX if straight else ("ucx",)), *ways]
    return ways


def sockets_to(location: Location) -> str:
    """Name the plain transport to a source: one without a data port is on this host."""
    return "tcp" if location.card.data_port else "unix"
