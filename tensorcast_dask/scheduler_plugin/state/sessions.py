"""Programs: who is there, and what ends with them.

Rules:

1. A session is known by its id, whatever comm it speaks on; the newest comm counts.
2. One that lost its comm may come back for a while; then its creations are rolled back,
   and later its recorded answers are forgotten. Its pins stay, plans that it waits to begin do not.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorcast_dask.scheduler_plugin.state.creations import Creations
from tensorcast_dask.scheduler_plugin.state.events import EndSession
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.records import NO_HOST, SessionRecord
from tensorcast_dask.tensors.ids import SessionId
from tensorcast_dask.tensors.messages import OpenSession

__all__ = ["Sessions"]


class Sessions:
    """All sessions."""

    def __init__(
        self,
        ground: Ground,
        creations: Creations,
        *,
        grace_s: float,
        recovery_s: float,
        keep_s: float,
    ) -> None:
        self._outbox = ground.outbox
        self._timers = ground.timers
        self._outcomes = ground.outcomes
        self._creations = creations
        self._grace_s = grace_s
        self._recovery_s = recovery_s
        self._keep_s = keep_s
        self._sessions: dict[SessionId, SessionRecord] = {}
        #: Told of one that is over.
        self.on_over: Callable[[SessionId], None] = lambda _: None

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session: SessionId) -> SessionRecord | None:
        """Find a session that is open, or may come back."""
        return self._sessions.get(session)

    def open(self, connection: int, opening: OpenSession) -> SessionRecord:
        """Let a session in, perhaps again."""
        record = self._sessions.get(opening.session)
        if record is None:
            record = SessionRecord(session=opening.session, host=opening.host)
            self._sessions[opening.session] = record
        elif record.connection and record.connection != connection:
            self._outbox.tell(
                EndSession(session=record.session, connection=record.connection)
            )
        record.host, record.pid = opening.host, opening.pid
        record.connection = connection
        record.openings += 1
        self._outcomes.settle(opening.session, opening.settled)
        return record

    def revived(self, session: SessionId) -> SessionRecord:
        """Know a session from the journal; it has the recovery time to come back."""
        record = self._sessions.get(session)
        if record is None:
            record = SessionRecord(session=session, host=NO_HOST)
            self._sessions[session] = record
            self._await(record, self._recovery_s)
        return record

    def lost(self, session: SessionId, connection: int) -> None:
        """Take the news that a comm ended; the session may come back."""
        record = self._sessions.get(session)
        if record is None or record.connection != connection:
            return
        record.connection = 0
        self._await(record, self._grace_s)

    def _await(self, record: SessionRecord, wait_s: float) -> None:
        openings = record.openings

        def judge() -> None:
            if not record.connection and record.openings == openings:
                self._over(record)

        self._timers.at(self._outbox.now_s + wait_s, judge)

    def close(self, record: SessionRecord) -> None:
        """End a session that says so."""
        if self._sessions.get(record.session) is record:
            self._outbox.tell(
                EndSession(session=record.session, connection=record.connection)
            )
            self._over(record)

    def _over(self, record: SessionRecord) -> None:
        self._creations.session_gone(record)
        self.on_over(record.session)
        self._outbox.emit("session_ended", session=record.session)
        if self._sessions.get(record.session) is record:
            del self._sessions[record.session]
        self.forget_later(record.session)

    def forget_later(self, session: SessionId) -> None:
        """Forget the answers of a session that does not come back."""

        def forget() -> None:
            if session not in self._sessions:
                for row in self._outcomes.forget(session):
                    self._outbox.persist(row)

        self._timers.at(self._outbox.now_s + self._keep_s, forget)
