"""A holder that sends over UCX, and breaks there.

Rules: as `tests.kit.holders`. Pieces are short, so that a chunk has a middle to break in.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import msgspec

from tensorcast_dask.dataplane.framing import Payload
from tensorcast_dask.dataplane.memory import address
from tensorcast_dask.dataplane.server import Peer, Reply
from tensorcast_dask.dataplane.transports.ucx_line import Stretch
from tensorcast_dask.dataplane.transports.ucx_serving import UcxServing
from tensorcast_dask.tensors.messages import (
    Chunk,
    ReadChunk,
    ReadRanges,
    StoreRequest,
    UcxOpen,
)
from tests.kit.holders import Break, Holder, Served

__all__ = ["NO_UCX", "PIECE_BYTES", "UcxHolder"]

#: Why tests of UCX cannot run here; "" where they can.
NO_UCX = (
    ""
    if importlib.util.find_spec("ucxx")
    else "ucxx is not installed (.ci/install-ucx, or the extra ucx)"
)
PIECE_BYTES = 16 << 10


class UcxHolder(Holder):
    """Answers requests for UCX too."""

    def __init__(self, served: Served, *, mapped: bool) -> None:
        super().__init__(served, mapped=mapped)
        self._ucx = UcxServing(allowed=lambda: True, piece_bytes=PIECE_BYTES)
        #: Transfers under way: what a store would hold leased.
        self.sending = 0

    def handle(self, request: StoreRequest, payload: Payload, peer: Peer) -> Reply:
        return self._ucx.answer(
            request, peer, lambda: self._answered(request, payload, peer)
        )

    def _answered(self, request: StoreRequest, payload: Payload, peer: Peer) -> Reply:
        if isinstance(request, UcxOpen):
            return self._ucx.open(request, peer)
        reply = super().handle(request, payload, peer)
        if not (isinstance(request, ReadChunk | ReadRanges) and request.ucx):
            return reply
        self.sending += 1
        return replace(reply, done=self._sent)

    def _sent(self) -> None:
        self.sending -= 1

    def closed(self, peer: Peer) -> None:
        self._ucx.closed(peer)
        super().closed(peer)

    def _half(self, answer: Chunk, bytes_: bytearray, how: Break, peer: Peer) -> None:
        if "ucx" not in peer.notes:
            super()._half(answer, bytes_, how, peer)
            return
        line, half = self._ucx.line(peer), len(bytes_) // 2
        peer.stream.send(msgspec.structs.replace(answer, nbytes=len(bytes_)))
        with address(bytes_) as (start, _):
            line.send(Stretch(start, half))
            line.drive(control=peer.stream, stall_s=5.0)
        if how is Break.STALL:
            self._served.closing.wait(20)
        peer.close()
