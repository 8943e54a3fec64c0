"""Copies on streams that run later: the copy engine of an emulated device.

Rules:

1. A piece of work runs when all that was queued on its stream before it has run, and all
   that it was told to follow. Among streams whose first piece may run anything may go first.
2. By default a thread takes the piece that was queued first. A `scheduler` takes the
   thread's place in tests: it is asked which stream goes next whenever somebody waits, and
   `step` runs one piece by hand. So any schedule can be made to happen.
3. Work that raises OwnerGone or Gone fails alone. Any other error is the engine's end:
   all that is queued, and all that comes later, fails with DeviceError.
4. Nothing is ever run twice, and `end` leaves no piece half run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from tensorcast_dask.exceptions import AbsentError, DeviceError, OwnershipError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Scheduler = Callable[[tuple[int, ...]], int]

__all__ = ["Engine", "Work"]

#: Errors of one copy, not of the device.
_OF_ONE: Final = (OwnershipError, AbsentError)


class Work:
    """One piece of work and its outcome; a ticket.

    Parameters
    ----------
    engine : Engine
        Who runs it.
    run : callable, optional
        What to do; None only marks the stream.
    after : sequence of Work
        What must have run first.
    """

    __slots__ = ("_engine", "after", "ended", "error", "number", "run")

    def __init__(
        self,
        engine: Engine,
        run: Callable[[], object] | None,
        after: Sequence[Work],
    ) -> None:
        self._engine = engine
        self.run = run
        #: Counts up in the order of queueing.
        self.number = 0
        self.after: Sequence[Work] = after
        self.ended = False
        self.error: Exception | None = None

    def done(self) -> bool:
        """Say whether it has run; raises what went wrong."""
        if self.ended and self.error is not None:
            raise self.error
        return self.ended

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it has run; False when the time was too short."""
        self._engine.wait_for(self, timeout_s)
        return self.done()


class Engine:
    """The streams of one device in one process.

    Parameters
    ----------
    scheduler : callable, optional
        Given the streams that may go on, it returns one of them. None: a thread.
    """

    def __init__(self, scheduler: Scheduler | None = None) -> None:
        self._scheduler = scheduler
        self._changed = threading.Condition()
        #: Work that has not begun, by stream; no empty queues.
        self._queues: dict[int, deque[Work]] = {}
        self._queued = 0
        #: Streams whose first piece runs now.
        self._running: set[int] = set()
        #: Why nothing runs any more.
        self._dead = ""
        self._thread: threading.Thread | None = None

    def submit(
        self, stream: int, run: Callable[[], object] | None, after: Sequence[Work] = ()
    ) -> Work:
        """Queue a piece of work."""
        work = Work(self, run, after)
        with self._changed:
            if self._dead:
                raise DeviceError(self._dead)
            self._queued += 1
            work.number = self._queued
            self._queues.setdefault(stream, deque()).append(work)
            if self._scheduler is None and self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="tensorcast-emulated-copies", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        return work

    def ready(self) -> tuple[int, ...]:
        """Return the streams whose first piece may run now, in the order of their numbers."""
        with self._changed:
            return self._ready()

    def _ready(self) -> tuple[int, ...]:
        return tuple(
            sorted(
                stream
                for stream, queue in self._queues.items()
                if stream not in self._running
                and all(other.ended for other in queue[0].after)
            )
        )

    def step(self, stream: int) -> None:
        """Run the first piece of a stream that is ready, here and now."""
        with self._changed:
            assert stream in self._ready(), "engine: the stream has nothing to run"
            work = self._queues[stream][0]
            self._running.add(stream)
        error: Exception | None = None
        try:
            if work.run is not None:
                work.run()
        except Exception as caught:  # noqa: BLE001  # it belongs to who waits
            error = caught
        with self._changed:
            self._running.discard(stream)
            self._queues[stream].popleft()
            if not self._queues[stream]:
                del self._queues[stream]
            self._finish(work, error)
            if error is not None and not isinstance(error, _OF_ONE):
                self._die(str(error))
            self._changed.notify_all()

    def _finish(self, work: Work, error: Exception | None) -> None:
        if error is not None and not isinstance(error, (*_OF_ONE, DeviceError)):
            error = DeviceError(f"a copy failed: {error!r}")
        work.error = error
        work.run, work.after = None, ()
        work.ended = True

    def _die(self, why: str) -> None:
        self._dead = self._dead or why
        for stream, queue in list(self._queues.items()):
            first = stream in self._running
            while len(queue) > first:
                self._finish(queue.pop(), DeviceError(self._dead))
            if not queue:
                del self._queues[stream]
        self._changed.notify_all()

    def wait_for(self, work: Work, timeout_s: float | None) -> None:
        """Wait until a piece has run, or the time is over."""
        if self._scheduler is None:
            with self._changed:
                self._changed.wait_for(lambda: work.ended, timeout_s)
            return
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not work.ended and (end_s is None or time.monotonic() < end_s):
            ready = self.ready()
            assert ready, "engine: what is waited for can never run"
            self.step(self._scheduler(ready))

    def end(self, why: str) -> None:
        """Let no further piece run; the one that runs comes to its end. Idempotent."""
        with self._changed:
            self._die(why)
            self._changed.wait_for(lambda: not self._running)
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._dead or self._ready())
                if self._dead:
                    return
                stream = self._first()
            self.step(stream)

    def _first(self) -> int:
        """Return the stream of the ready piece that has waited longest."""
        return min(self._ready(), key=lambda stream: self._queues[stream][0].number)
