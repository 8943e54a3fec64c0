"""What every kind of device must do, as a class to subclass.

Rules:

1. A subclass names its kind; where the machine lacks it, all is skipped with the reason.
2. Only what CUDA promises is asked here. What an emulated device does where CUDA promises
   nothing is tested with the emulated device.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import pytest

from tensorcast_dask.dataplane.devices import (
    ArrayMemory,
    Device,
    DeviceRange,
    HostMemory,
    Memory,
    SlabHandle,
    open_device,
)
from tensorcast_dask.dataplane.devices.staging import Ring, Terms, to_device, to_host
from tensorcast_dask.dataplane.memory import sums_of
from tensorcast_dask.exceptions import (
    AlreadyExists,
    CapacityError,
    DeadlineExceeded,
    Gone,
    InvalidArgument,
    Mismatch,
    OwnerGone,
    Unimplemented,
    UnsupportedPlatform,
)
from tensorcast_dask.tensors.devices import DeviceSpec, parse_devices
from tests.kit.contracts import noise
from tests.kit.device_peer import Peer, peer
from tests.kit.eventually import eventually

__all__ = ["DeviceContract"]

SIZES = [1, 63, 4097, (3 << 20) + 5]


class DeviceContract:
    """One kind of device."""

    setting: ClassVar[str]
    name: ClassVar[str]
    #: False where the library has no handles that another process can open.
    exports: ClassVar[bool] = True
    #: What contexts of others may take meanwhile.
    slack_bytes: ClassVar[int] = 0

    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls) -> DeviceSpec:
        return parse_devices(cls.setting)

    @pytest.fixture(scope="class")
    @classmethod
    def run_dir(cls) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="tc-") as folder:
            yield folder

    @pytest.fixture(scope="class")
    @classmethod
    def home(cls, spec: DeviceSpec, run_dir: str) -> Iterator[Device]:
        """Open for all tests of the class, so that opening it again is quick."""
        try:
            device = open_device(cls.name, spec, run_dir)
        except UnsupportedPlatform as error:
            pytest.skip(str(error))
        with device:
            yield device

    @pytest.fixture
    def device(self, home: Device, spec: DeviceSpec, run_dir: str) -> Iterator[Device]:
        with open_device(self.name, spec, run_dir) as device:
            yield device

    @pytest.fixture(scope="class")
    @classmethod
    def shared_peer(cls, spec: DeviceSpec, run_dir: str) -> Iterator[Peer]:
        with cls.another(spec, run_dir) as found:
            yield found

    @classmethod
    def another(cls, spec: DeviceSpec, run_dir: str) -> AbstractContextManager[Peer]:
        """A process of the test's own that has the device open, to be killed."""
        if not cls.exports:
            pytest.skip("this library has no handles for other processes")
        return peer(cls.name, spec, run_dir)

    def filled(self, device: Device, data: bytes) -> Memory:
        memory = device.allocate(len(data))
        device.copy(memory.range(), data).wait()
        return memory

    def bytes_of(self, device: Device, place: DeviceRange) -> bytes:
        into = bytearray(place.nbytes)
        device.copy(into, place).wait()
        return bytes(into)

    # -------------------------------------------------------------- copies
    @pytest.mark.parametrize("nbytes", SIZES)
    def test_bytes_come_back_as_they_went(self, device: Device, nbytes: int) -> None:
        data = noise(nbytes)
        memory = self.filled(device, data)
        assert self.bytes_of(device, memory.range()) == data
        device.free(memory)

    def test_ranges_are_copied_and_nothing_beside_them(self, device: Device) -> None:
        memory = self.filled(device, bytes(1000))
        device.copy(memory.range(10, 5), b"inner").wait()
        device.copy(memory.range(995), b"right").wait()
        device.copy(memory.range(500, 5), memory.range(10, 5)).wait()
        expected = bytearray(1000)
        expected[10:15] = expected[500:505] = b"inner"
        expected[995:] = b"right"
        assert self.bytes_of(device, memory.range()) == expected

    def test_nothing_is_copied_too(self, device: Device) -> None:
        memory = self.filled(device, b"kept")
        device.copy(memory.range(4), b"").wait()
        device.copy(bytearray(), memory.range(0, 0)).wait()
        assert self.bytes_of(device, memory.range()) == b"kept"

    @pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 11), (11, 0), (4, -1)])
    def test_a_range_outside_is_refused(
        self, device: Device, offset: int, nbytes: int
    ) -> None:
        memory = device.allocate(10)
        with pytest.raises(InvalidArgument, match="outside"):
            memory.range(offset, nbytes)

    def test_sides_that_cannot_be_copied_are_refused(self, device: Device) -> None:
        memory = self.filled(device, b"kept")
        for target, source in (
            (memory.range(), b"longer"),
            (b"read", memory.range()),
            (memory.range(), "text"),
            (memory.range(), memoryview(bytes(8))[::2]),
        ):
            with pytest.raises(InvalidArgument):
                device.copy(target, source)
        assert self.bytes_of(device, memory.range()) == b"kept"
        assert device.list().in_flight == 0

    def test_copies_of_one_stream_run_in_order(self, device: Device) -> None:
        memory, into = device.allocate(1 << 20), bytearray(1 << 20)
        for fill in range(8):
            device.copy(memory.range(), bytes([fill]) * (1 << 20), stream=1)
        device.copy(into, memory.range(), stream=1).wait()
        assert into == bytes([7]) * (1 << 20)

    def test_a_stream_follows_an_event_of_another(self, device: Device) -> None:
        first, second = device.allocate(1 << 20), device.allocate(1 << 20)
        data, into = noise(1 << 20), bytearray(1 << 20)
        written = device.copy(first.range(), data, stream=1)
        moved = device.copy(second.range(), first.range(), stream=2, after=[written])
        device.copy(into, second.range(), stream=3, after=[moved]).wait()
        assert into == data

    def test_an_event_is_done_after_all_before_it(self, device: Device) -> None:
        memory, into = self.filled(device, noise(1 << 20)), bytearray(1 << 20)
        copied = device.copy(into, memory.range(), stream=5)
        mark = device.event(6, after=[device.event(5)])
        mark.wait()
        assert copied.done()
        assert mark.done()
        assert into == noise(1 << 20)

    def test_waiting_ends_with_its_time(self, device: Device) -> None:
        memory = device.allocate(8 << 20)
        event = device.copy(memory.range(), bytes(8 << 20))
        try:
            event.wait(0)
        except DeadlineExceeded:
            event.wait(60)
        assert event.done()

    def test_threads_copy_side_by_side(self, device: Device) -> None:
        memory, size = device.allocate(8 * 4096), 4096
        wrong: list[int] = []

        def work(number: int) -> None:
            place = memory.range(number * size, size)
            for turn in range(20):
                data = noise(size, seed=100 * number + turn)
                device.copy(place, data, stream=number % 3).wait()
                if self.bytes_of(device, place) != data:
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    # -------------------------------------------------------------- memory
    def test_memory_is_counted_and_comes_back(self, device: Device) -> None:
        before = device.list()
        memory = device.allocate(1 << 20)
        during = device.list()
        assert during.owned_bytes == 1 << 20
        assert during.free_bytes <= before.free_bytes
        device.free(memory)
        assert device.list().owned_bytes == before.owned_bytes == 0
        self.comes_back(device, before.free_bytes)

    def test_no_room_is_typed_and_the_device_goes_on(self, device: Device) -> None:
        with pytest.raises(CapacityError):
            device.allocate(2 * device.list().total_bytes)
        memory = self.filled(device, b"goes on")
        assert self.bytes_of(device, memory.range()) == b"goes on"

    @pytest.mark.parametrize("nbytes", [0, -1])
    def test_a_slab_of_nothing_is_refused(self, device: Device, nbytes: int) -> None:
        with pytest.raises(InvalidArgument, match="at least 1"):
            device.allocate(nbytes)

    def test_what_was_freed_cannot_be_used(self, device: Device) -> None:
        memory = self.filled(device, b"data")
        place = memory.range()
        device.free(memory)
        for verb in (
            lambda: device.free(memory),
            lambda: device.export(memory),
            lambda: device.wrap(place),
            lambda: device.copy(place, b"late"),
            lambda: device.copy(bytearray(4), place),
            lambda: device.close(memory),
        ):
            with pytest.raises(Gone):
                verb()

    def test_memory_of_another_opening_is_refused(
        self, home: Device, device: Device
    ) -> None:
        memory = self.filled(home, b"data")
        try:
            with pytest.raises(Mismatch):
                device.copy(bytearray(4), memory.range())
            with pytest.raises(InvalidArgument, match="another device"):
                device.event(after=[home.event()])
        finally:
            home.free(memory)

    def test_host_memory_is_pinned_once(self, device: Device) -> None:
        buffer = bytearray(noise(1 << 20))
        pinned = device.open(HostMemory(buffer))
        with pytest.raises(AlreadyExists):
            device.open(HostMemory(memoryview(buffer)[4096:8192]))
        assert device.list().pinned_bytes == 1 << 20
        memory = device.allocate(1 << 20)
        device.copy(memory.range(), buffer).wait()
        assert self.bytes_of(device, memory.range()) == buffer
        device.copy(pinned.range(0, 16), memory.range(16, 16)).wait()
        assert buffer[:16] == buffer[16:32]
        device.close(pinned)
        assert device.list().pinned_bytes == 0
        with pytest.raises(Gone):
            device.close(pinned)
        device.close(device.open(HostMemory(buffer)))
        buffer.append(0)  # nothing holds it any more

    def test_host_memory_that_cannot_be_pinned_is_refused(self, device: Device) -> None:
        for buffer in (b"read only", bytearray()):
            with pytest.raises((InvalidArgument, BufferError)):
                device.open(HostMemory(buffer))

    def test_a_wrapped_range_is_as_long_as_told(self, device: Device) -> None:
        memory = self.filled(device, noise(1000))
        array = device.wrap(memory.range(8, 100))
        assert getattr(array, "nbytes", None) == 100

    def test_memory_of_an_array_is_used_as_it_lies(self, device: Device) -> None:
        data = noise(8192)
        array: Any = device.wrap(self.filled(device, data).range(100, 1000))
        facts = getattr(array, "__cuda_array_interface__", None)
        address = array.address if facts is None else facts["data"][0]
        memory = device.open(ArrayMemory(address, 1000, array))
        assert self.bytes_of(device, memory.range(10, 5)) == data[110:115]
        if self.exports:
            handle = device.export(memory)
            assert handle.offset == 100
            assert handle.nbytes >= len(data)
            assert device.exported(handle) is memory
        device.close(memory)
        with pytest.raises(Gone):
            self.bytes_of(device, memory.range())

    def test_a_closed_device_says_so(self, device: Device) -> None:
        memory = self.filled(device, b"data")
        device.close()
        device.close()
        for verb in (
            device.list,
            device.event,
            lambda: device.allocate(1),
            lambda: device.copy(memory.range(), b"late"),
        ):
            with pytest.raises(Gone, match="closed"):
                verb()

    def test_closing_gives_everything_back(self, home: Device, device: Device) -> None:
        free = home.list().free_bytes
        device.allocate(1 << 20)
        device.close()
        self.comes_back(home, free)

    def test_the_staging_ring_moves_both_ways(self, device: Device) -> None:
        data, into = noise((3 << 20) + 5), bytearray((3 << 20) + 5)
        place = device.allocate(len(data)).range()
        terms = Terms(chunk_bytes=1 << 20, stream=4)
        with Ring(device, piece_bytes=256 << 10) as ring:
            there = list(to_device(ring, data, place, terms))
            back = list(to_host(ring, place, into, terms))
        assert [moved.sum for moved in there] == sums_of(data, 1 << 20)
        assert there == back
        assert into == data

    # -------------------------------------------------------------- processes
    def test_a_handle_is_bytes(self, device: Device) -> None:
        memory = device.allocate(100)
        if not self.exports:
            with pytest.raises(Unimplemented, match="cupy"):
                device.export(memory)
            return
        handle = device.export(memory)
        assert SlabHandle.decode(handle.encode()) == handle
        assert handle.nbytes == 100
        assert handle.device == device.id.uuid
        with pytest.raises(InvalidArgument):
            SlabHandle.decode(handle.encode()[:-1])

    def test_a_handle_does_not_open_where_it_was_exported(
        self, device: Device, shared_peer: Peer
    ) -> None:
        handle = device.export(device.allocate(100))
        with pytest.raises(Mismatch, match="exported"):
            device.open(handle)

    def test_handles_of_nothing_are_refused(
        self, device: Device, shared_peer: Peer
    ) -> None:
        number = shared_peer.ask("allocate", "00")
        true = SlabHandle.decode(bytes.fromhex(shared_peer.ask("export", number)))
        for name, data in (
            ("GPU-of-nobody", true.data),
            (true.device, b"\x01" * len(true.data)),
        ):
            handle = SlabHandle(
                device=name, exporter=true.exporter, nbytes=1, data=data
            )
            with pytest.raises((Mismatch, OwnerGone, InvalidArgument)):
                device.open(handle)
        shared_peer.ask("free", number)
        assert device.list().opened_bytes == 0

    def test_another_process_sees_the_whole_slab_and_can_write(
        self, device: Device, shared_peer: Peer
    ) -> None:
        data = noise(5000)
        memory = self.filled(device, data)
        handle = device.export(memory).encode().hex()
        number = shared_peer.ask("open", handle)
        assert shared_peer.ask("open", handle) == number
        assert bytes.fromhex(shared_peer.ask("read", number)) == data
        shared_peer.ask("write", number, 4990, b"from there".hex())
        assert self.bytes_of(device, memory.range(4990)) == b"from there"
        shared_peer.ask("close", number)
        assert bytes.fromhex(shared_peer.ask("read", number))[:4990] == data[:4990]
        shared_peer.ask("close", number)
        with pytest.raises(Gone):
            shared_peer.ask("read", number)
        device.free(memory)

    def test_what_was_opened_is_neither_freed_nor_exported(
        self, device: Device, shared_peer: Peer
    ) -> None:
        number = shared_peer.ask("allocate", noise(64).hex())
        handle = SlabHandle.decode(bytes.fromhex(shared_peer.ask("export", number)))
        memory = device.open(handle)
        for verb in (device.free, device.export):
            with pytest.raises(InvalidArgument):
                verb(memory)
        assert self.bytes_of(device, memory.range()) == noise(64)
        assert device.list().opened_bytes == 64
        device.close(memory)
        shared_peer.ask("free", number)

    def test_a_killed_opener_lets_go(
        self, home: Device, device: Device, spec: DeviceSpec, run_dir: str
    ) -> None:
        free = device.list().free_bytes
        memory = self.filled(device, noise(1 << 20))
        with self.another(spec, run_dir) as other:
            number = other.ask("open", device.export(memory).encode().hex())
            assert bytes.fromhex(other.ask("read", number)) == noise(1 << 20)
            other.kill()
        assert self.bytes_of(device, memory.range()) == noise(1 << 20)
        device.free(memory)
        self.comes_back(device, free)

    def test_a_killed_owner_gives_its_memory_back(
        self, home: Device, device: Device, spec: DeviceSpec, run_dir: str
    ) -> None:
        free = device.list().free_bytes
        with self.another(spec, run_dir) as other:
            other.ask("allocate", noise(1 << 20).hex())
            other.kill()
        self.comes_back(device, free)

    def comes_back(self, device: Device, free: int) -> None:
        least = free - self.slack_bytes
        eventually(lambda: device.list().free_bytes >= least, within_s=20)

    def test_a_forked_child_is_told_to_use_spawn(
        self, home: Device, spec: DeviceSpec, run_dir: str
    ) -> None:
        with self.another(spec, run_dir) as other:
            number = other.ask("allocate", b"of the parent".hex())
            assert other.ask("fork") == ["UnsupportedPlatform"] * 9
            assert bytes.fromhex(other.ask("read", number)) == b"of the parent"
