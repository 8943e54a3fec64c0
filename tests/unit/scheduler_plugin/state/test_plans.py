from __future__ import annotations

import msgspec
import pytest

from tensorcast_dask.exceptions import (
    CatalogUnavailable,
    InvalidArgument,
    Mismatch,
    NotFound,
    StaleOwner,
)
from tensorcast_dask.scheduler_plugin.state.events import CatalogSettings, PlanDropped
from tensorcast_dask.scheduler_plugin.state.plan_stories import STEP_LINES
from tensorcast_dask.scheduler_plugin.state.plans import POLL_S, UNDO_S
from tensorcast_dask.scheduler_plugin.state.records import packed
from tensorcast_dask.scheduler_plugin.state.runs import PlanRow
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.messages import RunStatus, StepStatus
from tensorcast_dask.tensors.plans import Kind, PlanSpec, Step
from tests.kit.catalogs import Desk, Program
from tests.kit.plans import Runner, chain, noop

FAULT = m.Fault(kind="Gone", message="it was destroyed")


def scene(**settings: float) -> tuple[Desk, Program, Runner]:
    d = Desk(settings=CatalogSettings(token=b"t", **settings))  # type: ignore[arg-type]
    d.node("a")
    p = d.program()
    return d, p, Runner(p)


def states(state: m.PlanState) -> dict[str, str]:
    return {name: str(one.status) for name, one in state.outcomes.items()}


def test_a_key_opens_one_run_and_is_on_disk_before_anybody_is_told() -> None:
    d, p, r = scene()
    d.auto = False
    spec = chain("a", "b")
    ask = m.OpenPlan(
        rid=p.rid(), key="k", digest=spec.digest(), spec=spec.to_json(), deadline_s=9.0
    )
    p.ask(ask)
    assert not p.answered(ask.rid)
    d.commit()
    state = p.result(ask.rid, m.PlanState)
    assert (state.status, state.started, state.left_s) == ("running", True, 9.0)
    again = r.open(spec)
    assert (again.run, again.started) == (state.run, False)


def test_a_key_is_one_plans_only() -> None:
    _, _, r = scene()
    r.open(chain("a"))
    with pytest.raises(Mismatch, match="another plan"):
        r.open(chain("b"))


def test_a_run_that_is_over_gives_its_results_and_runs_nothing() -> None:
    _, _, r = scene()
    r.open(chain("a"))
    assert r.begin("a").outcome is None
    r.ended("a", value=b"v", kind="pickle", attempts=1)
    assert r.end().status is RunStatus.DONE
    again = r.open(chain("a"))
    assert (again.status, again.started) == (RunStatus.DONE, False)
    assert again.outcomes["a"].value == b"v"
    with pytest.raises(StaleOwner):
        r.begin("a")


def test_what_is_over_is_kept_for_a_while_and_then_the_key_is_free() -> None:
    d, _, r = scene(plan_result_ttl_s=50.0)
    first = r.open(chain("a"))
    r.ended("a")
    r.end()
    d.pass_time(49.0)
    assert r.look().run == first.run
    d.pass_time(2.0)
    with pytest.raises(NotFound):
        r.look()
    d.flush()
    assert d.catalog.debug_state()["plans_kept"] == 0
    assert r.open(chain("b")).started
    kept = {(row.kind, row.key): row.blob for row in d.rows}
    assert kept["plan", "k"] is not None
    assert all(blob is None for (kind, _), blob in kept.items() if kind == "step")


def test_what_cannot_be_a_plan_opens_nothing() -> None:
    d, p, _ = scene()
    spec = chain("a")
    for more in (
        {"key": ""},
        {"digest": "other"},
        {"spec": b"{"},
        {"deadline_s": -1.0},
        {"payloads": {"a": bytes(9 << 20)}},
    ):
        good: dict[str, object] = {
            "rid": p.rid(),
            "key": "k",
            "digest": spec.digest(),
            "spec": spec.to_json(),
            "deadline_s": 1.0,
        }
        ask = m.OpenPlan(**(good | more))  # type: ignore[arg-type]
        p.ask(ask)
        assert isinstance(p.answers[ask.rid], m.Fault), more
    assert d.catalog.debug_state()["plans"] == 0


def test_the_first_outcome_of_a_step_counts() -> None:
    _, _, r = scene()
    r.open(chain("a"))
    first = r.ended("a", value=b"1")
    assert r.ended("a", value=b"2") == first
    assert r.begin("a").outcome == first


