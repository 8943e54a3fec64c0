"""The tiers of a store with a device against a model: random schedules of everything.

The store's state and media, the device process's slabs and a program that reads are the real
ones, in one thread: whoever waits for an order carries the orders out that come before it,
unless the schedule says that the device process dies first. The model knows which bytes a
generation has, and which copies a program has spoilt. Whatever happens, what is read is the
model's bytes, and in the end all memory is back.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, Final, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensorcast_dask.dataplane.devices import Device, Memory, SlabHandle
from tensorcast_dask.dataplane.devices.emulated import EmulatedDriver, find
from tensorcast_dask.dataplane.server import Peer
from tensorcast_dask.device.main import Slabs
from tensorcast_dask.exceptions import (
    AbsentError,
    CapacityError,
    DeviceError,
    Mismatch,
    OwnerGone,
    TensorCastError,
)
from tensorcast_dask.store.core import Core, now_s
from tensorcast_dask.store.device_media import media_of
from tensorcast_dask.store.device_reads import DeviceReads
from tensorcast_dask.store.device_target import DeviceTarget
from tensorcast_dask.store.devices import Devices
from tensorcast_dask.store.machine import Machine
from tensorcast_dask.store.shelf import Shelf
from tensorcast_dask.store.state.orders import Order
from tensorcast_dask.store.state.replicas import Life, Wanted
from tensorcast_dask.tensors.devices import parse_devices
from tensorcast_dask.tensors.ids import ArtifactId, Generation, RequestId, Version
from tensorcast_dask.tensors.messages import (
    Act,
    AttachDevice,
    DeviceOrder,
    Fault,
    NextOrder,
    Open,
    Opened,
    OrderEnded,
    StoreSettings,
    Tier,
)
from tests.kit.stores import content, index_of

PAGE: Final = 4096
SPEC: Final = parse_devices("emulated:1x8MiB")
CAPACITY: Final = 24 * PAGE
WITHIN_S: Final = 60.0

picks = st.integers(0, 1 << 16)
lengths = st.sampled_from([1, 100, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 9 * PAGE])
moves = st.sampled_from([Tier.DEVICE, Tier.PINNED])


class Pumped(Devices):
    """Who waits for an order does the device process's work."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.pump: Any = None
        self.idle_s = 0.0

    def wait(self, order: Order, until_s: float) -> OrderEnded:
        while order.outcome is None:
            self.pump()
        return super().wait(order, until_s)


class Process:
    """The device process, without the process."""

    def __init__(self, device: Device, peer: Peer) -> None:
        self.device = device
        self.slabs = Slabs(device)
        self.peer = peer
        self.ended: OrderEnded | None = None

    def carry_out(self, order: DeviceOrder, fd: int) -> None:
        try:
            self.ended = self.slabs.carry_out(order, fd)
        except TensorCastError as error:
            self.ended = OrderEnded(number=order.number, fault=Fault.of(error))


