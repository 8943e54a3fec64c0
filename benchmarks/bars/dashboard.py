"""The pages in Dask's dashboard, with 20 nodes and 5,000 artifacts.

1. Scheduler and nodes are one process of their own, so that Dask's page has as many workers as
   ours has nodes; the 30 artifacts of the first page lie on every node, which fills it.
2. *First paint* is from the navigation to Bokeh's word that all is drawn, in the same Chromium.
3. A *tick* is all that holds the loop for one browser: the page made anew, packed and sent, in
   processor time of the loop's thread, which neighbours do not lengthen. A program puts and
   destroys meanwhile, so that there is something to make anew.
4. Browsers run elsewhere in life. On this machine they are given the lowest priority, so that
   what is measured is what they cost the scheduler, not what drawing costs its processor.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import tensorcast_dask as tc
from benchmarks import product
from benchmarks.harness import absolute, emit, paired, unavailable
from benchmarks.helpers import Helper
from benchmarks.sizes import Sizes, parse

NODES, ARTIFACTS, SPREAD, TICKS, ASKS, BROWSERS = 20, 5000, 30, 200, 400, 5
PAGES = ("placement", "memory", "transfers", "plans", "events")
FIRST_PAINT = "first paint of the placement page, against Dask's workers page"
TICK = "a tick of the placement page, p99 of 200"
BUSY = "scheduler request p95 with 5 browsers open, against none"
DRAWN = """
  const look = () => {
    if (window.Bokeh?.documents?.length > 0 && Bokeh.documents[0].is_idle)
      window.drawn = performance.now();
    else requestAnimationFrame(look);
  };
  look();
"""


# ------------------------------------------------------------------ in the helpers
def host(state: dict[str, Any], nodes: int) -> tuple[str, str]:
    """Start scheduler and nodes; where they and the dashboard are."""
    cluster = state["cluster"] = tc.LocalCluster(
        nodes,
        processes=False,
        protocol="tcp",
        host="127.0.0.1",
        threads_per_worker=1,
        host_memory="64 MiB",
        separate_hosts=True,
        dashboard_address="127.0.0.1:0",
        settings={"memory": {"reserve-min": "1 MiB", "reserve": 0}},
    )
    assert cluster.scheduler is not None
    port = cluster.scheduler.http_server.port
    return cluster.scheduler_address, f"http://127.0.0.1:{port}"


def end(state: dict[str, Any]) -> None:
    """Close them."""
    state["cluster"].close()


def begin_work(state: dict[str, Any], address: str) -> None:
    """Put and destroy until told to stop."""
    state["stop"] = threading.Event()

    def work() -> None:
        with tc.connect(address) as cast:
            number = 0
            while not state["stop"].is_set():
                number += 1
                cast.put(
                    {"x": np.ones(64, np.uint8)}, f"busy/{number % 100}", version="next"
                )
                if number > 100:
                    cast.destroy(f"busy/{(number + 50) % 100}")

    state["thread"] = threading.Thread(target=work, daemon=True)
    state["thread"].start()


def end_work(state: dict[str, Any]) -> None:
    """Stop."""
    state["stop"].set()
    state["thread"].join(30)


# ------------------------------------------------------------------ on the scheduler
async def ticks(count: int, dask_scheduler: Any) -> list[float]:  # noqa: ARG001
    """Let an open page be made anew and sent; what each time held the loop, in ms."""
    from bokeh.protocol import Protocol
    from tornado.websocket import WebSocketHandler

    from tensorcast_dask.dashboard.pages.view import View

    used: list[float] = []

    def timed(function: Any) -> Any:
        # None of these waits for anything: what lies between is others' work.
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            begun_s = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                used.append(time.thread_time() - begun_s)

        return run

    def connected(view: View) -> bool:
        session = getattr(view._doc.session_context, "session", None)
        return session is not None and session.connection_count > 0

    def views() -> list[View]:
        found = [one for one in gc.get_objects() if isinstance(one, View)]
        return [one for one in found if connected(one)]

    async with asyncio.timeout(60):
        while not views():  # noqa: ASYNC110 - it is another program that opens it
            await asyncio.sleep(0.2)
    view, held = views()[0], []
    before = Protocol.create, WebSocketHandler.write_message
    Protocol.create = timed(before[0])
    WebSocketHandler.write_message = timed(before[1])  # type: ignore[method-assign]
    try:
        for _ in range(count):
            view._board._tick = -1
            used.clear()
            session = view._doc.session_context.session
            await session.with_document_locked(timed(view.update))
            held.append(sum(used) * 1000)
            await asyncio.sleep(0.05)
    finally:
        Protocol.create = before[0]
        WebSocketHandler.write_message = before[1]  # type: ignore[method-assign]
    return held


# ------------------------------------------------------------------ here
async def fill(address: str, artifacts: int, spread: int) -> None:
    """Put them, and those of the first page everywhere."""
    async with await tc.connect(address, asynchronous=True) as cast:
        room = asyncio.Semaphore(16)

        async def put(number: int) -> None:
            async with room:
                name = f"run-{number:06}"
                labels = {"tenant": f"t{number % 7}"}
                data = {"x": np.ones(64 << number % 8, np.uint8)}
                artifact = await cast.put(data, name, labels=labels)
                if number < spread:
                    for worker in await cast.workers():
                        await cast.replicate(artifact, worker)

        await asyncio.gather(*(put(number) for number in range(artifacts)))


@contextmanager
def chromium() -> Iterator[Any]:
    """Chromium at the lowest priority (4)."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        message = "no Chromium (.ci/install-chromium)"
        raise FileNotFoundError(message)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        wrapped = Path(folder) / "chromium"
        wrapped.write_text(f'#!/bin/sh\nexec nice -n 19 {path} "$@"\n')
        wrapped.chmod(0o755)
        browser = driver.chromium.launch(
            executable_path=str(wrapped), args=["--no-sandbox"]
        )
        try:
            yield browser
        finally:
            browser.close()