def test_runs_under_way_are_told_with_the_task_that_ends_them() -> None:
    d, _, r = scene()
    first = r.open(chain("a"))
    r.key = "named"
    second = r.open(chain("a"), report="its report")
    assert d.catalog.plans.running() == (
        ("k", first.run, f"report-k-{first.run:x}"),
        ("named", second.run, "its report"),
    )
    r.end(cancel=True)
    assert [key for key, _, _ in d.catalog.plans.running()] == ["k"]


def test_a_run_that_is_done_is_not_resumed() -> None:
    _, _, r = scene()
    r.open(chain("a"))
    r.ended("a")
    r.end()
    resumed = r.resume()
    assert (resumed.started, resumed.status) == (False, RunStatus.DONE)


def test_a_run_that_was_resumed_is_kept_from_its_new_end_on() -> None:
    d, _, r = scene(plan_result_ttl_s=50.0)
    r.open(chain("a"))
    r.end(cancel=True)
    d.pass_time(40.0)
    r.resume()
    r.ended("a")
    r.end()
    d.pass_time(40.0)
    assert r.look().status is RunStatus.DONE
    d.pass_time(11.0)
    with pytest.raises(NotFound):
        r.look()


def test_a_run_that_is_stopped_twice_ends_of_the_first_reason() -> None:
    d, p, r = scene()
    info = p.put("x")
    spec = PlanSpec(
        steps=(noop("a"), noop("undo a", compensates="a"), noop("b"))
    ).check()
    r.open(spec, deadline_s=5.0)
    r.ended("a")
    assert r.end(cancel=True).status is RunStatus.RUNNING
    d.pass_time(6.0)
    r.end(cancel=True)
    pin = m.Pin(rid=p.rid(), generation=info.generation, ttl_s=5.0)
    late = p.answers[r.effect("b", pin)]
    assert isinstance(late, m.Fault)
    assert "cancelled" in late.message
    r.ended("undo a")
    state = r.end()
    assert state.status is RunStatus.CANCELLED
    assert state.message == "the plan was cancelled"


def test_who_has_waited_enough_and_is_told_again_at_the_end_gets_one_answer() -> None:
    d, p, r = scene()
    r.open(chain("a"))
    early = p.ask(m.PlanAsked(rid=p.rid(), key="k", wait_s=5.0))
    r.ended("a")
    r.end()
    assert p.result(early, m.PlanState).status is RunStatus.DONE
    answers = dict(p.answers)
    d.pass_time(6.0)
    assert p.answers == answers


def test_a_row_that_cannot_be_read_is_said_and_the_others_are_kept() -> None:
    d, p, r = scene()
    r.open(chain("a"))
    r.ended("a")
    r.key = "bad"
    r.open(chain("a"))
    rows = [one for one in d.rows if (one.kind, one.key) == ("plan", "bad")]
    assert rows[-1].blob is not None
    broken = msgspec.msgpack.decode(rows[-1].blob, type=PlanRow)
    broken = msgspec.structs.replace(broken, spec=b"{")
    d.rows.append(packed("plan", "bad", broken))
    info = p.put("x")
    pin = m.Pin(rid=p.rid(), generation=info.generation, ttl_s=5.0)
    r.effect("a", pin)
    assert any(row.kind == "outcome" and "plan:" in row.key for row in d.rows)
    d = d.restart()
    p.open()
    assert "plan 'bad' is lost" in d.catalog.said
    r.key = "k"
    assert states(r.look()) == {"a": "done"}
    d.flush()
    assert d.catalog.debug_state()["plans"] == 1
    newest = {row.key: row.blob for row in d.rows if "plan:" in row.key}
    assert set(newest.values()) == {None}


def test_who_is_told_of_a_step_is_told_what_is_on_disk() -> None:
    d, p, r = scene()
    r.open(chain("a", "b"))
    d.auto = False
    outcome = m.StepOutcome(status=StepStatus.DONE)
    end = m.EndStep(rid=p.rid(), key="k", run=r.run, step="a", outcome=outcome)
    p.ask(end)
    assert p.answered(end.rid)  # the worker goes on; a repeat would end alike
    assert d.queue[-1].lazy
    look = p.ask(m.PlanAsked(rid=p.rid(), key="k"))
    assert not p.answered(look)
    d.commit()
    assert states(p.result(look, m.PlanState)) == {"a": "done"}


