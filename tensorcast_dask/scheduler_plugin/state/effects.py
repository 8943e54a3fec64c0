"""Changes that steps of plans ask for: each made once.

Rules:

1. A change is known by the life of its plan's key, its step and its place among the step's
   changes; not by its content, which may differ when a step is run again (another deadline).
2. Its first answer that is no fault stands. Who asks while it is under way waits for it. Only
   after a fault does a higher attempt make it anew.
3. The answers lie among the outcomes, under a session's name that no program has, in the
   journal where the change itself is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.operations import Caller
from tensorcast_dask.scheduler_plugin.state.runs import Run
from tensorcast_dask.tensors.ids import RequestId, SessionId
from tensorcast_dask.tensors.messages import Fault, StepEffect

__all__ = ["EFFECTS", "Effects"]

#: Sessions that hold the outcomes of effects begin with this.
EFFECTS: Final = "plan:"


class Effects:
    """What steps have changed and not yet ended with."""

    def __init__(self, ground: Ground) -> None:
        self._outbox = ground.outbox
        self._outcomes = ground.outcomes
        self._operations = ground.operations

    def ask(self, caller: Caller, run: Run, ask: StepEffect) -> Caller | None:
        """Say under which name a change is to be made; None when it is answered (rule 2)."""
        session = _session(run.life, ask.number, ask.step)
        known = self._outcomes.known(session)
        after = self._outbox.firm
        for rid, answered, value in known:
            if not answered:
                self._forward(rid, caller)
                return None
            if not isinstance(value, Fault):
                self._outbox.reply(caller.session, caller.rid, value, after=after)
                return None
        if ask.attempt <= len(known):
            value = known[ask.attempt - 1][2]
            self._outbox.reply(caller.session, caller.rid, value, after=after)
            return None
        rid = RequestId(f"{session}:{len(known) + 1}")
        self._outcomes.look(session, rid, b"")
        self._forward(rid, caller)
        return Caller(session, rid, caller.host)

    def stop(self, run: Run) -> None:
        """Cancel what is under way."""
        for session in self._of(run):
            for rid, answered, _ in self._outcomes.known(session):
                if not answered:
                    self._operations.cancel(rid)

    def forget(self, run: Run, step: str = "") -> None:
        """Forget the changes of a run, or of one step."""
        for session in self._of(run, step):
            self._drop(session)

    def forget_faults(self, run: Run) -> None:
        """Have a run that is resumed try again what failed, and find what did not."""
        for session in self._of(run):
            for rid, answered, value in self._outcomes.known(session):
                if answered and isinstance(value, Fault):
                    self._outcomes.unasked(session, rid)

    def keep_only(self, runs: Iterable[Run]) -> None:
        """Forget changes of runs that are forgotten themselves."""
        mine = {session for run in runs for session in self._of(run)}
        for session in self._outcomes.sessions():
            if session.startswith(EFFECTS) and session not in mine:
                self._drop(session)

    def _forward(self, rid: RequestId, caller: Caller) -> None:
        waiting = self._outbox.forwards.setdefault(rid, {})
        waiting[caller.session, caller.rid] = None

    def _of(self, run: Run, step: str = "") -> list[SessionId]:
        found = []
        for name in (step,) if step else run.steps:
            number = 1
            while self._outcomes.known(_session(run.life, number, name)):
                found.append(_session(run.life, number, name))
                number += 1
        return found

    def _drop(self, session: SessionId) -> None:
        for row in self._outcomes.forget(session):
            self._outbox.persist(row, lazy=True)


def _session(life: int, number: int, step: str) -> SessionId:
    return SessionId(f"{EFFECTS}{life:x}:{number}/{step}")
