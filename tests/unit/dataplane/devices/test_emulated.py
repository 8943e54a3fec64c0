"""Emulated devices: the contract, and what CUDA leaves open."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorcast_dask.dataplane import faults
from tensorcast_dask.dataplane.devices import Device, SlabHandle, find_devices
from tensorcast_dask.dataplane.devices.emulated import EmulatedDriver
from tensorcast_dask.dataplane.devices.registry import open_device
from tensorcast_dask.exceptions import (
    CapacityError,
    DeviceError,
    InvalidArgument,
    Mismatch,
    OwnerGone,
    UnsupportedPlatform,
)
from tensorcast_dask.tensors.devices import DeviceSpec, parse_devices
from tests.kit.contracts_device import DeviceContract
from tests.kit.eventually import eventually
from tests.kit.leaks import no_leaks

MIB = 1 << 20
SPEC = parse_devices("emulated:2x32MiB")


def helper(device: Device) -> int:
    driver = device._driver
    assert isinstance(driver, EmulatedDriver)
    return driver.helper_pid


class TestEmulated(DeviceContract):
    setting = "emulated:2x32MiB"
    name = "emulated:1"

    def test_the_room_is_shared_by_all_processes(
        self, device: Device, shared_peer
    ) -> None:
        memory = device.allocate(31 * MIB)
        with pytest.raises(CapacityError, match="evict"):
            shared_peer.ask("allocate", "00" * (MIB + 1))
        device.free(memory)
        shared_peer.ask("free", shared_peer.ask("allocate", "00" * (MIB + 1)))

    def test_a_freed_slab_stays_for_who_has_it_open(
        self, device: Device, shared_peer
    ) -> None:
        free = device.list().free_bytes
        memory = self.filled(device, b"kept for you")
        handle = device.export(memory)
        number = shared_peer.ask("open", handle.encode().hex())
        device.free(memory)
        assert device.list().free_bytes == free - 12
        assert bytes.fromhex(shared_peer.ask("read", number)) == b"kept for you"
        shared_peer.ask("close", number)
        assert device.list().free_bytes == free
        with pytest.raises(OwnerGone):
            shared_peer.ask("open", handle.encode().hex())

    def test_the_slabs_of_a_killed_owner_are_revoked(
        self, home: Device, device: Device, spec: DeviceSpec, run_dir: str
    ) -> None:
        free = device.list().free_bytes
        with self.another(spec, run_dir) as other:
            number = other.ask("allocate", b"lost".hex())
            memory = device.open(
                SlabHandle.decode(bytes.fromhex(other.ask("export", number)))
            )
            assert self.bytes_of(device, memory.range()) == b"lost"
            other.kill()
        self.comes_back(device, free)
        for target, source in (
            (bytearray(4), memory.range()),
            (memory.range(), b"late"),
        ):
            with pytest.raises(OwnerGone, match="another replica"):
                device.copy(target, source).wait()
        device.close(memory)
        assert device.list().in_flight == 0  # the device goes on

    def test_threads_open_and_close_one_slab(self, device: Device, shared_peer) -> None:
        number = shared_peer.ask("allocate", b"shared".hex())
        handle = SlabHandle.decode(bytes.fromhex(shared_peer.ask("export", number)))
        wrong: list[bytes] = []

        def work() -> None:
            for _ in range(50):
                memory = device.open(handle)
                data = self.bytes_of(device, memory.range())
                if data != b"shared":
                    wrong.append(data)
                device.close(memory)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert device.list().opened_bytes == 0
        free = device.list().free_bytes
        shared_peer.ask("free", number)
        assert device.list().free_bytes == free + 6

    def test_new_memory_is_full_of_junk(self, device: Device) -> None:
        memory = device.allocate(100)
        assert self.bytes_of(device, memory.range()) == b"\xaa" * 100

    def test_an_array_is_of_no_use_to_host_code(self, device: Device) -> None:
        import numpy as np

        array = device.wrap(self.filled(device, b"data").range())
        uses: tuple[Any, ...] = (bytes, list, np.asarray, len, memoryview)
        for use in uses:
            with pytest.raises(TypeError):
                use(array)

    def test_another_budget_is_refused(self, home: Device, run_dir: str) -> None:
        with pytest.raises(Mismatch, match=r"tensorcast\.device"):
            open_device("emulated:1", parse_devices("emulated:2x1MiB"), run_dir)


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    folder = tmp_path / "r"
    folder.mkdir(mode=0o700)
    return str(folder)


def test_devices_have_names_that_stay(run_dir: str) -> None:
    found = find_devices(SPEC, run_dir)
    assert [str(device) for device in found] == ["emulated:0", "emulated:1"]
    assert found[0] != found[1]
    assert found == find_devices(SPEC, run_dir)


@pytest.mark.parametrize(
    ("name", "setting", "error"),
    [
        ("emulated:0", None, UnsupportedPlatform),
        ("cuda:0", "emulated:1x1MiB", UnsupportedPlatform),
        ("emulated:7", "emulated:1x1MiB", DeviceError),
        ("EMU-of-nobody", "emulated:1x1MiB", DeviceError),
        ("disk", "emulated:1x1MiB", InvalidArgument),
    ],
)
def test_a_device_that_is_not_there_is_named(
    run_dir: str, name: str, setting: str | None, error: type[Exception]
) -> None:
    with pytest.raises(error, match=name):
        open_device(name, parse_devices(setting), run_dir)


def test_a_device_opens_by_its_uuid_too(run_dir: str) -> None:
    wanted = find_devices(SPEC, run_dir)[1]
    with open_device(wanted.uuid, SPEC, run_dir) as device:
        assert device.id == wanted


def test_the_helper_ends_with_its_last_user(run_dir: str) -> None:
    with (
        no_leaks(threads=True),
        open_device("emulated:0", SPEC, run_dir) as one,
        open_device("emulated:0", SPEC, run_dir) as two,
    ):
        pid = helper(one)
        assert helper(two) == pid
        one.close()
        two.copy(two.allocate(10).range(), bytes(10)).wait()
    with open_device("emulated:0", SPEC, run_dir) as again:
        assert again.list().free_bytes == 32 * MIB


def test_the_end_of_the_helper_is_the_loss_of_the_device(run_dir: str) -> None:
    with open_device("emulated:0", SPEC, run_dir) as device:
        memory = device.allocate(10)
        known = device.copy(memory.range(), bytes(10))
        known.wait()
        os.kill(helper(device), signal.SIGKILL)

        def lost() -> bool:
            try:
                device.copy(memory.range(), bytes(10)).wait()
            except DeviceError:
                return True
            return False

        eventually(lost, within_s=10)
        for verb in (
            device.list,
            device.event,
            lambda: device.allocate(1),
            lambda: device.free(memory),
            lambda: device.export(memory),
        ):
            with pytest.raises(DeviceError, match="failed earlier"):
                verb()
        assert known.done()
    with open_device("emulated:0", SPEC, run_dir) as again:  # as after a reset
        assert again.list().free_bytes == 32 * MIB


class Schedule:
    """Which stream goes next, as the test says."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def __call__(self, ready: tuple[int, ...]) -> int:
        return self.order.pop(0) if self.order else ready[0]


