"""A browser clicks through the pages while the cluster lives, and shows what the catalog says."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.dashboard.board import PAGES, Board
from tensorcast_dask.exceptions import PlanFailed
from tensorcast_dask.scheduler_plugin.dask_private import EXTENSION
from tests.kit.browser import PATIENCE_S, READY, Browser, Look, browser
from tests.kit.eventually import eventually
from tests.kit.local import stores_in

pytestmark = pytest.mark.timeout(300)  # for hangs, not for busy machines
MIB = 1 << 20
SCRIPT = "<script>alert(1)</script>"
#: Our tabs over whose middle something else lies.
COVERED = """() => {
  const covered = [];
  for (const one of document.querySelectorAll(".tc-pages a")) {
    const box = one.getBoundingClientRect();
    const top = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
    if (top !== one) covered.push(one.textContent + " by " + top?.outerHTML.slice(0, 80));
  }
  return covered;
}"""
#: What a plot that stands alone has: bars for navigation, parts that are drawn, and how bright it is
#: behind all.
DRAWN = """() => {
  const large = [];
  const walk = (node) => {
    if (node.shadowRoot) walk(node.shadowRoot);
    for (const one of node.children) {
      const {width, height} = one.getBoundingClientRect();
      if (one.matches("canvas, .slick-viewport") && width > 100 && height > 50) large.push(one);
      walk(one);
    }
  };
  walk(document.body);
  const page = document.documentElement;
  return {
    bars: document.querySelectorAll(".navbar, .tc-pages").length,
    large: large.length,
    back: Math.max(...getComputedStyle(page).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)),
  };
}"""
#: What pages say that have nothing to draw.
EMPTY = ("No plan has been run", "Nothing moves now")
IMAGE = '<img src=x onerror="alert(2)">'


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    run.chmod(0o700)
    return run


@pytest.fixture(scope="module")
def cluster(run_dir: Path) -> Iterator[tc.LocalCluster]:
    with (
        pytest.MonkeyPatch.context() as patch,
        tc.LocalCluster(
            3,
            processes=False,
            threads_per_worker=1,
            host_memory="16 MiB",
            separate_hosts=True,
            dashboard_address="127.0.0.1:0",
            settings={
                "run-dir": str(run_dir),
                "lease": {"ttl": "2s"},
                "segment": {"slab-bytes": "1 MiB"},
                "memory": {"reserve-min": "1 MiB", "reserve": 0},
                # Slow enough that a copy can be seen.
                "transfer": {"bandwidth": "4 MiB", "connections": 1, "chunk-bytes": "64 KiB"},
            },
        ) as made,
    ):  # fmt: skip
        patch.setenv("TENSORCAST_RUN_DIR", str(run_dir))
        yield made


@pytest.fixture(scope="module")
def session(cluster: tc.LocalCluster) -> Iterator[tc.Session]:
    with tc.connect(cluster) as made:
        yield made


@pytest.fixture
def cast(session: tc.Session) -> Iterator[tc.Session]:
    """The session; each test ends with what it began with: nothing."""
    yield session
    for artifact in session.list():
        session.destroy(artifact.id)


@pytest.fixture(scope="module")
def chromium(cluster: tc.LocalCluster) -> Iterator[Browser]:
    assert cluster.scheduler is not None
    port = cluster.scheduler.http_server.port
    with browser(f"http://127.0.0.1:{port}") as started:
        yield started


@pytest.fixture
def chrome(chromium: Browser) -> Iterator[Browser]:
    """The browser; what went wrong in its pages went wrong in the test."""
    yield chromium
    wrong, chromium.wrong = chromium.wrong, []
    chromium.close_all()
    assert wrong == []


def nodes(cast: tc.Session) -> list[tc.Worker]:
    """All three, by name; one that was killed comes back with another store."""

    def three() -> list[tc.Worker]:
        found = sorted(cast.workers(), key=lambda one: one.name)
        return found if [one.name for one in found] == ["0", "1", "2"] else []

    return eventually(three, within_s=60)


def put(cast: tc.Session, name: str, nbytes: int = 4096, **more: Any) -> tc.Artifact:
    return cast.put({"x": np.ones(nbytes, np.uint8)}, name, **more)


def counted(look: Look) -> dict[str, int]:
    found = re.findall(r"<b>([\d,]+)</b> (\w+?)s?\b", look.text("head"))
    return {what: int(count.replace(",", "")) for count, what in found}


def counts(cast: tc.Session) -> dict[str, int]:
    state = cast.debug_state()["catalog"]
    return {
        "artifact": state["artifacts"],
        "version": state["versions"],
        "replica": state["replicas"],
        "node": state["nodes"],
    }


def agrees(look: Look, cast: tc.Session) -> None:
    """The head says what `debug_state` says."""
    look.until(lambda: counted(look) == counts(cast), what=look.text("head"))


def held(look: Look) -> set[tuple[str, str, str]]:
    """What the page *placement* shows: artifact, node, tier."""
    return {
        (one["artifact"], one["node"].partition(" ")[0], one["tier"])
        for one in look.rows("cells")
    }


def listed(cast: tc.Session) -> set[tuple[str, str, str]]:
    """The same, as the catalog's tables have it."""
    rows = cast.sql("SELECT id, node_name, tier FROM replicas WHERE live").rows
    return {(str(one), str(node), str(tier)) for one, node, tier in rows}


