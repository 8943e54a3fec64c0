"""Lines from this process's device to those of other nodes.

Rules:

1. A connection comes from the store, which does not use it any more; when it ends, so does its line.
2. Each line has a thread: neither an order nor another line waits for it.
3. The outcome of an order is told when UCX has let go of its memory. A line that has failed is
   ended first, and everything that was ordered of it fails too.
4. There are only so many: who comes too late goes by way of the host.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from typing import TYPE_CHECKING, Final

from tensorcast_dask.dataplane.framing import FrameStream
from tensorcast_dask.dataplane.transports.ucx_slabs import SlabReceiver, send_slab
from tensorcast_dask.exceptions import CapacityError, PeerLost, TensorCastError
from tensorcast_dask.tensors.checksums import decode_sums, encode_sums
from tensorcast_dask.tensors.messages import Act, Fault, OrderEnded

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.dataplane.devices import Device, DeviceRange
    from tensorcast_dask.tensors.messages import DeviceOrder

__all__ = ["Lines"]

logger = logging.getLogger(__name__)

_MOST: Final = 64


class _Incoming:
    """A line that we receive over, and what was ordered of it."""

    def __init__(self, stream: FrameStream) -> None:
        self.stream = stream
        self.todo: queue.SimpleQueue[tuple[DeviceOrder, DeviceRange] | None] = (
            queue.SimpleQueue()
        )


class Lines:
    """The lines of one device.

    Parameters
    ----------
    device : Device
        Opened by this process.
    told : callable
        Is told of each order that is over; from any thread.
    """

    def __init__(self, device: Device, told: Callable[[OrderEnded], None]) -> None:
        self._device = device
        self._told = told
        self._lock = threading.Lock()
        self._count = 0
        self._incoming: dict[int, _Incoming] = {}

    def begin(self, order: DeviceOrder, place: DeviceRange, fd: int) -> None:
        """Begin what a `SEND` or `RECEIVE` says; `fd` is the connection, -1 where it is known.

        Raises
        ------
        CapacityError
            When there are too many lines.
        PeerLost
            When the line has ended.
        """
        stream = _stream(fd, order) if fd >= 0 else None
        with self._lock:
            line = self._incoming.get(order.line)
            if stream is None and line is None:
                message = "the line between the devices has ended"
                raise PeerLost(message)
            if stream is not None:
                self._start(order, place, stream)
            elif line is not None:
                line.todo.put((order, place))

    def _start(
        self, order: DeviceOrder, place: DeviceRange, stream: FrameStream
    ) -> None:
        if self._count >= _MOST:
            stream.close()
            message = f"this device has {_MOST} lines to others already; read by way of the host"
            raise CapacityError(message)
        self._count += 1
        if order.act is Act.SEND:
            _spawn(lambda: self._send(order, place, stream))
            return
        line = self._incoming[order.line] = _Incoming(stream)
        line.todo.put((order, place))
        _spawn(lambda: self._receive(order, line))

    def hang_up(self, number: int) -> None:
        """End a line; what was ordered of it ends. One that has ended is fine."""
        with self._lock:
            line = self._incoming.get(number)
            if line is not None:
                line.stream.shutdown()
                line.todo.put(None)

    # -------------------------------------------------------------- threads
    def _send(
        self, order: DeviceOrder, place: DeviceRange, stream: FrameStream
    ) -> None:
        ended = OrderEnded(number=order.number)
        try:
            send_slab(
                stream,
                self._device,
                place,
                generation=order.generation,
                chunk_bytes=order.chunk_bytes,
                sums=decode_sums(
                    order.sums, nbytes=order.nbytes, chunk_bytes=order.chunk_bytes
                ),
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody waits
            ended = _failed(order, error)
        finally:
            stream.close()
            with self._lock:
                self._count -= 1
            self._told(ended)

    def _receive(self, first: DeviceOrder, line: _Incoming) -> None:
        receiver = SlabReceiver(
            line.stream,
            self._device,
            generation=first.generation,
            chunk_bytes=first.chunk_bytes,
        )
        item = line.todo.get()
        failed: OrderEnded | None = None
        while item is not None and failed is None:
            order, place = item
            try:
                found = receiver.fetch(
                    order.at // order.chunk_bytes, place, any_lane=order.any_lane
                )
            except Exception as error:  # noqa: BLE001 - as above
                failed = _failed(order, error)
            else:
                sums = encode_sums([found])
                ended = OrderEnded(number=order.number, sums=sums, via=receiver.via)
                self._told(ended)
                item = line.todo.get()
        receiver.close()
        line.stream.close()
        with self._lock:
            self._count -= 1
            del self._incoming[first.line]
        if failed is not None:
            self._told(failed)
        while not line.todo.empty():
            left = line.todo.get()
            if left is not None:
                over = PeerLost("the line between the devices has ended")
                self._told(_failed(left[0], over))


def _failed(order: DeviceOrder, error: Exception) -> OrderEnded:
    if not isinstance(error, TensorCastError):
        logger.error("a line has failed by a defect", exc_info=error)
        error = PeerLost(f"the line between the devices failed: {error!r}")
    logger.info("%s of segment %d: %s", order.act, order.segment, error)
    return OrderEnded(number=order.number, fault=Fault.of(error))


def _stream(fd: int, order: DeviceOrder) -> FrameStream:
    peer = "the reader's device" if order.act is Act.SEND else "the holder's device"
    return FrameStream(
        socket.socket(fileno=fd), peer=peer, stall_s=order.stall_s or None
    )


def _spawn(target: Callable[[], None]) -> None:
    threading.Thread(target=target, name="tensorcast-line", daemon=True).start()
