from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import InvalidName, QuotaExceeded
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ArtifactId, NodeId
from tests.kit.catalogs import Desk, Program
from tests.kit.signals import snapshot


def scene() -> tuple[Desk, Program]:
    d = Desk()
    d.node("a")
    return d, d.program()


def quota(p: Program, **more: object) -> m.QuotaState:
    given = {"name": "q", **more}
    return p.call(m.SetQuota(rid=p.rid(), **given), m.QuotaState)  # type: ignore[arg-type]


def test_what_would_pass_a_quota_is_refused_and_nothing_is_taken() -> None:
    d, p = scene()
    p.put("t/x", nbytes=60)
    assert quota(p, prefix="t/", nbytes=100).used_bytes == 60
    before = d.catalog.debug_state()["creations"]
    with pytest.raises(QuotaExceeded) as caught:
        p.create("t/y", nbytes=41)
    assert caught.value.data == {"quota": "q", "used": 60, "nbytes": 41}
    assert d.catalog.debug_state()["creations"] == before
    assert d.nodes[NodeId("a")].inbox == []
    p.put("t/y", nbytes=40)
    p.put("other", nbytes=5000)


def test_a_name_that_is_given_back_or_destroyed_gives_its_part_back() -> None:
    _, p = scene()
    quota(p, prefix="t/", artifacts=1)
    created = p.create("t/x")
    with pytest.raises(QuotaExceeded):
        p.create("t/y")
    p.call(m.AbortCreated(rid=p.rid(), generation=created.generation), type(None))
    p.put("t/y")
    p.destroy("t/y")
    p.put("t/z")
    assert quota(p, prefix="t/", artifacts=1).used_artifacts == 1


def test_a_quota_counts_one_tenants_artifacts_of_each_version_once() -> None:
    d, p = scene()
    d.node("b")
    quota(p, tenant="red", nbytes=250)
    p.put("x", labels={"tenant": "red"}, replicas=2)
    p.put("x", labels={"tenant": "red"}, version=-1)
    p.put("y", labels={"tenant": "blue"})
    found = snapshot(p, "quota/")["quota/q"]
    assert (found["used_bytes"], found["limit_bytes"]) == (200, 250)
    with pytest.raises(QuotaExceeded):
        p.create("z", labels={"tenant": "red"})


def test_a_file_is_refused_where_nothing_more_may_come_and_counted_when_it_is_read() -> (
    None
):
    d, p = scene()
    quota(p, artifacts=1)
    load = m.LoadFile(rid=p.rid(), id=ArtifactId("f"), path="/f.safe", deadline_s=9.0)
    p.call(load, m.ArtifactInfo)
    (state,) = d.catalog.quotas.states()
    assert (state.used_artifacts, state.used_bytes) == (1, len("/f.safe"))
    more = m.LoadFile(rid=p.rid(), id=ArtifactId("g"), path="/g", deadline_s=9.0)
    with pytest.raises(QuotaExceeded):
        p.call(more, m.ArtifactInfo)


def test_a_quota_outlives_a_restart_and_ends_when_it_has_no_limit() -> None:
    d, p = scene()
    p.put("x", nbytes=70)
    quota(p, nbytes=100)
    e = d.restart()
    p.open()
    e.nodes[NodeId("a")].join()
    assert [one.used_bytes for one in e.catalog.quotas.states()] == [70]
    with pytest.raises(QuotaExceeded):
        p.create("y", nbytes=31)
    quota(p)
    p.put("y", nbytes=31)
    assert e.catalog.quotas.states() == ()
    with pytest.raises(InvalidName):
        quota(p, name="")
