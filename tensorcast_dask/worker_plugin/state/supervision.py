"""How a worker comes to a store, keeps it and lets it go.

::

    looking --> adopting --> attending --> ended
       |  ^        |            |
       v  |        v            | the control connection ended
    starting    (next one)      |
       |                        v
       +-- failed <-- too many tries -- looking

Rules:

1. A free store of this cluster and host comes before a new one: it may hold bytes.
2. A store that refused is not asked again within one search; when the list is used up a
   store is started, and that one is asked. Another worker that looked at that moment may
   have taken it: then the next one is started at once, `MOST_RIVALS` times at most.
3. A store that goes away is replaced at once, the next one after a second, then two, and
   so on up to 30 s: a store that cannot live does not eat the machine.
4. Nothing here ever ends the worker. Without a store the worker computes on, its node
   takes no placements, and `report` says why.
5. After `Closing` nothing is looked for or started; a store is let go once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias, assert_never

from tensorcast_dask.tensors.ids import NodeId
from tensorcast_dask.tensors.messages import NodeCard

__all__ = [
    "MOST_RIVALS",
    "Adopt",
    "Adopted",
    "Closing",
    "ControlEnded",
    "Event",
    "Found",
    "Instruction",
    "LetGo",
    "Look",
    "Phase",
    "Refused",
    "Report",
    "Start",
    "StartFailed",
    "Started",
    "Supervision",
    "TimePassed",
    "WakeAt",
]

MAX_DELAY_S: Final = 30.0
#: How many started stores of one search may be taken by others.
MOST_RIVALS: Final = 3
#: A store that lived for so long clears the record of failures.
STEADY_S: Final = 60.0


class Phase(StrEnum):
    """Where the worker stands."""

    LOOKING = "looking"
    ADOPTING = "adopting"
    STARTING = "starting"
    ATTENDING = "attending"
    WAITING = "waiting"
    ENDED = "ended"


# ------------------------------------------------------------------------- events
@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """The moment of an earlier `WakeAt`, or the beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Stores of this cluster and host, best first."""

    cards: tuple[NodeCard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A store was started and answers."""

    card: NodeCard


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    """No store could be started."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """The store is ours."""

    card: NodeCard


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The store said no, or did not answer."""

    node: NodeId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlEnded:
    """The control connection ended: the store died, or has another owner."""

    node: NodeId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """The worker closes. `orphan`: its stream to the scheduler broke first."""

    orphan: bool
    why: str


Event: TypeAlias = (
    TimePassed
    | Found
    | Started
    | StartFailed
    | Adopted
    | Refused
    | ControlEnded
    | Closing
)


