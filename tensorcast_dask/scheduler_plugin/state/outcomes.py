"""One request id, one change: the answers that were given, by session.

Rules:

1. A request id ends in a number that its session counts up. It is *running*, *answered*,
   or below the session's floor (answered and forgotten).
2. The same request again gets the first answer, another payload under its id Mismatch,
   and one below the floor Unknown: it is never carried out twice.
3. The floor is the highest of what the session has settled and what its ring let go.
4. An answer goes to the journal with the rows of its change, in one of as many places as
   the ring has: the newest in a place counts, so old ones need no taking away.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

from tensorcast_dask.exceptions import InvalidName
from tensorcast_dask.scheduler_plugin.state.events import Row
from tensorcast_dask.tensors import messages
from tensorcast_dask.tensors.ids import RequestId, SessionId
from tensorcast_dask.tensors.messages import Fault, Wire

__all__ = ["OutcomeRow", "Outcomes", "Standing", "Value", "number_of"]

Value: TypeAlias = Wire | Fault | None


class Standing(StrEnum):
    """How a request id stands."""

    NEW = "new"
    RUNNING = "running"
    ANSWERED = "answered"
    FORGOTTEN = "forgotten"
    OTHER = "other"  # another payload under a known id


class OutcomeRow(msgspec.Struct, array_like=True, frozen=True):
    """An answer in the journal."""

    session: SessionId = SessionId("")
    rid: RequestId = RequestId("")
    digest: bytes = b""
    kind: str = ""  # class of the value, "" for the empty answer
    value: bytes = b""


_ANSWERS: Final = {
    kind.__name__: kind
    for kind in (
        messages.ArtifactInfo,
        messages.Created,
        messages.Moved,
        messages.Destroyed,
        messages.Pinned,
        messages.AliasState,
        messages.Drained,
    )
}


def number_of(rid: RequestId) -> int:
    """Find the number at the end of a request id; 0 when there is none."""
    digits = len(rid) - len(rid.rstrip("0123456789"))
    return int(rid[-min(digits, 18) :]) if digits else 0


@dataclass(slots=True)
class _Ring:
    """Answers of one session."""

    floor: int = 0
    #: Digests of requests that run, however many the session sends without waiting.
    running: dict[RequestId, bytes] = field(default_factory=dict)
    #: Digests and answers, the oldest answer first.
    answered: dict[RequestId, tuple[bytes, Value]] = field(default_factory=dict)
    #: Places in the journal that hold a row.
    places: dict[int, None] = field(default_factory=dict)


class Outcomes:
    """What was asked and answered.

    Parameters
    ----------
    per_session : int
        Answers kept of one session.
    """

    def __init__(self, *, per_session: int) -> None:
        self._per_session = per_session
        self._rings: dict[SessionId, _Ring] = {}

    @staticmethod
    def digest_of(request: Wire) -> bytes:
        """Make what tells two payloads apart.

        Raises
        ------
        InvalidName
            When the request holds text that cannot be sent at all.
        """
        try:
            raw = messages.encode(request)
        except UnicodeEncodeError as error:
            message = f"the request holds text that is not valid Unicode: {error}"
            raise InvalidName(message) from error
        return hashlib.blake2b(raw, digest_size=8).digest()

    def look(
        self, session: SessionId, rid: RequestId, digest: bytes
    ) -> tuple[Standing, Value]:
        """How a request stands; a new one is running from now on."""
        ring = self._rings.get(session)
        if ring is None:
            ring = self._rings[session] = _Ring()
        if (running := ring.running.get(rid)) is not None:
            return (Standing.RUNNING if running == digest else Standing.OTHER), None
        if (answered := ring.answered.get(rid)) is not None:
            if answered[0] != digest:
                return Standing.OTHER, None
            return Standing.ANSWERED, answered[1]
        if 0 < number_of(rid) <= ring.floor:
            return Standing.FORGOTTEN, None
        ring.running[rid] = digest
        return Standing.NEW, None

    def answered(
        self, session: SessionId, rid: RequestId, value: Value, *, durable: bool
    ) -> Row | None:
        """Note an answer; the row for the journal when it has to be durable."""
        ring = self._rings.get(session)
        if ring is None:
            return None
        if (digest := ring.running.pop(rid, None)) is None:
            if rid not in ring.answered:
                return None
            digest = ring.answered[rid][0]
        ring.answered[rid] = (digest, value)
        while len(ring.answered) > self._per_session:
            oldest = next(iter(ring.answered))
            del ring.answered[oldest]
            ring.floor = max(ring.floor, number_of(oldest))
        if not durable:
            return None
        place = number_of(rid) % self._per_session
        ring.places[place] = None
        row = OutcomeRow(
            session,
            rid,
            digest,
            "" if value is None else type(value).__name__,
            b"" if value is None else messages.encode(value),
        )
        blob = msgspec.msgpack.encode(row)
        return Row(kind="outcome", key=f"{session}|{place}", blob=blob)

    def unasked(self, session: SessionId, rid: RequestId) -> None:
        """Forget a request that was refused for now, so that it may be asked again."""
        ring = self._rings.get(session)
        if ring is not None:
            ring.running.pop(rid, None)
            ring.answered.pop(rid, None)

    def settle(self, session: SessionId, below: int) -> None:
        """Forget what a session has said it needs no more."""
        ring = self._rings.setdefault(session, _Ring())
        ring.floor = max(ring.floor, below - 1)
        for known in (ring.running, ring.answered):
            for rid in [rid for rid in known if 0 < number_of(rid) <= ring.floor]:
                del known[rid]

    def known(self, session: SessionId) -> tuple[tuple[RequestId, bool, Value], ...]:
        """Give the requests of a session: id, whether answered, and how."""
        ring = self._rings.get(session)
        if ring is None:
            return ()
        answered = [(rid, True, one[1]) for rid, one in ring.answered.items()]
        return (*answered, *((rid, False, None) for rid in ring.running))

    def forget(self, session: SessionId) -> list[Row]:
        """Forget a session that is over; returns the rows that say so."""
        ring = self._rings.pop(session, None)
        if ring is None:
            return []
        return [
            Row(kind="outcome", key=f"{session}|{place}", blob=None)
            for place in ring.places
        ]

    def recover(self, row: OutcomeRow) -> None:
        """Take an answer from the journal."""
        ring = self._rings.setdefault(row.session, _Ring())
        kind = _ANSWERS.get(row.kind)
        value = None if kind is None else messages.decode(row.value, kind)
        ring.answered[row.rid] = (row.digest, value)
        number = number_of(row.rid)
        ring.floor = max(ring.floor, number - self._per_session)
        ring.places[number % self._per_session] = None

    def sessions(self) -> tuple[SessionId, ...]:
        """Sessions with answers."""
        return tuple(self._rings)

    def counts(self) -> tuple[int, int]:
        """How many sessions, and how many answers of theirs."""
        return len(self._rings), sum(
            len(one.running) + len(one.answered) for one in self._rings.values()
        )
