"""Moves between the host and a device: bit for bit, verified, bounded, given up cleanly."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorcast_dask.dataplane import faults
from tensorcast_dask.dataplane.devices import Device, HostMemory, open_device
from tensorcast_dask.dataplane.devices.staging import (
    Moved,
    Ring,
    Terms,
    to_device,
    to_host,
)
from tensorcast_dask.dataplane.fileranges import FileRange
from tensorcast_dask.exceptions import (
    CapacityError,
    DeviceError,
    FileChanged,
    InvalidArgument,
    Mismatch,
)
from tensorcast_dask.tensors.checksums import chunk_sums
from tensorcast_dask.tensors.devices import parse_devices
from tests.kit.contracts import noise

SPEC = parse_devices("emulated:1x16MiB")
CHUNK, PIECE = 64 << 10, 16 << 10
TERMS = Terms(chunk_bytes=CHUNK)
SIZES = [0, 1, PIECE, CHUNK - 1, CHUNK, 5 * CHUNK + 77]


@pytest.fixture(scope="module")
def run_dir() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="tc-") as folder:
        yield folder


@pytest.fixture(scope="module")
def home(run_dir: str) -> Iterator[Device]:
    with open_device("emulated:0", SPEC, run_dir) as device:
        yield device


@pytest.fixture
def device(home: Device, run_dir: str) -> Iterator[Device]:
    with open_device("emulated:0", SPEC, run_dir) as device:
        yield device


@pytest.fixture
def ring(device: Device) -> Iterator[Ring]:
    with Ring(device, piece_bytes=PIECE) as ring:
        yield ring


def moves(data: bytes | bytearray) -> list[Moved]:
    """What a move of these bytes reports."""
    sums = chunk_sums(data, len(data), CHUNK)
    return [
        Moved(n, n * CHUNK, min(CHUNK, len(data) - n * CHUNK), s)
        for n, s in enumerate(sums)
    ]


def collect(into: list[Moved], move: Iterator[Moved]) -> None:
    """Keep what is reported, also when the move then fails."""
    for moved in move:
        into.append(moved)  # extend keeps nothing when it raises


@pytest.mark.parametrize("nbytes", SIZES)
def test_bytes_go_and_come_back_with_their_sums(ring: Ring, nbytes: int) -> None:
    data, into = noise(nbytes), bytearray(nbytes)
    memory = ring.device.allocate(nbytes + 100)
    place = memory.range(50, nbytes)
    assert list(to_device(ring, data, place, TERMS)) == moves(data)
    assert list(to_host(ring, place, into, TERMS)) == moves(data)
    assert into == data
    edges = bytearray(50)
    for at in (0, nbytes + 50):
        ring.device.copy(edges, memory.range(at, 50)).wait()
        assert edges == b"\xaa" * 50


@pytest.mark.parametrize("nbytes", SIZES)
def test_bytes_go_from_one_file_to_another(
    ring: Ring, nbytes: int, tmp_path: Path
) -> None:
    data = noise(nbytes)
    (tmp_path / "from").write_bytes(b"head" + data + b"tail")
    memory = ring.device.allocate(nbytes or 1)
    place = memory.range(0, nbytes)
    with (tmp_path / "from").open("rb") as file:
        source = FileRange(file.fileno(), 4, nbytes)
        assert list(to_device(ring, source, place, TERMS)) == moves(data)
    with (tmp_path / "to").open("wb") as file:
        target = FileRange(file.fileno(), 7, nbytes)
        assert list(to_host(ring, place, target, TERMS)) == moves(data)
    assert (tmp_path / "to").read_bytes() == (bytes(7) + data if data else b"")


def test_pinned_memory_is_not_copied_on_the_host(ring: Ring) -> None:
    data = bytearray(noise(5 * CHUNK + 77))
    into = bytearray(len(data))
    pins = [ring.device.open(HostMemory(buffer)) for buffer in (data, into)]
    place = ring.device.allocate(len(data)).range()
    terms = Terms(chunk_bytes=CHUNK, pinned=True)
    assert list(to_device(ring, data, place, terms)) == moves(data)
    assert list(to_host(ring, place, into, terms)) == moves(data)
    assert into == data
    for pin in pins:
        ring.device.close(pin)


@pytest.mark.parametrize("back", [False, True])
def test_a_damaged_chunk_is_not_reported(ring: Ring, back: bool) -> None:
    data = noise(4 * CHUNK)
    place = ring.device.allocate(len(data)).range()
    sums = [moved.sum for moved in moves(data)]
    damaged = bytearray(data)
    damaged[2 * CHUNK + 5] ^= 1
    terms = Terms(chunk_bytes=CHUNK, sums=sums)
    if back:
        ring.device.copy(place, damaged).wait()
        move = to_host(ring, place, bytearray(len(data)), terms)
    else:
        move = to_device(ring, damaged, place, terms)
    seen: list[Moved] = []
    with pytest.raises(Mismatch, match="chunk 2") as caught:
        collect(seen, move)
    assert caught.value.data["damaged"]
    assert seen == moves(data)[: len(seen)]
    assert len(seen) <= 2
    assert list(to_device(ring, data, place, terms)) == moves(data)


def test_no_chunk_is_reported_before_its_copies_are_done(ring: Ring) -> None:
    data = noise(3 * CHUNK)
    place = ring.device.allocate(len(data)).range()
    with contextlib.closing(to_device(ring, data, place, TERMS)) as move:
        for moved in move:
            # Another stream sees it at once: nothing of the chunk is still to come.
            part = place.memory.range(moved.offset, moved.nbytes)
            into = bytearray(moved.nbytes)
            ring.device.copy(into, part, stream=9).wait()
            assert into == data[moved.offset : moved.offset + moved.nbytes]


@pytest.mark.parametrize("back", [False, True])
def test_a_move_that_is_given_up_leaves_nothing_under_way(
    ring: Ring, back: bool
) -> None:
    data = bytearray(noise(8 * CHUNK))
    place = ring.device.allocate(len(data)).range()
    move = (
        to_host(ring, place, data, TERMS)
        if back
        else to_device(ring, data, place, TERMS)
    )
    with contextlib.closing(move):
        assert next(move).chunk == 0
        with pytest.raises(CapacityError, match="ring"):
            next(to_device(ring, bytes(1), place.memory.range(0, 1), TERMS))
    assert ring.device.list().in_flight == 0
    del move
    data.append(0)
    assert list(to_device(ring, data[:-1], place, TERMS)) == moves(data[:-1])


def test_a_device_that_fails_in_the_middle_is_typed(ring: Ring) -> None:
    data = bytearray(noise(4 * CHUNK))
    place = ring.device.allocate(len(data)).range()
    seen: list[Moved] = []
    with (
        faults.armed("device.copy=raise:DeviceError@7"),
        pytest.raises(DeviceError),
    ):
        collect(seen, to_device(ring, data, place, TERMS))
    assert seen == moves(data)[: len(seen)]
    assert len(seen) <= 1


def test_a_file_that_is_too_short_is_typed(ring: Ring, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(noise(CHUNK + 10))
    place = ring.device.allocate(2 * CHUNK).range()
    with (tmp_path / "short").open("rb") as file:
        move = to_device(ring, FileRange(file.fileno(), 0, 2 * CHUNK), place, TERMS)
        with pytest.raises(FileChanged, match=str(CHUNK + 10)):
            list(move)
    assert ring.device.list().in_flight == 0


def test_sides_of_two_lengths_and_odd_rings_are_refused(device: Device) -> None:
    for wrong in ({"buffers": 1}, {"buffers": 5}, {"piece_bytes": 1000}):
        with pytest.raises(InvalidArgument):
            Ring(device, **wrong)
    with Ring(device) as ring, pytest.raises(InvalidArgument, match="move between"):
        next(to_device(ring, b"12345", device.allocate(4).range()))


def test_a_ring_holds_its_buffers_and_no_more(device: Device) -> None:
    with Ring(device, buffers=4, piece_bytes=PIECE) as ring:
        assert device.list().pinned_bytes == 4 * PIECE
        ring.close()
    assert device.list().pinned_bytes == 0
