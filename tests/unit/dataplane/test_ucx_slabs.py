"""A line between two devices: both ends in one process, with an emulated device each."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator

import pytest

from tensorcast_dask.dataplane.devices import Device, DeviceRange, open_device
from tensorcast_dask.dataplane.memory import sums_of
from tensorcast_dask.device.lines import Lines
from tensorcast_dask.exceptions import PeerLost, TensorCastError
from tensorcast_dask.tensors.checksums import decode_sums, encode_sums
from tensorcast_dask.tensors.devices import parse_devices
from tensorcast_dask.tensors.ids import Generation
from tensorcast_dask.tensors.messages import Act, DeviceOrder, OrderEnded
from tests.kit.contracts import noise
from tests.kit.eventually import eventually
from tests.kit.leaks import Footprint
from tests.kit.ucx_holders import NO_UCX

pytestmark = pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX)

CHUNK = 64 << 10
DATA = noise(3 * CHUNK + 5)
SUMS = list(sums_of(DATA, CHUNK, threads=1))


@pytest.fixture(scope="module")
def devices() -> Iterator[list[Device]]:
    run_dir = tempfile.mkdtemp(prefix="tc-", dir="/tmp")
    spec = parse_devices("emulated:2x8MiB")
    made = [open_device(f"emulated:{n}", spec, run_dir) for n in range(2)]
    yield made
    for device in made:
        device.close()
    shutil.rmtree(run_dir, ignore_errors=True)


class Pair:
    """A holder with a slab, and a reader with room for it."""

    def __init__(self, devices: list[Device], sums: list[int]) -> None:
        self.ended: dict[int, OrderEnded] = {}
        self.changed = threading.Condition()
        self.slabs = [device.allocate(len(DATA)) for device in devices]
        devices[0].copy(self.slabs[0].range(), DATA).wait()
        self.devices, self.sums = devices, sums
        self.ends = [Lines(device, self.told) for device in devices]
        self.sockets = socket.socketpair()
        send = self.order(1, Act.SEND, nbytes=len(DATA), sums=encode_sums(sums))
        self.ends[0].begin(send, self.slabs[0].range(), self.sockets[0].detach())

    def told(self, ended: OrderEnded) -> None:
        with self.changed:
            self.ended[ended.number] = ended
            self.changed.notify_all()

    def order(self, number: int, act: Act, **more: object) -> DeviceOrder:
        return DeviceOrder(
            number=number,
            act=act,
            line=7,
            generation=Generation(5),
            chunk_bytes=CHUNK,
            stall_s=20.0,
            **more,  # type: ignore[arg-type]
        )

    def place(self, chunk: int) -> DeviceRange:
        start = chunk * CHUNK
        return self.slabs[1].range(start, min(CHUNK, len(DATA) - start))

    def fetch(self, chunk: int) -> OrderEnded:
        """Have a chunk received; how that ended."""
        number, place = 100 + chunk, self.place(chunk)
        order = self.order(
            number, Act.RECEIVE, at=chunk * CHUNK, nbytes=place.nbytes, any_lane=True
        )
        fd = self.sockets[1].detach() if self.sockets[1].fileno() >= 0 else -1
        self.ends[1].begin(order, place, fd)
        return self.outcome(number)

    def outcome(self, number: int) -> OrderEnded:
        with self.changed:
            assert self.changed.wait_for(lambda: number in self.ended, 60)
        return self.ended[number]

    def close(self) -> None:
        self.ends[1].hang_up(7)
        self.outcome(1)
        for device, slab in zip(self.devices, self.slabs, strict=True):
            device.free(slab)


def test_every_chunk_comes_as_it_is_and_a_line_leaves_nothing(
    devices: list[Device],
) -> None:
    for _ in range(2):  # the first one loads UCX
        before = Footprint.now()
        pair = Pair(devices, SUMS)
        for chunk in (2, 0, 3, 1):
            ended = pair.fetch(chunk)
            assert ended.fault is None
            nbytes = pair.place(chunk).nbytes
            sums = decode_sums(ended.sums, nbytes=nbytes, chunk_bytes=CHUNK)
            assert list(sums) == [SUMS[chunk]]
            assert ended.via.endswith(":device")
        found = bytearray(len(DATA))
        devices[1].copy(found, pair.slabs[1].range()).wait()
        assert found == DATA
        pair.close()
        assert pair.outcome(1).fault is None
    eventually(lambda: not Footprint.now().since(before, threads=True), within_s=20)
    assert all(device.list().pinned_bytes == 0 for device in devices)


def error_of(ended: OrderEnded) -> TensorCastError:
    assert ended.fault is not None
    return ended.fault.error()


def test_bytes_that_are_not_what_the_holder_told_end_the_line(
    devices: list[Device],
) -> None:
    pair = Pair(devices, [SUMS[0], SUMS[1] ^ 1, *SUMS[2:]])
    assert pair.fetch(0).fault is None
    error = error_of(pair.fetch(1))
    assert isinstance(error, PeerLost)
    assert "damaged" in error.message
    with pytest.raises(PeerLost, match="has ended"):
        eventually(lambda: pair.fetch(2) is None, within_s=20)
    pair.close()


def test_a_line_that_was_hung_up_takes_no_more_orders(devices: list[Device]) -> None:
    pair = Pair(devices, SUMS)
    assert pair.fetch(0).fault is None
    pair.ends[1].hang_up(7)
    with pytest.raises(PeerLost, match="has ended"):
        eventually(lambda: pair.fetch(1) is None, within_s=20)
    pair.close()