def test_placement_shows_what_is_put_copied_moved_evicted_and_destroyed(
    cast: tc.Session, chrome: Browser
) -> None:
    w0, w1, w2 = nodes(cast)
    look = chrome.open("tensorcast-placement")
    look.until(lambda: look.text("empty").startswith("There are no artifacts yet."))
    spare = put(cast, "spare", 3 * MIB, worker=w0)
    for name in (SCRIPT, IMAGE, "$$x$$", "odd/" + "long-" * 40):
        put(cast, name, worker=w1)
    cast.replicate(spare, w1)
    look.until(lambda: held(look) == listed(cast) >= {("spare", "1", "host")})
    agrees(look, cast)
    cast.migrate("$$x$$", w1, w2)
    look.until(lambda: held(look) == listed(cast) >= {("$$x$$", "2", "host")})
    for number in range(5):  # more than fits: what other hosts have goes
        put(cast, f"fill/{number}", 3 * MIB, worker=w1)
    look.until(lambda: held(look) == listed(cast) >= {("fill/4", "1", "host")})
    assert ("spare", "1", "host") not in held(look)
    cast.destroy("$$x$$")
    look.until(lambda: held(look) == listed(cast) and "$$x$$" not in str(held(look)))
    agrees(look, cast)
    look.close()
    look = chrome.open("tensorcast-events?words=evicted+spare")
    look.until(lambda: look.columns("events")["event"][:1] == ["evicted"])
    look.close()


def test_a_name_is_shown_as_it_is_and_leads_to_its_story(
    cast: tc.Session, chrome: Browser
) -> None:
    put(cast, SCRIPT, labels={"stage": "prod", "api-token": "hush"})
    look = chrome.open("tensorcast-placement")
    look.until(lambda: look.columns("rows")["link"] == [SCRIPT])
    at = look.point("placement", -2.0, 0)
    look.page.mouse.move(*at)
    look.until(lambda: SCRIPT in look.all_text(), what="the name beside the pointer")
    story = chrome.popup(lambda: look.page.mouse.click(*at))
    assert "tensorcast-story?ref=%3Cscript%3E" in story.page.url
    story.until(lambda: SCRIPT in story.all_text())
    story.until(
        lambda: [one["labels"] for one in story.rows("versions")] == ["stage=prod"]
    )
    story.until(lambda: "version 1 committed" in story.columns("lines")["what"])
    for page in (look, story):
        assert "hush" not in page.page.content() + page.everything()
        page.close()


def test_placement_is_searched_grouped_and_turned_over(
    cast: tc.Session, chrome: Browser
) -> None:
    put(cast, "models/a", labels={"tenant": "blue"})
    for number in range(35):
        put(
            cast, f"runs/{number % 2}/{number:02}", 64, labels={"part": str(number % 5)}
        )
    look = chrome.open("tensorcast-placement?name=^runs/")
    look.until(lambda: "1 to 30 of 35" in look.text("found"))
    look.press("after")
    look.until(lambda: "31 to 35 of 35" in look.text("found"))
    look.press("before")
    look.until(lambda: "1 to 30 of 35" in look.text("found"))
    look.fill("label", "part=3")
    look.until(lambda: "1 to 7 of 7" in look.text("found"))
    look.fill("name", "no such name")
    look.until(
        lambda: look.text("empty") == "No artifact fits what is asked for above."
    )
    look.fill("name", "")
    look.fill("label", "")
    look.fill("group", "name")
    look.until(lambda: "runs/" in look.columns("rows")["link"])
    runs = next(one for one in look.rows("rows") if one["link"] == "runs/")
    assert runs["note"].startswith("35 artifacts")
    look.page.mouse.click(*look.point("placement", -2.0, runs["y"]))
    look.until(lambda: "1 to 30 of 35" in look.text("found"), what="a group opens")
    look.fill("name", "")
    look.fill("tenant", "blue")
    look.until(lambda: look.columns("rows")["link"] == ["models/a"])
    look.close()


