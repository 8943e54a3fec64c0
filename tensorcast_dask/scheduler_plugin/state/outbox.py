"""What one `handle` brings forth, and what waits for the disk.

Rules:

1. A change is applied at once in memory; its rows go out as one `Persist` at the end of
   the `handle` that made it.
2. Whatever depends on a change is told after the journal has it. `touch` notes which
   names a change concerns, `pending` says what a reader of a name must wait for: so an
   answer waits only for changes that it shows.
3. What is not told yet is kept here, in order, and comes out of `durable_to`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from tensorcast_dask.scheduler_plugin.state.events import (
    Emit,
    Instruction,
    Issued,
    Log,
    Persist,
    Reply,
    Row,
    ToNodeSend,
    WakeAt,
)
from tensorcast_dask.tensors.ids import ArtifactId, Generation, RequestId, SessionId
from tensorcast_dask.tensors.messages import Fact, Fault, ToNode, Wire

Name: TypeAlias = ArtifactId | Generation
Held: TypeAlias = Instruction | Callable[[], None]


class Outbox:
    """Instructions in the making.

    Attributes
    ----------
    now_s : float
        The clock reading of the event that is handled.
    seq : int
        Last sequence number handed to the journal.
    firm : int
        Last of them that an answer may wait for; what came after it is lazy.
    durable : int
        Last sequence number that the journal has on disk.
    stalled : str
        Why the journal cannot write; "" while it can.
    forwards : dict
        By request: whom its answer goes to, where that is not who it was made for.
    """

    def __init__(self, *, seq: int) -> None:
        self.now_s = 0.0
        self.seq = seq
        self.firm = seq
        self.durable = seq
        self.stalled = ""
        self._out: list[Instruction] = []
        self._rows: list[Row] = []
        self._lazy = True
        self._issued: list[Issued] = []
        self._epoch = 0
        self._held: dict[int, list[Held]] = {}
        self.forwards: dict[RequestId, dict[tuple[SessionId, RequestId], None]] = {}
        #: The last change of each name that is not on disk yet.
        self._touched: dict[Name, int] = {}
        self._touches: deque[tuple[int, Name]] = deque()
        #: Told of every event, as it is emitted.
        self.on_emit: Callable[[Emit], None] = _nobody

    # ------------------------------------------------------------ changes
    def persist(self, row: Row, *names: Name, lazy: bool = False) -> None:
        """Add a row to this handle's batch; answers about `names` wait for it.

        A `lazy` row is one that nobody is told of: a batch of such rows may lie for a
        moment.
        """
        self._rows.append(row)
        self._lazy = self._lazy and lazy
        seq = self.seq + 1
        for name in names:
            self._touched[name] = seq
            self._touches.append((seq, name))

    def issue(self, digest: bytes, version: int) -> None:
        """Use a version number up, together with this handle's rows."""
        self._issued.append(Issued(digest=digest, version=version))

    def raise_epoch(self, epoch: int) -> None:
        """Have the head file say a higher epoch."""
        self._epoch = max(self._epoch, epoch)

    @property
    def here(self) -> int:
        """The sequence number that covers everything up to now."""
        return self.seq + 1 if self._rows or self._epoch else self.seq

    def pending(self, name: Name) -> int:
        """Find the sequence number that an answer about `name` must wait for."""
        return self._touched.get(name, 0)

    # ------------------------------------------------------------ tell
    def reply(
        self,
        session: SessionId,
        rid: RequestId,
        value: Wire | Fault | None,
        *,
        after: int = 0,
    ) -> None:
        """Answer a request once `after` is on disk; whoever else waits for it, too."""
        askers = self.forwards.pop(rid, None) or {(session, rid): None}
        for asker, own in askers:
            self.hold(Reply(session=asker, rid=own, value=value), after=after)

    def hold(self, what: Held, *, after: int) -> None:
        """Tell, or do, something once `after` is on disk."""
        if after > self.durable:
            self._held.setdefault(after, []).append(what)
        elif callable(what):
            what()
        else:
            self._out.append(what)

    def send(self, link: int, message: ToNode) -> None:
        """Send to a node now; link 0 (no link) drops it."""
        if link:
            self._out.append(ToNodeSend(link=link, message=message))

    def tell(self, instruction: Instruction) -> None:
        """Any other instruction, now."""
        self._out.append(instruction)

    def log(self, level: str, text: str) -> None:
        """Write to the log."""
        self._out.append(Log(level=level, text=text))

    def emit(self, topic: str, **facts: Fact) -> None:
        """Tell whoever watches."""
        emit = Emit(topic=topic, facts=facts)
        self._out.append(emit)
        self.on_emit(emit)

    # ------------------------------------------------------------ ends
    def durable_to(self, seq: int) -> None:
        """Let go what waited for the journal up to `seq`."""
        self.durable = max(self.durable, min(seq, self.seq))
        while self._touches and self._touches[0][0] <= self.durable:
            at, name = self._touches.popleft()
            if self._touched.get(name) == at:
                del self._touched[name]
        for at in sorted(at for at in self._held if at <= self.durable):
            for what in self._held.pop(at):
                self.hold(what, after=0)

    @property
    def waiting(self) -> int:
        """How many answers and acts wait for the disk."""
        return sum(map(len, self._held.values()))

    def take(self, wake_at_s: float | None) -> list[Instruction]:
        """Close this handle: everything it brought forth."""
        if self._rows or self._issued or self._epoch:
            self.seq += 1
            self._out.append(
                Persist(
                    seq=self.seq,
                    rows=tuple(self._rows),
                    issued=tuple(self._issued),
                    epoch=self._epoch,
                    lazy=self._lazy and not self._issued and not self._epoch,
                )
            )
            if not self._lazy or self._issued or self._epoch:
                self.firm = self.seq
            self._rows, self._issued, self._epoch = [], [], 0
            self._lazy = True
        if wake_at_s is not None:
            self._out.append(WakeAt(at_s=wake_at_s))
        out, self._out = self._out, []
        return out


def _nobody(emit: Emit) -> None:
    """Nobody listens."""
