"""A simulated process that registers memory: its link, and content that its owner changes.

It follows `instance.register`. Bytes are values, one a chunk, other ones after each change.

Rules:

1. A lender lives and dies with its program; that of an instance is its store's, which serves
   nothing any more of an instance (`owner`) that is dead.
2. Inside the fence chunks change one by one; a reader is given a chunk only at rest, with
   the stamp of the content that it is of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tensorcast_dask.exceptions import Gone, Incomplete, OwnerGone
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import (
    ClusterId,
    Epoch,
    Generation,
    HostId,
    Incarnation,
    NodeId,
)
from tests.kit.sim_store import values_of
from tests.kit.sim_timeline import Life, Process

if TYPE_CHECKING:
    from tests.kit.sim_network import End
    from tests.kit.world import World

__all__ = ["Lent", "SimLender"]

RETRY_S = 1.0


@dataclass(eq=False)
class Lent:
    """One registration."""

    record: m.ReplicaRecord
    values: list[int]
    #: Even: at rest.
    stamp: int = 0
    #: Every content that it ever had at rest, by stamp.
    contents: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.contents[self.stamp] = list(self.values)

    @classmethod
    def of(cls, record: m.ReplicaRecord) -> Lent:
        """Give what a version holds at first."""
        return cls(record, values_of(record.generation, record.nbytes))

    def mutate(self, pauses_s: list[float]) -> Process:
        """Change every chunk inside the fence."""
        self.stamp += 1
        for at in range(len(self.values)):
            self.values[at] += 1 << 32
            yield pauses_s[at % len(pauses_s)]
        self.stamp += 1
        self.contents[self.stamp] = list(self.values)


@dataclass(eq=False)
class SimLender:
    """The registering side of one program."""

    world: World
    name: str
    host: str
    life: Life
    owner: Life | None = None
    #: Told of what the catalog ends.
    on_end: Callable[[Generation], None] = field(default=lambda _: None)
    lent: dict[Generation, Lent] = field(default_factory=dict)
    link: End | None = None
    up: bool = False
    seen_epoch: int = 0
    seq: int = 0

    def __post_init__(self) -> None:
        self.node = NodeId(self.name)
        self.card = m.NodeCard(
            node=self.node,
            incarnation=Incarnation(1),
            host=HostId(self.host),
            socket=f"/run/{self.name}",
            name=f"instance-{self.name}",
            kind="instance",
            roles=(),
        )
        self._connect()

    # -------------------------------------------------------------- lending
    def lend(self, record: m.ReplicaRecord) -> Lent:
        """Begin to serve a version."""
        lent = Lent.of(record)
        self.world.watch.lends(record.generation, lent)
        self.serve(lent)
        return lent

    def serve(self, lent: Lent) -> None:
        """Serve what is lent, and tell the catalog."""
        self.lent[lent.record.generation] = lent
        self._tell(m.ReplicaReady(record=lent.record))

    def forget(self, generation: Generation) -> None:
        """Stop serving a version."""
        if self.lent.pop(generation, None) is not None:
            why = "released by its owner"
            gone = m.ReplicaDropped(generation=generation, tier=m.Tier.HOST, why=why)
            self._tell(gone)

    def at_rest(self, generation: Generation) -> Lent:
        """Give what is lent, for a reader.

        Raises
        ------
        Gone, OwnerGone, Incomplete
            When it is not, or is being changed.
        """
        if self.owner is not None and not self.owner.alive:
            message = "the process that lent it has ended"
            raise OwnerGone(message)
        lent = self.lent.get(generation)
        if lent is None:
            message = "its owner has released it"
            raise Gone(message)
        if lent.stamp % 2:
            message = "its owner is changing it; read again"
            raise Incomplete(message)
        return lent

    # -------------------------------------------------------------- link
    def _connect(self) -> None:
        if self.life.alive and self.link is None:
            self.world.dial_link(self, self._connected)

    def _connected(self, end: End | None) -> None:
        if not self.life.alive or self.link is not None:
            if end is not None:
                end.close()
            return
        if end is None:
            self.world.time.after(RETRY_S, self._connect)
            return
        self.link = end
        end.on_message = lambda message: self._hear(end, message)
        end.on_closed = lambda: self._closed(end)
        hello = m.NodeHello(
            card=self.card,
            cluster=ClusterId("c1"),
            epoch=Epoch(self.seen_epoch),
            counter=max(self.lent, default=0),
        )
        end.send(hello)

    def _closed(self, end: End) -> None:
        if self.link is end:
            self.link, self.up = None, False
            self.world.time.after(RETRY_S, self._connect)

    def _tell(self, message: m.FromNode) -> None:
        if self.up and self.link is not None:
            self.link.send(message)

    def _hear(self, end: End, message: object) -> None:
        if not self.life.alive or self.link is not end:
            return
        match message:
            case m.NodeWelcome():
                self.up = True
                self.seen_epoch = message.epoch
                records = tuple(lent.record for lent in self.lent.values())
                self._tell(m.Inventory(replicas=records))
                self._renew(end, message.lease_ttl_s)
            case m.DoDrop():
                self.forget(message.generation)
                self._tell(m.TaskDone(task=message.task))
                self.on_end(message.generation)
            case m.LinkRefused():
                refused = f"{self.name} was not let in: {message}"
                raise AssertionError(refused)
            case _:
                pass  # a lender pulls, loads and saves nothing

    def _renew(self, end: End, ttl_s: float) -> None:
        if self.link is end and self.up and self.life.alive:
            self.seq += 1
            self._tell(m.Renew(seq=self.seq))
            self.world.time.after(ttl_s / 3, lambda: self._renew(end, ttl_s))

    def close(self) -> None:
        """Serve nothing any more, and say so."""
        for generation in list(self.lent):
            self.forget(generation)
        self.life.alive = False
        if self.link is not None:
            self.link.close()

    def die(self) -> None:
        """End with the process that serves it."""
        if self.owner is not None:
            self.life.alive = False
        if self.link is not None:
            self.world.network.break_one(self.link.connection)
