"""P06, P07, P17, P18, P27: programs that make, read, publish and destroy one id at once."""

from __future__ import annotations

import multiprocessing
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.exceptions import AlreadyExists, Gone, TensorCastError

if TYPE_CHECKING:
    from collections.abc import Callable

#: A slab, and a segment of its own.
SIZES = (50, 200_000)
THREADS = 16


def filled(size: int, value: float) -> dict[str, np.ndarray]:
    return {"x": np.full(size, value)}


def in_threads(count: int, act: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=act, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def race(address: str, size: int, base: int, start: Any, told: Any) -> None:
    outcomes: list[tuple[str, float]] = []

    def put(number: int) -> None:
        value = float(base + number)
        try:
            cast.put(filled(size, value), "same")
        except AlreadyExists:
            outcomes.append(("taken", value))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test tells it
            outcomes.append((repr(error), value))
        else:
            outcomes.append(("made", value))

    with tc.connect(address) as cast:
        start.wait(60)
        in_threads(THREADS, put)
    told.put(outcomes)


@pytest.mark.parametrize("size", SIZES)
def test_p17_of_many_programs_that_put_one_id_exactly_one_makes_it(
    cluster: tc.LocalCluster, cast: tc.Session, size: int
) -> None:
    context = multiprocessing.get_context("spawn")
    start, told = context.Barrier(2), context.Queue()
    racers = [
        context.Process(
            target=race, args=(cluster.scheduler_address, size, base, start, told)
        )
        for base in (100, 200)
    ]
    for racer in racers:
        racer.start()
    outcomes = [one for _ in racers for one in told.get(timeout=120)]
    for racer in racers:
        racer.join(60)
    assert Counter(what for what, _ in outcomes) == {
        "made": 1,
        "taken": 2 * THREADS - 1,
    }
    (winner,) = (value for what, value in outcomes if what == "made")
    assert (cast.artifact("same").tensor(framework="numpy") == winner).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rounds", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_p27_a_read_that_meets_a_destroy_is_the_value_or_gone_at_once(
    cluster: tc.LocalCluster, cast: tc.Session, size: int, rounds: int
) -> None:
    with tc.connect(cluster) as other:
        for number in range(rounds):
            cast.put(filled(size, number), "here")
            handle = cast.artifact("here")
            ending = threading.Thread(target=other.destroy, args=("here",))
            ending.start()
            try:
                assert (handle.tensor(framework="numpy", deadline=30) == number).all()
            except Gone:
                pass
            finally:
                ending.join()
            again = cast.put(filled(size, number), "here")
            assert (again.tensor(framework="numpy", deadline=30) == number).all()
            cast.destroy("here")


@pytest.mark.parametrize("size", SIZES)
def test_p06_what_the_caller_changes_after_a_put_is_not_in_it(
    cast: tc.Session, size: int
) -> None:
    for number in range(200 if size < 1000 else 20):
        tensor = np.full(size, float(number))
        artifact = cast.put({"x": tensor}, "kept")
        tensor[:] = -1
        assert (artifact.tensor(framework="numpy") == number).all()
        cast.destroy("kept")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_p07_no_reader_sees_another_readers_edit(
    cast: tc.Session, size: int, framework: str
) -> None:
    if framework == "torch":
        pytest.importorskip("torch")
    artifact = cast.put(filled(size, 3), "shared")
    held = {place.card.node for place in artifact.locations()}
    view = artifact.view({"x": tc.s_[:40]})
    for handle in (artifact, view, cast.artifact("shared")):
        handle.tensor(framework=framework)[:] = 7
        assert (handle.tensor(framework=framework) == 3).all()
    target = next(worker for worker in cast.workers() if worker.node not in held)
    artifact.replicate(target)
    cast.release(artifact, worker=held.pop())
    assert (artifact.tensor(framework="numpy") == 3).all()


def test_p18_spinning_readers_of_the_latest_see_whole_versions_in_rising_order(
    cluster: tc.LocalCluster, cast: tc.Session
) -> None:
    names = [f"shard{n}" for n in range(8)]
    published = 8
    over = threading.Event()
    wrong: list[str] = []

    def spin(_: int) -> None:
        newest = 0
        with tc.connect(cluster) as session:
            while not over.is_set():
                try:
                    artifact = session.latest("model")
                    tensors = artifact.tensor_dict(framework="numpy", deadline=60)
                except TensorCastError as error:
                    wrong.append(repr(error))
                    return
                seen = {float(part[at]) for part in tensors.values() for at in (0, -1)}
                if seen != {float(artifact.version)} or artifact.version < newest:
                    wrong.append(f"{artifact.version} after {newest}: {seen}")
                newest = artifact.version

    def publish(version: int) -> None:
        tensors = {name: np.full(40_000, float(version)) for name in names}
        cast.put(tensors, "model", version="next").publish()

    publish(1)
    readers = threading.Thread(target=in_threads, args=(4, spin))
    readers.start()
    for version in range(2, published + 1):
        publish(version)
    over.set()
    readers.join(120)
    assert not wrong
    assert cast.latest("model").version == published
