"""Signals, as a program meets them."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.exceptions import CatalogUnavailable, InvalidArgument
from tests.kit.eventually import eventually

pytestmark = pytest.mark.process


def test_reads_are_heat_and_consumers_know_their_version(cast: tc.Session) -> None:
    first = cast.put({"w": np.ones(1000)}, "hot")
    first.publish()
    first.tensor_dict()
    eventually(
        lambda: (
            cast.signals.snapshot("artifact/hot")["artifact/hot"]["reads_per_s"] > 0
        ),
        within_s=20,
    )
    (consumer,) = cast.signals.snapshot("consumer/").values()
    assert (consumer["version"], consumer["behind"]) == (1, 0)
    cast.put({"w": np.zeros(1000)}, "hot", version="next").publish()
    (consumer,) = cast.signals.snapshot("consumer/").values()
    assert (consumer["version"], consumer["behind"]) == (1, 1)


def test_a_watch_is_closed_from_another_thread_or_ends_in_its_time(
    cast: tc.Session,
) -> None:
    watch = cast.signals.watch("plan/")
    seen: list[int] = []

    def iterate() -> None:
        seen.extend(len(changes.changed) for changes in watch)

    thread = threading.Thread(target=iterate)
    thread.start()
    time.sleep(0.3)  # scene: it waits at the catalog by now
    watch.close()
    thread.join(20)
    assert not thread.is_alive()
    watch.close()
    (first,) = cast.signals.watch("plan/quiet", seconds=0.2)
    assert not first, "a watch begins with all that there is, which may be nothing"
    eventually(lambda: cast.debug_state()["catalog"]["watchers"] == 0, within_s=20)


def test_a_watch_in_an_asynchronous_program(cluster: tc.LocalCluster) -> None:
    async def program() -> list[str]:
        found: list[str] = []
        async with await tc.connect(
            cluster.scheduler_address, asynchronous=True
        ) as cast:
            async with cast.signals.watch("event/", every=0.02) as watch:
                asking = asyncio.create_task(anext(watch))
                await asyncio.sleep(0.2)  # scene: the watch has begun
                await cast.put(np.ones(10), "async")
                while "event/created" not in found:
                    found += [one.name for one in (await asking).events]
                    asking = asyncio.create_task(anext(watch))
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await cast.destroy("async")
        return found

    assert "event/created" in asyncio.run(program())


def test_what_is_no_prefix_and_no_time_is_refused(cluster: tc.LocalCluster) -> None:
    cast = tc.connect(cluster)
    for bad in ([], [1], 7):
        with pytest.raises(InvalidArgument):
            cast.signals.snapshot(bad)
    for seconds in (-1, float("nan"), "1", True):
        with pytest.raises(InvalidArgument):
            cast.signals.watch(every=seconds)
    watch = cast.signals.watch("node/")
    cast.close()
    with pytest.raises(CatalogUnavailable):
        next(watch)
