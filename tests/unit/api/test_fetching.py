"""Bytes that cross to a program of another host, counted where they leave."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from tensorcast_dask.api.actions.fetching import Part, fetch
from tensorcast_dask.api.connection.deadlines import Deadline
from tensorcast_dask.api.connection.stores import Stores
from tensorcast_dask.dataplane import arrays
from tensorcast_dask.dataplane.server import Reply
from tensorcast_dask.tensors.ids import HostId
from tensorcast_dask.tensors.messages import ArtifactInfo, ChunkMap, SessionOpen
from tensorcast_dask.tensors.views import View, s_
from tests.kit.holders import GENERATION, TOKEN, Holder, Served, serve
from tests.kit.segments import stored

if TYPE_CHECKING:
    from tensorcast_dask.dataplane.framing import Payload
    from tensorcast_dask.dataplane.server import Peer
    from tensorcast_dask.tensors.messages import StoreRequest
    from tensorcast_dask.tensors.specs import Index

BASE = np.arange(1024 * 1024, dtype=np.uint8).reshape(1024, 1024)


class Counting(Holder):
    """Counts the bytes of tensors that leave it."""

    sent = 0
    index: Index

    def handle(self, request: StoreRequest, payload: Payload, peer: Peer) -> Reply:
        reply = super().handle(request, payload, peer)
        if isinstance(reply.message, ChunkMap):
            described = type(self).index.encode()
            return Reply(
                message=msgspec.structs.replace(reply.message, index=described)
            )
        parts = reply.payload if isinstance(reply.payload, list) else [reply.payload]
        type(self).sent += sum(map(len, parts))
        return reply


@dataclass
class Link:
    """Mints request ids."""

    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def next_rid(self) -> str:
        return f"reader-{next(self.numbers)}"


@dataclass
class Reader:
    """What `fetch` asks of a session: request ids, and channels to stores."""

    stores: Stores
    link: Link = field(default_factory=Link)


def reader(served: Served) -> Reader:
    greeting = SessionOpen(
        cluster=served.credentials.cluster,
        epoch=1,  # type: ignore[arg-type]
        token=TOKEN,
        nodes=(served.card,),
        chunk_bytes=served.chunk_bytes,
        small_bytes=1,
        deadline_default_s=60.0,
    )
    return Reader(Stores(greeting, HostId("elsewhere")))


def fetched(
    memory: Any, index: Index, *, view: bytes = b"", part: Part | None = None
) -> Any:
    """What comes to a program of another host."""
    info = ArtifactInfo(
        id="v",  # type: ignore[arg-type]
        version=1,  # type: ignore[arg-type]
        generation=GENERATION,
        stage="committed",  # type: ignore[arg-type]
        owner="system",  # type: ignore[arg-type]
        nbytes=index.nbytes,
        tensors=2,
        view=view,
    )
    Counting.sent, Counting.index = 0, index
    with serve(bytes(memory[: index.nbytes]), holder=Counting) as served:
        asking = reader(served)
        limit = Deadline(time.monotonic() + 60)
        try:
            return fetch(asking, info, [served.card], limit, part)  # type: ignore[arg-type]
        finally:
            asking.stores.close()


@pytest.mark.parametrize(
    "what",
    [s_[3:9], s_[:, 5], s_[::64, ::2], s_[512:]],
    ids=["rows", "a column", "steps", "half"],
)
def test_of_a_view_only_its_own_bytes_cross(what: Any) -> None:
    memory, index = stored({"x": BASE, "y": BASE + 1})
    view = View.of({"x": what})
    shown = view.resolve(index)
    own, buffer, resolved = fetched(memory, index, view=shown.described().encode())
    made = arrays.materialise(buffer, own, framework="numpy", view=resolved)
    assert np.array_equal(np.asarray(made["x"]), BASE[what])
    assert Counting.sent == BASE[what].nbytes


@pytest.mark.parametrize("span", [(0, 1), (1000, 300_007), (0, BASE.nbytes), (5, 5)])
def test_of_a_part_of_a_tensor_only_its_own_bytes_cross(span: tuple[int, int]) -> None:
    memory, index = stored({"x": BASE, "y": BASE + 1})
    start, stop = span
    _, buffer, _ = fetched(memory, index, part=Part("y", start, stop))
    assert bytes(buffer) == (BASE + 1).tobytes()[start:stop]
    assert Counting.sent == stop - start