def painted(browser: Any, address: str) -> float:
    """How long a page takes until it is drawn, in ms."""
    context = browser.new_context(viewport={"width": 1440, "height": 1000})
    try:
        page = context.new_page()
        page.add_init_script(DRAWN)
        page.goto(address)
        page.wait_for_function("window.drawn !== undefined", timeout=60_000)
        return float(page.evaluate("window.drawn"))
    finally:
        context.close()


def asked(cast: Any, count: int) -> float:
    """p95 of a request to the catalog, in ms."""
    took = []
    for number in range(count):
        begun_s = time.perf_counter()
        cast.exists(f"run-{number % 50:06}")
        took.append((time.perf_counter() - begun_s) * 1000)
        time.sleep(0.004)  # browsers tick once a second: ask over some seconds
    return statistics.quantiles(took, n=20)[-1]


def main(sizes: Sizes) -> None:
    """Three lines."""
    nodes, artifacts, spread, count, asks = (
        (3, 100, 3, 5, 30) if sizes.smoke else (NODES, ARTIFACTS, SPREAD, TICKS, ASKS)
    )
    try:
        import bokeh  # noqa: F401
        import playwright  # noqa: F401

        assert shutil.which("chromium"), "no Chromium (.ci/install-chromium)"
    except (ImportError, AssertionError) as error:
        for name in (FIRST_PAINT, TICK, BUSY):
            emit(unavailable(name, str(error)))
        return
    with (
        product.run_directory() as run,
        Helper("host") as there,
        Helper("busy") as busy,
    ):
        os.environ["TENSORCAST_RUN_DIR"] = str(run)
        address, base = there(host, nodes)
        asyncio.run(fill(address, artifacts, spread))
        with tc.connect(address) as cast, chromium() as browser:
            emit(
                paired(
                    FIRST_PAINT,
                    lambda: painted(browser, f"{base}/tensorcast-placement"),
                    lambda: painted(browser, f"{base}/workers"),
                    bar=2.0,
                    better="lower",
                    pairs=sizes.pairs,
                    notes={"nodes": nodes, "artifacts": artifacts},
                )
            )
            busy(begin_work, address)
            context = browser.new_context(viewport={"width": 1440, "height": 1000})
            context.new_page().goto(f"{base}/tensorcast-placement")
            said: dict[str, list[float]] = {"median": [], "most": []}

            def p99() -> float:
                held = cast.client.run_on_scheduler(ticks, count)
                said["median"].append(statistics.median(held))
                said["most"].append(max(held))
                return statistics.quantiles(held, n=100)[98]

            emit(
                absolute(
                    TICK, p99, bar=100, better="lower", unit="ms", times=1, notes=said
                )
            )
            context.close()

            def opened() -> float:
                context = browser.new_context(viewport={"width": 1440, "height": 1000})
                try:
                    pages = [context.new_page() for _ in range(BROWSERS)]
                    for page, name in zip(pages, PAGES, strict=True):
                        page.add_init_script(DRAWN)
                        page.goto(f"{base}/tensorcast-{name}")
                    for (
                        page
                    ) in pages:  # what they cost is asked, not what opening them does
                        page.wait_for_function(
                            "window.drawn !== undefined", timeout=60_000
                        )
                    time.sleep(2)
                    return asked(cast, asks)
                finally:
                    context.close()
                    time.sleep(1)

            emit(
                paired(
                    BUSY, opened, lambda: asked(cast, asks), bar=1.3, better="lower",
                    pairs=sizes.pairs,
                )
            )  # fmt: skip
            busy(end_work)
        there(end)


if __name__ == "__main__":
    main(parse())
