"""The pull planner: which chunk is asked of which source, until all are here.

Rules:

1. Pure: the simulator and the sockets drive the same planner. It asks (`AskMap`, `Fetch`),
   the shell reports (`Mapped`, `Arrived`, `Lost`, `Dropped`), time passes (`TimePassed`).
2. Chunks are taken from one common pool, each source starting at another place: a fast
   source takes more of them, and no list is dealt out in advance that could be wrong.
3. A chunk is under way at one source only. It is asked of another one after the shell has
   said that no more bytes of it can come (`Dropped`, `Lost`): two writers never share a place.
4. A chunk whose bytes do not hash to what the maps promise is the source's fault: it is
   left, and the chunk comes from another one.
5. A source that is silent for `stall_s` with something asked of it is left; one that was
   left for a fault that may pass is asked again, `_TRIES` times in all.
6. A slow source does not hold the end up: when nothing else is to be asked, an idle source
   takes over the chunk that has been under way longest, if it is likely to be done sooner.
7. All chunks are of one content. Memory that its owner may change carries a stamp: when a
   source brings another one, all that is here is thrown away and asked for again.
8. The plan ends exactly once: `Finished`, or `Failed` with a typed fault, at the latest at
   its deadline.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias, assert_never

import msgspec

from tensorcast_dask.exceptions import (
    DeadlineExceeded,
    Incomplete,
    Mismatch,
    PeerLost,
    TensorCastError,
)
from tensorcast_dask.tensors.checksums import chunk_count
from tensorcast_dask.tensors.messages import Fault

__all__ = [
    "Arrived",
    "AskMap",
    "Cancelled",
    "Dropped",
    "Event",
    "Failed",
    "Fetch",
    "Finished",
    "Instruction",
    "Leave",
    "Lost",
    "Mapped",
    "Pull",
    "Steal",
    "TimePassed",
]

_TRIES: Final = 3
_BACKOFF_S: Final = 0.1
_PATIENCE: Final = 4.0  # a chunk is stolen after so many times its usual time
_MISSING: Final = 0
_ASKED: Final = 1
_HERE: Final = 2


# ------------------------------------------------------------------ events
class Mapped(msgspec.Struct, frozen=True, kw_only=True):
    """A source told what it has (`ChunkMap`)."""

    source: int
    nbytes: int
    chunk_bytes: int
    index: bytes
    have: bytes = b""
    sums: bytes = b""
    #: Which content it speaks of (rule 7).
    stamp: int = 0


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """All bytes of a chunk are in their place, and hash to `digest`."""

    source: int
    chunk: int
    digest: int
    #: What the source said that they hash to.
    claimed: int
    #: Of which content they are (rule 7).
    stamp: int = 0


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk asked of a source will not come from it; its connection is closed."""

    source: int
    chunk: int


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A source failed; none of its connections can bring another byte."""

    source: int
    fault: Fault
    #: It sent damaged bytes, or is not who it was: it is not asked again.
    for_ever: bool = False


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """Nobody wants the bytes any more."""

    why: str


class TimePassed(msgspec.Struct, frozen=True):
    """Look at the clock."""


Event: TypeAlias = Mapped | Arrived | Dropped | Lost | Cancelled | TimePassed


# ------------------------------------------------------------------ instructions
class AskMap(msgspec.Struct, frozen=True, kw_only=True):
    """Connect to a source where that is not done, and ask for its chunk map."""

    source: int


class Fetch(msgspec.Struct, frozen=True, kw_only=True):
    """Ask a source for a chunk, to be received into its place."""

    source: int
    chunk: int


class Steal(msgspec.Struct, frozen=True, kw_only=True):
    """Close the connection that waits for a chunk, then report `Dropped`."""

    source: int
    chunk: int


class Leave(msgspec.Struct, frozen=True, kw_only=True):
    """Close all connections to a source, then report `Lost` if anything was asked."""

    source: int
    why: str


class Finished(msgspec.Struct, frozen=True):
    """Every chunk is here and verified."""


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes cannot be had; close everything."""

    fault: Fault


Instruction: TypeAlias = AskMap | Fetch | Steal | Leave | Finished | Failed


# ------------------------------------------------------------------ the planner
@dataclass(slots=True)
class _Source:
    number: int
    #: Chunks under way: chunk -> when it was asked for.
    asked: dict[int, float] = field(default_factory=dict)
    have: bytes = b""
    mapped: bool = False
    asking_map: bool = False
    #: When it last said or sent something, or was first asked.
    heard_s: float = 0.0
    tries: int = 0
    #: Not asked before; inf = never again.
    rests_until_s: float = 0.0
    leaving: bool = False
    chunks: int = 0
    busy_s: float = 0.0
    fault: Fault | None = None

    def has(self, chunk: int) -> bool:
        return not self.have or bool(self.have[chunk >> 3] >> (chunk & 7) & 1)

    def usual_s(self) -> float:
        return self.busy_s / self.chunks if self.chunks else 0.0