def test_values_of_a_plan_are_bounded_together() -> None:
    _, _, r = scene()
    names = [f"s{at}" for at in range(65)]
    r.open(chain(*names))
    kept = [r.ended(name, value=bytes(1 << 20)).status for name in names]
    assert kept == [StepStatus.DONE] * 64 + [StepStatus.FAILED]
    state = r.end()
    assert state.fault is not None
    assert state.fault.data["kind"] == "InvalidArgument"


def test_functions_are_kept_for_as_long_as_the_plan_can_be_resumed() -> None:
    _, _, r = scene()
    r.open(chain("a"), payloads={"a": b"f"})
    r.ended("a", StepStatus.FAILED, fault=FAULT)
    r.end()
    assert r.resume().payloads == {"a": b"f"}
    r.ended("a")
    r.end()
    assert r.look(whole=True).payloads == {}


def test_a_failed_step_skips_what_needs_it_and_leaves_the_rest_alone() -> None:
    _, _, r = scene()
    spec = PlanSpec(
        steps=(noop("a"), noop("b", "a"), noop("c", "b"), noop("d"))
    ).check()
    r.open(spec)
    r.ended("a", StepStatus.FAILED, fault=FAULT)
    why = "skipped: step 'a' failed because it was destroyed"
    for name in ("b", "c"):
        outcome = r.begin(name).outcome
        assert outcome is not None
        assert outcome.status is StepStatus.SKIPPED
        assert outcome.fault is not None
        assert outcome.fault.message == why
    assert r.begin("d").outcome is None
    r.ended("d")
    state = r.end()
    assert state.status is RunStatus.FAILED
    assert state.fault is not None
    assert state.fault.kind == "PlanFailed"
    assert state.fault.data == {"plan": "k", "step": "a", "kind": "Gone"}
    assert state.message == (
        "plan 'k' failed: step 'a' failed because it was destroyed; done: 'd'; "
        "skipped: 'b', 'c'"
    )


def test_a_run_is_not_over_while_a_step_is_missing() -> None:
    _, _, r = scene()
    r.open(chain("a", "b"))
    r.ended("a")
    with pytest.raises(Mismatch, match="'b' has not ended"):
        r.end()


def test_p34_the_deadline_ends_a_run_once_and_no_step_adds_to_it() -> None:
    d, _, r = scene()
    r.open(chain("a", "b"), deadline_s=10.0)
    r.ended("a")
    d.pass_time(4.0)
    assert r.begin("b").left_s == pytest.approx(6.0)
    d.pass_time(6.5)
    state = r.look()
    assert state.status is RunStatus.FAILED
    assert state.fault is not None
    assert state.fault.kind == "DeadlineExceeded"
    assert states(state) == {"a": "done", "b": "cancelled"}
    with pytest.raises(StaleOwner):
        r.ended("b")


def test_p34_a_deadline_of_nothing_lets_each_step_look_once() -> None:
    d, _, r = scene()
    r.open(chain("a"), deadline_s=0.0, poll=True)
    state = r.begin("a")
    assert state.poll
    assert state.left_s == POLL_S
    d.pass_time(POLL_S + 0.1)
    assert r.look().status is RunStatus.FAILED


def test_a_cancelled_run_begins_nothing_more_and_says_so() -> None:
    _, _, r = scene()
    r.open(chain("a", "b"))
    r.ended("a")
    state = r.end(cancel=True)
    assert state.status is RunStatus.CANCELLED
    assert states(state) == {"a": "done", "b": "cancelled"}


def test_steps_that_undo_have_a_moment_after_the_deadline() -> None:
    d, _, r = scene()
    spec = PlanSpec(
        steps=(noop("a"), noop("undo a", compensates="a"), noop("b"))
    ).check()
    r.open(spec, deadline_s=5.0)
    r.ended("a")
    d.pass_time(6.0)
    assert r.look().status is RunStatus.RUNNING
    outcome = r.begin("b").outcome
    assert outcome is not None
    assert outcome.status is StepStatus.CANCELLED
    assert r.begin("undo a").outcome is None
    r.ended("undo a")
    assert r.end().status is RunStatus.FAILED
    r.key = "k2"
    r.open(spec, deadline_s=5.0)
    d.pass_time(5.5 + UNDO_S)
    assert r.look().status is RunStatus.FAILED


