"""The device process: it holds a node's slabs, and does what its store orders.

Rules:

1. It opens the device itself, after its only start: nobody forks with a context.
2. One order after the other; what waits for another node has a thread (`lines`). An order is done
   when its events are: what the store is told has happened.
3. It closes every description that came with an order before it reports: the store sees by
   that that nobody writes any more.
4. An error of the device ends it: nothing can be done with the device in this process. It
   ends with its store's connection, and its slabs go with it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tensorcast_dask.dataplane.channel import Channel, Credentials, Prefer
from tensorcast_dask.dataplane.devices import (
    HostMemory,
    SlabHandle,
    find_devices,
    open_device,
)
from tensorcast_dask.dataplane.devices.staging import (
    Ring,
    Terms,
    sums_of_range,
    to_device,
    to_host,
)
from tensorcast_dask.dataplane.fileranges import FileRange
from tensorcast_dask.dataplane.maps import SharedMap
from tensorcast_dask.dataplane.transports import ucx_line
from tensorcast_dask.device.launch import LOG_NAME
from tensorcast_dask.device.lines import Lines
from tensorcast_dask.exceptions import (
    DeviceError,
    InvalidArgument,
    PeerLost,
    RequestError,
    TensorCastError,
)
from tensorcast_dask.tensors.checksums import decode_sums, encode_sums
from tensorcast_dask.tensors.devices import SLAB_SPAN, parse_devices
from tensorcast_dask.tensors.ids import RequestId
from tensorcast_dask.tensors.messages import (
    Act,
    AttachDevice,
    DeviceOrder,
    DeviceStart,
    DeviceTold,
    Done,
    Fault,
    NextOrder,
    OrderEnded,
    OrderOver,
    Role,
    decode,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tensorcast_dask.dataplane.devices import Device, DeviceRange, Event, Memory
    from tensorcast_dask.dataplane.devices.staging import Moved

__all__ = ["Slabs", "main"]

logger = logging.getLogger(__name__)

#: What cudaMalloc hands out: a handle of less would expose a neighbour too.
GRAIN_BYTES: Final = 2 << 20
_CALL_S: Final = 3600.0
_ATTACH_S: Final = 30.0
_ZEROS: Final = bytes(1 << 20)
_numbers = itertools.count(1)


class Slabs:
    """The memory of one device, under its store's orders.

    Parameters
    ----------
    device : Device
        Opened by this process.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ring = Ring(device)
        self._slabs: dict[int, Memory] = {}
        self._pinned: dict[int, tuple[SharedMap, Memory]] = {}

    @property
    def shares(self) -> bool:
        """Whether other processes can open its slabs; tried once."""
        slab = self._device.allocate(GRAIN_BYTES)
        try:
            self._device.export(slab)
        except RequestError:
            return False
        finally:
            self._device.free(slab)
        return True

    def carry_out(self, order: DeviceOrder, fd: int) -> OrderEnded:
        """Do one thing; `fd` is closed afterwards.

        Raises
        ------
        TensorCastError
            What went wrong; the order is over.
        """
        try:
            return self._do(order, fd)
        finally:
            if fd >= 0:
                os.close(fd)

    def _do(self, order: DeviceOrder, fd: int) -> OrderEnded:
        match order.act:
            case Act.ALLOCATE:
                slab = self._slabs[order.segment] = self._device.allocate(order.nbytes)
                return OrderEnded(number=order.number, handle=self._handle(slab))
            case Act.WAIT:
                pass
            case Act.FREE:
                if order.segment in self._slabs:
                    self._device.free(self._slabs.pop(order.segment))
            case Act.PIN:
                self._pin(order, fd)
            case Act.UNPIN:
                self._unpin(order.segment)
            case Act.FILL | Act.SAVE | Act.CHECK:
                return OrderEnded(number=order.number, sums=self._move(order, fd))
            case Act.COPY | Act.GATHER:
                self._of_others(order, fd)
            case Act.SEND | Act.RECEIVE | Act.HANG_UP:
                assert False, "device: lines carry these out"  # noqa: B011, PT015
        return OrderEnded(number=order.number)

    def place(self, order: DeviceOrder) -> DeviceRange:
        """Give the range of a slab that an order is about."""
        return self._slabs[order.segment].range(order.at, order.nbytes)

    def _of_others(self, order: DeviceOrder, fd: int) -> None:
        if order.act is Act.COPY:
            self._copy(order)
        else:
            self._gather(order, fd)

    def _copy(self, order: DeviceOrder) -> None:
        """Copy what others have on this device into a slab; what they leave out is zero."""
        there = self._slabs[order.segment]
        with self._opened(order) as (opened, copies):
            for start, number, offset, length in _spans(order):
                target = there.range(start, length)
                if number < 0:
                    source: DeviceRange | bytes = _ZEROS[:length]
                else:
                    memory, begin = opened[number]
                    source = memory.range(begin + offset, length)
                copies.append(self._device.copy(target, source))

    def _gather(self, order: DeviceOrder, fd: int) -> None:
        """Copy a range of what others have on this device to memory that is zero."""
        end = order.at + order.nbytes
        file = SharedMap(fd, order.nbytes, writable=True)
        try:
            with self._opened(order) as (opened, copies):
                for start, number, offset, length in SLAB_SPAN.iter_unpack(order.spans):
                    low, high = max(start, order.at), min(start + length, end)
                    if low >= high:
                        continue
                    memory, begin = opened[number]
                    source = memory.range(begin + offset + low - start, high - low)
                    target = file.view[low - order.at : high - order.at]
                    copies.append(self._device.copy(target, source))
                    del target
        finally:
            file.close()

    @contextlib.contextmanager
    def _opened(
        self, order: DeviceOrder
    ) -> Iterator[tuple[list[tuple[Memory, int]], list[Event]]]:
        """Open handles for a block; the copies that it asks for are done at its end."""
        opened: list[tuple[Memory, int]] = []
        copies: list[Event] = []
        try:
            for data in order.handles:
                handle = SlabHandle.decode(data)
                opened.append((self._device.open(handle), handle.offset))
            yield opened, copies
        finally:
            for event in copies:
                with contextlib.suppress(TensorCastError):
                    event.wait()
            for memory, _ in opened:
                with contextlib.suppress(TensorCastError):
                    self._device.close(memory)
        for event in copies:
            event.wait()

    def _handle(self, slab: Memory) -> bytes:
        with contextlib.suppress(RequestError):
            return self._device.export(slab).encode()
        return b""

    def _move(self, order: DeviceOrder, fd: int) -> bytes:
        if not order.nbytes:
            return b""
        there = self.place(order)
        terms = Terms(
            chunk_bytes=order.chunk_bytes,
            sums=decode_sums(
                order.sums, nbytes=order.nbytes, chunk_bytes=order.chunk_bytes
            )
            if order.sums
            else (),
        )
        if order.act is Act.SAVE:
            file = FileRange(fd, 0, order.nbytes)
            return _sums(to_host(self._ring, there, file, terms))
        if order.act is Act.CHECK:
            return encode_sums(sums_of_range(self._ring, there, terms))
        pinned = self._pinned.get(order.pinned)
        if pinned is None:
            file = FileRange(fd, 0, order.nbytes)
            return _sums(to_device(self._ring, file, there, terms))
        known = Terms(chunk_bytes=terms.chunk_bytes, sums=terms.sums, pinned=True)
        source = pinned[0].view[order.pinned_at : order.pinned_at + order.nbytes]
        return _sums(to_device(self._ring, source, there, known))

    def _pin(self, order: DeviceOrder, fd: int) -> None:
        shared = SharedMap(fd, order.nbytes, writable=True)
        try:
            memory = self._device.open(HostMemory(shared.view))
        except BaseException:
            shared.close()
            raise
        self._pinned[order.segment] = shared, memory

    def _unpin(self, segment: int) -> None:
        held = self._pinned.pop(segment, None)
        if held is not None:
            self._device.close(held[1])
            held[0].close()