# ------------------------------------------------------------------- instructions
@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """List the stores of this cluster and host. Answer: `Found`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a store. Answer: `Started` or `StartFailed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    """Ask that store. Answer: `Adopted` or `Refused`."""

    card: NodeCard


@dataclass(frozen=True, slots=True, kw_only=True)
class LetGo:
    """Tell the store that it is on its own."""

    orphan: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Send `TimePassed` then."""

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Tell whoever listens how it stands."""

    phase: Phase
    node: NodeId
    why: str


Instruction: TypeAlias = Look | Start | Adopt | LetGo | WakeAt | Report


@dataclass(slots=True, kw_only=True)
class Supervision:
    """One worker's care for one store. Starts with `TimePassed`."""

    phase: Phase = Phase.WAITING
    #: The store that is attended or asked; None in other phases.
    card: NodeCard | None = None
    #: Why there is no store, "" while there is one.
    why: str = "not started yet"
    #: Stores of this search that were not asked yet, best first.
    untried: list[NodeCard] = field(default_factory=list)
    #: Whether this search has already started a store (rule 2).
    started: bool = False
    #: How many that it started were given to others.
    rivals: int = 0
    #: Searches that ended without a steady store, in a row.
    failures: int = 0
    #: When the store that is attended was adopted.
    since_s: float = 0.0
    #: How often a store was adopted.
    adoptions: int = 0

    def handle(  # noqa: PLR0911  (one for each event)
        self, event: Event, *, now_s: float
    ) -> list[Instruction]:
        """Absorb one event and say what must be done about it."""
        if self.phase is Phase.ENDED:
            return self._late(event)
        match event:
            case TimePassed():
                return self._look() if self.phase is Phase.WAITING else []
            case Found(cards=cards):
                return self._found(cards)
            case Started(card=card):
                # What was not asked for ends by itself when nobody adopts it.
                return self._ask(card) if self.phase is Phase.STARTING else []
            case StartFailed(why=why):
                return self._start_failed(why, now_s=now_s)
            case Adopted(card=card):
                return self._attend(card, now_s=now_s)
            case Refused(node=node, why=why):
                return self._refused(node, why, now_s=now_s)
            case ControlEnded(node=node, why=why):
                return self._lost(node, why, now_s=now_s)
            case Closing(orphan=orphan, why=why):
                return self._close(orphan=orphan, why=why)
            case _:
                assert_never(event)

    def _look(self) -> list[Instruction]:
        self.phase = Phase.LOOKING
        self.card = None
        self.started = False
        self.rivals = 0
        self.untried = []
        return [Look()]

    def _found(self, cards: tuple[NodeCard, ...]) -> list[Instruction]:
        if self.phase is not Phase.LOOKING:
            return []
        self.untried = list(cards)
        return self._next()

    def _next(self) -> list[Instruction]:
        """Ask the next store of this search, or start one (rules 1 and 2)."""
        if self.untried:
            return self._ask(self.untried.pop(0))
        self.phase = Phase.STARTING
        self.card = None
        self.started = True
        return [Start()]

    def _ask(self, card: NodeCard) -> list[Instruction]:
        self.phase = Phase.ADOPTING
        self.card = card
        return [Adopt(card=card)]

    def _start_failed(self, why: str, *, now_s: float) -> list[Instruction]:
        if self.phase is not Phase.STARTING:
            return []
        return self._failed(f"no store could be started: {why}", now_s=now_s)

    def _refused(self, node: NodeId, why: str, *, now_s: float) -> list[Instruction]:
        if (
            self.phase is not Phase.ADOPTING
            or self.card is None
            or self.card.node != node
        ):
            return []
        if self.started and self.rivals < MOST_RIVALS:
            self.rivals += 1
            return self._next()
        if self.started:
            return self._failed(
                f"the store that was started refused: {why}", now_s=now_s
            )
        return self._next()

    def _attend(self, card: NodeCard, *, now_s: float) -> list[Instruction]:
        if self.phase is not Phase.ADOPTING:
            return []
        self.phase = Phase.ATTENDING
        self.card = card
        self.why = ""
        self.untried = []
        self.since_s = now_s
        self.adoptions += 1
        return [Report(phase=self.phase, node=card.node, why="")]

    def _lost(self, node: NodeId, why: str, *, now_s: float) -> list[Instruction]:
        if (
            self.phase is not Phase.ATTENDING
            or self.card is None
            or self.card.node != node
        ):
            return []
        if now_s - self.since_s >= STEADY_S:
            self.failures = 0
        return self._failed(f"the store went away: {why}", now_s=now_s)

    def _failed(self, why: str, *, now_s: float) -> list[Instruction]:
        """Wait, then search again (rule 3)."""
        node = NodeId("") if self.card is None else self.card.node
        self.phase = Phase.WAITING
        self.card = None
        self.why = why
        delay_s = (
            0.0 if not self.failures else min(2.0 ** (self.failures - 1), MAX_DELAY_S)
        )
        self.failures += 1
        return [
            Report(phase=self.phase, node=node, why=why),
            WakeAt(at_s=now_s + delay_s),
        ]

    def _close(self, *, orphan: bool, why: str) -> list[Instruction]:
        attended = self.phase is Phase.ATTENDING
        self.phase = Phase.ENDED
        self.why = f"the worker closed: {why}"
        return [LetGo(orphan=orphan, why=why)] if attended else []

    def _late(self, event: Event) -> list[Instruction]:
        """Give back what was under way when the worker closed (rule 5)."""
        if isinstance(event, Adopted):
            return [LetGo(orphan=False, why=self.why)]
        return []
