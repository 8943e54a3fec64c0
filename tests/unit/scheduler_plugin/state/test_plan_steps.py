from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import NotFound, StaleOwner
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.messages import StepStatus
from tests.kit.catalogs import Desk
from tests.kit.plans import Runner, chain


def scene() -> tuple[Desk, Runner]:
    d = Desk()
    d.node("a")
    return d, Runner(d.program())


def test_a_step_begins_until_it_has_ended_and_then_gives_its_outcome() -> None:
    _, r = scene()
    r.open(chain("a"), deadline_s=9.0)
    assert r.begin("a") == m.StepState(left_s=9.0)
    assert r.begin("a") == m.StepState(left_s=9.0)
    done = r.ended("a", value=b"v", kind="plain")
    assert r.begin("a") == m.StepState(outcome=done)


def test_what_needs_a_failed_step_is_skipped_when_it_asks_to_begin() -> None:
    _, r = scene()
    r.open(chain("a", "b"))
    fault = m.Fault(kind="Gone", message="it went")
    r.ended("a", StepStatus.FAILED, fault=fault)
    outcome = r.begin("b").outcome
    assert outcome is not None
    assert outcome.status is StepStatus.SKIPPED
    assert outcome.fault is not None
    assert "step 'a' failed because it went" in outcome.fault.message


def test_steps_that_are_not_of_the_run_are_refused() -> None:
    _, r = scene()
    r.open(chain("a"))
    with pytest.raises(NotFound, match="no step 'b'"):
        r.begin("b")
    r.run += 1
    with pytest.raises(StaleOwner):
        r.begin("a")
    with pytest.raises(StaleOwner):
        r.ended("a")