def test_a_run_that_stops_does_so_still_after_a_restart() -> None:
    d, p, r = scene()
    steps = (noop("a"), noop("undo a", compensates="a"), noop("b"))
    r.open(PlanSpec(steps=steps).check())
    r.ended("a")
    assert r.end(cancel=True).status is RunStatus.RUNNING
    d = d.restart()
    p.open()
    outcome = r.begin("b").outcome
    assert outcome is not None
    assert outcome.status is StepStatus.CANCELLED
    assert r.begin("undo a").outcome is None
    r.ended("undo a")
    d = d.restart()
    p.open()
    assert r.end().status is RunStatus.CANCELLED
    r.key = "k2"
    r.open(PlanSpec(steps=steps).check())
    r.end(cancel=True)
    d = d.restart()
    p.open()
    d.pass_time(UNDO_S + 0.5)
    assert r.look().status is RunStatus.CANCELLED


def test_who_waits_is_told_at_the_end_or_in_time() -> None:
    d, p, r = scene()
    r.open(chain("a"))
    soon = p.ask(m.PlanAsked(rid=p.rid(), key="k", wait_s=1.0))
    late = p.ask(m.PlanAsked(rid=p.rid(), key="k", wait_s=50.0))
    assert not p.answered(soon)
    d.pass_time(1.5)
    assert p.result(soon, m.PlanState).status is RunStatus.RUNNING
    assert not p.answered(late)
    r.ended("a")
    r.end()
    assert p.result(late, m.PlanState).status is RunStatus.DONE


def test_who_waits_for_a_step_is_told_at_its_end_or_at_that_of_the_run() -> None:
    _, p, r = scene()
    r.open(chain("a", "b"))
    one = p.ask(m.PlanAsked(rid=p.rid(), key="k", wait_s=50.0, step="a"))
    other = p.ask(m.PlanAsked(rid=p.rid(), key="k", wait_s=50.0, step="b"))
    assert not p.answered(one)
    r.ended("a")
    assert states(p.result(one, m.PlanState)) == {"a": "done"}
    assert states(r.look(wait_s=50.0, step="a")) == {"a": "done"}
    assert not p.answered(other)
    r.end(cancel=True)
    assert states(p.result(other, m.PlanState)) == {"a": "done", "b": "cancelled"}


def test_an_interrupted_run_is_resumed_once_and_what_is_done_stays_done() -> None:
    d, p, r = scene()
    first = r.open(chain("a", "b"))
    r.ended("a")
    d.tell(PlanDropped(key="k", run=first.run + 1, why="of another run"))
    assert r.look().status is RunStatus.RUNNING
    d.tell(PlanDropped(key="k", run=first.run, why="the scheduler was restarted"))
    state = r.look()
    assert state.status is RunStatus.INTERRUPTED
    assert "resume it" in state.message
    other = Runner(p)
    other.run = r.run
    resumed = r.resume()
    assert (resumed.started, resumed.status) == (True, RunStatus.RUNNING)
    assert resumed.run != first.run
    assert states(resumed) == {"a": "done"}
    assert resumed.spec == chain("a", "b").to_json()
    assert not other.resume().started
    stale = Runner(p)
    stale.run = first.run
    with pytest.raises(StaleOwner):
        stale.ended("b")
    r.ended("b")
    assert r.end().status is RunStatus.DONE


def test_a_resumed_run_does_again_what_failed_or_was_undone() -> None:
    _, _, r = scene()
    spec = PlanSpec(
        steps=(noop("a"), noop("undo a", compensates="a"), noop("b"), noop("c", "b"))
    ).check()
    r.open(spec)
    r.ended("a")
    r.ended("b", StepStatus.FAILED, fault=FAULT)
    r.begin("c")
    r.ended("undo a")
    assert "undone by: 'undo a'" in r.end().message
    resumed = r.resume()
    assert states(resumed) == {}
    assert r.begin("a").outcome is None


def test_a_function_that_is_marked_once_is_begun_once() -> None:
    d, _, r = scene()
    spec = PlanSpec(
        steps=(Step(name="f", kind=Kind.SUBMIT, token="t", once=True),)
    ).check()
    r.open(spec)
    assert r.begin("f").outcome is None
    r.program.desk = d.restart()
    r.program.open()
    outcome = r.begin("f").outcome
    assert outcome is not None
    assert outcome.fault is not None
    assert (outcome.status, outcome.fault.kind) == ("failed", "Unknown")


def test_a_restart_keeps_runs_outcomes_and_what_was_left_of_the_deadline() -> None:
    d, p, r = scene()
    spec = chain("a", "b")
    r.open(spec, deadline_s=20.0, payloads={"a": b"f"})
    r.ended("a", value=b"v")
    d = d.restart()
    p.open()
    state = r.look(whole=True)
    assert state.status is RunStatus.RUNNING
    assert state.outcomes["a"].value == b"v"
    assert (state.spec, state.payloads) == (spec.to_json(), {"a": b"f"})
    d.pass_time(21.0)
    assert r.look().status is RunStatus.FAILED
    d = d.restart()
    p.open()
    assert r.look().status is RunStatus.FAILED