def _sums(moved: Iterable[Moved]) -> bytes:
    return encode_sums([chunk.sum for chunk in moved])


def _spans(order: DeviceOrder) -> Iterator[tuple[int, int, int, int]]:
    """Give the spans of a copy, and between them what is to be zero (no handle: -1)."""
    at = 0
    spans = sorted(SLAB_SPAN.iter_unpack(order.spans))
    for start, number, offset, length in [*spans, (order.nbytes, -1, 0, 0)]:
        for gap in range(at, start, len(_ZEROS)):
            yield gap, -1, 0, min(len(_ZEROS), start - gap)
        if length:
            yield start, number, offset, length
        at = max(at, start + length)


def _teller(channel: Channel) -> Callable[[OrderEnded], None]:
    """Give what tells the store of orders that are over, from any thread."""

    def tell(ended: OrderEnded) -> None:
        request = OrderOver(rid=_rid(), ended=ended)
        with contextlib.suppress(TensorCastError):  # the store, or the order, is gone
            channel.call(request, expect=Done, until_s=time.monotonic() + _CALL_S)

    return tell


def _rid() -> RequestId:
    return RequestId(f"device-{os.getpid()}-{next(_numbers)}")


def _carry_out(
    order: DeviceOrder, fd: int, slabs: Slabs, lines: Lines
) -> OrderEnded | None:
    """Do one thing; None when its outcome comes later."""
    if order.act is Act.HANG_UP:
        lines.hang_up(order.line)
        return OrderEnded(number=order.number)
    if not order.act.beside:
        return slabs.carry_out(order, fd)
    lines.begin(order, slabs.place(order), fd)
    return None