def test_memory_shows_what_stores_say(cast: tc.Session, chrome: Browser) -> None:
    w0, *_ = nodes(cast)
    cast.pin(put(cast, "pinned", 2 * MIB, worker=w0), ttl=600)
    look = chrome.open("tensorcast-memory")

    def same() -> bool:
        said = {
            (one["name"], name.rpartition("/")[2]): one
            for name, one in cast.signals.snapshot("node/").items()
            if not name.endswith("/orders")
        }
        shown = {
            (one["node"].partition(" ")[0], one["tier"]): one
            for one in look.rows("rows")
        }
        return said.keys() == shown.keys() and all(
            shown[key][f"{field}"] == one[f"{field}_bytes"]
            for key, one in said.items()
            for field in ("used", "capacity", "pinned", "evictable", "reserved")
        )

    look.until(same)
    look.until(lambda: any(one["pinned"] == 2 * MIB for one in look.rows("rows")))
    look.until(lambda: "pinned" in look.columns("parts")["part"])
    agrees(look, cast)
    look.close()


def test_transfers_show_a_copy_while_it_moves_and_its_way_afterwards(
    cast: tc.Session, chrome: Browser
) -> None:
    w0, _, w2 = nodes(cast)
    large = put(cast, "large", 12 * MIB, worker=w2)
    look = chrome.open("tensorcast-transfers")
    copying = threading.Thread(target=cast.replicate, args=(large, w0))
    copying.start()
    try:
        look.until(
            lambda: (
                "1 under way" in look.text("found")
                and any(
                    one["artifact"] == "large" and 0 < one["done"] < one["total"]
                    for one in look.rows("flows")
                )
            )
        )
    finally:
        copying.join()
    look.until(lambda: look.columns("flows")["artifact"] == [])
    # Links of a node that was killed before stay in the matrix, and leave the signals.
    look.until(lambda: len(look.rows("matrix")) >= len(cast.signals.snapshot("link/")))

    def ways() -> set[tuple[str, str]]:
        names = dict(enumerate(look.columns("axis")["name"]))
        cells = look.rows("matrix")
        return {(names.get(one["y"], ""), names.get(one["x"], "")) for one in cells}

    look.until(lambda: ("2", "0") in ways())
    look.until(lambda: "2" in look.columns("sources")["name"])
    look.close()


def fails() -> None:
    message = f"no {IMAGE} here"
    raise ValueError(message)


def test_plans_show_their_steps_and_why_they_failed(
    cast: tc.Session, chrome: Browser
) -> None:
    w0, w1, _ = nodes(cast)
    with cast.plan(tc.context(id="fine", ddl=60, key="fine-1")) as plan:
        one = plan.on_worker(w0).submit(max, 1, 2)
        plan.on_worker(w1).submit(max, one, 3)
    plan.run()
    with cast.plan(tc.context(id="bad", ddl=60, key="bad-1")) as plan:
        plan.on_worker(w0).submit(fails)
    with pytest.raises(PlanFailed):
        plan.run()
    look = chrome.open("tensorcast-plans")
    look.until(lambda: look.columns("runs")["key"] == ["bad-1", "fine-1"])
    assert look.columns("runs")["status"] == ["failed", "done"]
    look.until(lambda: look.columns("steps")["status"] == ["failed"])
    look.until(lambda: IMAGE in look.all_text(), what="the reason, as text")
    table = "Bokeh.documents[0].get_model_by_name('runs').selected"
    look.page.evaluate(f"() => {{ {table}.indices = [1] }}")
    look.until(lambda: look.columns("steps")["status"] == ["done", "done"])
    look.until(lambda: look.text("failure") == "")
    left, right = look.columns("steps")["left"], look.columns("steps")["right"]
    assert right[0] <= left[1] <= right[1], "the second waits for the first"
    look.close()


def test_events_are_searched_and_lead_to_stories(
    cast: tc.Session, chrome: Browser
) -> None:
    for name in (f"{SCRIPT}told", "told/0", "told/1"):
        put(cast, name)
    look = chrome.open("tensorcast-events?words=created+told/")
    look.until(lambda: look.columns("events")["event"] == ["created"] * 2)
    look.fill("words", f"created {SCRIPT}told")
    look.until(lambda: look.columns("events")["link"] == [f"{SCRIPT}told"])
    look.until(lambda: SCRIPT in look.all_text())
    link = look.page.get_by_role("link", name=f"{SCRIPT}told v1")
    story = chrome.popup(link.click)
    story.until(lambda: SCRIPT in story.all_text())
    story.close()
    cast.destroy("told/1")
    look.fill("words", "destroyed told/1")
    look.until(lambda: len(look.columns("events")["event"]) == 1)
    look.close()