def test_while_the_journal_is_away_no_plan_goes_on() -> None:
    d, _, r = scene()
    r.open(chain("a"))
    d.stall()
    with pytest.raises(CatalogUnavailable):
        r.ended("a")
    d.unstall()
    r.ended("a")
    assert r.end().status is RunStatus.DONE


def test_what_nobody_knows_is_not_found() -> None:
    _, _, r = scene()
    with pytest.raises(NotFound):
        r.look()
    r.open(chain("a"))
    with pytest.raises(NotFound):
        r.begin("z")
    with pytest.raises(InvalidArgument):
        r.look(wait_s=-1.0)


def test_the_story_of_a_run_is_told_in_order() -> None:
    _, p, r = scene()
    names = [f"s{at}" for at in range(40)]
    r.open(chain(*names))
    for name in names:
        r.ended(name)
    r.end()

    def words(ref: str) -> list[str]:
        told = p.call(m.ExplainAsked(rid=p.rid(), ref=ref), m.Explained)
        return [line.split(":")[0] for _, line in told.lines]

    assert words("plan:k") == [
        "submit",
        "admit",
        *["execute", "record"] * (STEP_LINES // 2),
        "report",
    ]
    assert words("plan:k/s39") == ["execute", "record"]


def call(name: str) -> Step:
    return Step(
        name=name, kind=Kind.CALL, instance="e", options={"function": "f"}, args=b"x"
    )


def begin(r: Runner, step: str, attachment: str) -> m.StepState:
    ask = m.BeginStep(
        rid=r.program.rid(), key=r.key, run=r.run, step=step, attachment=attachment
    )
    return r.program.call(ask, m.StepState)


def test_a_call_is_held_to_one_life_of_its_instance() -> None:
    _, _, r = scene()
    run = r.open(PlanSpec(steps=(call("a"),)).check()).run
    first = begin(r, "a", "life-1")
    assert (first.since, first.again) == (run, False)
    again = begin(r, "a", "life-1")
    assert (again.since, again.again) == (run, True)
    other = begin(r, "a", "life-2").outcome
    assert other is not None
    assert other.fault is not None
    assert (other.status, other.fault.kind) == (StepStatus.FAILED, "Unknown")


def test_a_resumed_run_asks_after_a_call_whose_end_is_not_known() -> None:
    d, _, r = scene()
    first = r.open(PlanSpec(steps=(call("a"),)).check()).run
    begin(r, "a", "life-1")
    d.tell(PlanDropped(key="k", run=first, why="its task is gone"))
    r.resume()
    again = begin(r, "a", "life-1")
    assert (again.since, again.again) == (first, True)


def test_a_resumed_run_makes_a_call_anew_that_is_known_to_have_failed() -> None:
    _, _, r = scene()
    first = r.open(PlanSpec(steps=(call("a"),)).check()).run
    begin(r, "a", "life-1")
    r.ended("a", StepStatus.FAILED, fault=m.Fault(kind="CallFailed", message="no"))
    r.end()
    second = r.resume().run
    assert second != first
    again = begin(r, "a", "life-2")
    assert (again.since, again.again) == (second, False)


@pytest.mark.parametrize("kind", ["Unknown", "DeadlineExceeded", "PeerLost"])
def test_a_resumed_run_does_not_give_a_call_in_doubt_to_another_life(kind: str) -> None:
    _, _, r = scene()
    r.open(PlanSpec(steps=(call("a"),)).check())
    begin(r, "a", "life-1")
    r.ended("a", StepStatus.FAILED, fault=m.Fault(kind=kind, message="who knows"))
    r.end()
    r.resume()
    outcome = begin(r, "a", "life-2").outcome
    assert outcome is not None
    assert outcome.fault is not None
    assert outcome.fault.kind == "Unknown"


def test_the_life_that_a_call_went_to_is_known_after_a_restart() -> None:
    d, _, r = scene()
    first = r.open(PlanSpec(steps=(call("a"),)).check()).run
    begin(r, "a", "life-1")
    after = d.restart()
    after.node("a")
    later = Runner(after.program())
    later.run = first
    again = begin(later, "a", "life-1")
    assert (again.since, again.again) == (first, True)
