"""The scheme `cuda_ipc`: holder and reader have one emulated device, as two processes would."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import pytest

from tensorcast_dask.dataplane import arrays
from tensorcast_dask.dataplane.arrays import DeviceTensor, LentSlabs
from tensorcast_dask.dataplane.devices import (
    ArrayMemory,
    Device,
    Holding,
    Memory,
    find_devices,
    open_device,
)
from tensorcast_dask.dataplane.devices.emulated import open_driver
from tensorcast_dask.dataplane.server import Peer, Reply
from tensorcast_dask.dataplane.transports.base import Context
from tensorcast_dask.dataplane.transports.cuda_ipc import IpcSource, open_ipc
from tensorcast_dask.exceptions import (
    Incomplete,
    InvalidArgument,
    PeerLost,
    UnsupportedPlatform,
    WrongPeer,
)
from tensorcast_dask.tensors.devices import parse_devices
from tensorcast_dask.tensors.dtypes import DTYPES
from tensorcast_dask.tensors.messages import Location, Open, Opened, StoreRequest
from tests.kit.contracts_transport import TransportContract, pattern
from tests.kit.holders import GENERATION, Holder, Served, serve

if TYPE_CHECKING:
    from tensorcast_dask.dataplane.framing import Payload

SETTING = "emulated:1x16MiB"


@pytest.fixture(scope="module")
def run_dir() -> Iterator[str]:
    made = tempfile.mkdtemp(prefix="tc-", dir="/tmp")
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def reader(run_dir: str) -> Iterator[Device]:
    with open_device("emulated:0", parse_devices(SETTING), run_dir) as device:
        yield device


def another(run_dir: str, setting: str = SETTING) -> Device:
    """The device as another process has it open."""
    spec = parse_devices(setting)
    (found,) = find_devices(spec, run_dir)
    return Device(open_driver(found, spec, run_dir), process="another")


@pytest.fixture(scope="module", autouse=True)
def owner(run_dir: str) -> Iterator[Device]:
    with another(run_dir) as device:
        OnDevice.device = device
        yield device


class OnDevice(Holder):
    """Hands a slab out by its handle, or memory that somebody lends; the file is the tag."""

    device: ClassVar[Device]
    lent: ClassVar[LentSlabs | None] = None
    _memory: Memory | None = None

    def handle(self, request: StoreRequest, payload: Payload, peer: Peer) -> Reply:
        reply = super().handle(request, payload, peer)
        if not isinstance(request, Open):
            return reply
        assert isinstance(reply.message, Opened)
        if self.lent is None:
            opened = msgspec.structs.replace(reply.message, handle=self._slab())
            return Reply(message=opened, fds=reply.fds)
        for fd in reply.fds:
            os.close(fd)
        opened = msgspec.structs.replace(
            reply.message,
            mapped=False,
            slabs=self.lent.handles,
            spans=self.lent.spans,
            stamp=self._served.stamp,
        )
        return Reply(message=opened)

    def _slab(self) -> bytes:
        data = self._served.file.map_shared().view
        if self._memory is None:
            self._memory = self.device.allocate(max(1, len(data)))
        self.device.copy(self._memory.range(0, len(data)), data).wait()
        return self.device.export(self._memory).encode()


def ipc(
    served: Served, device: Device, *, location: Location | None = None
) -> IpcSource:
    context = Context(
        credentials=served.credentials,
        until_s=time.monotonic() + 10.0,
        device=device,
    )
    return open_ipc(location or served.location, GENERATION, context)


class TestCudaIpc(TransportContract):
    scheme = "cuda_ipc"
    checks_token = False
    outlives_holder = True
    holder: ClassVar[type[Holder]] = OnDevice

    @pytest.fixture(autouse=True)
    @classmethod
    def _device(cls, reader: Device) -> None:
        cls.device = reader


def test_a_slab_is_opened_once_and_closed_with_its_last_reader(reader: Device) -> None:
    with serve(pattern(1000), holder=OnDevice) as served:
        before = reader.list().opened_bytes
        with contextlib.closing(ipc(served, reader)) as source:
            first = source.slab()[1]
        with contextlib.closing(ipc(served, reader)) as source:
            second = source.slab()[1]
        assert first.shared
        assert first.memory is second.memory
        del source, first
        assert reader.list().opened_bytes == before + 1000
        into = bytearray(1000)
        reader.copy(into, second.memory.range(0, 1000)).wait()
        assert into == served.data
        del second
        assert reader.list().opened_bytes == before


def test_a_holder_of_another_host_and_a_missing_device_are_refused(
    reader: Device,
) -> None:
    with serve(b"x", holder=OnDevice) as served:
        with pytest.raises(PeerLost, match="another host"):
            ipc(served, reader, location=served.other_card(host="elsewhere"))
        with pytest.raises(InvalidArgument, match="device"):
            open_ipc(served.location, GENERATION, Context())


def library_arrays(
    device: Device, content: dict[str, np.typing.NDArray[Any]]
) -> dict[str, DeviceTensor]:
    """Tensors as an array library would make them: within one allocation of its own."""
    whole = device.allocate(1 << 20)
    made, at = {}, 4096
    for name, value in content.items():
        device.copy(whole.range(at, value.nbytes), value.tobytes()).wait()
        memory = device.open(ArrayMemory(whole.address + at, value.nbytes, whole))
        made[name] = DeviceTensor(
            Holding(device, memory),
            memory.range(),
            DTYPES[value.dtype.name],
            value.shape,
        )
        at += 4096 + value.nbytes
    return made


CONTENT = {"a": np.arange(5, dtype=np.int8), "b": np.arange(700.0).reshape(7, 100)}


@pytest.mark.parametrize("inside", [False, True])
def test_lent_memory_is_copied_from_where_it_lies_and_counts_by_its_stamp(
    owner: Device, reader: Device, monkeypatch: pytest.MonkeyPatch, *, inside: bool
) -> None:
    index, sources = arrays.canonical(library_arrays(owner, CONTENT))
    monkeypatch.setattr(OnDevice, "lent", arrays.lent_slabs(index, sources))
    device = owner if inside else reader
    with (
        serve(bytes(index.nbytes), holder=OnDevice) as served,
        contextlib.closing(ipc(served, device)) as source,
    ):
        memory = device.allocate(index.nbytes)
        source.read_ranges([(0, index.nbytes)], memory.range())
        found: dict[str, Any] = arrays.materialise_on(Holding(device, memory), index)
        for name, value in CONTENT.items():
            assert bytes(found[name].to_host()) == value.tobytes()
        with pytest.raises(WrongPeer, match="no slab"):
            source.slab()
        served.stamp += 2
        with pytest.raises(Incomplete, match="changed"):
            source.read_ranges([(0, 1)], bytearray(1))


def test_memory_of_a_pool_is_refused_by_its_setting_and_can_be_staged(
    run_dir: str,
) -> None:
    with another(run_dir, f"{SETTING}:pool") as device:
        index, sources = arrays.canonical(library_arrays(device, CONTENT))
        with pytest.raises(
            UnsupportedPlatform, match=r"take :pool off tensorcast\.device"
        ):
            arrays.lent_slabs(index, sources)
        staged = arrays.RangeReader(arrays.staged(sources, index), index)
        lying = arrays.RangeReader(sources, index)
        assert bytes(staged.read(0, index.nbytes)) == bytes(lying.read(0, index.nbytes))
        assert (
            bytes(lying.read(index.offsets[1] + 8, 16)) == CONTENT["b"].tobytes()[8:24]
        )
