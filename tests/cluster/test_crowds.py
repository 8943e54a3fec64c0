"""A hundred thousand artifacts, as a session and the command line meet them: a page at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import LocalCluster

import tensorcast_dask as tc
from tensorcast_dask.scheduler_plugin.dask_private import EXTENSION
from tensorcast_dask.scheduler_plugin.state.listing import MAX_PAGE
from tensorcast_dask.scheduler_plugin.state.readings import MAX_ARTIFACTS
from tensorcast_dask.tensors import messages as m
from tests.kit.commands import Commands
from tests.kit.crowds import fill
from tests.kit.eventually import eventually
from tests.kit.local import local_cluster

pytestmark = pytest.mark.timeout(240)  # for hangs, not for busy machines

COUNT = 100_000


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    return Commands(tmp_path_factory.mktemp("c"))


@pytest.fixture(scope="module")
def cluster(commands: Commands) -> Iterator[LocalCluster]:
    with local_cluster(commands.run_dir) as made:
        assert made.scheduler is not None
        with tc.connect(made.scheduler_address) as cast:
            eventually(cast.nodes, within_s=60)
        catalog = made.scheduler.extensions[EXTENSION].service.catalog

        async def filled() -> None:
            fill(catalog, COUNT)

        made.sync(filled)
        yield made


@pytest.fixture
def cast(cluster: LocalCluster) -> Iterator[tc.Session]:
    with tc.connect(cluster.scheduler_address) as made:
        yield made


def test_a_session_lists_all_of_them_in_pages_that_are_bounded(
    cast: tc.Session,
) -> None:
    found = cast.list()
    assert [one.id for one in found] == sorted(
        f"run-{number % 50:02}/step-{number:06}" for number in range(COUNT)
    )
    core = cast._core
    asked = m.ListArtifacts(rid=core.link.next_rid(), limit=COUNT)
    page = core.call(lambda: core.ask(asked, m.Listed, core.deadline(60)))
    assert len(page.infos) == MAX_PAGE
    # Few have the label: the page ends before it has many, and says where to go on.
    asked = m.ListArtifacts(
        rid=core.link.next_rid(), labels={"tenant": "nobody"}, limit=COUNT
    )
    page = core.call(lambda: core.ask(asked, m.Listed, core.deadline(60)))
    assert (page.infos, page.after != "") == ((), True)
    assert cast.list("run-07/", labels={"tenant": "t0", "part": "0"}, limit=3)
    assert cast.list(labels={"tenant": "nobody"}) == []


def test_a_placement_in_a_notebook_has_its_rows_and_says_that_there_are_more(
    cast: tc.Session,
) -> None:
    shown = cast.placement("run-4", limit=12)
    assert len(shown.grid.artifacts) == len(shown.grid.places) == 12
    assert all(shown.grid.places.values())
    assert shown.grid.more
    assert repr(shown).endswith("and more: look for a prefix")
    shown.close()


def test_the_command_line_shows_them(cluster: LocalCluster, commands: Commands) -> None:
    at = ("-s", cluster.scheduler_address)
    assert len(commands.json("ls", "run-07/", *at)) == COUNT // 50
    frame = commands.json("top", *at)
    assert f"artifacts {COUNT}" in frame["head"]
    assert len(frame["artifacts"]["rows"]) <= MAX_ARTIFACTS
    assert "step-" in commands("top", *at)[0]