@pytest.fixture
def scheduled(run_dir: str) -> Iterator[tuple[Device, Schedule]]:
    schedule = Schedule()
    driver = EmulatedDriver(
        find_devices(SPEC, run_dir)[0], SPEC.nbytes, run_dir, scheduler=schedule
    )
    with Device(driver) as device:
        yield device, schedule


def test_a_source_that_is_changed_early_shows(
    scheduled: tuple[Device, Schedule],
) -> None:
    device, _ = scheduled
    memory, source, into = device.allocate(5), bytearray(b"right"), bytearray(5)
    event = device.copy(memory.range(), source)
    assert not event.done()
    source[:] = b"wrong"
    event.wait()
    device.copy(into, memory.range()).wait()
    assert into == b"wrong"


def test_streams_run_in_any_order(scheduled: tuple[Device, Schedule]) -> None:
    device, schedule = scheduled
    memory, into = device.allocate(5), bytearray(5)
    device.copy(memory.range(), b"first", stream=1)
    last = device.copy(memory.range(), b"later", stream=2)
    schedule.order = [2, 1]
    device.event(0, after=[device.event(1), last]).wait()
    device.copy(into, memory.range()).wait()
    assert into == b"first"


def test_buffers_are_held_until_the_copy_is_done(
    scheduled: tuple[Device, Schedule],
) -> None:
    device, _ = scheduled
    memory, source = device.allocate(5), bytearray(b"right")
    event = device.copy(memory.range(), source)
    assert device.list().in_flight == 1
    with pytest.raises(BufferError):
        source.append(0)
    event.wait()
    source.append(0)
    assert device.list().in_flight == 0


def test_freeing_waits_for_the_copies(scheduled: tuple[Device, Schedule]) -> None:
    device, _ = scheduled
    memory = device.allocate(5)
    into = bytearray(5)
    device.copy(memory.range(), b"bytes")
    read = device.copy(into, memory.range())
    device.free(memory)
    assert read.done()
    assert into == b"bytes"


def test_closing_drops_what_has_not_run(scheduled: tuple[Device, Schedule]) -> None:
    device, _ = scheduled
    memory, source = device.allocate(5), bytearray(b"right")
    device.copy(memory.range(), source)
    device.close()
    source.append(0)


def test_a_failed_copy_ends_all_that_waits(scheduled: tuple[Device, Schedule]) -> None:
    device, _ = scheduled
    memory, buffer = device.allocate(10), bytearray(10)
    with faults.armed("device.copy=raise:DeviceError@2"):
        events = [device.copy(buffer, memory.range(), stream=n % 2) for n in range(4)]
        events[0].wait()
        for event in events[1:]:
            with pytest.raises(DeviceError):
                event.wait()
    with pytest.raises(DeviceError, match="failed earlier"):
        device.copy(buffer, memory.range())
    assert events[0].done()
    del buffer[:]  # nothing holds it
