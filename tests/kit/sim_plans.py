"""The runs that a simulated store drives: it follows `store.plans`; the runs and the session are the product's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from tensorcast_dask.dataplane.carried import CarriedSession
from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.store.state.driving import Drive
from tensorcast_dask.store.state.driving_words import GiveUp, Make, Say
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import HostId
from tensorcast_dask.tensors.wants import Ticket
from tests.kit.sim_timeline import Process

if TYPE_CHECKING:
    from tensorcast_dask.store.state.driving_words import Instruction
    from tests.kit.sim_desk import Outcome
    from tests.kit.sim_node import SimNode

__all__ = ["SimPlans"]

GRACE_S = 2.0
LOST = m.Fault(kind="PeerLost", message="the node does not answer")


class SimPlans:
    """All runs that one store drives."""

    def __init__(self, node: SimNode) -> None:
        self.node = node
        host = HostId(node.host)
        self.session = CarriedSession(self._carry, f"{node.name}-plans", host)
        self.drives: dict[Ticket, Drive] = {}
        self._askers: dict[tuple[Ticket, int], int] = {}
        self._alarm = 0

    def _carry(self, message: m.SessionIn) -> bool:
        self.node.tell(message)
        return True

    def end(self) -> None:
        """Have the session end."""
        self.node.tell(m.SessionIn(session=self.session.session, raw=b""))

    # -------------------------------------------------------------- events
    def ordered(self, order: m.DoRun) -> None:
        """Take a run."""
        drive = Drive(
            order,
            node=self.node.node,
            host=self.node.card.host,
            now_s=self.node.now_s(),
        )
        if drive.ticket not in self.drives:
            self.drives[drive.ticket] = drive
            self._tell(drive, drive.begin)

    def _tell(self, drive: Drive, event: Callable[[], list[Instruction]]) -> None:
        if self.drives.get(drive.ticket) is not drive:
            return
        for one in event():
            self._do(drive, one)
        if drive.over:
            del self.drives[drive.ticket]
        self._look()

    def _look(self) -> None:
        """Set the alarm anew."""
        self._alarm += 1
        alarm = self._alarm
        times = [drive.next_s() for drive in self.drives.values()]

        def ring() -> None:
            if alarm == self._alarm:
                for drive in list(self.drives.values()):
                    self._tell(drive, partial(drive.tick, now_s=self.node.now_s()))

        if times:
            self.node.after(max(0.001, min(times) - self.node.now_s()), ring)

    def _do(self, drive: Drive, instruction: Instruction) -> None:
        match instruction:
            case Say(number=number, request=request):
                rid = self.session.next_rid()
                asked = msgspec.structs.replace(request, rid=rid)
                self.session.ask(asked, partial(self._answered, drive, number))
            case Make():
                self.node.after(0.0, lambda: self._make(drive, instruction))
            case GiveUp(number=number):
                self.node.after(0.0, lambda: self._give_up(drive, number))

    def _answered(self, drive: Drive, number: int, answer: m.Answer) -> None:
        now_s = self.node.now_s()
        self._tell(drive, partial(drive.answered, number, answer, now_s=now_s))

    # -------------------------------------------------------------- calls
    def _make(self, drive: Drive, call: Make) -> None:
        ended = partial(self._called, drive, call.number)
        if call.card.node != self.node.node:
            self.node.world.time.spawn(self.node.life, self._call_far(call, ended))
            return
        key = drive.ticket, call.number
        self._askers[key] = 0
        try:
            asker = self.node.desk.begin(call.request, ended)
        except TensorCastError as error:
            ended(m.Fault.of(error))
            return
        if key in self._askers:
            self._askers[key] = asker

    def _called(self, drive: Drive, number: int, outcome: Outcome) -> None:
        self._askers.pop((drive.ticket, number), None)
        came = outcome.error() if isinstance(outcome, m.Fault) else outcome.value
        self._tell(drive, partial(drive.called, number, came, now_s=self.node.now_s()))

    def _give_up(self, drive: Drive, number: int) -> None:
        asker = self._askers.get((drive.ticket, number), 0)
        if asker:
            self.node.desk.give_up(asker)

    def _call_far(self, call: Make, ended: Callable[[Outcome], None]) -> Process:
        world = self.node.world
        yield world.network.latency_s()
        there = world.node(call.card.node)
        if (
            there is None
            or not there.life.alive
            or not world.network.reaches(self.node.host, there.host)
        ):
            ended(LOST)
            return
        came: list[Outcome] = []

        def carry() -> Process:
            try:
                came.append((yield from there.desk.call(call.request)))
            except TensorCastError as error:
                came.append(m.Fault.of(error))

        over = world.time.spawn(there.life, carry())
        yield over, call.request.deadline_s + GRACE_S
        yield world.network.latency_s()
        reached = world.network.reaches(self.node.host, there.host)
        ended(came[0] if came and reached else LOST)
