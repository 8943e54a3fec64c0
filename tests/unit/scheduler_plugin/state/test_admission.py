from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import QuotaExceeded
from tensorcast_dask.policies import Role
from tensorcast_dask.tensors import messages as m
from tests.kit.catalogs import Desk
from tests.kit.policies import FakeProcesses, Given, install


def test_a_quota_is_checked_again_after_a_policy_was_asked() -> None:
    d = Desk()
    d.node("a")
    p, other = d.program(), d.program("other")
    f = FakeProcesses(d)
    p.call(m.SetQuota(rid=p.rid(), name="q", artifacts=1), m.QuotaState)
    install(p, Given(Role.ADMIT, None, None))
    f.stalled = True
    rid = p.ask(_create(p, "x"))
    # Another comes first, by a way that asks no policy.
    load = m.LoadFile(rid=other.rid(), id="f", path="/f", deadline_s=9.0)  # type: ignore[arg-type]
    other.call(load, m.ArtifactInfo)
    d.pass_time(0.3)
    with pytest.raises(QuotaExceeded):
        p.result(rid, m.Created)


def _create(p, name: str) -> m.Create:
    from tests.kit.catalogs import index_of

    index = index_of(100)
    return m.Create(
        rid=p.rid(),
        id=name,  # type: ignore[arg-type]
        nbytes=index.nbytes,
        index=index.encode(),
        index_digest=index.digest(),
        tensors=1,
    )


def test_what_a_process_registers_is_nobodys_to_admit_or_count() -> None:
    d = Desk()
    d.node("a")
    node = d.node("i", kind="instance")
    p = d.program()
    f = FakeProcesses(d)
    p.call(m.SetQuota(rid=p.rid(), name="q", artifacts=0), m.QuotaState)
    install(p, Given(Role.ADMIT, "no"))
    created = p.create("x", owner=m.Owner.CALLER, node=node.node)
    assert created.node.node == node.node
    assert [one.wanted for one in f.views if one.wanted] == []
    with pytest.raises(QuotaExceeded):
        p.create("y")
