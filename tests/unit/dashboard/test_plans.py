from __future__ import annotations

from tensorcast_dask.dashboard.data.plans import STEPS, Chosen, plans
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.messages import StepStatus
from tensorcast_dask.tensors.plans import PlanSpec
from tests.kit.catalogs import Desk
from tests.kit.plans import Runner, chain, noop

FAULT = m.Fault(kind="Gone", message="<b>it</b> was destroyed")


def scene() -> tuple[Desk, Runner]:
    d = Desk()
    d.node("a")
    return d, Runner(d.program(), "first")


def test_steps_are_bars_from_when_they_begin_to_when_they_end() -> None:
    d, r = scene()
    r.open(chain("a", "b", "c"))
    r.begin("a")
    d.pass_time(2.0)
    r.ended("a", attempts=1, seconds=1.9, node="a")
    r.begin("b")
    d.pass_time(1.0)
    steps = plans(d.catalog, Chosen()).columns["steps"]
    assert steps["name"] == ["a", "b", "c"]
    assert steps["status"] == ["done", "running", "waits"]
    assert steps["left"] == [0.0, 2.0, 0.0]
    assert steps["right"] == [2.0, 3.0, 0.0]
    assert steps["node"] == ["w-a (a)", "any", "any"]
    r.ended("b", StepStatus.FAILED, fault=FAULT, attempts=2)
    told = plans(d.catalog, Chosen())
    assert told.columns["steps"]["text"][1] == "1.0 s; Gone: <b>it</b> was destroyed"
    assert told.columns["runs"]["failed"] == [1]


def test_the_one_that_is_chosen_is_drawn_and_its_failure_is_said_as_text() -> None:
    d, r = scene()
    r.open(chain("a"))
    r.begin("a")
    r.ended("a", StepStatus.FAILED, fault=FAULT)
    r.end()
    other = Runner(r.program, "second")
    other.open(chain("x", "y"))
    told = plans(d.catalog, Chosen())
    assert told.columns["runs"]["key"] == ["second", "first"]
    assert told.columns["steps"]["name"] == ["x", "y"]
    assert told.texts["failure"] == ""
    told = plans(d.catalog, Chosen("first"))
    assert told.columns["steps"]["name"] == ["a"]
    assert told.texts["chosen"] == "<b>first</b> is failed"
    assert told.texts["failure"].startswith("<b>PlanFailed</b>: plan &#x27;first&#x27;")
    assert "&lt;b&gt;it&lt;/b&gt; was destroyed" in told.texts["failure"]


def test_a_run_of_an_earlier_life_is_listed_without_times() -> None:
    d, r = scene()
    r.open(chain("a", "b"))
    r.begin("a")
    r.ended("a", seconds=3.0, attempts=1)
    r.ended("b", attempts=1)
    r.end()
    d = d.restart()
    d.pass_time(0.1)
    told = plans(d.catalog, Chosen())
    assert told.columns["runs"]["time"] == ["-"]
    assert told.columns["steps"]["left"] == told.columns["steps"]["right"] == [0.0, 0.0]
    assert (
        told.columns["steps"]["text"][0] == "3.0 s, before this start of the scheduler"
    )


def test_a_step_that_is_done_again_begins_anew() -> None:
    d, r = scene()
    r.open(chain("a"))
    r.begin("a")
    d.pass_time(1.0)
    r.ended("a", StepStatus.FAILED, fault=FAULT)
    r.end()
    r.resume()
    steps = plans(d.catalog, Chosen()).columns["steps"]
    assert (steps["status"], steps["right"]) == (["waits"], [0.0])


def test_steps_are_bounded_and_that_is_said() -> None:
    d, r = scene()
    r.open(PlanSpec(steps=tuple(noop(f"s{n}") for n in range(STEPS + 7))).check())
    told = plans(d.catalog, Chosen())
    assert len(told.columns["steps"]["y"]) == told.counts["steps"] == STEPS
    assert told.texts["chosen"].endswith(f"its first {STEPS} steps, 7 more")


def test_arguments_and_values_are_never_told() -> None:
    d, r = scene()
    r.open(chain("a"), payloads={"a": b"hush"})
    r.begin("a")
    r.ended("a", value=b"hush", kind="pickle")
    assert "hush" not in repr(plans(d.catalog, Chosen()))


def test_without_plans_it_says_what_would_be_here() -> None:
    told = plans(Desk().catalog, Chosen("gone"))
    assert told.counts == {"steps": 0, "runs": 0}
    assert told.texts["empty"].startswith("No plan has been run")
