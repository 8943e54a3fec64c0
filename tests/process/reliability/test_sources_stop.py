"""P29: the holder of the bytes dies or stands still while they are read."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import psutil
import pytest

import tensorcast_dask as tc
from tensorcast_dask.exceptions import (
    DataLost,
    DeadlineExceeded,
    NotFound,
    PeerLost,
)
from tests.kit.baseline import baseline
from tests.kit.eventually import eventually
from tests.kit.faulty import (
    Faults,
    faulty_cluster,
    holders,
    kill_node,
    others,
    stopped,
    store_pid,
    whole,
)

CHUNKS = 32
CHUNK_BYTES = 256 << 10
#: By then a few chunks of the first lanes have arrived.
SOME = 10
CONTENT = np.random.default_rng(29).integers(0, 255, CHUNKS * CHUNK_BYTES, np.uint8)


@pytest.fixture(scope="module")
def cluster_of_strangers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[tc.Session, Faults]]:
    """Three nodes on hosts of their own; a read of all of it takes a second."""
    with (
        faulty_cluster(
            tmp_path_factory.mktemp("run"),
            3,
            separate_hosts=True,
            settings={
                "lease": {"ttl": "3s"},
                "segment": {"own-bytes": "64 KiB"},
                "transfer": {
                    "bandwidth": "2 MiB",
                    "chunk-bytes": CHUNK_BYTES,
                    "stall": "1s",
                },
            },
        ) as (cluster, faults),
        tc.connect(cluster) as session,
    ):
        whole(session, 3)
        yield session, faults


@pytest.fixture
def strangers(
    cluster_of_strangers: tuple[tc.Session, Faults],
) -> Iterator[tuple[tc.Session, Faults]]:
    """The same, whole and empty again after each test, also one that failed."""
    session, _ = cluster_of_strangers
    whole(session, 3)  # a worker that was slow to begin with may be away for a moment
    yield cluster_of_strangers
    whole(session, 3)
    with contextlib.suppress(NotFound):
        session.destroy("x")


def read_meanwhile(
    strangers: tuple[tc.Session, Faults],
    act: Callable[[str], None],
    *,
    replicas: int,
    deadline: float | None = None,
    view: bool = False,
) -> Any:
    """Read over TCP; once a third has come, act on the node it comes from."""
    session, faults = strangers
    artifact = session.put({"x": CONTENT}, "x", replicas=replicas)
    handle: Any = artifact.view({"x": tc.s_[1:]}) if view else artifact
    outcome: list[Any] = []

    def read() -> None:
        try:
            outcome.append(handle.tensor(framework="numpy", deadline=deadline))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
            outcome.append(error)

    pids = {store_pid(session, node): node for node in holders(artifact)}
    with faults.armed("copy.chunk=log"):
        reader = threading.Thread(target=read)
        reader.start()
        faults.wait("copy.chunk", count=1 if view else SOME)
        source = next(pids[hit.pid] for hit in faults.hits("copy.chunk"))
        act(source)
        reader.join(90)
    assert not reader.is_alive()
    return outcome.pop()


def connections(pid: int) -> int:
    """Open connections of this process to what a store listens on."""
    ports = {
        c.laddr.port
        for c in psutil.Process(pid).net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }
    return sum(
        bool(c.raddr) and c.raddr.port in ports and c.status == psutil.CONN_ESTABLISHED
        for c in psutil.Process().net_connections("tcp")
    )


def test_p29_a_killed_source_is_left_for_another_and_nothing_else_is_seen(
    strangers: tuple[tc.Session, Faults],
) -> None:
    session, _ = strangers
    with baseline(session, nodes=False):
        got = read_meanwhile(strangers, lambda n: kill_node(session, n), replicas=2)
        assert got.tobytes() == CONTENT.tobytes()
        session.destroy("x")
        whole(session, 3)


def test_p29_the_death_of_the_only_source_is_typed_within_the_deadline(
    strangers: tuple[tc.Session, Faults],
) -> None:
    session, _ = strangers
    with baseline(session, nodes=False):
        began_s = time.monotonic()
        got = read_meanwhile(
            strangers, lambda n: kill_node(session, n), replicas=1, deadline=20
        )
        assert isinstance(got, DataLost | PeerLost | DeadlineExceeded), got
        assert time.monotonic() - began_s < 30
        session.destroy("x")
        whole(session, 3)
        again = session.put({"x": CONTENT[:9]}, "x")
        assert again.tensor(framework="numpy").tobytes() == CONTENT[:9].tobytes()
        session.destroy("x")


def test_p29_a_source_that_stands_still_is_left_for_another(
    strangers: tuple[tc.Session, Faults],
) -> None:
    session, _ = strangers
    with baseline(session, nodes=False), ExitStack() as held:

        def stop(node: str) -> None:
            held.enter_context(stopped(store_pid(session, node)))

        got = read_meanwhile(strangers, stop, replicas=2, deadline=20)
        assert isinstance(got, np.ndarray), got
        assert got.tobytes() == CONTENT.tobytes()
        held.close()
        whole(session, 3)
        session.destroy("x")


@pytest.mark.parametrize("view", [False, True])
def test_p29_a_stopped_only_source_is_typed_in_time_and_all_is_well_when_it_goes_on(
    strangers: tuple[tc.Session, Faults], view: bool
) -> None:
    session, _ = strangers
    with baseline(session, nodes=False), ExitStack() as held:
        before = psutil.Process().memory_info().rss
        # Idle ones are kept for a while, whoever used them.
        known = {
            pid: connections(pid)
            for pid in (store_pid(session, node.node) for node in session.workers())
        }
        pids: list[int] = []

        def stop(node: str) -> None:
            pids.append(store_pid(session, node))
            held.enter_context(stopped(pids[0]))

        began_s = time.monotonic()
        got = read_meanwhile(strangers, stop, replicas=1, deadline=2, view=view)
        assert isinstance(got, DataLost | PeerLost | DeadlineExceeded), got
        assert time.monotonic() - began_s < 15
        assert psutil.Process().memory_info().rss - before < CONTENT.nbytes
        eventually(lambda: connections(pids[0]) <= max(1, known[pids[0]]), within_s=20)
        held.close()
        whole(session, 3)
        artifact = session.artifact("x")
        assert artifact.tensor(framework="numpy").tobytes() == CONTENT.tobytes()
        session.destroy("x")


@pytest.mark.parametrize("size", [1000, 2 << 20])
def test_p29_a_copy_leaves_a_source_that_stands_still(
    strangers: tuple[tc.Session, Faults], size: int
) -> None:
    session, _ = strangers
    with baseline(session, nodes=False):
        artifact = session.put({"x": CONTENT[:size]}, "x", replicas=2)
        (third,) = others(session, artifact)
        first = store_pid(session, holders(artifact)[0])
        with stopped(first):
            session.replicate(artifact, third, deadline=30)
            assert third.node in holders(artifact)
        whole(session, 3)
        session.destroy("x")


@pytest.mark.parametrize("cluster", ["one host"], indirect=True)
@pytest.mark.parametrize("size", [1000, 2 << 20])
@pytest.mark.parametrize("hinted", [True, False])
def test_p34_a_node_of_this_host_that_stands_still_does_not_hold_a_read_up(
    cluster: tc.LocalCluster, cast: tc.Session, size: int, hinted: bool
) -> None:
    artifact = cast.put({"x": CONTENT[:size]}, "here")
    held = holders(artifact)
    (second,) = others(cast, artifact)
    artifact.replicate(second)
    if hinted:
        assert artifact.tensor(framework="numpy") is not None
    with tc.connect(cluster) as fresh:
        reader = artifact if hinted else fresh.artifact("here")
        with stopped(store_pid(cast, held[0])):
            began_s = time.monotonic()
            got = reader.tensor(framework="numpy", deadline=60)
            assert time.monotonic() - began_s < 30
            assert got.tobytes() == CONTENT[:size].tobytes()
    del got
