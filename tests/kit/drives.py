"""Stores that drive runs of plans, at a catalog's desk: no thread, no socket, time is the desk's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from tensorcast_dask.exceptions import OwnerGone
from tensorcast_dask.store.state.driving import Drive
from tensorcast_dask.store.state.driving_words import Make, Say
from tensorcast_dask.tensors import messages as m

if TYPE_CHECKING:
    from tensorcast_dask.store.state.driving_words import Instruction
    from tensorcast_dask.tensors.ids import RequestId
    from tensorcast_dask.tensors.wants import Ticket
    from tests.kit.catalogs import Desk, FakeNode, Program

__all__ = ["DrivingStore", "FakeInstance", "orders"]


def orders(node: FakeNode) -> list[m.DoRun]:
    """Take the runs that a node was told to drive."""
    found = [one for one in node.inbox if isinstance(one, m.DoRun)]
    node.inbox = [one for one in node.inbox if not isinstance(one, m.DoRun)]
    return found


@dataclass
class FakeInstance:
    """One life of an instance: what it was called with, by key."""

    name: str
    attachment: str
    alive: bool = True
    #: How often a call was carried out, by key.
    made: dict[str, int] = field(default_factory=dict)

    def call(self, request: m.CallInstance) -> bytes | OwnerGone:
        """Carry a call out, once a key."""
        if not self.alive or request.attachment != self.attachment:
            return OwnerGone("this life of it is over")
        self.made.setdefault(request.key, 1)
        return b"\xc0"


class DrivingStore:
    """The plans' desk of one fake node."""

    def __init__(self, desk: Desk, node: FakeNode, life: int = 1) -> None:
        self.node = node
        self.program: Program = desk.program(f"{node.node}-{life}", host=node.host)
        self.drives: dict[Ticket, Drive] = {}
        self.open: dict[RequestId, tuple[Drive, int]] = {}
        #: What is on its way: it is lost with the store.
        self.sending: list[m.SessionRequest] = []
        self.calls: list[tuple[Drive, Make]] = []
        self.came: list[tuple[Drive, int, bytes | OwnerGone]] = []

    @property
    def now_s(self) -> float:
        """The desk's instant."""
        return self.program.desk.now_s

    def reopen(self) -> None:
        """Be connected anew: what has no answer is asked again."""
        self.program.open()
        for rid in list(self.open):
            if rid in self.program.asked and not self.program.answered(rid):
                self.program.ask(self.program.asked[rid])

    def turn(self, instances: dict[str, FakeInstance] | None = None) -> bool:
        """Do one thing that can be done now; False when there is none."""
        for order in orders(self.node):
            drive = Drive(
                order, node=self.node.node, host=self.node.host, now_s=self.now_s
            )
            if drive.ticket not in self.drives:
                self.drives[drive.ticket] = drive
                self._do(drive, drive.begin())
            return True
        for rid in list(self.open):
            if self.program.answered(rid):
                self._answer(rid)
                return True
        if self.sending:
            self.program.ask(self.sending.pop(0))
            return True
        if self.came:
            drive, number, came = self.came.pop(0)
            self._do(drive, drive.called(number, came, now_s=self.now_s))
            return True
        if self.calls:
            drive, made = self.calls.pop(0)
            instance = (instances or {}).get(made.request.instance)
            gone = OwnerGone("there is none")
            value = gone if instance is None else instance.call(made.request)
            self.came.append((drive, made.number, value))
            return True
        for drive in list(self.drives.values()):
            if drive.next_s() <= self.now_s:
                self._do(drive, drive.tick(now_s=self.now_s))
                return True
        return False

    def _answer(self, rid: RequestId) -> None:
        drive, number = self.open.pop(rid)
        value = self.program.answers[rid]
        answer = m.Answer(rid=rid)
        if isinstance(value, m.Fault):
            answer = m.Answer(rid=rid, fault=value)
        elif value is not None:
            raw = msgspec.Raw(msgspec.msgpack.encode(value))
            answer = m.Answer(rid=rid, value=raw)
        self._do(drive, drive.answered(number, answer, now_s=self.now_s))

    def _do(self, drive: Drive, told: list[Instruction]) -> None:
        for one in told:
            match one:
                case Say(number=number, request=request):
                    rid = self.program.rid()
                    if number:
                        self.open[rid] = (drive, number)
                    sent = msgspec.structs.replace(request, rid=rid)
                    self.sending.append(sent)  # type: ignore[arg-type]
                case Make():
                    self.calls.append((drive, one))
                case _:
                    pass
        if drive.over:
            self.drives.pop(drive.ticket, None)
