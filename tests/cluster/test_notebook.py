"""What a notebook is shown of a running cluster, with the libraries of notebooks and without."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.api import pages
from tensorcast_dask.api.connect import session_of_task
from tensorcast_dask.dashboard import board
from tensorcast_dask.exceptions import InvalidArgument, NotFound, UnsupportedPlatform
from tests.kit.eventually import eventually

EVIL = "<script>alert(1)</script>"
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tc.LocalCluster]:
    run_dir = tmp_path_factory.mktemp("tc") / "r"
    with tc.LocalCluster(
        1,
        processes=False,
        host_memory="32 MiB",
        settings={"run-dir": str(run_dir)},
    ) as made:
        yield made


@pytest.fixture
def cast(cluster: tc.LocalCluster) -> Iterator[tc.Session]:
    with tc.connect(cluster) as session:
        session.wait_for_workers(1)
        yield session
        for artifact in session.list(all_versions=True):
            session.destroy(artifact.id)


def test_every_noun_shows_what_is_known_of_it(cast: tc.Session) -> None:
    artifact = cast.put({EVIL: np.ones((2, 3), np.float32)}, EVIL, labels={"a": EVIL})
    view = artifact.view({EVIL: tc.s_[:1]}, name="part")
    (worker,) = cast.workers()
    plan = cast.plan(tc.context(id=EVIL))
    step = plan.on_worker(worker).alias("now", EVIL)
    plan.on_any().alias("later", "nobody", after=[step])
    run = plan.submit()
    result = run.outcome()
    operation = cast.put(np.ones(1000), "small", wait=False)
    operation.wait()
    shown: dict[str, str] = {
        name: noun._repr_html_()
        for name, noun in {
            "session": cast,
            "artifact": artifact,
            "view": view,
            "worker": worker,
            "plan": plan,
            "run": run,
            "result": result,
            "operation": operation,
            "signals": cast.signals.snapshot(["artifact/", "event/"]),
            "placement": cast.placement(),
        }.items()
        if hasattr(noun, "_repr_html_")
    }
    assert not any("<script" in drawn for drawn in shown.values())
    assert cast.client.scheduler.address in shown["session"]
    assert cast.client.dashboard_link in shown["session"]
    assert "32.0 MiB" in shown["session"]
    assert "float32" in shown["artifact"]
    assert "2 x 3" in shown["artifact"]
    assert "1 x 3" in shown["view"]
    assert "host" in shown["view"]
    assert "alias-0: alias on" in shown["plan"]
    assert shown["run"] == shown["result"]
    assert "NotFound" in shown["result"]
    assert ">done<" in shown["operation"]
    assert "event/created" in shown["signals"]
    text = plan.visualize()
    assert text.splitlines()[1] == "alias-1: alias on any after alias-0"
    assert text._repr_mimebundle_()["image/svg+xml"].startswith("<svg")


def test_a_session_that_is_closed_is_shown_too(cluster: tc.LocalCluster) -> None:
    with tc.connect(cluster) as cast:
        artifact = cast.put(np.ones(3), "gone")
        cast.destroy("gone")
        assert ">gone<" in artifact._repr_html_()
        run = cast.plan().submit()
        run.result()
    assert ">closed<" in cast._repr_html_()
    assert ">gone<" in artifact._repr_html_()
    assert "not known" in run._repr_html_()


def _dashboard_of_a_task() -> object:
    session = session_of_task()
    assert session is not None
    return session.dashboard()


def test_a_page_of_the_dashboard_is_an_address_and_a_frame(cast: tc.Session) -> None:
    assert pages.PAGES == board.PAGES
    page = cast.dashboard("plans", key=EVIL)
    root = cast.client.dashboard_link.removesuffix("/status")
    assert page.address.startswith(f"{root}/tensorcast-plans?key=%3Cscript")
    assert page.address in repr(page)
    assert f"src='{root}/individual-tensorcast-plans?" in page._repr_html_()
    for bad in ({"page": "nothing"}, {"height": 0}, {"height": "tall"}):
        with pytest.raises(InvalidArgument):
            cast.dashboard(**bad)
    inside = cast.client.submit(_dashboard_of_a_task, pure=False)
    assert isinstance(inside.exception(), UnsupportedPlatform)


def test_a_placement_follows_what_happens_and_ends_with_its_session(
    cluster: tc.LocalCluster,
) -> None:
    with tc.connect(cluster) as cast:
        cast.wait_for_workers(1)
        cast.put(np.ones(1000), "follow/first")
        shown = cast.placement("follow/", every=0.05)
        assert "follow/first v1 (committed)  7.8 KiB  0:host" in repr(shown)
        assert cast.placement("follow/", every=0.05) is shown
        cast.put(np.ones(1000), "follow/second").publish()
        cast.put(np.ones(1000), "apart/other")
        eventually(lambda: "follow/second v1  " in repr(shown), within_s=20)
        assert "other" not in repr(shown)
        assert "follow/second" in shown._repr_mimebundle_()["text/html"]
        few = cast.placement("follow/", limit=1)
        assert "and more" in repr(few)
        few.close()
        assert not few.active
        assert "follow/first" in repr(few), "what was shown last stays"
        few.close()
        for artifact in cast.list():
            cast.destroy(artifact.id)
        eventually(lambda: "no artifacts" in repr(shown), within_s=20)
        assert shown.active
    assert not shown.active
    shown.close()
    for bad in ({"limit": 0}, {"every": 0}, {"prefix": 7}, {"labels": 7}):
        with pytest.raises(InvalidArgument), tc.connect(cluster) as other:
            other.placement(**bad)


def test_without_ipywidgets_a_placement_is_a_table(
    cast: tc.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    bundle = cast.placement()._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}


def test_a_widget_changes_in_its_place_and_is_searched(cast: tc.Session) -> None:
    pytest.importorskip("ipywidgets", reason="the extra [notebook] is not installed")
    cast.put(np.ones(10), "a/first")
    shown = cast.placement(every=0.05)
    assert shown._repr_mimebundle_()[WIDGET]["model_id"]
    words, table = shown._widget().children
    assert "a/first" in table.value
    cast.put(np.ones(10), "b/second")
    eventually(lambda: "b/second" in table.value, within_s=20)
    words.value = "a"
    eventually(lambda: "b/second" not in table.value, within_s=20)
    assert "a/first" in table.value
    table.close()
    cast.put(np.ones(10), "a/third")
    eventually(lambda: not shown.active, within_s=20)


def test_an_event_loop_is_never_made_to_wait_for_what_is_shown(
    cluster: tc.LocalCluster,
) -> None:
    async def program() -> None:
        async with await tc.connect(
            cluster.scheduler_address, asynchronous=True
        ) as cast:
            artifact = await cast.put(np.ones(10), "loop")
            assert ">loop<" in artifact._repr_html_()
            assert "tcp://" in cast._repr_html_() or "inproc" in cast._repr_html_()
            shown = await cast.placement()
            assert "loop v" in repr(shown)
            await shown.close()
            assert not shown.active
            await cast.destroy("loop")

    asyncio.run(program())


def test_a_shell_is_taught_what_cannot_draw_itself(
    cast: tc.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    formatters: Any = pytest.importorskip(
        "IPython.core.formatters", reason="IPython is not installed"
    )
    # What a shell shows with; a whole one would write a history into the home folder.
    shell = SimpleNamespace(display_formatter=formatters.DisplayFormatter())
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    from tensorcast_dask.notebook.formatters import teach

    teach()
    rows = cast.sql("SELECT 1 AS one")
    for value, says in (
        (NotFound(EVIL), "&lt;script&gt;"),
        (rows, ">one<"),
        (cast.signals.snapshot("catalog/")["catalog/counts"], "catalog/counts"),
        (cast.nodes()[0], "32.0 MiB"),
    ):
        bundle, _ = shell.display_formatter.format(value)
        assert says in bundle["text/html"]
        assert "<script" not in bundle["text/html"]
        assert bundle["text/plain"]
