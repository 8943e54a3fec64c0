from __future__ import annotations

import pytest

from tensorcast_dask.api.plans.graph import NODE, Place, compile_plan
from tensorcast_dask.scheduler_plugin import dask_private
from tensorcast_dask.tensors.contexts import Context
from tensorcast_dask.tensors.messages import StepOutcome, StepStatus
from tensorcast_dask.tensors.plans import PlanSpec
from tensorcast_dask.tensors.wants import Ticket
from tests.kit.plans import chain, noop

TICKET = Ticket("roll-out", 7)
PLACES = {"w1": Place("n1", "tcp://a:1"), "gone": Place("gone")}


def graph(spec: PlanSpec, **more: object) -> dict[str, set[str]]:
    """Each task's dependencies."""
    made, _ = compile_plan(spec, {}, PLACES, ticket=TICKET, name="7", **more)  # type: ignore[arg-type]
    return {key: set(task.dependencies) for key, task in dict(made).items()}


def test_a_step_is_a_task_with_a_name_that_people_read() -> None:
    assert graph(chain("load", "show it")) == {
        "load-roll-out-7": set(),
        "show it-roll-out-7": {"load-roll-out-7"},
        "report-roll-out-7": {"load-roll-out-7", "show it-roll-out-7"},
    }


def test_a_task_is_pinned_to_its_nodes_worker_and_says_its_node() -> None:
    spec = PlanSpec(
        context=Context(priority=3),
        steps=(noop("a", node="w1"), noop("b", node="gone"), noop("c")),
    ).check()
    made, _ = compile_plan(spec, {}, PLACES, ticket=TICKET, name="7")
    notes = {name: layer.annotations or {} for name, layer in made.layers.items()}
    assert notes["step a"] == {
        "retries": 2,
        "priority": 3,
        NODE: "n1",
        "workers": ["tcp://a:1"],
        "allow_other_workers": False,
    }
    assert notes["step b"] == {"retries": 2, "priority": 3, NODE: "gone"}
    assert NODE not in notes["step c"]
    assert NODE == dask_private.NODE


@pytest.mark.parametrize("most", [1, 2, 3])
def test_concurrency_bounds_the_tasks_that_may_run_at_once(most: int) -> None:
    spec = PlanSpec(steps=tuple(noop(f"s{at}") for at in range(7))).check()
    left = {k: v for k, v in graph(spec, concurrency=most).items() if "report" not in k}
    while left:
        ready = [key for key, needs in left.items() if not needs & left.keys()]
        assert 0 < len(ready) <= most
        for key in ready:
            del left[key]


def test_steps_that_are_done_have_no_task_and_steps_that_undo_never_have() -> None:
    spec = PlanSpec(
        steps=(noop("a"), noop("undo", compensates="a"), noop("b", "a"))
    ).check()
    done = {"a": StepOutcome(status=StepStatus.DONE)}
    assert graph(spec, done=done) == {
        "b-roll-out-7": set(),
        "report-roll-out-7": {"b-roll-out-7"},
    }
