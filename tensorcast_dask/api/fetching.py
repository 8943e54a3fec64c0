"""Bytes from nodes of other hosts into this process's own memory.

Used where no node is on the reader's host, so that nobody could keep a replica for it, and
for views, whose ranges are not worth a replica of the base.

Rules:

1. Every chunk is verified against its sum before the result is handed out.
2. Holders are tried in the catalog's order; one that fails is left and its chunks go to
   the next. When none is left the last error is raised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.dataplane import memory
from tensorcast_dask.exceptions import (
    AbsentError,
    Incomplete,
    PeerLost,
    TensorCastError,
    WrongPeer,
)
from tensorcast_dask.tensors.checksums import chunk_count, chunk_range
from tensorcast_dask.tensors.messages import (
    Chunk,
    ChunkMap,
    ChunkMapAsked,
    Ranges,
    ReadChunk,
    ReadRanges,
)
from tensorcast_dask.tensors.views import View

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensorcast_dask.api.core import Core
    from tensorcast_dask.api.deadlines import Deadline
    from tensorcast_dask.tensors.boxes import Runs
    from tensorcast_dask.tensors.messages import ArtifactInfo, NodeCard
    from tensorcast_dask.tensors.specs import Index
    from tensorcast_dask.tensors.views import ResolvedView

__all__ = ["fetch"]

_THREADS: Final = 4
#: Ranges of at most this many bytes together go in one message.
_BATCH_BYTES: Final = 16 << 20


def fetch(
    core: Core, info: ArtifactInfo, cards: Sequence[NodeCard], limit: Deadline
) -> tuple[Index, memoryview, ResolvedView | None]:
    """Bring an artifact, or the ranges of a view, into memory of our own. Blocks.

    Returns
    -------
    (Index, memoryview, ResolvedView or None)
        Of a view: a packed segment of just its boxes, and the view that reads them.

    Raises
    ------
    PeerLost
        When no holder could be reached.
    """
    last: TensorCastError | None = None
    for card in cards:
        try:
            limit.check(f"reading {info.id!r}")
            return _fetch_from(core, info, card, limit)
        except (AbsentError, PeerLost, WrongPeer) as error:
            last = error
    if last is not None:
        raise last
    message = f"no node holds {info.id!r} v{info.version} now; try again"
    raise PeerLost(message)


def _fetch_from(
    core: Core, info: ArtifactInfo, card: NodeCard, limit: Deadline
) -> tuple[Index, memoryview, ResolvedView | None]:
    asked = ChunkMapAsked(rid=core.link.next_rid(), generation=info.generation)
    chunks = core.stores.ask(card, asked, ChunkMap, limit).message
    index = core.stores.index(info.generation, chunks.index)
    view: ResolvedView | None = None
    if info.view:
        base_view = View.decode(info.view).resolve(index)
        index, view = base_view.packed()
        buffer = memory.private(index.nbytes)
        places = zip(base_view.runs(), index.offsets, strict=True)
        jobs = [
            job
            for runs, offset in places
            for job in _range_jobs(
                core, info, card, chunks, runs, buffer[offset:], limit
            )
        ]
    else:
        buffer = memory.private(chunks.nbytes)
        jobs = _chunk_jobs(core, info, card, chunks, buffer, limit)
    memory.run_parallel(jobs, threads=_THREADS)
    return index, buffer, view


def _chunk_jobs(
    core: Core,
    info: ArtifactInfo,
    card: NodeCard,
    chunks: ChunkMap,
    buffer: memoryview,
    limit: Deadline,
) -> list[Callable[[], object]]:
    view = buffer

    def job(number: int) -> Callable[[], object]:
        start, length = chunk_range(
            number, nbytes=chunks.nbytes, chunk_bytes=chunks.chunk_bytes
        )

        def run() -> None:
            request = ReadChunk(
                rid=core.link.next_rid(), generation=info.generation, chunk=number
            )
            into = view[start : start + length]
            reply = core.stores.ask(card, request, Chunk, limit, into=into)
            _verify(reply.message.sum, into, reply.nbytes, info, card)
            _same_content(reply.message.stamp, chunks.stamp, info)

        return run

    count = chunk_count(chunks.nbytes, chunks.chunk_bytes)
    return [job(number) for number in range(count)]


def _range_jobs(
    core: Core,
    info: ArtifactInfo,
    card: NodeCard,
    chunks: ChunkMap,
    runs: Runs,
    out: memoryview,
    limit: Deadline,
) -> list[Callable[[], object]]:
    """Give requests for the runs of one box, each landing where it belongs in the packed one."""

    def job(start: int, nbytes: int, ranges: bytes) -> Callable[[], object]:
        def run() -> None:
            request = ReadRanges(
                rid=core.link.next_rid(), generation=info.generation, ranges=ranges
            )
            into = out[start : start + nbytes]
            reply = core.stores.ask(card, request, Ranges, limit, into=into)
            _verify(reply.message.sum, into, reply.nbytes, info, card)
            _same_content(reply.message.stamp, chunks.stamp, info)

        return run

    jobs: list[Callable[[], object]] = []
    at = 0
    for nbytes, ranges in runs.batches(_BATCH_BYTES):
        jobs.append(job(at, nbytes, ranges))
        at += nbytes
    return jobs


def _same_content(found: int, expected: int, info: ArtifactInfo) -> None:
    """Chunks of lent memory belong together only within one stamp."""
    if found != expected:
        message = f"the owner of {info.id!r} changed it while it was read; read again"
        raise Incomplete(message)


def _verify(
    expected: int, content: Any, nbytes: int, info: ArtifactInfo, card: NodeCard
) -> None:
    if len(content) != nbytes or memory.sum_of(content) != expected:
        message = f"node {card.name or card.node} sent damaged bytes of {info.id!r}"
        raise WrongPeer(message)
