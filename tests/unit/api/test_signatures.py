"""What is the same of all public calls."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import tensorcast_dask as tc

#: Calls that wait for nobody, or hand on what they are given.
NO_DEADLINE = {
    "Artifact.mutate",
    "Session.close",
    "Session.dashboard",
    "Session.plan",
    "Session.plan_run",
    "Session.submit",
}


def calls(cls: Any) -> list[str]:
    functions = inspect.getmembers(cls, inspect.isfunction)
    return [f"{cls.__name__}.{name}" for name, _ in functions if name[0] != "_"]


CALLS = [name for cls in (tc.Session, tc.Artifact, tc.Worker) for name in calls(cls)]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_may_wait_takes_a_deadline_by_name(name: str) -> None:
    cls, _, method = name.partition(".")
    given = inspect.signature(getattr(getattr(tc, cls), method)).parameters
    options = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in given.values())
    if name in NO_DEADLINE:
        assert "deadline" not in given
    elif not options:
        assert given["deadline"].kind is inspect.Parameter.KEYWORD_ONLY
        assert given["deadline"].default is None
