"""Pulls: the planner's instructions carried out on sockets or UCX, into a segment of ours.

Rules:

1. A lane is one connection and one thread. It takes the next chunk when it is done with
   one, receives it in one call without the GIL, and hands over only what it has verified.
2. A source is reported lost only when all its lanes have ended: no byte of it can come.
3. Whatever way it ends, the reservation is committed or taken back, every connection is
   closed, and every lane has ended.
4. Where both ends have UCX and the settings allow it lanes go over it, never beside TLS: UCX
   has none; from device to device where both have the bytes there. A way that fails is told to
   the catalog, and sends this pull's source to the next one, at last TCP: it costs a retry,
   no more.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tensorcast_dask.dataplane import faults
from tensorcast_dask.dataplane.memory import DEFAULT_THREADS
from tensorcast_dask.dataplane.transports.base import Context, Work, open_source
from tensorcast_dask.exceptions import (
    AbsentError,
    InvalidArgument,
    PeerLost,
    ReachError,
    TensorCastError,
)
from tensorcast_dask.store.core import now_s
from tensorcast_dask.store.records import Pulled, digest_of_index
from tensorcast_dask.store.sharing import anyone
from tensorcast_dask.store.sides import UCX, Lane, Side, sockets_to, ways_to
from tensorcast_dask.store.state import pull
from tensorcast_dask.tensors.checksums import encode_sums
from tensorcast_dask.tensors.messages import Fault, Location

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.dataplane.transports.base import Arrived, Source
    from tensorcast_dask.store.core import Core
    from tensorcast_dask.store.flights import Flights
    from tensorcast_dask.store.media import Landing
    from tensorcast_dask.store.state.replicas import Wanted
    from tensorcast_dask.tensors.ids import Generation

__all__ = ["PullRun", "lanes_for"]

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.05
#: Chunks given out for each lane: two under way (`Context.depth`), and one at hand, so that the
#: next request need not wait for the planner to hear of what has arrived.
_DEPTH: Final = 3
_FEWEST_LANES: Final = 2
_MOST_LANES: Final = 4
_RESERVE_S: Final = 60.0
#: One line fills the memory bus while another's chunk is verified; each costs 20 ms to open.
_UCX_LANES: Final = 2


class PullRun:
    """One pull over TCP (or unix sockets, or UCX).

    Parameters
    ----------
    core : Core
        The state.
    wanted : Wanted
        What is pulled and where to.
    sources : tuple of Location
        Holders, best first.
    source_generation : Generation
        Under which they hold the bytes.
    landing : Landing
        Where it lands.
    context : Context
        Credentials and deadline.
    flights : Flights
        The store's pulls.
    progress : callable
        Told of bytes that have arrived.
    """

    def __init__(
        self,
        core: Core,
        wanted: Wanted,
        sources: tuple[Location, ...],
        *,
        source_generation: Generation,
        landing: Landing,
        context: Context,
        flights: Flights,
        progress: Callable[[int], None],
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._tell = tell
        self._source_generation = source_generation
        self._core = core
        self._wanted = wanted
        self._context = replace(
            context,
            any_lane=core.settings.ucx == "on",
            depth=landing.depth or context.depth,
        )
        self._progress = progress
        self._flights = flights
        settings = core.settings
        self._lanes_each = settings.connections or lanes_for(DEFAULT_THREADS)
        self._target = landing
        self._planner = pull.Pull(
            sources=len(sources),
            nbytes=wanted.nbytes,
            window=1,  # set before each step
            stall_s=settings.stall_s,
            deadline_s=context.until_s or now_s() + 3600.0,
        )
        ucx = settings.ucx != "off" and self._context.credentials.tls is None
        device = landing.direct() is not None
        self._sides = [
            Side(n, anyone(one), ways_to(one, ucx=ucx, device=device))
            for n, one in enumerate(sources)
        ]
        #: How the bytes of each source came; why UCX was left.
        self._via: dict[int, str] = {}
        self._left = ""
        self._lanes: list[Lane] = []
        self._events: queue.SimpleQueue[pull.Event] = queue.SimpleQueue()
        #: Guards lanes and sides.
        self._lock = threading.Lock()
        self._outcome: pull.Finished | pull.Failed | None = None
        self._started_s = 0.0

    def cancel(self, why: str) -> None:
        """Give up; `run` raises soon."""
        self._events.put(pull.Cancelled(why=why))

    def run(self) -> Pulled:
        """Pull, verify and commit.

        Raises
        ------
        TensorCastError
            When the bytes cannot be had in time; nothing is left of the attempt.
        """
        self._started_s = now_s()
        try:
            with self._flights.joined(len(self._sides)):
                self._do(self._planner.start(now_s=now_s()))
                while self._outcome is None:
                    event = self._next()
                    self._planner.window = self._window()
                    self._do(self._planner.handle(event, now_s=now_s()))
            if isinstance(self._outcome, pull.Failed):
                raise self._outcome.fault.error()
            return self._finish()
        finally:
            self._close()

    def _next(self) -> pull.Event:
        try:
            return self._events.get(timeout=_TICK_S)
        except queue.Empty:
            return pull.TimePassed()

    def _window(self) -> int:
        """How many chunks may be under way at each source now."""
        settings = self._core.settings
        share_bytes = settings.inflight_bytes // self._flights.sources
        chunk_bytes = self._planner.chunk_bytes or settings.chunk_bytes
        return max(1, min(self._lanes_each * _DEPTH, share_bytes // chunk_bytes))

    def _finish(self) -> Pulled:
        planner, wanted = self._planner, self._wanted
        self._reserve()
        assert planner.index is not None, "store: a finished pull knows its index"
        self._end_lanes()
        self._core.commit(
            wanted.generation,
            wanted.tier,
            index=planner.index,
            index_digest=digest_of_index(planner.index),
            sums=encode_sums(planner.sums),
            cut_bytes=planner.chunk_bytes,
        )
        share = planner.share()
        asked = [side.location for side in self._sides]
        used = [asked[number] for number in range(len(asked)) if share[number]]
        seconds = now_s() - self._started_s
        return Pulled(
            moved_bytes=wanted.nbytes,
            via="+".join(sorted(set(self._via.values()) or {"tcp"})),
            sources=tuple(location.card.node for location in used),
            shares=tuple(wanted.nbytes * one // sum(share) for one in share if one),
            seconds=seconds,
            left=self._left,
        )

    def _close(self) -> None:
        self._end_lanes()
        self._target.close()

    def _end_lanes(self) -> None:
        """End every lane that can still write; one that is connecting never will."""
        self._target.end()
        for side in self._sides:
            self._leave(side)
        with self._lock:
            writing = [
                lane.thread
                for lane in self._lanes
                if lane.connection is not None and lane.thread is not None
            ]
        for thread in writing:
            thread.join()

    # -------------------------------------------------------------- instructions
    def _do(self, told: list[pull.Instruction]) -> None:
        for instruction in told:
            match instruction:
                case pull.AskMap():
                    self._ask_map(self._sides[instruction.source])
                case pull.Fetch():
                    self._fetch(self._sides[instruction.source], instruction.chunk)
                case pull.Steal():
                    self._steal(self._sides[instruction.source], instruction.chunk)
                case pull.Leave():
                    side = self._sides[instruction.source]
                    logger.warning("source %d: %s", side.number, instruction.why)
                    self._tell(
                        f"leaves {side.location.card.name or side.location.card.node[:8]}: {instruction.why}"
                    )
                    self._give_up(side, instruction.why)
                case pull.Finished() | pull.Failed():
                    self._outcome = instruction

    def _ask_map(self, side: Side) -> None:
        def ask() -> None:
            source = None
            try:
                source = self._open(side, sockets_to(side.location))
                found = source.chunk_map()
            except TensorCastError as error:
                self._events.put(
                    pull.Lost(
                        source=side.number,
                        fault=Fault.of(error),
                        for_ever=not error.retryable,
                    )
                )
                return
            finally:
                if source is not None:
                    source.close()
            self._events.put(
                pull.Mapped(
                    source=side.number,
                    nbytes=found.nbytes,
                    chunk_bytes=found.chunk_bytes,
                    index=found.index,
                    have=found.have,
                    sums=found.sums,
                    stamp=found.stamp,
                )
            )

        if side.closing:  # lanes of the former attempt keep to their own side
            side = self._sides[side.number] = side.anew()
        _spawn(ask)

    def _connect(self, side: Side) -> Source:
        """Open a lane's connection: over UCX where it can be had, else over sockets."""
        while (scheme := side.scheme) in UCX:
            try:
                return self._open(side, scheme)
            except (AbsentError, InvalidArgument, ReachError) as error:
                self._leave_way(side, scheme, error)
        return self._open(side, scheme)

    def _leave_way(self, side: Side, scheme: str, error: TensorCastError) -> None:
        with self._lock:
            left = side.leave(scheme, error.message)
            self._left = left or self._left
        if left:
            logger.warning("pull of %d: %s", self._source_generation, left)
            self._tell(f"goes another way: {left}")

    def _open(self, side: Side, scheme: str) -> Source:
        direct = self._target.direct() if scheme == "device" else None
        if direct is not None:
            return direct(side.location, self._source_generation, self._context)
        return open_source(
            side.location,
            self._source_generation,
            scheme=scheme,
            context=self._context,
        )

    def _fetch(self, side: Side, chunk: int) -> None:
        if self._outcome is not None:  # the first refusal is the outcome
            return
        try:
            self._reserve()
        except TensorCastError as error:
            self._outcome = pull.Failed(fault=Fault.of(error))
            return
        side.todo.put(chunk)
        with self._lock:
            most = _UCX_LANES if side.scheme in UCX else self._lanes_each
            needed = len(side.lanes) < min(most, self._lanes_each)
            idle = any(not lane.owes for lane in side.lanes)
            if not needed or (idle and side.todo.qsize() <= 1):
                return
            lane = Lane(side)
            side.lanes.append(lane)
            self._lanes.append(lane)
            lane.thread = _spawn(lambda: self._run_lane(lane))

    def _steal(self, side: Side, chunk: int) -> None:
        with self._lock:
            for lane in side.lanes:
                if chunk in lane.owes:
                    lane.stolen = True
                    if lane.connection is not None:
                        lane.connection.close()
                    return
        # It is still in the queue, or has arrived: ask the lanes to give the queue back.
        self._requeue(side, chunk)

    def _requeue(self, side: Side, chunk: int) -> None:
        kept: list[int | None] = []
        with contextlib.suppress(queue.Empty):
            while True:
                kept.append(side.todo.get_nowait())
        for item in kept:
            if item == chunk:
                self._events.put(pull.Dropped(source=side.number, chunk=chunk))
            else:
                side.todo.put(item)

    def _give_up(self, side: Side, why: str) -> None:
        """Leave a source for a while; a device that is silent may have a store that is not."""
        if side.scheme == "device":
            self._leave_way(side, "device", PeerLost(why))
        self._leave(side)

    def _leave(self, side: Side) -> None:
        """Close all lanes of a source; the last one to end reports it lost."""
        with self._lock:
            side.closing = True
            lanes = list(side.lanes)
            for lane in lanes:
                if lane.connection is not None:
                    lane.connection.close()
        for _ in range(self._lanes_each):
            side.todo.put(None)

    # -------------------------------------------------------------- arriving
    def _reserve(self) -> None:
        planner = self._planner
        assert planner.index is not None, "store: a pull that knows no index"
        self._target.reserve(
            index=planner.index,
            chunk_bytes=planner.chunk_bytes,
            until_s=self._context.until_s or now_s() + _RESERVE_S,
        )

    def _settle(self, lane: Lane, arrived: Arrived) -> None:
        """Report a verified chunk."""
        chunk = arrived.work.chunk
        self._target.settle(chunk)
        with self._lock:
            lane.owes.remove(chunk)
            if lane.connection is not None:
                self._via[lane.source.number] = lane.connection.via
        self._events.put(
            pull.Arrived(
                source=lane.source.number,
                chunk=chunk,
                digest=arrived.sum,
                claimed=arrived.sum,
                stamp=arrived.stamp,
            )
        )
        self._progress(arrived.nbytes)

    # -------------------------------------------------------------- a lane's thread
    def _run_lane(self, lane: Lane) -> None:
        error: TensorCastError | None = None
        try:
            while (chunk := lane.source.todo.get()) is not None:
                self._read(lane, chunk)
                if lane.source.closing:
                    break
        except TensorCastError as caught:
            error = caught
        except OSError as caught:
            error = PeerLost(f"the pull failed on this side: {caught}")
        finally:
            if lane.connection is not None:
                lane.connection.close()
        self._lane_ended(lane, error)

    def _read(self, lane: Lane, first: int) -> None:
        """Fetch a chunk, and those that follow while there are any."""
        given = deque([first])
        with self._lock:
            lane.owes.append(first)
        if lane.connection is None:
            connection = self._connect(lane.source)
            with self._lock:
                lane.connection = connection
                closing = lane.source.closing or lane.stolen
            if closing:
                message = "the connection is closed here"
                raise PeerLost(message)

        def work() -> Work | None:
            if given:
                chunk = given.popleft()
            else:
                try:
                    found = lane.source.todo.get_nowait()
                except queue.Empty:
                    return None
                if found is None:
                    lane.source.todo.put(None)
                    return None
                chunk = found
                with self._lock:
                    lane.owes.append(chunk)
            if straight:
                return Work(chunk, None)
            return Work(chunk, self._target.place(chunk, self._planner.length(chunk)))

        assert lane.connection is not None, "store: a lane reads when it is connected"
        straight = lane.scheme == "device"
        for arrived in lane.connection.read_chunks(work):
            faults.point("copy.arrived", detail=self._wanted.id)
            self._settle(lane, arrived)

    def _lane_ended(self, lane: Lane, error: TensorCastError | None) -> None:
        side = lane.source
        with self._lock:
            side.lanes.remove(lane)
            self._lanes.remove(lane)
            owed = list(lane.owes)
            lane.owes.clear()
            stolen = lane.stolen and not side.closing
            if error is not None and not stolen:
                side.error = side.error or error
            last = not side.lanes
        for chunk in owed:
            self._target.give_up(chunk)
        if stolen:
            for chunk in owed:
                self._events.put(pull.Dropped(source=side.number, chunk=chunk))
            return
        if error is not None and not side.closing:
            if lane.scheme in UCX and isinstance(error, ReachError):
                self._leave_way(side, lane.scheme, error)
            self._leave(side)
        current = self._sides[side.number] is side
        if last and current and (side.error is not None or side.closing):
            self._report_lost(side)

    def _report_lost(self, side: Side) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                side.todo.get_nowait()
        error = side.error or PeerLost(f"source {side.number} was left")
        side.error = None
        self._events.put(
            pull.Lost(
                source=side.number,
                fault=Fault.of(error),
                for_ever=bool(error.data.get("damaged")) or not error.retryable,
            )
        )


def lanes_for(cores: int) -> int:
    """Return how many connections a pull has to each source by default."""
    return min(_MOST_LANES, max(_FEWEST_LANES, cores))


def _spawn(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name="tensorcast-pull", daemon=True)
    thread.start()
    return thread
