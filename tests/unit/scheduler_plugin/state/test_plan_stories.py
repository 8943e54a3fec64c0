from __future__ import annotations

from tensorcast_dask.scheduler_plugin.state.plan_stories import STEP_LINES
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.contexts import Context
from tensorcast_dask.tensors.plans import Kind, PlanSpec, Step
from tests.kit.catalogs import Desk, Program
from tests.kit.plans import Runner, noop


def told(p: Program, ref: str) -> list[str]:
    explained = p.call(m.ExplainAsked(rid=p.rid(), ref=ref), m.Explained)
    return [line for _, line in explained.lines]


def test_a_run_is_told_under_its_key_and_who_asked_and_steps_up_to_a_limit() -> None:
    d = Desk()
    d.node("a")
    p = d.program()
    names = [f"s{at}" for at in range(STEP_LINES)]
    spec = PlanSpec(
        context=Context(id="me"), steps=tuple(noop(name) for name in names)
    ).check()
    r = Runner(p)
    r.open(spec)
    for name in names:
        r.ended(name)
    r.end()
    lines = told(p, "plan:k")
    assert lines[0].startswith("submit: ")
    assert lines[-1] == "report: done"
    of_steps = [one for one in lines if one.startswith(("execute:", "record:"))]
    assert len(of_steps) == STEP_LINES
    assert set(lines) <= set(told(p, "context:me"))
    assert len(told(p, f"plan:k/{names[-1]}")) == 2


def test_what_came_of_a_call_is_told_of_the_step_and_of_the_instance() -> None:
    d = Desk()
    d.node("a")
    r = Runner(d.program())
    call = Step(
        name="s", kind=Kind.CALL, instance="e", options={"function": "f"}, args=b"x"
    )
    r.open(PlanSpec(steps=(call,)).check())
    r.begin("s")
    r.ended("s", seconds=0.25)
    line = "instance e: f for step s of plan k is done after 0.250 s"
    assert line in told(r.program, "plan:k/s")
    assert told(r.program, "instance:e") == [line]
