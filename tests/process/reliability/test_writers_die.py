"""P25, P18: a program dies, or is interrupted, in the middle of a put, a publish or a read."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.exceptions import TensorCastError
from tests.kit.baseline import baseline
from tests.kit.eventually import eventually
from tests.kit.faulty import Faults, faulty_cluster, whole

#: A slab, and a segment of its own in several chunks.
SIZES = (1000, 3 << 20)
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Scene:
    """A cluster and who looks at it."""

    cluster: tc.LocalCluster
    session: tc.Session
    faults: Faults
    strangers: bool


@pytest.fixture(scope="module", params=["one host", "strangers"])
def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    strangers = request.param == "strangers"
    with (
        faulty_cluster(
            tmp_path_factory.mktemp("run"),
            2,
            separate_hosts=strangers,
            settings={
                "session": {"grace": "500ms"},
                "lease": {"ttl": "2s", "reservation-ttl": "2s"},
                "transfer": {"chunk-bytes": "256 KiB"},
                "segment": {"warm-bytes": "0"},
            },
        ) as (cluster, faults),
        tc.connect(cluster) as session,
    ):
        whole(session, 2)
        yield Scene(cluster, session, faults, strangers)


@pytest.fixture(autouse=True)
def named(scene: Scene) -> Iterator[None]:
    """One test's failure is not the next one's."""
    yield
    scene.session.destroy("victim")


def noise(size: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, size, np.uint8)


# ---------------------------------------------------------------- what the child does
def put(cast: tc.Session, size: int) -> None:
    cast.put({"x": noise(size)}, "victim")


def build(cast: tc.Session, size: int) -> None:
    """Fill half of a draft, and the rest never."""
    draft = cast.create({"x": ((size,), "uint8")}, "victim")
    draft.tensors(framework="numpy")["x"][: size // 2] = 7
    cast.put({"x": noise(9)}, "half/done")
    threading.Event().wait()


def lend_and_publish(cast: tc.Session, size: int) -> None:
    lent = cast.register({"x": noise(size, 2)}, "victim", version="next")
    lent.publish()


def read(cast: tc.Session, size: int) -> None:
    cast.artifact("victim").tensor(framework="numpy")


def child(
    address: str, act: Callable[[tc.Session, int], None], size: int, told: Any
) -> None:
    """Act; when that is interrupted, say whether the session can still be used."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tc.connect(address) as cast:
        told.send("begun")
        try:
            act(cast, size)
        except KeyboardInterrupt:
            told.send("interrupted")
            told.recv()  # the fault is over, and what was left has been looked at
            other = cast.put({"x": noise(5000)}, "other")
            assert other.tensor(framework="numpy").tobytes() == noise(5000).tobytes()
            cast.destroy("other")
            told.send("usable")
        else:
            told.send("done")


@contextlib.contextmanager
def acting(
    scene: Scene, act: Callable[[tc.Session, int], None], size: int
) -> Iterator[tuple[Any, Any]]:
    """Run a child for the length of a block."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(
        target=child, args=(scene.cluster.scheduler_address, act, size, theirs)
    )
    process.start()
    try:
        assert ours.poll(60)
        assert ours.recv() == "begun"
        yield process, ours
    finally:
        process.kill()
        process.join(30)
        ours.close()
        theirs.close()


def is_free(session: tc.Session) -> bool:
    return not session.exists("victim")


def put_again(scene: Scene, size: int) -> None:
    """Make under the victim's name what it did not; nothing of the victim shows."""
    content = noise(size, 3)

    def made() -> bool:
        try:
            again = scene.session.put({"x": content}, "victim")
        except TensorCastError as error:
            raise AssertionError(error) from None
        return bool((again.tensor(framework="numpy") == content).all())

    eventually(made, within_s=20, what="the name is free")
    scene.session.destroy("victim")


# ---------------------------------------------------------------- killed
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("point", ["put.reserved", "put.before_commit"])
def test_p25_a_program_that_is_killed_in_a_put_leaves_nothing(
    scene: Scene, size: int, point: str
) -> None:
    with baseline(scene.session):
        with (
            scene.faults.armed(f"{point}=pause@1"),
            acting(scene, put, size) as (process, _),
        ):
            scene.faults.wait(point)
            assert is_free(scene.session)
            process.kill()
            if size == SIZES[0]:
                scene.session.destroy("victim")  # also before the time is over
        eventually(lambda: is_free(scene.session), within_s=20)
        put_again(scene, size)