class TierMachine(RuleBasedStateMachine):
    """A store with a device does what the model does."""

    run_dir: ClassVar[str]
    lives: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        told = StoreSettings(
            host_memory_bytes=40 * PAGE,
            own_segment_bytes=PAGE,
            slab_bytes=4 * PAGE,
            reserve_fraction=0.0,
            reserve_min_bytes=0,
            chunk_bytes=PAGE,
        )
        self.core = Core(told, shelf=Shelf(), machine=Machine())
        self.core.room.pause = self.pause
        self.devices = Pumped(self.core)
        self.devices.pump = self.pump
        self.devices.media = media_of(self.devices, self.core)
        self.reads = DeviceReads(self.core, self.devices, lambda: False)
        self.bytes: dict[Generation, bytes] = {}
        #: Copies on the device that a program has written to.
        self.spoilt: set[Generation] = set()
        #: What the program has open: slab, tag, generation.
        self.held: list[tuple[Memory, int, Generation]] = []
        self.dies_in = -1
        self.process: Process | None = None
        self.sockets: list[socket.socket] = []
        self.program = self.open_device("program")
        self.attach()

    def pause(self, seconds: float) -> None:
        """The store waits for others: the device process goes on, nobody else will."""
        if not self.pump():
            message = f"nobody lets go, however often {seconds} s pass"
            raise CapacityError(message)

    def open_device(self, name: str) -> Device:
        TierMachine.lives += 1
        (device,) = find(SPEC, self.run_dir)
        driver = EmulatedDriver(device, SPEC.nbytes, self.run_dir)
        return Device(driver, process=f"{name}-{self.lives}")

    def teardown(self) -> None:
        self.dies_in = -1
        while self.held:
            self.let_go(-1)
        for generation in list(self.core.table.replicas):
            self.core.drop(generation, why="the end")
        self.settle()
        for tier, stock in self.core.table.tiers.items():
            assert stock.used_bytes == stock.reserved_bytes == 0, tier
            assert stock.pool.lingering_bytes == 0, tier
        assert not self.core.table.leased
        if self.process is not None:
            warm = self.core.table.tiers[Tier.DEVICE].pool.warm_bytes
            assert self.process.device.list().owned_bytes == warm
            self.die()
        self.program.close()
        for sock in self.sockets:
            sock.close()
        self.core.shelf.end()

    # -------------------------------------------------------------- the device process
    def pump(self) -> bool:
        """One order is carried out, or the process dies over it; False when there is none."""
        process = self.process
        if process is None:
            return False
        request = NextOrder(rid=RequestId("r"), ended=process.ended)
        process.ended = None
        reply = self.devices.handle(request, process.peer)
        order = cast("DeviceOrder", reply.message)
        if order.act is Act.WAIT:
            return False
        fd = reply.fds[0] if reply.fds else -1
        if self.dies_in == 0:
            if fd >= 0:
                os.close(fd)
            self.die()
            return True
        self.dies_in -= self.dies_in > 0
        process.carry_out(order, fd)
        return True

    @rule()
    def settle(self) -> None:
        while len(self.devices._orders):
            self.pump()
        self.core.tick()
        self.core.shelf.settle()
        while len(self.devices._orders):
            self.pump()

    @precondition(lambda self: self.process is not None)
    @rule(after=st.integers(-6, 3))
    def may_die(self, after: int) -> None:
        if after < -5:
            self.die()
        elif after >= 0:
            self.dies_in = after

    def die(self) -> None:
        assert self.process is not None
        process, self.process, self.dies_in = self.process, None, -1
        process.device.close()
        self.devices.closed(process.peer)
        self.spoilt.clear()
        for generation in list(self.bytes):
            self.forget(generation)

    @precondition(lambda self: self.process is None)
    @rule()
    def attach(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        self.sockets += [ours, theirs]
        stream = SimpleNamespace(sock=ours)
        peer = cast("Peer", SimpleNamespace(stream=stream, unix=True, pid=os.getpid()))
        device = self.open_device("device")
        request = AttachDevice(
            rid=RequestId("r"),
            device=device.id.uuid,
            name="emulated:0",
            capacity_bytes=CAPACITY,
            grain_bytes=PAGE,
            shares=True,
        )
        self.devices.handle(request, peer)
        self.process = Process(device, peer)

    # -------------------------------------------------------------- the store
    @rule(nbytes=lengths)
    def put(self, nbytes: int) -> None:
        generation = Generation(self.core.table.highest + 1)
        data = content(nbytes, seed=generation)
        wanted = Wanted(
            generation=generation,
            id=ArtifactId("a"),
            version=Version(1),
            nbytes=nbytes,
            tier=Tier.HOST,
            owner=0,
            deadline_s=now_s() + WITHIN_S,
            labels={},
        )
        try:
            filling = self.core.reserve(wanted, until_s=now_s())
        except CapacityError:
            return
        held = self.core.hold(generation, filling.copy)
        held.view()[:] = data
        self.core.release(held)
        self.core.commit(
            generation, Tier.HOST, index=index_of(nbytes), index_digest="d"
        )
        self.bytes[generation] = data

    @rule(nbytes=lengths, spoils=st.booleans(), drops=st.booleans(), pick=picks)
    def share(self, nbytes: int, *, spoils: bool, drops: bool, pick: int) -> None:
        """What happens most: a replica goes to the device and a program uses it there."""
        before = len(self.bytes)
        self.put(nbytes)
        if len(self.bytes) == before:
            return
        self.save(len(self.bytes) - 1, Tier.DEVICE)
        count = len(self.held)
        self.open(len(self.bytes) - 1, share=True)
        if drops:
            self.drop(len(self.bytes) - 1, Tier.HOST)
        if len(self.held) > count and spoils:
            self.spoil(count)
        if pick % 2:
            self.open(len(self.bytes) - 1, share=False)
        if pick % 3 == 0 and len(self.held) > count:
            self.let_go(-1)

    @rule(tier=moves, count=st.integers(2, 4))
    def crowd(self, tier: Tier, count: int) -> None:
        """More than fits: the device spills to host memory, which unpins."""
        for _ in range(count):
            before = len(self.bytes)
            self.put(9 * PAGE)
            if len(self.bytes) > before:
                self.save(before, tier)
                if tier is Tier.DEVICE:
                    self.drop(before, Tier.HOST)

    def pick(self, pick: int) -> Generation | None:
        known = list(self.bytes)
        return known[pick % len(known)] if known else None

    @rule(pick=picks, tier=moves)
    def save(self, pick: int, tier: Tier) -> None:
        generation = self.pick(pick)
        if generation is None:
            return
        try:
            self.devices.media[tier].save(generation, until_s=now_s() + WITHIN_S)
        except (AbsentError, CapacityError, DeviceError, Mismatch):
            return
        assert self.life(generation, tier) is Life.COMMITTED

    @rule(pick=picks)
    def restore(self, pick: int) -> None:
        generation = self.pick(pick)
        if generation is None or self.life(generation, Tier.HOST) is not None:
            return
        medium = self.devices.media[Tier.DEVICE]
        try:
            medium.restore(generation, until_s=now_s() + WITHIN_S)
        except Mismatch:
            assert generation in self.spoilt
            self.forget(generation)
            return
        except (AbsentError, CapacityError):
            return
        assert self.life(generation, Tier.HOST) is Life.COMMITTED

    @rule(pick=picks, tier=st.sampled_from([None, *Tier]))
    def drop(self, pick: int, tier: Tier | None) -> None:
        generation = self.pick(pick)
        if generation is None:
            return
        self.core.drop(generation, tier, why="test")
        if self.life(generation, Tier.DEVICE) is None:
            self.spoilt.discard(generation)
        self.forget(generation)

    def forget(self, generation: Generation) -> None:
        replica = self.core.table.replicas.get(generation)
        if replica is None or not replica.committed:
            self.bytes.pop(generation, None)
        if self.life(generation, Tier.DEVICE) is None:
            self.spoilt.discard(generation)

    def life(self, generation: Generation, tier: Tier) -> Life | None:
        replica = self.core.table.replicas.get(generation)
        copy = None if replica is None else replica.copy(tier)
        return None if copy is None else copy.life

    # -------------------------------------------------------------- the program
    @rule(pick=picks, share=st.booleans())
    def open(self, pick: int, *, share: bool) -> None:
        generation = self.pick(pick)
        if generation is None or self.process is None:
            return
        request = Open(
            rid=RequestId("r"),
            generation=generation,
            deadline_s=WITHIN_S,
            device=self.program.id.uuid,
            share=share,
        )
        try:
            reply = self.reads.open(request, self.process.peer)
        except Mismatch:
            assert generation in self.spoilt
            self.forget(generation)
            return
        except (AbsentError, DeviceError):
            return
        opened = cast("Opened", reply.message)
        slab = self.program.open(SlabHandle.decode(opened.handle))
        self.held.append((slab, reply.fds[0], generation))
        if reply.done is not None:
            reply.done()
        assert generation not in self.spoilt
        assert self.read(slab, generation) == self.bytes[generation]
        if not share:
            self.let_go(-1)

    def read(self, slab: Memory, generation: Generation) -> bytes:
        into = bytearray(len(self.bytes[generation]))
        self.program.copy(into, slab.range(0, len(into))).wait()
        return bytes(into)

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def spoil(self, pick: int) -> None:
        slab, _, generation = self.held[pick % len(self.held)]
        try:
            self.program.copy(slab.range(0, 1), b"\xee").wait()
        except OwnerGone:
            return
        data = self.bytes.get(generation)
        if data is None or self.life(generation, Tier.DEVICE) is not Life.COMMITTED:
            return
        if data[:1] != b"\xee" and self.same_slab(slab, generation):
            self.spoilt.add(generation)

    def same_slab(self, slab: Memory, generation: Generation) -> bool:
        """Whether the copy is still in the slab that the program opened."""
        into = bytearray(1)
        replica = self.core.table.replicas[generation]
        copy = replica.copy(Tier.DEVICE)
        assert copy is not None
        assert self.process is not None
        theirs = self.process.slabs._slabs[copy.segment]
        self.process.device.copy(into, theirs.range(0, 1)).wait()
        return into == b"\xee"

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def let_go(self, pick: int) -> None:
        slab, tag, _ = self.held.pop(pick % len(self.held) if pick >= 0 else pick)
        self.program.close(slab)
        os.close(tag)

    # -------------------------------------------------------------- always
    @invariant()
    def the_table_is_consistent(self) -> None:
        self.core.table.check()
        for tier, stock in self.core.table.tiers.items():
            if tier is not Tier.DEVICE or self.process is not None:
                assert stock.held_bytes <= stock.row.capacity_bytes, tier

    @invariant()
    def what_is_in_host_memory_is_what_was_put(self) -> None:
        for generation, data in self.bytes.items():
            if self.life(generation, Tier.HOST) is Life.COMMITTED:
                with self.core.reading(generation, Tier.HOST) as held:
                    assert bytes(held.view()) == data

    @invariant()
    def no_replica_is_lost_but_by_the_end_of_the_device(self) -> None:
        self.sweep()
        for generation in self.bytes:
            replica = self.core.table.replicas.get(generation)
            assert replica is not None
            assert replica.committed

    def sweep(self) -> None:
        """What a program has spoilt may have been found out, and given up."""
        for generation in list(self.spoilt):
            self.forget(generation)


@pytest.fixture(scope="module", autouse=True)
def _home() -> Iterator[None]:
    """The device stays open, so that each history begins at once."""
    TierMachine.run_dir = tempfile.mkdtemp(prefix="tc-", dir="/tmp")
    (device,) = find(SPEC, TierMachine.run_dir)
    home = EmulatedDriver(device, SPEC.nbytes, TierMachine.run_dir)
    yield
    home.close(None)
    shutil.rmtree(TierMachine.run_dir, ignore_errors=True)


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(
    max_examples=max(200, settings().max_examples),
    stateful_step_count=12,
    deadline=None,
)


def test_every_place_of_a_ring_has_room_for_a_whole_chunk() -> None:
    machine = TierMachine()
    nbytes = 2 * PAGE + 24
    data, index = content(nbytes), index_of(nbytes)
    wanted = Wanted(
        generation=Generation(1),
        id=ArtifactId("a"),
        version=Version(1),
        nbytes=nbytes,
        tier=Tier.DEVICE,
        owner=0,
        deadline_s=now_s() + WITHIN_S,
        labels={},
    )
    target = DeviceTarget(machine.core, machine.devices, wanted)
    target.reserve(index=index, chunk_bytes=PAGE, until_s=now_s() + WITHIN_S)
    for chunk in (2, 0, 1):  # each in a place of its own
        piece = data[chunk * PAGE : (chunk + 1) * PAGE]
        target.place(chunk, len(piece))[:] = piece
    for chunk in (0, 2, 1):
        target.settle(chunk)
    machine.core.commit(wanted.generation, Tier.DEVICE, index=index, index_digest="d")
    target.close()
    machine.bytes[wanted.generation] = data
    machine.open(0, share=False)  # and compares
    machine.teardown()
