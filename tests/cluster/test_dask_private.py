"""Each private attribute of Dask that we touch is there and does what we take it to do."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest
from dask.base import annotate
from distributed import Client, Nanny, Scheduler, Worker
from distributed.spill import SpillBuffer
from tornado.httpclient import AsyncHTTPClient

from tensorcast_dask.scheduler_plugin import dask_private as of_scheduler
from tensorcast_dask.worker_plugin import dask_private as of_worker
from tensorcast_dask.worker_plugin.nanny import MemoryCheckPlugin
from tests.kit.eventually import eventually_async
from tests.kit.loops import on_loop

MIB = 1 << 20


@asynccontextmanager
async def a_scheduler() -> AsyncIterator[Scheduler]:
    async with Scheduler(
        port=0, host="127.0.0.1", dashboard_address="127.0.0.1:0"
    ) as scheduler:
        yield scheduler


@asynccontextmanager
async def a_worker(
    memory_limit: str = "1 GiB",
) -> AsyncIterator[tuple[Scheduler, Worker]]:
    async with (
        a_scheduler() as scheduler,
        Worker(scheduler.address, memory_limit=memory_limit, nthreads=1) as worker,
    ):
        yield scheduler, worker


@on_loop
async def test_a_handler_is_answered_and_may_take_the_comm() -> None:
    async with a_scheduler() as scheduler:
        seen = []

        async def take(comm: object, **facts: object) -> str:
            seen.append((comm is not None, facts))
            return "taken"

        of_scheduler.add_handler(scheduler, "tensorcast_try", take)
        async with Client(scheduler.address, asynchronous=True) as client:
            assert client.scheduler is not None
            assert await client.scheduler.tensorcast_try(x=1) == "taken"
        assert seen == [(True, {"x": 1})]


@on_loop
async def test_extensions_and_plugin_tables_are_dicts_of_the_scheduler() -> None:
    async with a_scheduler() as scheduler:
        assert isinstance(scheduler.extensions, dict)
        assert isinstance(scheduler.worker_plugins, dict)
        assert isinstance(scheduler.nanny_plugins, dict)


@on_loop
async def test_the_dashboards_server_takes_a_modules_routes_while_it_runs() -> None:
    async with a_scheduler() as scheduler:
        port = scheduler.services["dashboard"].port
        url = f"http://127.0.0.1:{port}/tensorcast/v1/nodes"
        asking = AsyncHTTPClient()
        before = await asking.fetch(url, raise_error=False)
        of_scheduler.add_routes(scheduler, "tensorcast_dask.http.dashboard")
        after = await asking.fetch(url, raise_error=False)
        asking.close()
        assert (before.code, after.code) == (404, 503)  # there is no catalog
        assert b"CatalogUnavailable" in after.body


@on_loop
async def test_every_way_to_retire_passes_our_step() -> None:
    async with a_worker() as (scheduler, worker):
        passed = []

        def wrap(retire):
            async def ours(*args, **kwargs):
                passed.append(kwargs)
                return await retire(*args, **kwargs)

            return ours

        of_scheduler.replace_retire(scheduler, wrap)
        async with Client(scheduler.address, asynchronous=True) as client:
            await client.retire_workers([worker.address])
        assert len(passed) == 1
        await scheduler.retire_workers()
        assert len(passed) == 2


@on_loop
async def test_without_tls_there_are_no_certificates() -> None:
    async with a_worker() as (scheduler, worker):
        assert of_scheduler.link_tls(scheduler) is None
        assert of_scheduler.tls_files(scheduler) is None
        assert of_worker.tls_files(worker) is None


@on_loop
async def test_a_worker_counts_its_own_memory_and_not_what_it_maps() -> None:
    async with a_worker() as (_, worker):
        assert of_worker.replace_worker_monitor(worker)
        before = worker.monitor.get_process_memory()
        fd = os.memfd_create("mapped")
        os.ftruncate(fd, 128 * MIB)
        for offset in range(0, 128 * MIB, 4096):
            os.pwrite(fd, b"x", offset)
        with mmap.mmap(fd, 128 * MIB, mmap.MAP_PRIVATE, mmap.PROT_READ) as view:
            assert sum(view[::4096]) == 128 * MIB // 4096 * ord("x")
            assert psutil.Process().memory_info().rss - before > 100 * MIB
            assert worker.monitor.get_process_memory() - before < 32 * MIB
            worker.monitor.update()
            assert worker.monitor.recent()["memory"] - before < 32 * MIB
        os.close(fd)


@on_loop
async def test_the_stream_to_the_scheduler_tells_leaving_from_being_left() -> None:
    async with a_scheduler() as scheduler:
        worker = await Worker(scheduler.address, nthreads=1)
        assert of_worker.stream_is_alive(worker)
        assert of_worker.is_running(worker)
        worker.batched_stream.comm.abort()
        assert not of_worker.stream_is_alive(worker)
        await worker.finished()
        assert not of_worker.is_running(worker)


@on_loop
async def test_a_lowered_limit_reaches_what_was_derived_from_it() -> None:
    async with a_worker("1 GiB") as (_, worker):
        manager = worker.memory_manager
        assert isinstance(manager.data, SpillBuffer)
        spill_at = manager.data.n
        incoming = worker.state.transfer_incoming_bytes_limit
        of_worker.lower_worker_limit(worker, 512 * MIB)
        assert manager.memory_limit == 512 * MIB
        assert manager.data.n == pytest.approx(spill_at / 2)
        assert worker.state.transfer_incoming_bytes_limit == pytest.approx(incoming / 2)
        of_worker.lower_worker_limit(worker, 1024 * MIB)
        assert manager.memory_limit == 512 * MIB


@on_loop
async def test_a_nanny_judges_by_the_workers_own_memory_and_tells_the_worker() -> None:
    async with (
        a_scheduler() as scheduler,
        Nanny(scheduler.address, nthreads=1, memory_limit="1 GiB") as nanny,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        original = nanny.periodic_callbacks["memory_monitor"].callback
        await client.register_plugin(MemoryCheckPlugin({}, {}))
        replaced = nanny.periodic_callbacks["memory_monitor"].callback
        assert replaced is not original
        replaced()  # below the limit: nothing happens
        assert of_worker.replace_nanny_check(nanny)
        assert nanny.periodic_callbacks["memory_monitor"].callback is replaced

        async def asked(dask_worker: Worker) -> object:
            return await of_worker.ask_nanny(dask_worker)

        (facts,) = (await client.run(asked)).values()
        assert facts == {"replaced": True, "limit_bytes": 1 << 30, "auto": False}


@on_loop
async def test_a_nanny_lowers_the_limit_that_dask_chose() -> None:
    async with (
        a_scheduler() as scheduler,
        Nanny(scheduler.address, nthreads=1, memory_limit="auto") as nanny,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        limit = nanny.memory_manager.memory_limit
        assert limit is not None
        await client.register_plugin(
            MemoryCheckPlugin({}, {"node": {"host-memory": "64 MiB"}})
        )
        assert nanny.memory_manager.memory_limit == limit - 64 * MIB
        await client.register_plugin(
            MemoryCheckPlugin({}, {"node": {"host-memory": "64 MiB"}})
        )
        assert nanny.memory_manager.memory_limit == limit - 64 * MIB


@on_loop
async def test_a_worker_without_our_nanny_plugin_is_told_nothing() -> None:
    async with (
        a_scheduler() as scheduler,
        Nanny(scheduler.address, nthreads=1),
        Client(scheduler.address, asynchronous=True) as client,
    ):

        async def asked(dask_worker: Worker) -> object:
            return await of_worker.ask_nanny(dask_worker)

        assert list((await client.run(asked)).values()) == [None]


@on_loop
async def test_a_nanny_tells_each_worker_that_it_starts_what_was_done() -> None:
    async with (
        a_scheduler() as scheduler,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        await client.register_plugin(MemoryCheckPlugin({}, {}))
        async with Nanny(scheduler.address, nthreads=1, memory_limit="1 GiB") as nanny:

            def told(dask_worker: Worker) -> object:
                return of_worker.told_by_nanny(dask_worker)

            (facts,) = (await client.run(told)).values()
            assert facts == {
                "replaced": True,
                "limit_bytes": 1 << 30,
                "auto": False,
                "nanny": nanny.address,
            }


@on_loop
async def test_a_worker_without_nanny_was_told_nothing_and_waits_for_no_signal() -> (
    None
):
    async with a_worker() as (_, worker):
        assert of_worker.told_by_nanny(worker) is None
        assert not of_worker.waits_for_signals()
        assert not await of_worker.wait_until_listed(worker, node="n", incarnation=1)
        assert await of_worker.ask_grant(worker, node="n", holder="h") == b""


@on_loop
async def test_the_signal_handler_of_the_command_line_is_known_by_its_module() -> None:
    from distributed._signals import wait_for_signals

    task = asyncio.create_task(wait_for_signals())
    await eventually_async(of_worker.waits_for_signals, within_s=5)
    os.kill(os.getpid(), signal.SIGINT)
    await task
    assert not of_worker.waits_for_signals()


@on_loop
async def test_a_task_that_no_worker_may_run_is_found_and_sent_on() -> None:
    async with (
        a_worker() as (scheduler, worker),
        Client(scheduler.address, asynchronous=True) as client,
    ):
        with annotate(**{of_scheduler.NODE: "n1"}):
            future = client.submit(int, "3", workers=["tcp://127.0.0.1:9"], key="it")

        await eventually_async(lambda: of_scheduler.stuck_tasks(scheduler), within_s=30)
        ((key, node, workers, waited_s),) = of_scheduler.stuck_tasks(scheduler)
        assert (key, node, workers) == ("it", "n1", frozenset({"tcp://127.0.0.1:9"}))
        assert waited_s >= 0
        assert of_scheduler.is_under_way(scheduler, "it")
        of_scheduler.send_to(scheduler, "it", [worker.address])
        assert await future == 3
        assert not of_scheduler.is_under_way(scheduler, "it")
        assert not of_scheduler.is_under_way(scheduler, "unknown")
        assert of_scheduler.stuck_tasks(scheduler) == []
