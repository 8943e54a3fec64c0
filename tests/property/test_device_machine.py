"""Emulated devices against a model: random schedules of everything that can happen.

Three processes (openings with names of their own) share one device. Each runs its queued
copies only when the schedule says so, one at a time, and may end at any moment. The model
holds plain bytes and carries out the same copies in the same order; after every step all
that the device holds, and all host buffers, are compared bit for bit.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tensorcast_dask.dataplane.devices import Device, Event, Memory, SlabHandle
from tensorcast_dask.dataplane.devices.emulated import EmulatedDriver, find
from tensorcast_dask.exceptions import CapacityError, Gone, Mismatch, OwnerGone
from tensorcast_dask.tensors.devices import parse_devices

BUDGET: Final = 4096
SPEC: Final = parse_devices(f"emulated:1x{BUDGET}")
HOST: Final = 512
PROCESSES: Final = 3
STREAMS: Final = 2

who = st.integers(0, PROCESSES - 1)
streams = st.integers(0, STREAMS - 1)
picks = st.integers(0, 1 << 16)
sizes = st.sampled_from([1, 64, 500, 512, 2000, BUDGET])


@dataclass(eq=False)
class Slab:
    """The model of a slab."""

    owner: int
    data: bytearray
    handle: SlabHandle | None = None
    openers: set[int] = field(default_factory=set)
    freed: bool = False
    revoked: bool = False

    @property
    def charged(self) -> int:
        held = not self.revoked and (not self.freed or self.openers)
        return len(self.data) if held else 0


@dataclass(eq=False)
class Side:
    """One side of a copy in the model: a slab or a host buffer, and where."""

    slab: Slab | None
    data: bytearray
    at: int


@dataclass(eq=False)
class Queued:
    """A copy that has not run in the model."""

    event: Event
    target: Side
    source: Side
    nbytes: int
    after: tuple[Queued, ...]
    ended: bool = False
    lost: bool = False

    def run(self) -> None:
        self.ended = True
        slabs = [side.slab for side in (self.target, self.source) if side.slab]
        self.lost = any(slab.revoked for slab in slabs)
        if not self.lost:
            found = self.source.data[self.source.at : self.source.at + self.nbytes]
            self.target.data[self.target.at : self.target.at + self.nbytes] = found


def count_of_handles(slabs: list[Slab]) -> int:
    return sum(slab.handle is not None for slab in slabs)


class Process:
    """One opening, with what the model knows of it."""

    def __init__(self, number: int, life: int, run_dir: str) -> None:
        self.number = number
        self.driver = EmulatedDriver(
            find(SPEC, run_dir)[0], SPEC.nbytes, run_dir, scheduler=self.next_stream
        )
        self.device = Device(self.driver, process=f"{number}-{life}")
        self.host = bytearray(bytes([number + 1]) * HOST)
        #: The same in the model.
        self.expected = bytearray(self.host)
        self.memories: dict[Slab, Memory] = {}
        self.queues: dict[int, deque[Queued]] = {n: deque() for n in range(STREAMS)}
        self.past: list[Queued] = []

    def next_stream(self, ready: tuple[int, ...]) -> int:
        """Somebody waits: the lowest stream goes first, here and in the model."""
        self.ran(ready[0])
        return ready[0]

    def ran(self, stream: int) -> None:
        self.queues[stream].popleft().run()


class DeviceMachine(RuleBasedStateMachine):
    """The device does what the model does."""

    run_dir: ClassVar[str]
    home: ClassVar[Device]

    def __init__(self) -> None:
        super().__init__()
        self.lives = PROCESSES
        self.processes = [Process(n, n, self.run_dir) for n in range(PROCESSES)]
        self.slabs: list[Slab] = []

    def teardown(self) -> None:
        for process in self.processes:
            process.device.close()
        left = self.home.list()
        assert left.free_bytes == BUDGET, "room is lost"

    # -------------------------------------------------------------- memory
    @rule(number=who, nbytes=sizes)
    def allocate(self, number: int, nbytes: int) -> None:
        process = self.processes[number]
        if sum(slab.charged for slab in self.slabs) + nbytes > BUDGET:
            with pytest.raises(CapacityError):
                process.device.allocate(nbytes)
            return
        memory = process.device.allocate(nbytes)
        slab = Slab(number, bytearray(b"\xaa" * nbytes))
        process.memories[slab] = memory
        self.slabs.append(slab)

    @rule(number=who, nbytes=sizes)
    def share(self, number: int, nbytes: int) -> None:
        """What happens most: one process makes a slab, another opens and uses it."""
        count = len(self.slabs)
        self.allocate(number, nbytes)
        if len(self.slabs) == count:
            return
        slab, reader = self.slabs[-1], (number + 1) % PROCESSES
        slab.handle = self.processes[number].device.export(self.memory(number, slab))
        self.open(reader, count_of_handles(self.slabs) - 1)
        self.copy(reader, 0, len(self.held(reader)), nbytes * 7, nbytes, 1)

    @rule(number=who, pick=picks)
    def export(self, number: int, pick: int) -> None:
        owned = [s for s in self.held(number) if s.owner == number]
        if owned:
            slab = owned[pick % len(owned)]
            handle = self.processes[number].device.export(self.memory(number, slab))
            slab.handle = SlabHandle.decode(handle.encode())

    @rule(number=who, pick=picks)
    def open(self, number: int, pick: int) -> None:
        exported = [slab for slab in self.slabs if slab.handle]
        if not exported:
            return
        process, slab = self.processes[number], exported[pick % len(exported)]
        assert slab.handle is not None
        if slab.handle.exporter == f"{number}-{self.life(number)}":
            with pytest.raises(Mismatch):
                process.device.open(slab.handle)
        elif slab in process.memories:
            known = process.memories[slab]
            assert process.device.open(slab.handle) is known
            process.device.close(known)
        elif slab.freed or slab.revoked:
            with pytest.raises(OwnerGone):
                process.device.open(slab.handle)
        else:
            process.memories[slab] = process.device.open(slab.handle)
            slab.openers.add(number)

    @rule(number=who, pick=picks)
    def give_up(self, number: int, pick: int) -> None:
        """Free an owned slab, close an opened one: its copies run first."""
        held = self.held(number)
        if not held:
            return
        process, slab = self.processes[number], held[pick % len(held)]
        memory = process.memories[slab]
        if slab.owner == number and number not in slab.openers:
            process.device.free(memory)
            slab.freed = True
        else:
            process.device.close(memory)
            slab.openers.discard(number)
        del process.memories[slab]
        with pytest.raises(Gone):
            process.device.copy(memory.range(0, 1), b"x")

    # -------------------------------------------------------------- copies
    @rule(number=who, stream=streams, a=picks, b=picks, c=picks, follow=picks)
    def copy(
        self, number: int, stream: int, a: int, b: int, c: int, follow: int
    ) -> None:
        process = self.processes[number]
        target, to = self.side(process, a)
        source, origin = self.side(process, b)
        longest = min(len(target.data) - target.at, len(source.data) - source.at)
        nbytes = c % (longest + 1)
        if target.data is source.data and target.at != source.at:
            nbytes = min(nbytes, abs(target.at - source.at))  # no overlap
        after = tuple(process.past[-1:]) if follow % 3 == 0 else ()
        event = process.device.copy(
            self.part(to, target.at, nbytes),
            self.part(origin, source.at, nbytes),
            stream=stream,
            after=[queued.event for queued in after],
        )
        queued = Queued(event, target, source, nbytes, after)
        process.queues[stream].append(queued)
        process.past.append(queued)

    @rule(number=who, pick=picks)
    def step(self, number: int, pick: int) -> None:
        """One copy runs."""
        process = self.processes[number]
        ready = process.driver.engine.ready()
        assert ready == tuple(
            stream
            for stream, queue in process.queues.items()
            if queue and all(other.ended for other in queue[0].after)
        )
        if ready:
            stream = ready[pick % len(ready)]
            queued = process.queues[stream][0]
            process.driver.engine.step(stream)
            process.ran(stream)
            self.outcome(queued)

    @rule(number=who, pick=picks)
    def wait(self, number: int, pick: int) -> None:
        process = self.processes[number]
        if process.past:
            self.outcome(process.past[pick % len(process.past)])

    @staticmethod
    def outcome(queued: Queued) -> None:
        try:
            queued.event.wait()
        except OwnerGone:
            assert queued.lost
        else:
            assert not queued.lost
        assert queued.ended

    @rule(number=who, at=st.integers(0, HOST - 1), value=st.integers(0, 255))
    def write_early(self, number: int, at: int, value: int) -> None:
        """The program writes to its buffer, copies under way or not."""
        process = self.processes[number]
        process.host[at] = process.expected[at] = value

    # -------------------------------------------------------------- deaths
    @rule(number=who)
    def die(self, number: int) -> None:
        """A process ends with all that it owned and had open; another takes its place."""
        self.processes[number].device.close()
        for slab in self.slabs:
            slab.openers.discard(number)
            slab.revoked |= slab.owner == number
        self.lives += 1
        # Slabs of the dead belong to nobody that is here.
        for slab in self.slabs:
            if slab.owner == number:
                slab.owner = -1
        self.processes[number] = Process(number, self.lives, self.run_dir)

    # -------------------------------------------------------------- the comparison
    @invariant()
    def equal(self) -> None:
        charged = sum(slab.charged for slab in self.slabs)
        assert self.home.list().free_bytes == BUDGET - charged
        for process in self.processes:
            assert process.host == process.expected
            for slab, memory in process.memories.items():
                number = process.driver._number(memory.address)
                if not slab.revoked:
                    assert process.driver._slabs[number].view == slab.data
            listed = process.device.list()
            assert listed.in_flight == sum(map(len, process.queues.values()))

    # -------------------------------------------------------------- help
    def life(self, number: int) -> str:
        return self.processes[number].device._process.partition("-")[2]

    def held(self, number: int) -> list[Slab]:
        return list(self.processes[number].memories)

    def memory(self, number: int, slab: Slab) -> Memory:
        return self.processes[number].memories[slab]

    def side(self, process: Process, pick: int) -> tuple[Side, Any]:
        places: list[Slab | None] = [None, *process.memories]
        slab, at = places[pick % len(places)], pick // 7
        if slab is None:
            return Side(None, process.expected, at % HOST), process.host
        return Side(slab, slab.data, at % len(slab.data)), process.memories[slab]

    @staticmethod
    def part(whole: Any, at: int, nbytes: int) -> Any:
        if isinstance(whole, Memory):
            return whole.range(at, nbytes)
        return memoryview(whole)[at : at + nbytes]


@pytest.fixture(scope="module", autouse=True)
def _home():
    """The device stays open, so that each history begins at once."""
    DeviceMachine.run_dir = tempfile.mkdtemp(prefix="tc-")
    DeviceMachine.home = Process(PROCESSES, 0, DeviceMachine.run_dir).device
    yield
    DeviceMachine.home.close()
    shutil.rmtree(DeviceMachine.run_dir, ignore_errors=True)


TestDevices = DeviceMachine.TestCase
TestDevices.settings = settings(
    max_examples=max(200, settings().max_examples),
    stateful_step_count=30,
    deadline=None,
)
