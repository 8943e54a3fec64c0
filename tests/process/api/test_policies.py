"""Policies at a real scheduler: processes that are started, killed and replaced."""

from __future__ import annotations

import time

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.exceptions import InvalidArgument, NotFound, QuotaExceeded
from tensorcast_dask.policies import Role, Spread
from tests.kit.eventually import eventually

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def none_left(cast: tc.Session):
    yield
    for one in cast.policies.list():
        cast.policies.remove(one.name)


def status(cast: tc.Session, name: str) -> str:
    (found,) = [one.status for one in cast.policies.list() if one.name == name]
    return str(found)


def test_a_policy_that_is_in_a_loop_is_killed_and_puts_go_on(cast: tc.Session) -> None:
    class Chosen:
        role = Role.PLACE

        def __init__(self, node: str) -> None:
            self.node = node

        def decide(self, view, wanted=None):
            while wanted.id == "loop":
                pass
            return self.node

    w1, w2 = cast.workers()
    cast.policies.install(Chosen(w2.node), name="chosen", limit=2.0)
    put = cast.put(np.ones(3), "x")
    assert any(w2.node[:8] in line for line in cast.explain(put))
    begin = time.monotonic()
    cast.put(np.ones(3), "loop")
    assert time.monotonic() - begin > 1.9, "it was waited for"
    assert status(cast, "chosen") == "aside"
    (state,) = cast.policies.list()
    assert "within 2 s" in state.why
    cast.put(np.ones(3), "after")
    cast.policies.install(Chosen(w1.node), name="chosen", limit=30.0)
    assert status(cast, "chosen") == "running"
    again = cast.put(np.ones(3), "again")
    assert any(w1.node[:8] in line for line in cast.explain(again))


def test_what_is_no_policy_is_refused_here_and_what_cannot_be_loaded_there(
    cast: tc.Session,
) -> None:
    with pytest.raises(InvalidArgument, match="role"):
        cast.policies.install(object())
    with pytest.raises(InvalidArgument, match=r"Spread\(\.\.\.\)"):
        cast.policies.install(Spread)
    with pytest.raises(InvalidArgument, match="function of the signal"):
        cast.signals.trigger("node/", "queue", 3, above=1)  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        cast.policies.remove("nobody")

    class Bad:
        role = Role.ADMIT

        def decide(self, view, wanted=None):
            return None

        def __reduce__(self):
            return (int, ("no number",))

    cast.policies.install(Spread(), limit=30.0)
    with pytest.raises(InvalidArgument, match="ValueError"):
        cast.policies.install(Bad(), limit=30.0)
    assert [one.name for one in cast.policies.list()] == ["Spread"]


def test_a_quota_refuses_before_anything_is_allocated(cast: tc.Session) -> None:
    cast.policies.set_quota("q", prefix="t/", nbytes=10_000)
    cast.put(np.ones(1000), "t/x")
    with pytest.raises(QuotaExceeded):
        cast.put(np.ones(1000), "t/y")
    assert cast.debug_state()["catalog"]["creations"] == 0
    (quota,) = cast.policies.quotas()
    assert quota.used_bytes >= 8000
    cast.policies.set_quota("q")
    cast.put(np.ones(1000), "t/y")


def test_a_trigger_runs_a_plan_once_for_a_crossing(cast: tc.Session) -> None:
    def act(signal):
        plan = cast.plan()
        plan.on_any().noop(name="scaled")
        return plan

    trigger = cast.signals.trigger(
        "catalog/counts", "artifacts", act, above=1.0, every=0.05, name="scale"
    )
    cast.put(np.ones(10), "one")
    cast.put(np.ones(10), "two")
    eventually(lambda: bool(trigger.runs), within_s=60)
    assert trigger.runs[0].result()["scaled"].status == "done"
    assert trigger.runs[0].plan.startswith("scale-catalog/counts-")
    cast.put(np.ones(10), "three")
    trigger.close()
    eventually(lambda: not trigger.active, within_s=60)
    assert len(trigger.fired) == 1
    assert trigger.error is None
