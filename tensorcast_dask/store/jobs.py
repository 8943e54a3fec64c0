"""Work that takes time: each piece once, its outcome kept until the catalog has it.

Rules:

1. A task has a number within one epoch of the catalog. The same order again starts nothing:
   it is running, or its outcome is said again.
2. Work on the same bytes is done once (`once`): who comes second waits for the first and
   gets its result.
3. Every job ends in one `TaskDone`, whatever happens; it is kept until `TaskSeen`, or
   until a catalog of another epoch comes, which knows nothing of it.
4. How it went is told with its end, in `MAX_LINES` lines at most: nothing is kept here for stories.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec

from tensorcast_dask.exceptions import DeadlineExceeded, TensorCastError
from tensorcast_dask.tensors.messages import Fault, TaskDone

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from tensorcast_dask.tensors.ids import Epoch

__all__ = ["MAX_LINES", "Job", "Jobs", "Once"]

logger = logging.getLogger(__name__)

R = TypeVar("R")

MAX_LINES: Final = 12
_LINE_CHARS: Final = 300


class Job:
    """One running task."""

    def __init__(self, task: int, *, until_s: float) -> None:
        self.task = task
        self.until_s = until_s
        self.done_bytes = 0
        self._lines: list[tuple[float, str]] = []
        self._lock = threading.Lock()
        self._cancelled = False
        self._cancel: Callable[[str], None] | None = None

    def on_cancel(self, cancel: Callable[[str], None] | None) -> None:
        """Say how to stop what is being done now; at once where it was asked already."""
        with self._lock:
            self._cancel = cancel
            now = self._cancelled and cancel is not None
        if now and cancel is not None:
            cancel("the task was cancelled")

    def tell(self, line: str) -> None:
        """Say how it goes, for its story (rule 4); in whichever thread."""
        if len(self._lines) < MAX_LINES:
            self._lines.append((time.monotonic(), line[:_LINE_CHARS]))

    def lines(self) -> tuple[tuple[float, str], ...]:
        """Give what was said, with how many seconds ago."""
        now_s = time.monotonic()
        return tuple((round(now_s - at_s, 6), line) for at_s, line in self._lines)

    def cancel(self) -> None:
        """Stop it; it ends with DeadlineExceeded, or as done."""
        with self._lock:
            self._cancelled = True
            cancel = self._cancel
        if cancel is not None:
            cancel("the task was cancelled")

    def check(self) -> None:
        """Return when the job is to go on.

        Raises
        ------
        DeadlineExceeded
            When it was cancelled, or its time has passed.
        """
        if self._cancelled:
            message = "the task was cancelled"
            raise DeadlineExceeded(message)
        if time.monotonic() >= self.until_s:
            message = "the task's deadline passed on this node; allow more time"
            raise DeadlineExceeded(message)


class Jobs:
    """The tasks of one store.

    Parameters
    ----------
    tell : callable
        Sends a message to the catalog, where there is one.
    """

    def __init__(self, tell: Callable[[TaskDone], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._epoch = 0
        self._running: dict[int, Job] = {}
        self._outcomes: dict[int, TaskDone] = {}

    @property
    def running(self) -> int:
        """How many tasks are under way."""
        return len(self._running)

    def greeted(self, epoch: Epoch) -> list[TaskDone]:
        """Return the outcomes to say again to the catalog that greeted us."""
        with self._lock:
            if epoch != self._epoch:
                self._epoch = epoch
                self._outcomes.clear()
                self._running.clear()  # they go on; nobody waits for what they did
            return list(self._outcomes.values())

    def start(
        self, task: int, *, deadline_s: float, run: Callable[[Job], TaskDone]
    ) -> None:
        """Carry a task out in a thread of its own."""
        with self._lock:
            known = self._outcomes.get(task)
            if known is None and task in self._running:
                return
            job = Job(task, until_s=time.monotonic() + deadline_s)
            epoch = self._epoch
            if known is None:
                self._running[task] = job
        if known is not None:
            self._tell(known)
            return
        threading.Thread(
            target=self._run,
            args=(job, epoch, run),
            name=f"tensorcast-task-{task}",
            daemon=True,
        ).start()

    def _run(self, job: Job, epoch: int, run: Callable[[Job], TaskDone]) -> None:
        started_s = time.monotonic()
        try:
            done = run(job)
        except TensorCastError as error:
            done = TaskDone(
                task=job.task,
                fault=Fault.of(error),
                seconds=time.monotonic() - started_s,
            )
        except Exception as error:  # rule 3: the catalog waits for an end
            logger.exception("task %d failed", job.task)
            fault = Fault.of(TensorCastError(f"the node failed: {error}; see its log"))
            done = TaskDone(task=job.task, fault=fault)
        done = msgspec.structs.replace(done, lines=job.lines())
        with self._lock:
            if epoch != self._epoch:
                return  # a catalog of another epoch came; it knows nothing of this task
            del self._running[job.task]
            self._outcomes[job.task] = done
        self._tell(done)

    def repeat(self, task: int) -> bool:
        """Say the outcome of a task again; False when there is none."""
        with self._lock:
            known = self._outcomes.get(task)
        if known is not None:
            self._tell(known)
        return known is not None

    def ended(self, done: TaskDone) -> None:
        """Record the outcome of a task that was carried out elsewhere."""
        with self._lock:
            self._outcomes[done.task] = done
        self._tell(done)

    def seen(self, task: int) -> None:
        """Forget an outcome: the catalog has it."""
        with self._lock:
            self._outcomes.pop(task, None)

    def cancel(self, task: int) -> None:
        """Stop a task, where it still runs."""
        with self._lock:
            job = self._running.get(task)
        if job is not None:
            job.cancel()


class _Flight(Generic[R]):
    """Work that several wait for."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.result: R | None = None
        self.error: BaseException | None = None


class Once(Generic[R]):
    """Joins calls for the same thing.

    That its time passed, or that it was cancelled, is the first one's own affair: who
    waited for it then begins anew.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[Hashable, _Flight[R]] = {}

    def run(self, key: Hashable, work: Callable[[], R], *, until_s: float) -> R:
        """Do `work`, or wait for who does it already.

        Raises
        ------
        DeadlineExceeded
            When it was not done in time; it goes on for the others.
        """
        while True:
            with self._lock:
                flight = self._flights.get(key)
                mine = flight is None
                if flight is None:
                    flight = self._flights[key] = _Flight()
            if mine:
                return self._lead(key, flight, work)
            if not flight.ended.wait(max(0.0, until_s - time.monotonic())):
                message = "the same bytes are being brought for somebody else, and not in time"
                raise DeadlineExceeded(message)
            if flight.error is None:
                return flight.result  # type: ignore[return-value]  # set before `ended`
            if not isinstance(flight.error, DeadlineExceeded):
                raise flight.error

    def runs(self, key: Hashable) -> bool:
        """Say whether somebody does it now."""
        with self._lock:
            return key in self._flights

    def _lead(self, key: Hashable, flight: _Flight[R], work: Callable[[], R]) -> R:
        try:
            flight.result = work()
        except BaseException as error:
            flight.error = error
            raise
        finally:
            with self._lock:
                del self._flights[key]
            flight.ended.set()
        return flight.result
