"""A network of hosts: connections that keep their order, and may go silent or break.

Rules:

1. A direction of a connection delivers in order, a prefix of what was sent, each message
   once; nothing else is promised. Connections are independent of each other.
2. Where a direction is cut, messages wait. One that waits for longer than `GIVE_UP_S`
   breaks the connection for its sender; the other end notices when it can, at the latest
   after `KEEPALIVE_S`.
3. Messages are packed and unpacked on their way, as on a wire.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tensorcast_dask.tensors import messages
from tensorcast_dask.tensors.messages import Wire
from tests.kit.sim_faults import Faults
from tests.kit.sim_timeline import Timeline

__all__ = ["Connection", "End", "Network"]

_DULL = (messages.Renew, messages.Renewed)
GIVE_UP_S = 10.0
KEEPALIVE_S = 20.0


@dataclass(eq=False)
class End:
    """One end of a connection."""

    connection: Connection
    host: str
    label: str
    on_message: Callable[[Wire], None]
    on_closed: Callable[[], None]
    open: bool = True
    #: Nothing is delivered to the other end before.
    free_s: float = 0.0

    @property
    def other(self) -> End:
        """The other end."""
        one, two = self.connection.ends
        return two if self is one else one

    def send(self, message: Wire, *, times: int = 1) -> None:
        """Send; on a connection that is broken, in vain."""
        if self.open:
            for _ in range(times):
                self.connection.network.carry(self, message)

    def close(self) -> None:
        """Close; what was sent before still arrives. This end hears nothing more."""
        if self.open:
            self.open = False
            self.connection.network.tell_closed(self.other, after=self)

    def break_off(self) -> None:
        """Hear that the connection is broken."""
        if self.open:
            self.open = False
            self.on_closed()


class Connection:
    """Two ends."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.ends: tuple[End, End]
        self.broken = False


class Network:
    """All hosts and connections.

    Parameters
    ----------
    timeline : Timeline
        The clock.
    rng : Random
        Chance.
    faults : Faults
        How often what happens.
    """

    def __init__(self, timeline: Timeline, rng: Random, faults: Faults) -> None:
        self.timeline = timeline
        self.rng = rng
        self.faults = faults
        #: Directions that are silent, and until when.
        self.cuts: dict[tuple[str, str], float] = {}
        self.connections: list[Connection] = []

    # -------------------------------------------------------------- state
    def cut(self, one: str, two: str, seconds: float) -> None:
        """Silence a direction."""
        until_s = self.timeline.now_s + seconds
        self.cuts[one, two] = max(self.cuts.get((one, two), 0.0), until_s)

    def heal(self) -> None:
        """End all silence; what waited for it arrives at its time."""
        self.cuts.clear()

    def silent_until_s(self, one: str, two: str) -> float:
        """Until when a direction is silent; a past time when it is not."""
        return self.cuts.get((one, two), 0.0)

    def reaches(self, one: str, two: str) -> bool:
        """Whether two hosts can talk now."""
        now_s = self.timeline.now_s
        return one == two or (
            self.silent_until_s(one, two) <= now_s
            and self.silent_until_s(two, one) <= now_s
        )

    def latency_s(self) -> float:
        """Draw how long one message takes."""
        rng = self.rng
        if self.faults.delay and rng.random() < self.faults.delay:
            return rng.uniform(0.0, self.faults.delay_s)
        return rng.choice((0.0005, 0.001, 0.003))

    def twice(self) -> int:
        """Draw how often a message that may be repeated is said."""
        chance = self.faults.duplicate
        return 2 if chance and self.rng.random() < chance else 1

    # -------------------------------------------------------------- connections
    def connect(self, one: tuple[str, str], two: tuple[str, str]) -> tuple[End, End]:
        """Join two (host, label); the handlers are to be set by who asks."""
        connection = Connection(self)
        connection.ends = (
            End(connection, *one, _ignore, _unheard),
            End(connection, *two, _ignore, _unheard),
        )
        self.connections = [
            c for c in self.connections if c.ends[0].open or c.ends[1].open
        ]
        self.connections.append(connection)
        return connection.ends

    def carry(self, end: End, message: Wire) -> None:
        """Bring a message to the other end (rules 1 and 2)."""
        other, now_s = end.other, self.timeline.now_s
        if end.connection.broken or not other.open:
            self.timeline.after(self.latency_s(), end.break_off)
            return
        silent_s = self.silent_until_s(end.host, other.host)
        if silent_s - now_s > GIVE_UP_S:
            self.timeline.after(GIVE_UP_S, lambda: self.snap(end))
            return
        at_s = max(now_s, silent_s) + self.latency_s()
        end.free_s = at_s = max(at_s, end.free_s)
        raw = messages.encode(message)
        kind = type(message)
        self.timeline.at(at_s, lambda: self._deliver(other, raw, kind))

    def _deliver(self, end: End, raw: bytes, kind: type[Wire]) -> None:
        if end.open:
            message = messages.decode(raw, kind)
            if not isinstance(message, _DULL):
                self.timeline.note(f"-> {end.label}", message)
            end.on_message(message)

    def tell_closed(self, end: End, *, after: End) -> None:
        """Let the other end of a closed one know, after what was sent."""
        now_s = self.timeline.now_s
        silent_s = self.silent_until_s(after.host, end.host)
        at_s = max(now_s, after.free_s, min(silent_s, now_s + KEEPALIVE_S))
        self.timeline.at(at_s + self.latency_s(), end.break_off)

    def snap(self, end: End) -> None:
        """Break a connection that this end has given up."""
        if end.open:
            end.connection.broken = True
            self.timeline.note("network", f"{end.label} gave its connection up")
            self.tell_closed(end.other, after=end)
            end.break_off()

    def break_one(self, connection: Connection) -> None:
        """Break a connection now; either end hears of it in its own time."""
        connection.broken = True
        for end in connection.ends:
            late_s = self.rng.choice((0.0, 0.002, 0.05, 1.0))
            self.timeline.after(late_s, end.break_off)


def _ignore(message: Wire) -> None:
    """Nobody listens yet."""


def _unheard() -> None:
    """Nobody listens yet."""
