from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tensorcast_dask.exceptions import DeadlineExceeded, NotFound
from tensorcast_dask.store.jobs import MAX_LINES, Job, Jobs, Once
from tensorcast_dask.tensors.ids import Epoch
from tensorcast_dask.tensors.messages import TaskDone
from tests.kit.eventually import eventually


def test_an_order_that_comes_again_starts_nothing_and_is_answered_again() -> None:
    told: list[TaskDone] = []
    runs: list[int] = []
    jobs = Jobs(told.append)

    def run(job: Job) -> TaskDone:
        runs.append(job.task)
        return TaskDone(task=job.task, moved_bytes=5)

    jobs.start(1, deadline_s=5.0, run=run)
    eventually(lambda: told, within_s=5.0)
    jobs.start(1, deadline_s=5.0, run=run)
    assert told == [TaskDone(task=1, moved_bytes=5)] * 2
    assert runs == [1]
    jobs.seen(1)
    jobs.start(1, deadline_s=5.0, run=run)
    eventually(lambda: len(told) == 3, within_s=5.0)


def test_how_it_went_is_told_with_the_end_and_is_bounded() -> None:
    told: list[TaskDone] = []
    jobs = Jobs(told.append)

    def run(job: Job) -> TaskDone:
        job.tell("x" * 1000)
        for number in range(100):
            job.tell(str(number))
        message = "no"
        raise NotFound(message)

    jobs.start(1, deadline_s=5.0, run=run)
    eventually(lambda: told, within_s=20.0)
    (done,) = told
    assert len(done.lines) == MAX_LINES
    assert done.lines[0][1] == "x" * 300
    assert [line for _, line in done.lines[1:3]] == ["0", "1"]
    assert all(ago_s >= 0 for ago_s, _ in done.lines)


def test_every_job_ends_in_one_outcome_whatever_it_raises() -> None:
    told: list[TaskDone] = []
    jobs = Jobs(told.append)

    def missing(_: Job) -> TaskDone:
        message = "no"
        raise NotFound(message)

    def broken(_: Job) -> TaskDone:
        message = "a defect"
        raise ValueError(message)

    for task, run in ((1, missing), (2, broken)):
        jobs.start(task, deadline_s=5.0, run=run)
    eventually(lambda: len(told) == 2, within_s=5.0)
    kinds = {done.task: done.fault.kind for done in told if done.fault is not None}
    assert kinds == {1: "NotFound", 2: "TensorCastError"}
    assert jobs.running == 0


def test_a_catalog_of_another_epoch_is_told_nothing_of_the_former_ones_tasks() -> None:
    told: list[TaskDone] = []
    jobs = Jobs(told.append)
    jobs.greeted(Epoch(1))
    may_end = threading.Event()

    def slow(job: Job) -> TaskDone:
        may_end.wait(5.0)
        return TaskDone(task=job.task)

    jobs.start(1, deadline_s=5.0, run=slow)
    jobs.ended(TaskDone(task=2))
    assert jobs.greeted(Epoch(1)) == [TaskDone(task=2)]
    assert jobs.greeted(Epoch(2)) == []
    may_end.set()
    jobs.start(1, deadline_s=5.0, run=lambda job: TaskDone(task=job.task, via="new"))
    eventually(lambda: TaskDone(task=1, via="new") in told, within_s=5.0)
    assert TaskDone(task=1) not in told


def test_a_cancel_reaches_what_is_running_and_what_begins_after_it() -> None:
    job = Job(1, until_s=time.monotonic() + 5.0)
    said: list[str] = []
    job.check()
    job.on_cancel(said.append)
    job.cancel()
    assert len(said) == 1
    job.on_cancel(said.append)
    assert len(said) == 2
    with pytest.raises(DeadlineExceeded, match="cancelled"):
        job.check()
    with pytest.raises(DeadlineExceeded, match="deadline"):
        Job(2, until_s=0.0).check()


def test_the_same_work_is_done_once_and_all_get_its_result_or_its_error() -> None:
    once: Once[int] = Once()
    begun, may_end = threading.Event(), threading.Event()
    runs: list[int] = []

    def work() -> int:
        runs.append(1)
        begun.set()
        may_end.wait(5.0)
        return 7

    until_s = time.monotonic() + 5.0
    found: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(once.run("key", work, until_s=until_s))
        )
        for _ in range(3)
    ]
    threads[0].start()
    begun.wait(5.0)
    for thread in threads[1:]:
        thread.start()
    with pytest.raises(DeadlineExceeded):
        once.run("key", work, until_s=0.0)
    may_end.set()
    for thread in threads:
        thread.join()
    assert found == [7, 7, 7]
    assert len(runs) < 3

    def fails() -> int:
        message = "no"
        raise NotFound(message)

    with pytest.raises(NotFound):
        once.run("key", fails, until_s=until_s)
    assert once.run("key", lambda: 9, until_s=until_s) == 9


def test_who_waits_for_work_that_ran_out_of_its_own_time_does_it_itself() -> None:
    once: Once[int] = Once()
    begun, may_end = threading.Event(), threading.Event()

    def cancelled() -> int:
        begun.set()
        may_end.wait(5.0)
        message = "the task was cancelled"
        raise DeadlineExceeded(message)

    until_s = time.monotonic() + 5.0
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(once.run, "key", cancelled, until_s=until_s)
        begun.wait(5.0)
        second = pool.submit(once.run, "key", lambda: 7, until_s=until_s)
        may_end.set()
        with pytest.raises(DeadlineExceeded, match="cancelled"):
            first.result()
        assert second.result() == 7
