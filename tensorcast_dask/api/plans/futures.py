"""Runs and steps as Dask knows them: tasks that wait for what the catalog says.

Rules:

1. Such a task gives what its run or step came to, or raises what it failed of, whichever
   executor carries the run on. It only asks: when it is lost nothing else is. When nobody wants
   it any more it ends: a thread that runs for Dask is never ended from outside.
2. It gives its place in the worker's pool back before it waits, and goes before other tasks.
3. Its name ends with the run's number, so that a resumed run is another Future.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from distributed import get_worker, secede

from tensorcast_dask.api.current import current_session
from tensorcast_dask.tensors.plans import task_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Client, Future

__all__ = [
    "of_run",
    "of_step",
    "plan_in",
    "run_key",
    "wait_for_run",
    "wait_for_step",
]

#: Above what plans and programs ask for: it begins, and then takes no place.
_FIRST: Final = 10_000_000


def run_key(key: str, run: int) -> str:
    """Name the task that gives what a run came to."""
    return task_key("plan", key, f"{run:x}")


def plan_in(text: str) -> str:
    """Give the key of the plan in the name of such a task; "" where it is none."""
    head, _, number = text.rpartition("-")
    is_one = head.startswith("plan-") and number.isalnum()
    return head.removeprefix("plan-") if is_one else ""


def of_run(client: Client, key: str, run: int) -> Future[Any]:
    """Have a worker wait for the end of a run."""
    name = run_key(key, run)
    return client.submit(wait_for_run, key, key=name, pure=False, priority=_FIRST)


def of_step(client: Client, key: str, run: int, step: str) -> Future[Any]:
    """Have a worker wait for the end of a step."""
    name = task_key(f"value of {step}", key, f"{run:x}")
    return client.submit(
        wait_for_step, key, step, key=name, pure=False, priority=_FIRST
    )


# -------------------------------------------------------------------- tasks
def wait_for_run(key: str) -> Any:
    """Give a run's `PlanResult`, or raise what it failed of."""
    wanted = _seceded()
    run = current_session().plan_run(key)
    return run._core.bridge(run._while, wanted)  # noqa: SLF001 - of this room


def wait_for_step(key: str, step: str) -> Any:
    """Give what a step came to, or raise what it failed of."""
    wanted = _seceded()
    run = current_session().plan_run(key)
    return run._core.bridge(run._value, step, wanted)  # noqa: SLF001 - of this room


def _seceded() -> Callable[[], bool]:
    """Give this task's place back; give what says whether anybody wants what it comes to."""
    worker = get_worker()
    key = worker.get_current_task()
    secede()  # type: ignore[no-untyped-call]

    def wanted() -> bool:
        task = worker.state.tasks.get(key)
        return task is not None and task.state != "cancelled"

    return wanted
