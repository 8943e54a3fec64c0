"""What a pull needs from a holder of bytes, and the registry of ways to get it.

Rules:

1. A scheme is a name and an opener; a new transport adds one file, calls `register`, and
   passes the contract tests.
2. A chunk is handed over only after its sum was checked. A damaged one is PeerLost with
   `damaged: True`, for the cure is the same: take it from somebody else.
3. Memory that its owner may change carries a stamp; bytes of two stamps are never mixed.
4. A source is used by one thread. After any error it is of no more use; chunks that
   were asked for and not handed over are the caller's to give to another source.
5. At most `depth` requests are under way on a source.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from tensorcast_dask.dataplane.channel import Credentials, Prefer
from tensorcast_dask.exceptions import Incomplete, InvalidArgument, PeerLost
from tensorcast_dask.tensors.checksums import decode_sums
from tensorcast_dask.tensors.ids import Generation, RequestId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensorcast_dask.dataplane.channel import ChannelPool
    from tensorcast_dask.dataplane.devices import Device
    from tensorcast_dask.dataplane.transports.idle import Idle
    from tensorcast_dask.tensors.messages import ChunkMap, Location

__all__ = [
    "Arrived",
    "Context",
    "Expected",
    "Opener",
    "Source",
    "Work",
    "damaged",
    "have_chunk",
    "next_rid",
    "open_source",
    "register",
    "schemes",
]

_DEPTH: Final = 2
_rids = itertools.count(1)


def next_rid() -> RequestId:
    """Make a request id that is unique in this process's life."""
    return RequestId(f"{os.getpid()}-{next(_rids)}")


class Work(NamedTuple):
    """One chunk to fetch and where it goes."""

    chunk: int
    into: Any  # writable buffer, or FileRange, of at least the chunk's length


class Arrived(NamedTuple):
    """One chunk that is there and verified."""

    work: Work
    nbytes: int
    sum: int
    #: Which content it is of, where its owner may change it.
    stamp: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Who pulls, and how."""

    credentials: Credentials = field(default_factory=Credentials)
    prefer: Prefer = Prefer.AUTO
    depth: int = _DEPTH
    until_s: float | None = None
    #: Largest payload that a source may send in one frame.
    max_payload_bytes: int = 1 << 30
    #: Take UCX also where it has no better lane than TCP.
    any_lane: bool = False
    #: Where ways that are slow to make are kept between pulls; None: they are not.
    idle: Idle[Any] | None = None
    #: The device whose memory is wanted, open in this process, and whether it stays in use.
    device: Device | None = None
    share: bool = False
    #: Channels that are kept, for a few questions in place of a connection of one's own.
    pool: ChannelPool | None = None
    #: How long the holder may take to have the bytes at hand.
    deadline_s: float = 60.0


class Source(Protocol):
    """One holder of one generation, over one connection."""

    scheme: str
    #: How the bytes come, for `explain`: "unix", "tcp", "map", "ucx:cma".
    via: str

    def chunk_map(self) -> ChunkMap:
        """Ask what can be had now."""
        ...

    def read_chunk(self, chunk: int, into: Any) -> Arrived:  # noqa: ANN401
        """Fetch one chunk into a buffer, or a place in a file.

        What is there before the chunk was verified is of no meaning.
        """
        ...

    def read_chunks(self, work: Callable[[], Work | None]) -> Iterator[Arrived]:
        """Fetch what `work` gives, one after the other, until it gives None.

        `work` is asked as late as the pipeline allows, so that sources can share a queue.
        """
        ...

    def read_ranges(self, ranges: list[tuple[int, int]], into: Any) -> int:  # noqa: ANN401
        """Fetch byte ranges, one after the other into one buffer; return their length."""
        ...

    def take_fd(self) -> int | None:
        """Hand over a read-only description of the whole segment, where there is one."""
        ...

    def close(self) -> None:
        """Close. Idempotent, from any thread: a read in progress ends with PeerLost."""
        ...


class Opener(Protocol):
    """Opens a source of one scheme."""

    def __call__(
        self, location: Location, generation: Generation, context: Context
    ) -> Source:
        """Connect; errors are those of `Channel.connect` and of the holder."""
        ...


_openers: dict[str, Opener] = {}


def register(scheme: str, opener: Opener) -> None:
    """Make a scheme known; a later one of the same name replaces it."""
    _openers[scheme] = opener


def schemes() -> tuple[str, ...]:
    """Return the schemes that are known here."""
    return tuple(sorted(_openers))


def open_source(
    location: Location,
    generation: Generation,
    *,
    scheme: str,
    context: Context | None = None,
) -> Source:
    """Open a source by its scheme.

    Raises
    ------
    InvalidArgument
        When the scheme is not known.
    """
    opener = _openers.get(scheme)
    if opener is None:
        message = f"no transport {scheme!r}; known are {', '.join(schemes())}"
        raise InvalidArgument(message)
    return opener(location, generation, context or Context())


# ------------------------------------------------------------------ arithmetic
def have_chunk(chunk_map: ChunkMap, chunk: int) -> bool:
    """Say whether a map offers a chunk."""
    if not chunk_map.have:
        return True
    byte, bit = divmod(chunk, 8)
    return byte < len(chunk_map.have) and bool(chunk_map.have[byte] >> bit & 1)


class Expected:
    """What the chunks of one pull must be, as far as it is known.

    Sums come from the chunk map; the stamp (of memory that its owner may change) from the
    map, or from the first bytes that arrive.
    """

    __slots__ = ("_stamp", "_sums")

    def __init__(self, chunk_map: ChunkMap | None = None) -> None:
        self._sums: tuple[int, ...] = ()
        if chunk_map is not None and chunk_map.sums:
            self._sums = decode_sums(
                chunk_map.sums,
                nbytes=chunk_map.nbytes,
                chunk_bytes=chunk_map.chunk_bytes,
            )
        self._stamp = chunk_map.stamp if chunk_map else None

    def check_sum(self, chunk: int, found: int, *, peer: str) -> None:
        """Check a chunk's sum against the map.

        Raises
        ------
        PeerLost
            When it differs; `data` has `damaged`.
        """
        known = self._sums[chunk] if chunk < len(self._sums) else 0
        if known and known != found:
            what = f"chunk {chunk}"
            raise damaged(what, peer)

    def check_stamp(self, stamp: int, *, peer: str) -> None:
        """Check that bytes are of the same content as all before them.

        Raises
        ------
        Incomplete
            When the owner changed its memory in between: what was read must be thrown away.
        """
        if self._stamp is None:
            self._stamp = stamp
        if stamp != self._stamp:
            message = f"the owner of the memory at {peer} changed it while it was read; read it again"
            raise Incomplete(message)


def damaged(what: str, peer: str) -> PeerLost:
    """Make the error for bytes that are not what their sum says."""
    message = f"{peer or 'the source'} sent {what} damaged; it is taken from another holder, or try again"
    return PeerLost(message, {"damaged": True})
