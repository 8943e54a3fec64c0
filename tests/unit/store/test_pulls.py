from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tensorcast_dask.dataplane.transports.base import Context
from tensorcast_dask.store.core import Core
from tensorcast_dask.store.flights import Flights
from tensorcast_dask.store.machine import Machine
from tensorcast_dask.store.pulls import PullRun, lanes_for
from tensorcast_dask.store.shelf import Shelf
from tensorcast_dask.store.state.replicas import Wanted
from tensorcast_dask.store.targets import Target
from tensorcast_dask.tensors.ids import ArtifactId, Generation, Version
from tensorcast_dask.tensors.messages import ReadChunk, StoreSettings, Tier
from tests.kit.holders import GENERATION, Holder, Served, serve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensorcast_dask.dataplane.framing import Payload
    from tensorcast_dask.dataplane.server import Peer, Reply
    from tensorcast_dask.tensors.messages import StoreRequest

CHUNK = 64 << 10
CHUNKS = 12


@pytest.mark.parametrize(("cores", "lanes"), [(1, 2), (2, 2), (3, 3), (4, 4), (96, 4)])
def test_lanes_follow_the_cores(cores: int, lanes: int) -> None:
    assert lanes_for(cores) == lanes


class Counting(Holder):
    """Counts the chunks that are asked of all holders and not answered."""

    lock = threading.Lock()
    now = 0
    most = 0

    def handle(self, request: StoreRequest, payload: Payload, peer: Peer) -> Reply:
        if not isinstance(request, ReadChunk):
            return super().handle(request, payload, peer)
        kind = type(self)
        with kind.lock:
            kind.now += 1
            kind.most = max(kind.most, kind.now)
        time.sleep(0.05)  # scene: a slow source
        with kind.lock:
            kind.now -= 1
        return super().handle(request, payload, peer)


@contextlib.contextmanager
def store(inflight_bytes: int, connections: int) -> Iterator[Core]:
    settings = StoreSettings(
        run_dir="/nowhere",
        cluster_name="c",
        host_memory_bytes=64 << 20,
        reserve_min_bytes=1 << 20,
        own_segment_bytes=CHUNK,
        chunk_bytes=CHUNK,
        connections=connections,
        inflight_bytes=inflight_bytes,
    )
    core = Core(settings, shelf=Shelf(max_descriptors=64), machine=Machine())
    try:
        yield core
    finally:
        for generation in list(core.table.replicas):
            with core.lock:
                core.drop(generation, why="the test is over")


def pulling(core: Core, flights: Flights, served: Served, at: int) -> PullRun:
    wanted = Wanted(
        generation=Generation(GENERATION + at),
        id=ArtifactId(f"x{at}"),
        version=Version(1),
        nbytes=len(served.data),
        tier=Tier.HOST,
        owner=0,
        deadline_s=time.monotonic() + 60,
        labels={},
        published=False,
    )
    context = Context(credentials=served.credentials, until_s=time.monotonic() + 60)
    return PullRun(
        core,
        wanted,
        (served.location,),
        source_generation=GENERATION,
        landing=Target(core, wanted),
        context=context,
        flights=flights,
        progress=lambda _: None,
    )


@pytest.mark.parametrize("bound", [2, 100])
def test_what_all_pulls_of_a_store_have_asked_for_is_bounded_together(
    bound: int,
) -> None:
    data = bytes(range(256)) * (CHUNKS * CHUNK // 256)
    Counting.most = 0
    with (
        serve(data, chunk_bytes=CHUNK, holder=Counting) as served,
        store(bound * CHUNK, connections=4) as core,
    ):
        flights = Flights()
        runs = [pulling(core, flights, served, at) for at in range(2)]
        with flights.joined(1):  # else the first one has it all until the second begins
            threads = [threading.Thread(target=run.run) for run in runs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert Counting.most <= 2 if bound == 2 else Counting.most > 2
        assert len(core.table.replicas) == 2
        assert flights.sources == 0
