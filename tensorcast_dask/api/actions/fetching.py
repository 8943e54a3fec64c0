"""Bytes from nodes of other hosts into this process's own memory.

Used where no node is on the reader's host, so that nobody could keep a replica for it, and
for views and parts of a tensor, whose ranges are not worth a replica of the whole.

Rules:

1. Every chunk is verified against its sum before the result is handed out. Ranges have the sum of
   what their holder sent: they are proved to have come as they left.
2. Holders are tried in the catalog's order; one that fails, or says nothing for `stall_s`
   while another has the bytes too, is left, and what is missing is asked of the next. When
   none is left the last error is raised.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tensorcast_dask.dataplane import memory
from tensorcast_dask.exceptions import (
    AbsentError,
    Incomplete,
    PeerLost,
    TensorCastError,
    WrongPeer,
)
from tensorcast_dask.tensors.boxes import Runs
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
    from collections.abc import Callable, Iterator, Sequence

    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.api.connection.deadlines import Deadline
    from tensorcast_dask.tensors.messages import ArtifactInfo, NodeCard
    from tensorcast_dask.tensors.specs import Index
    from tensorcast_dask.tensors.views import ResolvedView

__all__ = ["Part", "fetch"]

_THREADS: Final = 4
#: Ranges of at most this many bytes together go in one message.
_BATCH_BYTES: Final = 16 << 20


class Part(NamedTuple):
    """Some bytes of one tensor."""

    tensor: str
    start: int
    stop: int


def fetch(
    core: Core,
    info: ArtifactInfo,
    cards: Sequence[NodeCard],
    limit: Deadline,
    part: Part | None = None,
) -> tuple[Index, memoryview, ResolvedView | None]:
    """Bring an artifact, or the ranges of a view or a part, into memory of our own. Blocks.

    Returns
    -------
    (Index, memoryview, ResolvedView or None)
        Of a view: a packed segment of just its boxes, and the view that reads them. Of a part the
        memory is that part.

    Raises
    ------
    PeerLost
        When no holder could be reached.
    """
    last: TensorCastError | None = None
    # A holder is not told the deadline: there is no answer of its own to wait for.
    within = limit if limit.poll else limit.sooner(limit.left_s())
    landed: _Landing | None = None
    for number, card in enumerate(cards, 1):
        # The last one may be slow, since it restores from its disk: there is no better one.
        stall_s = core.stores.stall_s if number < len(cards) else None
        try:
            limit.check(f"reading {info.id!r}")
            source = _Source(core, info, card, within, stall_s, part)
            landed = _landing(source, landed)
            landed.fill(source)
        except (AbsentError, PeerLost, WrongPeer) as error:
            last = error
        else:
            return landed.index, landed.buffer, landed.view
    if last is not None:
        raise last
    message = f"no node holds {info.id!r} v{info.version} now; try again"
    raise PeerLost(message)


@dataclass(frozen=True, slots=True)
class _Source:
    """One holder, and how it is asked."""

    core: Core
    info: ArtifactInfo
    card: NodeCard
    limit: Deadline
    stall_s: float | None
    part: Part | None

    def ask(self, request: Any, expect: Any, into: memoryview | None = None) -> Any:
        """Ask once; bytes that come are verified."""
        frame = self.core.stores.ask(
            self.card, request, expect, self.limit, into=into, stall_s=self.stall_s
        )
        if into is not None:
            _verify(frame.message.sum, into, frame.nbytes, self.info, self.card)
        return frame.message


@dataclass(slots=True)
class _Landing:
    """Memory that is being filled, piece by piece, from one holder after the other."""

    index: Index
    buffer: memoryview
    view: ResolvedView | None
    #: How its holder cuts it, and which content of lent memory it is.
    cut: tuple[int, int, int]
    #: What is missing: a place in the buffer, and the request that brings it.
    missing: dict[int, tuple[memoryview, Callable[[_Source], Any]]]

    def fill(self, source: _Source) -> None:
        """Bring what is missing; the first failure ends it, and what came stays."""
        failed = False

        def job(number: int) -> None:
            nonlocal failed
            if failed:
                return
            into, request = self.missing[number]
            try:
                expect = Ranges if source.info.view or source.part else Chunk
                answer = source.ask(request(source), expect, into)
                _same_content(answer.stamp, self.cut[2], source.info)
            except BaseException:
                failed = True
                raise
            del self.missing[number]

        jobs = [partial(job, number) for number in list(self.missing)]
        memory.run_parallel(jobs, threads=_THREADS)


def _landing(source: _Source, begun: _Landing | None) -> _Landing:
    """Give memory for what a holder has: what was begun, where that is cut alike."""
    core, info = source.core, source.info
    asked = ChunkMapAsked(rid=core.link.next_rid(), generation=info.generation)
    chunks = source.ask(asked, ChunkMap)
    cut = (chunks.nbytes, chunks.chunk_bytes, chunks.stamp)
    if begun is not None and begun.cut == cut:
        return begun
    index = core.stores.index(info.generation, chunks.index)
    if source.part is not None:
        tensor, start, stop = source.part
        buffer = memory.private(stop - start)
        runs = Runs(index.entry(tensor).offset + start, stop - start)
        pieces = enumerate(_ranges(buffer, runs))
        return _Landing(index, buffer, None, cut, dict(pieces))
    if not info.view:
        buffer = memory.private(chunks.nbytes)
        whole = enumerate(_chunks(buffer, chunks))
        return _Landing(index, buffer, None, cut, dict(whole))
    shown = View.decode(info.view).resolve(index)
    own, view = shown.packed()
    buffer = memory.private(own.nbytes)
    places = zip(shown.runs(), own.offsets, strict=True)
    found = [piece for runs, at in places for piece in _ranges(buffer[at:], runs)]
    return _Landing(own, buffer, view, cut, dict(enumerate(found)))


def _chunks(
    buffer: memoryview, chunks: ChunkMap
) -> Iterator[tuple[memoryview, Callable[[_Source], ReadChunk]]]:
    def ask(number: int, source: _Source) -> ReadChunk:
        rid, generation = source.core.link.next_rid(), source.info.generation
        return ReadChunk(rid=rid, generation=generation, chunk=number)

    for number in range(chunk_count(chunks.nbytes, chunks.chunk_bytes)):
        start, length = chunk_range(
            number, nbytes=chunks.nbytes, chunk_bytes=chunks.chunk_bytes
        )
        yield buffer[start : start + length], partial(ask, number)


def _ranges(
    out: memoryview, runs: Runs
) -> Iterator[tuple[memoryview, Callable[[_Source], ReadRanges]]]:
    """Give the runs of one box, each with where it belongs in the packed one."""

    def ask(ranges: bytes, source: _Source) -> ReadRanges:
        rid, generation = source.core.link.next_rid(), source.info.generation
        return ReadRanges(rid=rid, generation=generation, ranges=ranges)

    at = 0
    for nbytes, ranges in runs.batches(_BATCH_BYTES):
        yield out[at : at + nbytes], partial(ask, ranges)
        at += nbytes


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
        raise WrongPeer(message, {"damaged": True})
