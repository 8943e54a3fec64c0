"""Whose store is this: free, held, released, orphaned, ending.

Rules:

1. One worker holds the store. It is granted to the first that asks when nobody holds it,
   when the holder released it or is dead, when the holder itself asks again, or for a grant
   that the scheduler signed with a higher epoch than any seen.
2. Each adoption raises the incarnation. What a former worker says on its control
   connection is refused (StaleOwner), and its end is no news.
3. The end of the control connection is news, not death: the store is orphaned and keeps
   `orphan_ttl_s`, dead worker or not.
4. Only three things end a store: an end message, the time of a released one, the time
   of an orphaned one. A free store waits for ever when it was started by hand, else for
   the worker that started it (`free_ends_s`).
5. A time that was extended (`linger`) never gets shorter by it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeAlias, assert_never

import msgspec

from tensorcast_dask.exceptions import StaleOwner
from tensorcast_dask.tensors.ids import Epoch, Incarnation

__all__ = [
    "Adoption",
    "Asked",
    "ConnectionEnded",
    "EndAsked",
    "EndNow",
    "Event",
    "Granted",
    "Instruction",
    "LetGoAsked",
    "Lingered",
    "Standing",
    "TimePassed",
    "Unattended",
    "WorkerDied",
]


_NONE: Final = Epoch(0)


class Standing(StrEnum):
    """Where a store stands."""

    FREE = "free"  # never adopted
    HELD = "held"
    RELEASED = "released"
    ORPHANED = "orphaned"
    ENDING = "ending"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A worker wants the store, on connection `link`."""

    link: int
    worker: str
    pid: int
    #: Epoch of a grant whose signature the shell has proved; 0 = none.
    grant_epoch: Epoch = _NONE
    #: The shell's word on the present holder's process.
    holder_dead: bool = False


class LetGoAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A worker gives the store up."""

    link: int
    ttl_s: float


class EndAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody with the right to it says that the store ends; `link` 0 = the catalog."""

    link: int
    why: str
    #: The connection is a worker's control connection.
    control: bool = False


class ConnectionEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A control connection is gone."""

    link: int


class WorkerDied(msgspec.Struct, frozen=True, kw_only=True):
    """The pidfd of the holder of `incarnation` says so."""

    incarnation: Incarnation


class Lingered(msgspec.Struct, frozen=True, kw_only=True):
    """The catalog extends what is left of an unattended store."""

    ttl_s: float


class TimePassed(msgspec.Struct, frozen=True):
    """Look at the clock."""


Event: TypeAlias = (
    Asked | LetGoAsked | EndAsked | ConnectionEnded | WorkerDied | Lingered | TimePassed
)


class Granted(msgspec.Struct, frozen=True, kw_only=True):
    """The store is the asker's: watch its process, tell the catalog."""

    incarnation: Incarnation


class Unattended(msgspec.Struct, frozen=True, kw_only=True):
    """The store is nobody's now, and ends in `ttl_s`."""

    why: str
    ttl_s: float


class EndNow(msgspec.Struct, frozen=True, kw_only=True):
    """The store ends."""

    why: str


Instruction: TypeAlias = Granted | Unattended | EndNow


class Adoption:
    """The state machine of one store.

    Parameters
    ----------
    orphan_ttl_s : float
        How long a store outlives a worker that was killed.
    free_ends_s : float
        When a store that nobody ever adopted ends; inf for one that was started by hand.
    """

    def __init__(
        self, *, orphan_ttl_s: float, free_ends_s: float = float("inf")
    ) -> None:
        self.orphan_ttl_s = orphan_ttl_s
        self.standing = Standing.FREE
        self.incarnation = Incarnation(0)
        self.worker = ""
        self.pid = 0
        self._link = 0
        self._epoch = Epoch(0)
        #: When an unattended store ends; inf while it is held.
        self.ends_s = free_ends_s

    def check(self, link: int) -> None:
        """Return when `link` is the holder's control connection.

        Raises
        ------
        StaleOwner
            When another worker has adopted the store since.
        """
        if link != self._link or self.standing is not Standing.HELD:
            message = (
                f"this store is {self._holder()}; this connection is of an earlier "
                "adoption: adopt again before you speak for it"
            )
            raise StaleOwner(
                message, {"worker": self.worker, "incarnation": self.incarnation}
            )

    def _holder(self) -> str:
        if self.standing is Standing.HELD:
            return f"held by worker {self.worker} (pid {self.pid})"
        return str(self.standing)

    def handle(self, event: Event, *, now_s: float) -> list[Instruction]:
        """Absorb one event and say what must be done about it.

        Raises
        ------
        StaleOwner
            When the sender has no right to it; nothing has changed.
        """
        match event:
            case Asked():
                return self._asked(event)
            case LetGoAsked():
                self.check(event.link)
                return self._leave(Standing.RELEASED, "released", event.ttl_s, now_s)
            case EndAsked():
                return self._end_asked(event)
            case ConnectionEnded() | WorkerDied():
                return self._lost(event, now_s)
            case Lingered():
                if self.ends_s < float("inf"):
                    self.ends_s = max(self.ends_s, now_s + event.ttl_s)
                return []
            case TimePassed():
                return self._time(now_s)
            case _:
                assert_never(event)

    def _asked(self, event: Asked) -> list[Instruction]:
        same = event.worker == self.worker and event.pid == self.pid
        # A connection that ended inside one process was ended by that process: workers
        # of a LocalCluster(processes=False) follow each other under one pid.
        orphan = self.standing is Standing.ORPHANED and (
            event.holder_dead or event.pid == self.pid
        )
        open_to_all = self.standing in (Standing.FREE, Standing.RELEASED)
        dead = self.standing is Standing.HELD and event.holder_dead
        higher = event.grant_epoch > self._epoch
        if self.standing is Standing.ENDING or not (
            same or orphan or open_to_all or dead or higher
        ):
            message = (
                f"this store is {self._holder()}; it is given away when that worker "
                "is dead or has released it"
            )
            raise StaleOwner(message, {"worker": self.worker, "pid": self.pid})
        self._epoch = max(self._epoch, event.grant_epoch)
        self.standing = Standing.HELD
        self.worker, self.pid, self._link = event.worker, event.pid, event.link
        self.ends_s = float("inf")
        self.incarnation = Incarnation(self.incarnation + 1)
        return [Granted(incarnation=self.incarnation)]

    def _end_asked(self, event: EndAsked) -> list[Instruction]:
        if event.control:
            self.check(event.link)
        if self.standing is Standing.ENDING:
            return []
        self.standing = Standing.ENDING
        return [EndNow(why=event.why)]

    def _lost(
        self, event: ConnectionEnded | WorkerDied, now_s: float
    ) -> list[Instruction]:
        if self.standing is not Standing.HELD:
            return []
        if isinstance(event, ConnectionEnded):
            mine, why = event.link == self._link, "its control connection ended"
        else:
            mine, why = event.incarnation == self.incarnation, "its process is dead"
        if not mine:
            return []
        return self._leave(Standing.ORPHANED, why, self.orphan_ttl_s, now_s)

    def _leave(
        self, standing: Standing, why: str, ttl_s: float, now_s: float
    ) -> list[Instruction]:
        self.standing = standing
        self.ends_s = now_s + ttl_s
        return [Unattended(why=f"worker {self.worker}: {why}", ttl_s=ttl_s)]

    def _time(self, now_s: float) -> list[Instruction]:
        if now_s < self.ends_s or self.standing is Standing.ENDING:
            return []
        why = f"{self.standing} and not adopted in time"
        self.standing = Standing.ENDING
        return [EndNow(why=why)]
