"""The pages are in Dask's dashboard while the catalog is, and only where they may be."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from distributed import Client, LocalCluster
from distributed.dashboard.scheduler import template_variables
from tornado.httpclient import AsyncHTTPClient

from tensorcast_dask.dashboard.board import PAGES
from tensorcast_dask.scheduler_plugin.dask_private import EXTENSION
from tests.kit.eventually import eventually
from tests.kit.local import local_cluster

pytestmark = pytest.mark.timeout(240)  # for hangs, not for busy machines


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tc") / "r"


def get(cluster: LocalCluster, address: str) -> tuple[int, str]:
    """What the scheduler's port answers."""
    assert cluster.scheduler is not None
    port = cluster.scheduler.http_server.port

    async def fetch() -> tuple[int, str]:
        url = f"http://127.0.0.1:{port}/{address}"
        answer = await AsyncHTTPClient().fetch(url, raise_error=False)
        return answer.code, answer.body.decode()

    code, body = cluster.sync(fetch)
    return code, body


def plots(cluster: LocalCluster) -> set[str]:
    found = json.loads(get(cluster, "individual-plots.json")[1]).values()
    return {one for one in found if "tensorcast" in one}


INDIVIDUAL = {f"/individual-tensorcast-{page}" for page in PAGES}


def test_pages_are_served_listed_and_in_the_navigation(run_dir: Path) -> None:
    with local_cluster(run_dir, n_workers=0) as cluster:
        for page in ("tensorcast", *(f"tensorcast-{one}" for one in (*PAGES, "story"))):
            code, body = get(cluster, page)
            assert code == 200
            assert 'href="tensorcast"' in body, "Dask's navigation leads to them"
            assert "tensorcast-memory" in body, "and ours to the others"
        assert plots(cluster) == INDIVIDUAL
        for address in INDIVIDUAL:
            code, body = get(cluster, address.lstrip("/"))
            assert (code, 'id="myTopnav"' in body) == (200, False)
        code, body = get(cluster, "status")
        assert 'href="tensorcast"' in body
        # Whoever has the address of the tables' names gets no script out of them.
        code, body = get(
            cluster, "tensorcast-story?ref=%3Cscript%3Ealert(1)%3C/script%3E"
        )
        assert code == 200
        assert "<script>alert(1)" not in body
    assert "tensorcast" not in template_variables(cluster.scheduler)["pages"]


def test_the_setting_takes_them_away(run_dir: Path) -> None:
    with local_cluster(
        run_dir, n_workers=0, settings={"dashboard": {"pages": False}}
    ) as cluster:
        assert get(cluster, "status")[0] == 200
        assert get(cluster, "tensorcast-placement")[0] == 404
        assert plots(cluster) == set()


def test_what_cannot_be_taken_away_holds_up_no_end(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        problem = "as Bokeh did that could not be stopped on a running loop"
        raise RuntimeError(problem)

    with local_cluster(run_dir, n_workers=0) as cluster:
        assert cluster.scheduler is not None
        installed = cluster.scheduler.extensions[EXTENSION]
        installed._hide.append(fails)
    assert "could not be stopped" in caplog.text
    assert installed.service is None
    eventually(
        lambda: "tensorcast-journal" not in {one.name for one in threading.enumerate()},
        within_s=30,
        what="the journal has ended",
    )


def test_a_scheduler_without_a_dashboard_has_a_catalog_all_the_same(
    run_dir: Path,
) -> None:
    # Without an address Dask's server would still listen, at its one default port.
    without = {"dashboard": False}
    with local_cluster(run_dir, n_workers=1, scheduler_kwargs=without) as cluster:
        with Client(cluster) as client:
            assert client.submit(sum, [1, 2]).result() == 3
        assert get(cluster, "tensorcast-placement")[0] == 404