def _serve(channel: Channel, slabs: Slabs, lines: Lines) -> None:
    """Take orders until the store is gone, or the device is."""
    ended: OrderEnded | None = None
    while True:
        request = NextOrder(rid=_rid(), ended=ended)
        frame = channel.call(
            request, expect=DeviceOrder, until_s=time.monotonic() + _CALL_S
        )
        order = frame.message
        if order.act is Act.WAIT:
            ended = None
            continue
        fd = frame.take_fd() if frame.fds else -1
        try:
            ended = _carry_out(order, fd, slabs, lines)
        except DeviceError as error:
            _last_word(channel, order, error)
            raise
        except TensorCastError as error:
            logger.warning("%s of segment %d: %s", order.act, order.segment, error)
            ended = OrderEnded(number=order.number, fault=Fault.of(error))


def _last_word(channel: Channel, order: DeviceOrder, error: DeviceError) -> None:
    how = OrderEnded(number=order.number, fault=Fault.of(error))
    request = NextOrder(rid=_rid(), ended=how)
    with contextlib.suppress(TensorCastError):
        channel.call(request, expect=DeviceOrder, until_s=time.monotonic() + 2.0)


def _lanes(told: DeviceStart) -> tuple[str, ...]:
    """Load UCX where it may be used: later somebody would wait for it."""
    if not told.ucx:
        return ()
    try:
        return ucx_line.offered()
    except TensorCastError as error:
        logger.warning("no lines to other devices: %s", error)
        return ()


def _connect(told: DeviceStart) -> Channel:
    return Channel.connect(
        told.card,
        credentials=Credentials(role=Role.DEVICE, host=told.card.host),
        prefer=Prefer.UNIX,
        until_s=time.monotonic() + _ATTACH_S,
    )


def _attach(told: DeviceStart) -> tuple[Channel, Slabs, Lines, DeviceTold]:
    spec = parse_devices(told.devices or None)
    there = find_devices(spec, told.run_dir)
    at = told.turn % len(there) if told.ordinal < 0 else told.ordinal
    if at >= len(there):
        message = f"there is no device {at}; there are {len(there)}; set tensorcast.node.device"
        raise DeviceError(message)
    device = open_device(there[at].uuid, spec, told.run_dir)
    total_bytes = device.list().total_bytes
    share = told.memory < 1
    capacity_bytes = int(total_bytes * told.memory if share else told.memory)
    capacity_bytes = min(capacity_bytes, total_bytes)
    if capacity_bytes < GRAIN_BYTES:
        message = f"{capacity_bytes} bytes of {device.id} are no device tier: tensorcast.node.device-memory takes at least {GRAIN_BYTES}"
        raise InvalidArgument(message)
    slabs = Slabs(device)
    lanes, channel = _lanes(told), _connect(told)
    beside = _connect(told) if lanes else channel
    request = AttachDevice(
        rid=_rid(),
        device=device.id.uuid,
        name=str(device.id),
        capacity_bytes=capacity_bytes,
        grain_bytes=GRAIN_BYTES,
        shares=slabs.shares,
        ucx=lanes,
    )
    channel.call(request, expect=Done, until_s=time.monotonic() + _ATTACH_S)
    found = DeviceTold(
        pid=os.getpid(),
        device=device.id.uuid,
        name=str(device.id),
        capacity_bytes=capacity_bytes,
    )
    return channel, slabs, Lines(device, _teller(beside)), found


def _say(told: DeviceTold, out: int) -> None:
    with contextlib.suppress(OSError):  # the starter waits no longer
        os.write(out, encode(told))
    os.close(out)


def _take_stdio(folder: Path) -> int:
    """Make the log our stdio; the former stdout, for one answer."""
    out = os.dup(1)
    log = os.open(
        folder / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    logging.basicConfig(
        level=os.environ.get("TENSORCAST_LOG", "INFO"),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    return out


def main() -> None:
    """Run a device process that is told what to be over stdin."""
    told = decode(sys.stdin.buffer.read(), DeviceStart)
    out = _take_stdio(Path(told.card.socket).parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        channel, slabs, lines, found = _attach(told)
    except TensorCastError as error:
        logger.warning("not attached: %s", error)
        _say(DeviceTold(fault=Fault.of(error)), out)
        return
    except BaseException as error:
        logger.exception("not attached")
        _say(DeviceTold(fault=Fault.of(DeviceError(repr(error)))), out)
        raise
    logger.info("%s is attached to store %s", found.name, told.card.node)
    _say(found, out)
    try:
        _serve(channel, slabs, lines)
    except PeerLost as error:
        logger.info("ending with the store: %s", error)
    except DeviceError as error:
        logger.warning("ending with the device: %s", error)
    logging.shutdown()
    os._exit(0)  # what is on the device goes with the process
