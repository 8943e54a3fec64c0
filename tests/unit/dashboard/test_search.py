from __future__ import annotations

import pytest

from tensorcast_dask.dashboard.data import search as module
from tensorcast_dask.dashboard.data.search import (
    NO_TENANT,
    REST,
    Grouping,
    Search,
    Sort,
    Wanted,
)
from tensorcast_dask.tensors.ids import ArtifactId, NodeId
from tensorcast_dask.tensors.messages import Tier
from tests.kit.catalogs import MIB, Desk
from tests.kit.crowds import crowd


def found(desk: Desk, wanted: Wanted) -> Search:
    search = Search(desk.catalog, wanted)
    while not search.advance(7):
        pass
    return search


def scene() -> Desk:
    d = Desk()
    d.node("a")
    d.node("b")
    p = d.program()
    p.put("models/Llama", nbytes=3 * MIB, labels={"tenant": "blue", "stage": "prod"})
    p.put("models/mini", nbytes=MIB, labels={"stage": "test", "api-token": "hush"})
    p.put("runs/llama-1", nbytes=2 * MIB, labels={"tenant": "green"}, replicas=2)
    p.create("zero")
    return d


ALL = ["models/Llama", "models/mini", "runs/llama-1", "zero"]


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (Wanted(), ALL),
        (Wanted(name="LLAMA"), ["models/Llama", "runs/llama-1"]),
        (Wanted(name="^models/"), ["models/Llama", "models/mini"]),
        (Wanted(name="^llama"), []),
        (Wanted(label="stage"), ["models/Llama", "models/mini"]),
        (Wanted(label="stage=test"), ["models/mini"]),
        (Wanted(label=" stage = prod "), ["models/Llama"]),
        (Wanted(tenant="green"), ["runs/llama-1"]),
        (Wanted(tenant=NO_TENANT), ["models/mini", "zero"]),
        (Wanted(name="llama", tenant="blue"), ["models/Llama"]),
        (Wanted(sort=Sort.SIZE), ["models/Llama", "runs/llama-1", "models/mini", "zero"]),
        (Wanted(sort=Sort.COPIES), ["zero", "models/Llama", "models/mini", "runs/llama-1"]),
    ],
)  # fmt: skip
def test_what_fits_is_found_in_the_order_that_is_wanted(
    wanted: Wanted, ids: list[str]
) -> None:
    assert found(scene(), wanted).ids == ids


@pytest.mark.parametrize("label", ["api-token", "api-token=hush", "api-token=other"])
def test_a_secret_label_cannot_be_searched_for(label: str) -> None:
    assert found(scene(), Wanted(label=label)).ids == []


def test_what_is_read_most_comes_first() -> None:
    d = scene()
    d.catalog.observed.usage.read(ArtifactId("models/mini"), 9, now_s=d.now_s)
    assert found(d, Wanted(sort=Sort.READS)).ids[0] == "models/mini"


def test_groups_hold_what_their_artifacts_hold() -> None:
    search = found(scene(), Wanted(group=Grouping.NAME))
    assert [one.name for one in search.groups] == ["models/", "runs/", "zero"]
    models, runs, _ = search.groups
    assert (models.artifacts, models.nbytes) == (2, 4 * MIB)
    assert sum(count for count, _ in models.held.values()) == 2
    assert runs.held == {
        (NodeId("a"), Tier.HOST): [1, 2 * MIB],
        (NodeId("b"), Tier.HOST): [1, 2 * MIB],
    }
    assert search.tenants == [NO_TENANT, "blue", "green"]
    by_tenant = found(scene(), Wanted(group=Grouping.TENANT, sort=Sort.SIZE))
    assert [one.name for one in by_tenant.groups] == ["blue", "green", NO_TENANT]


def test_groups_are_bounded_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_GROUPS", 2)
    search = found(scene(), Wanted(group=Grouping.NAME))
    assert [one.name for one in search.groups] == [REST, "models/", "runs/"]
    assert sum(one.artifacts for one in search.groups) == 4


def test_a_search_goes_on_by_so_many_and_survives_what_goes_meanwhile() -> None:
    d = crowd(300)
    search = Search(d.catalog, Wanted())
    assert not search.advance(100)
    assert (search.seen, len(search.ids)) == (100, 100)
    for name in search.ids[:2]:
        artifact = d.catalog.names.artifacts[name]
        d.catalog.replicas.erase(artifact.versions[artifact.newest])
    for name in list(d.catalog.names.artifacts)[-5:]:
        artifact = d.catalog.names.artifacts[name]
        d.catalog.replicas.erase(artifact.versions[artifact.newest])
    assert not search.advance(199)
    assert search.advance(199)
    assert search.seen == search.total == 300
    assert search.ids == sorted(search.ids)


def test_an_artifact_is_looked_at_once_however_many_versions_it_has() -> None:
    d = Desk()
    d.node("a")
    p = d.program()
    for version in range(1, 30):
        p.put("x", nbytes=version * 64, version=version)
    search = Search(d.catalog, Wanted())
    assert search.advance(1)
    assert (search.ids, search.nbytes) == (["x"], 29 * 64)


def test_nothing_is_found_at_once_where_there_is_nothing() -> None:
    search = Search(Desk().catalog, Wanted(group=Grouping.OWNER))
    assert search.advance(1)
    assert (search.ids, search.groups, search.tenants) == ([], [], [])