class Pull:
    """One pull of one generation from several sources.

    Parameters
    ----------
    sources : int
        How many there are; they are numbered from 0, best first.
    nbytes : int
        Length of the replica as the catalog knows it.
    window : int
        Chunks that may be under way at one source at a time.
    stall_s : float
        Silence after which a source is left.
    deadline_s : float
        When the plan fails, on the caller's clock.
    """

    def __init__(
        self,
        *,
        sources: int,
        nbytes: int,
        window: int,
        stall_s: float,
        deadline_s: float,
    ) -> None:
        self.nbytes = nbytes
        self.window = window
        self.stall_s = stall_s
        self.deadline_s = deadline_s
        self.chunk_bytes = 0
        #: None until a source has told it; the shell can then commit.
        self.index: bytes | None = None
        #: Expected hash of each chunk; 0 where no source has said.
        self.sums: list[int] = []
        #: The content that is being pulled.
        self.stamp = 0
        self.ended = False
        self._sources = [_Source(number) for number in range(sources)]
        self._chunks = bytearray()
        self._left = 0

    # -------------------------------------------------------------- looking
    @property
    def done_bytes(self) -> int:
        """Bytes that are here and verified."""
        here = self._chunks.count(_HERE)
        return min(self.nbytes, here * self.chunk_bytes)

    def length(self, chunk: int) -> int:
        """Return how long a chunk is; the last may be short."""
        return min(self.chunk_bytes, self.nbytes - chunk * self.chunk_bytes)

    def have(self) -> bytes:
        """Return the chunks that are here, one bit each, as they may be served on."""
        bits = bytearray(-(-len(self._chunks) // 8))
        for chunk, state in enumerate(self._chunks):
            if state == _HERE:
                bits[chunk >> 3] |= 1 << (chunk & 7)
        return bytes(bits)

    def share(self) -> list[int]:
        """Return how many chunks each source brought."""
        return [source.chunks for source in self._sources]

    # -------------------------------------------------------------- running
    def start(self, *, now_s: float) -> list[Instruction]:
        """Begin: ask every source for its map."""
        return self._next(now_s)

    def handle(self, event: Event, *, now_s: float) -> list[Instruction]:
        """Absorb one event and say what is to be done; nothing after the end."""
        if self.ended:
            return []
        told: list[Instruction] = []
        match event:
            case Mapped():
                told = self._mapped(event, now_s)
            case Arrived():
                told = self._arrived(event, now_s)
            case Dropped():
                self._unask(self._sources[event.source], event.chunk)
            case Lost():
                self._lost(event, now_s)
            case Cancelled():
                return self._fail(DeadlineExceeded(f"cancelled: {event.why}"))
            case TimePassed():
                told = self._stalled(now_s)
            case _:
                assert_never(event)
        return told + self._next(now_s)

    def _mapped(self, event: Mapped, now_s: float) -> list[Instruction]:
        source = self._sources[event.source]
        source.asking_map, source.heard_s = False, now_s
        if self.index is None and event.nbytes == self.nbytes and event.chunk_bytes > 0:
            self.index, self.chunk_bytes = event.index, event.chunk_bytes
            self._begin(event.stamp)
        count = len(self._chunks)
        fits = (
            (event.nbytes, event.chunk_bytes, event.index)
            == (self.nbytes, self.chunk_bytes, self.index)
            and len(event.have) in (0, -(-count // 8))
            and len(event.sums) in (0, count * 8)
        )
        if not fits:
            return [self._leave(source, "its map contradicts what is known", now_s)]
        if event.stamp != self.stamp:
            if any(other.asked for other in self._sources):
                return [self._changed(source, now_s)]
            self._begin(event.stamp)
        for chunk in range(len(event.sums) // 8):
            if not self.sums[chunk]:
                raw = event.sums[chunk * 8 : chunk * 8 + 8]
                self.sums[chunk] = int.from_bytes(raw, "little")
        source.mapped, source.have = True, event.have
        return []

    def _begin(self, stamp: int) -> None:
        """Have nothing yet of this content."""
        count = chunk_count(self.nbytes, self.chunk_bytes)
        self._chunks, self._left = bytearray(count), count
        self.sums, self.stamp = [0] * count, stamp

    def _changed(self, source: _Source, now_s: float) -> Leave:
        """Leave a source whose content is another one now; it is asked again."""
        message = "its owner changed it while it was read; read again"
        return self._leave(source, message, now_s, kind=Incomplete)

    def _arrived(self, event: Arrived, now_s: float) -> list[Instruction]:
        source = self._sources[event.source]
        asked_s = source.asked.pop(event.chunk, None)
        if asked_s is None:
            return []
        source.heard_s = now_s
        if event.stamp != self.stamp:
            self._chunks[event.chunk] = _MISSING
            return [self._changed(source, now_s)]
        expected = self.sums[event.chunk] or event.claimed
        if event.digest != event.claimed or event.digest != expected:
            self._chunks[event.chunk] = _MISSING
            return [self._leave(source, f"chunk {event.chunk} is damaged", now_s)]
        self._chunks[event.chunk] = _HERE
        self.sums[event.chunk] = event.digest
        self._left -= 1
        source.chunks += 1
        source.busy_s += now_s - asked_s
        return []

    def _unask(self, source: _Source, chunk: int) -> None:
        if source.asked.pop(chunk, None) is not None:
            self._chunks[chunk] = _MISSING

    def _lost(self, event: Lost, now_s: float) -> None:
        source = self._sources[event.source]
        for chunk in list(source.asked):
            self._unask(source, chunk)
        source.mapped = source.asking_map = False
        if source.leaving:
            source.leaving = False
            return  # the reason is known, the rest time is set
        source.fault = event.fault
        forever = event.for_ever or not event.fault.error().retryable
        self._rest(source, now_s, forever=forever)

    def _rest(self, source: _Source, now_s: float, *, forever: bool = False) -> None:
        source.tries += 1
        gone = forever or source.tries >= _TRIES
        source.rests_until_s = (
            float("inf") if gone else now_s + _BACKOFF_S * source.tries
        )

    def _leave(
        self,
        source: _Source,
        why: str,
        now_s: float,
        *,
        kind: type[TensorCastError] = Mismatch,
    ) -> Leave:
        """Give a source up; chunks that it still owes come back with `Lost`.

        For ever, where what it said is wrong (Mismatch).
        """
        source.fault = Fault.of(kind(f"source {source.number}: {why}"))
        source.mapped = False
        source.leaving = bool(source.asked) or source.asking_map
        self._rest(source, now_s, forever=kind is Mismatch)
        return Leave(source=source.number, why=why)

    def _stalled(self, now_s: float) -> list[Instruction]:
        return [
            self._leave(source, f"silent for {self.stall_s:g} s", now_s, kind=PeerLost)
            for source in self._sources
            if (source.asked or source.asking_map)
            and not source.leaving
            and now_s - source.heard_s >= self.stall_s
        ]

    # -------------------------------------------------------------- asking
    def _next(self, now_s: float) -> list[Instruction]:
        if self.index is not None and not self._left:
            self.ended = True
            return [Finished()]
        if now_s >= self.deadline_s:
            return self._fail(
                DeadlineExceeded(
                    f"the deadline passed with {self.done_bytes} of {self.nbytes} bytes "
                    "here; allow more time or look at the sources"
                )
            )
        told: list[Instruction] = []
        for source in self._sources:
            told += self._ask(source, now_s)
        told += self._steal(now_s)
        if not told and not any(self._alive(source) for source in self._sources):
            return self._fail(self._hopeless())
        return told

    def _alive(self, source: _Source) -> bool:
        return (
            bool(source.asked) or source.leaving or source.rests_until_s < float("inf")
        )

    def _hopeless(self) -> TensorCastError:
        faults = [source.fault for source in self._sources if source.fault]
        if len(faults) == 1:
            return faults[0].error()
        said = "; ".join(fault.message for fault in faults) or "there is none"
        return PeerLost(f"no source can give the bytes: {said}")

    def _ask(self, source: _Source, now_s: float) -> list[Instruction]:
        if source.leaving or source.asking_map or now_s < source.rests_until_s:
            return []
        told: list[Instruction] = []
        if source.mapped:
            while len(source.asked) < self.window:
                chunk = self._choose(source)
                if chunk is None:
                    break
                if not source.asked:
                    source.heard_s = now_s
                source.asked[chunk] = now_s
                self._chunks[chunk] = _ASKED
                told.append(Fetch(source=source.number, chunk=chunk))
        starved = source.mapped and source.have and not source.asked
        if not source.mapped or (starved and now_s - source.heard_s >= _BACKOFF_S):
            source.asking_map, source.heard_s = True, now_s
            told.append(AskMap(source=source.number))
        return told

    def _choose(self, source: _Source) -> int | None:
        """Return the next missing chunk that the source has, from its own start on."""
        count = len(self._chunks)
        start = source.number * count // len(self._sources)
        for low, high in ((start, count), (0, start)):
            chunk = self._chunks.find(_MISSING, low, high)
            while chunk >= 0:
                if source.has(chunk):
                    return chunk
                chunk = self._chunks.find(_MISSING, chunk + 1, high)
        return None

    def _steal(self, now_s: float) -> list[Instruction]:
        if self._chunks.find(_MISSING) >= 0:
            return []
        for idle in self._sources:
            ready = idle.mapped and not idle.asked and idle.chunks
            if not ready or now_s < idle.rests_until_s:
                continue
            slow = [
                (asked_s, source.number, chunk)
                for source in self._sources
                if source is not idle and not source.leaving
                for chunk, asked_s in source.asked.items()
                if idle.has(chunk)
            ]
            if slow and now_s - min(slow)[0] > _PATIENCE * idle.usual_s():
                _, number, chunk = min(slow)
                self._sources[number].rests_until_s = now_s + self.stall_s
                return [Steal(source=number, chunk=chunk)]
        return []

    def _fail(self, error: TensorCastError) -> list[Instruction]:
        self.ended = True
        return [Failed(fault=Fault.of(error))]
