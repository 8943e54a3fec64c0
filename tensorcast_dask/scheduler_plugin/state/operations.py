"""Requests on their way: answered once, by result, error, deadline or cancel.

Rules:

1. Every request gets one answer. A change's answer is recorded (`Outcomes`); when it is
   durable it is recorded in the same batch as the change.
2. An *operation* is a request that waits. Whoever finishes it first counts; what comes
   later finds it done and does nothing.
3. A refusal because the journal is away is not recorded: the same request may be asked
   again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tensorcast_dask.exceptions import (
    CatalogUnavailable,
    DeadlineExceeded,
    TensorCastError,
)
from tensorcast_dask.scheduler_plugin.state.events import OperationFacts
from tensorcast_dask.scheduler_plugin.state.outbox import Outbox
from tensorcast_dask.scheduler_plugin.state.outcomes import Outcomes, Value
from tensorcast_dask.scheduler_plugin.state.records import (
    NO_HOST,
    NO_NODE,
    VersionRecord,
)
from tensorcast_dask.scheduler_plugin.state.timers import Timer, Timers
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    Generation,
    HostId,
    NodeId,
    RequestId,
    SessionId,
)
from tensorcast_dask.tensors.messages import (
    ArtifactInfo,
    Fault,
    Moved,
    OperationState,
)

__all__ = ["Caller", "Operation", "Operations"]


@dataclass(slots=True, frozen=True)
class Caller:
    """Who asked, and under which id."""

    session: SessionId
    rid: RequestId
    host: HostId = NO_HOST


@dataclass(slots=True, kw_only=True)
class Operation:
    """A request that waits."""

    caller: Caller
    kind: str
    id: ArtifactId
    generation: Generation
    until_s: float
    started_s: float
    status: str = "running"  # running, done, failed, cancelled
    node: NodeId = NO_NODE
    via: str = ""
    message: str = ""
    ended_s: float = 0.0
    moved_bytes: int = 0
    timer: Timer | None = None
    #: Called once when it ends by deadline or cancel: let go what was waited for.
    leave: Callable[[], None] | None = None
    #: What the deadline does instead of DeadlineExceeded.
    on_deadline: Callable[[], None] | None = None
    #: (done, total) bytes.
    progress: Callable[[], tuple[int, int]] | None = None

    @property
    def open(self) -> bool:
        """Not answered yet."""
        return self.status == "running"


class Operations:
    """Who waits for what, and the giving of answers."""

    def __init__(
        self, outbox: Outbox, timers: Timers, outcomes: Outcomes, *, keep: int
    ) -> None:
        self._outbox = outbox
        self._timers = timers
        self._outcomes = outcomes
        self._keep = keep
        self._running: dict[RequestId, Operation] = {}
        self._ended: dict[RequestId, Operation] = {}

    # ------------------------------------------------------------ answers
    def give(
        self, caller: Caller, value: Value, *, after: int = 0, durable: bool = False
    ) -> None:
        """Answer a change; `durable` records the answer with this handle's rows."""
        row = self._outcomes.answered(
            caller.session, caller.rid, value, durable=durable
        )
        if row is not None:
            self._outbox.persist(row)
        if durable:
            after = self._outbox.here
        self._outbox.reply(caller.session, caller.rid, value, after=after)

    def refuse(self, caller: Caller, error: TensorCastError, *, after: int = 0) -> None:
        """Answer with an error."""
        if isinstance(error, CatalogUnavailable):
            self._outcomes.unasked(caller.session, caller.rid)
            self._outbox.reply(caller.session, caller.rid, Fault.of(error))
        else:
            self.give(caller, Fault.of(error), after=after)

    # ------------------------------------------------------------ operations
    def open(
        self,
        caller: Caller,
        kind: str,
        record: VersionRecord | None,
        deadline_s: float,
    ) -> Operation:
        """Let a request wait, at most until its deadline."""
        now_s = self._outbox.now_s
        operation = Operation(
            caller=caller,
            kind=kind,
            id=record.id if record is not None else ArtifactId(""),
            generation=record.generation if record is not None else Generation(0),
            until_s=now_s + deadline_s,
            started_s=now_s,
        )
        self._running[caller.rid] = operation
        operation.timer = self._timers.at(
            operation.until_s, lambda: self._deadline(operation)
        )
        return operation

    def finish(
        self,
        operation: Operation,
        value: Value,
        *,
        after: int = 0,
        durable: bool = False,
    ) -> None:
        """End with a result."""
        if operation.open:
            if isinstance(value, Moved):
                operation.node = value.location.card.node
                operation.moved_bytes = value.moved_bytes
                operation.via = value.via
            elif isinstance(value, ArtifactInfo) and operation.progress is not None:
                operation.moved_bytes, operation.via = value.nbytes, "file"
            self._end(operation, "done")
            self.give(operation.caller, value, after=after, durable=durable)

    def fail(
        self, operation: Operation, error: TensorCastError, *, after: int = 0
    ) -> None:
        """End with an error."""
        if operation.open:
            operation.message = error.message
            self._end(operation, "failed")
            self.refuse(operation.caller, error, after=after)

    def cancel(self, rid: RequestId) -> None:
        """Stop a request that waits; others are left alone."""
        operation = self._running.get(rid)
        if operation is not None:
            operation.message = "cancelled"
            self._end(operation, "cancelled")
            self._leave(operation)
            error = DeadlineExceeded("cancelled", {"cancelled": True})
            self.give(operation.caller, Fault.of(error))

    def _deadline(self, operation: Operation) -> None:
        if not operation.open:
            return
        if operation.on_deadline is not None:
            operation.on_deadline()
            return
        waited_s = self._outbox.now_s - operation.started_s
        message = (
            f"{operation.kind} of {operation.id or operation.node!r} did not end within its deadline "
            f"({waited_s:.3g} s); give it more time, or ask explain what holds it"
        )
        self._leave(operation)
        self.fail(operation, DeadlineExceeded(message))

    def _leave(self, operation: Operation) -> None:
        if operation.leave is not None:
            leave, operation.leave = operation.leave, None
            leave()

    def _end(self, operation: Operation, status: str) -> None:
        operation.status = status
        operation.ended_s = self._outbox.now_s
        if operation.timer is not None:
            operation.timer.cancel()
        operation.on_deadline = None
        self._running.pop(operation.caller.rid, None)
        self._ended[operation.caller.rid] = operation
        if len(self._ended) > self._keep:
            del self._ended[next(iter(self._ended))]

    # ------------------------------------------------------------ questions
    def __len__(self) -> int:
        return len(self._running)

    def find(self, rid: RequestId) -> Operation | None:
        """Find a request that waits, or one of the last that ended."""
        return self._running.get(rid) or self._ended.get(rid)

    def state_of(self, rid: RequestId) -> OperationState:
        """How a request stands."""
        operation = self.find(rid)
        if operation is None:
            return OperationState(status="unknown")
        done, total = self._bytes(operation)
        return OperationState(
            status=operation.status,
            done_bytes=done,
            total_bytes=total,
            message=operation.message,
        )

    def facts(self) -> tuple[OperationFacts, ...]:
        """All that run and the last that ended, oldest first."""
        return tuple(
            self._facts(one) for one in (*self._ended.values(), *self._running.values())
        )

    def _bytes(self, operation: Operation) -> tuple[int, int]:
        if operation.progress is not None and operation.open:
            return operation.progress()
        return operation.moved_bytes, operation.moved_bytes

    def _facts(self, operation: Operation) -> OperationFacts:
        done, total = self._bytes(operation)
        until_s = self._outbox.now_s if operation.open else operation.ended_s
        return OperationFacts(
            rid=operation.caller.rid,
            session=operation.caller.session,
            kind=operation.kind,
            status=operation.status,
            id=operation.id,
            generation=operation.generation,
            node=operation.node,
            done_bytes=done,
            total_bytes=total,
            seconds=until_s - operation.started_s,
            via=operation.via,
            message=operation.message,
        )