def connections(scheduler: Any) -> int:
    """How many browsers look at our pages."""
    return sum(
        session.connection_count
        for served in scheduler.http_application.applications
        for name, context in getattr(served, "applications", {}).items()
        if name.startswith("/tensorcast")
        for session in context.sessions
    )


def test_a_browser_that_is_closed_costs_nothing(
    cluster: tc.LocalCluster, cast: tc.Session, chrome: Browser
) -> None:
    put(cast, "x")
    look = chrome.open("tensorcast-placement")
    eventually(lambda: connections(cluster.scheduler) == 1, within_s=20)
    assert cluster.scheduler is not None
    service = cluster.scheduler.extensions[EXTENSION].service
    (board,) = (
        one
        for one in gc.get_objects()
        if type(one) is Board and one._of is service.catalog
    )
    first = board._tick
    eventually(lambda: board._tick > first, within_s=20, what="a page that is seen")
    look.close()
    eventually(lambda: connections(cluster.scheduler) == 0, within_s=20)
    last = board._tick
    time.sleep(2.5)  # scene: two ticks of a page that nobody sees
    assert (board._tick, board.idle) == (last, True)


def test_a_node_that_is_killed_is_seen_to_go_with_what_it_alone_had(
    cast: tc.Session, chrome: Browser, run_dir: Path
) -> None:
    w2 = nodes(cast)[2]
    put(cast, "doomed", worker=w2)
    look = chrome.open("tensorcast-placement?name=^doomed")
    look.until(lambda: held(look) == {("doomed", "2", "host")})
    card = next(one for one in stores_in(run_dir) if one.node == w2.node)
    os.kill(card.pid, signal.SIGKILL)
    look.until(lambda: look.columns("rows")["state"] == ["lost"])
    agrees(look, cast)
    heads = {one["node"]: one["state"] for one in look.rows("heads")}
    gone = [state for name, state in heads.items() if card.node[:8] in name]
    assert gone in ([], ["gone"])
    look.close()
    look = chrome.open("tensorcast-events?words=lost+doomed")
    look.until(lambda: look.columns("events")["event"] == ["lost"])
    look.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_bar_above_covers_nothing_on_a_narrow_window(
    cast: tc.Session, chrome: Browser, theme: str
) -> None:
    put(cast, "narrow")
    look = chrome.open(f"tensorcast-placement?theme={theme}")
    look.until(lambda: look.columns("rows")["link"] == ["narrow"])
    for width in (1200, 1000, 800):
        look.page.set_viewport_size({"width": width, "height": 500})
        assert look.page.evaluate(COVERED) == []
        look.page.mouse.wheel(0, 400)
        assert look.page.locator("#dask-logo").is_visible(), "it stays in sight"
        look.page.evaluate("() => scrollTo(0, 0)")
    look.page.locator(".tc-pages").get_by_text("Events").click()
    look.page.wait_for_url("**/tensorcast-events*")
    chrome.ready(look.page)
    assert look.page.evaluate(COVERED) == []
    look.close()


def shows(look: Look) -> bool:
    """Whether a page has drawn something, or says why not."""
    words = look.all_text()
    large: int = look.page.evaluate(DRAWN)["large"]
    return large > 0 or any(one in words for one in EMPTY)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_plot_stands_alone_in_a_frame_of_a_page_of_another_origin(
    cast: tc.Session, chrome: Browser, scheme: str
) -> None:
    """As JupyterLab's Dask extension shows them: by the list, in a sandbox, under no bar."""
    put(cast, "framed")
    with urlopen(f"{chrome.base}/individual-plots.json") as answer:
        listed = [one for one in json.load(answer).values() if "tensorcast" in one]
    assert len(listed) == len(PAGES)
    for route in listed:
        page = chrome.framed(f"{chrome.base}{route}", scheme=scheme)
        look = Look(page.frames[1])
        look.page.wait_for_function(READY, timeout=PATIENCE_S * 1000)
        look.until(lambda look=look: shows(look), what=route)
        drawn = look.page.evaluate(DRAWN)
        assert drawn["bars"] == 0, "neither Dask's bar nor ours"
        assert (drawn["back"] < 100) == (scheme == "dark"), drawn
        if route.endswith("placement"):
            look.until(
                lambda look=look: look.columns("rows")["link"] == ["framed"],
                what="what is there, and so the socket across origins",
            )
        page.close()