@pytest.mark.parametrize("moments", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_p25_a_program_that_is_killed_in_the_middle_of_the_copy_leaves_nothing(
    scene: Scene, moments: int
) -> None:
    with baseline(scene.session):
        for moment in range(moments):
            with acting(scene, put, 48 << 20) as (process, told):
                begun = partial(has_begun, scene.session, told)
                eventually(begun, within_s=30)
                time.sleep(moment * 0.004)  # scene: a later moment of the copy
                process.kill()
            eventually(lambda: settled(scene.session), within_s=20)
            scene.session.destroy("victim")
        put_again(scene, SIZES[1])


def has_begun(session: tc.Session, told: Any) -> bool:
    """Whether the child's bytes move, or have all come already."""
    return bool(moved_bytes(session) or told.poll())


def moved_bytes(session: tc.Session) -> int:
    stores = session.debug_state()["stores"].values()
    tiers = [use for store in stores for use in store.get("tiers", {}).values()]
    return sum(use["reserved_bytes"] for use in tiers)


def settled(session: tc.Session) -> bool:
    """Whether nothing is under way: the put is undone, or (too late to kill it) whole."""
    state = session.debug_state()["catalog"]
    return not state["creations"] and not moved_bytes(session)


def test_p25_a_program_that_is_killed_while_it_builds_in_place_leaves_nothing(
    scene: Scene,
) -> None:
    if scene.strangers:
        pytest.skip("what is built in place is built on its own host")
    with baseline(scene.session):
        with acting(scene, build, SIZES[1]) as (process, _):
            eventually(lambda: scene.session.exists("half/done"), within_s=60)
            process.kill()
        eventually(lambda: is_free(scene.session), within_s=20)
        scene.session.destroy("half/done")
        put_again(scene, SIZES[1])


def test_p18_a_publish_whose_owner_dies_in_the_copy_leaves_the_latest_where_it_was(
    scene: Scene,
) -> None:
    session, content = scene.session, noise(SIZES[1])
    with baseline(session):
        first = session.put({"x": content}, "victim")
        first.publish()
        with (
            scene.faults.armed("copy.arrived=pause"),
            acting(scene, lend_and_publish, SIZES[1]) as (process, _),
        ):
            scene.faults.wait("copy.arrived")
            assert session.latest("victim") == first
            process.kill()
        eventually(lambda: settled(session), within_s=20)
        latest = session.latest("victim")
        assert latest.tensor(framework="numpy").tobytes() == content.tobytes()
        assert latest == first
        session.destroy("victim")


# ---------------------------------------------------------------- interrupted
def interrupt(scene: Scene, process: Any, told: Any, point: str) -> None:
    """Interrupt a child while a store stands at a point; then let the store go on."""
    scene.faults.wait(point)
    os.kill(process.pid, signal.SIGINT)
    assert told.poll(5), "an interrupt waits for nobody"
    assert told.recv() == "interrupted"
    scene.faults.disarm()


def go_on(told: Any) -> None:
    told.send("go on")
    assert told.poll(60)
    assert told.recv() == "usable"


@pytest.mark.parametrize("size", SIZES)
def test_an_interrupted_put_leaves_nothing_and_its_session_goes_on(
    scene: Scene, size: int
) -> None:
    with baseline(scene.session):
        with ExitStack() as later:
            later.enter_context(scene.faults.armed("put.reserved=pause@1"))
            process, told = later.enter_context(acting(scene, put, size))
            interrupt(scene, process, told, "put.reserved")
            eventually(lambda: settled(scene.session), within_s=20)
            assert is_free(scene.session)
            go_on(told)
        put_again(scene, size)


def test_an_interrupted_read_leaves_nothing_and_its_session_goes_on(
    scene: Scene,
) -> None:
    if not scene.strangers:
        pytest.skip("a read of this host is one map")
    with baseline(scene.session):
        scene.session.put({"x": noise(SIZES[1])}, "victim")
        with (
            scene.faults.armed("copy.chunk=pause"),
            acting(scene, read, 0) as (process, told),
        ):
            interrupt(scene, process, told, "copy.chunk")
            go_on(told)
        scene.session.destroy("victim")
