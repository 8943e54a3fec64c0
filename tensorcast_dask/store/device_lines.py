"""Chunks that a holder's device sends straight to this node's device.

Rules:

1. A connection is made, proved and hung up here. In between it is the device process's, which
   has a description of it; so it is with the holder. No store sees a byte of a chunk.
2. A chunk is an order: it is over when UCX has let go of its place, and the bytes are verified.
3. Hanging up ends what is under way, at both ends.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.dataplane.channel import Channel
from tensorcast_dask.dataplane.transports.base import Arrived, Work, next_rid
from tensorcast_dask.exceptions import (
    DeviceError,
    PeerLost,
    Unimplemented,
    WrongPeer,
)
from tensorcast_dask.tensors.checksums import chunk_range, decode_sums
from tensorcast_dask.tensors.messages import Act, ChunkMap, SendSlab

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensorcast_dask.dataplane.transports.base import Context
    from tensorcast_dask.store.devices import Devices
    from tensorcast_dask.store.state.replicas import Copy
    from tensorcast_dask.tensors.ids import Generation
    from tensorcast_dask.tensors.messages import Location

__all__ = ["DeviceLine"]

_numbers = itertools.count(1)
_CLOSED: Final = "the connection is closed here"


class DeviceLine:
    """A source whose chunks need no place: they come to the slab (`transports.base.Source`).

    Parameters
    ----------
    devices : Devices
        Gives orders to our device process.
    filling : (Generation, Copy)
        The slab.
    chunk_bytes : int
        How the holder must cut its copy.
    location : Location
        The holder.
    generation : Generation
        What it calls the bytes.
    context : Context
        Credentials and deadline.

    Raises
    ------
    NotFound, Gone, InvalidArgument
        When the holder has no such copy on its device, or cannot send it.
    PeerLost
        When it does not answer.
    """

    scheme = "device"

    def __init__(
        self,
        devices: Devices,
        filling: tuple[Generation, Copy],
        *,
        chunk_bytes: int,
        location: Location,
        generation: Generation,
        context: Context,
    ) -> None:
        self.via = "ucx"
        self._devices = devices
        self._filling = filling
        self._generation = generation
        self._context = context
        self._number = next(_numbers)
        self._lock = threading.Lock()
        self._begun = self._closed = False
        channel = Channel.connect(
            location.card,
            credentials=context.credentials,
            prefer=context.prefer,
            until_s=context.until_s,
        )
        self._stream = channel.stream
        try:
            asked = SendSlab(rid=next_rid(), generation=generation)
            self._map: ChunkMap = channel.call(
                asked, expect=ChunkMap, until_s=context.until_s
            ).message
        except BaseException:
            channel.close()
            raise
        if self._map.chunk_bytes != chunk_bytes:
            channel.close()
            message = f"{self._stream.peer} cuts its copy on the device otherwise"
            raise WrongPeer(message)

    def chunk_map(self) -> ChunkMap:
        """See `Source`."""
        return self._map

    def read_chunk(self, chunk: int, into: Any) -> Arrived:  # noqa: ANN401
        """See `Source`."""
        todo = deque([Work(chunk, into)])
        (arrived,) = self.read_chunks(lambda: todo.popleft() if todo else None)
        return arrived

    def read_chunks(self, work: Callable[[], Work | None]) -> Iterator[Arrived]:
        """See `Source`."""
        while (item := work()) is not None:
            yield self._fetched(item)

    def _fetched(self, item: Work) -> Arrived:
        told, context = self._map, self._context
        start, nbytes = chunk_range(item.chunk, told.nbytes, told.chunk_bytes)
        with self._lock:
            if self._closed:
                raise PeerLost(_CLOSED)
            fd = -1 if self._begun else os.dup(self._stream.fileno())
            self._begun = True
            order = self._devices.order(
                Act.RECEIVE,
                self._filling[1].segment,
                fd=fd,
                uses=[self._filling],
                at=start,
                nbytes=nbytes,
                chunk_bytes=told.chunk_bytes,
                line=self._number,
                generation=self._generation,
                any_lane=context.any_lane,
                stall_s=context.credentials.stall_s or 0.0,
            )
        ended = self._devices.wait(order, context.until_s or math.inf)
        self.via = ended.via
        (found,) = decode_sums(ended.sums, nbytes=nbytes, chunk_bytes=told.chunk_bytes)
        return Arrived(item, nbytes, found)

    def read_ranges(self, ranges: list[tuple[int, int]], into: Any) -> int:  # noqa: ANN401
        """See `Source`; a line between devices carries chunks alone."""
        message = f"{len(ranges)} ranges into {type(into).__name__}: a line between devices carries whole chunks; use ucx or tcp"
        raise Unimplemented(message)

    def take_fd(self) -> int | None:
        """See `Source`: there is no file."""
        return None

    def close(self) -> None:
        """See `Source` (rule 3)."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._stream.close()
        if self._begun:
            with contextlib.suppress(DeviceError):  # it went with its process
                self._devices.order(Act.HANG_UP, 0, line=self._number)
