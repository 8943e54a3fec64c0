from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tensorcast_dask.exceptions import (
    CapacityError,
    CatalogUnavailable,
    OwnerGone,
    PeerLost,
    StaleOwner,
    TensorCastError,
)
from tensorcast_dask.store.state.driving import AGAIN_S, GRACE_S, LEAVE_S, Drive
from tensorcast_dask.store.state.driving_words import GiveUp, Instruction, Make, Say
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors import values
from tensorcast_dask.tensors.ids import ArtifactId, HostId, NodeId
from tensorcast_dask.tensors.plans import Kind, NameRef, PlanSpec, Step, StepRef
from tensorcast_dask.tensors.wants import NO_RID
from tests.kit.plans import chain, noop
from tests.kit.steps import CARD, INFO

DONE = m.StepStatus.DONE
NOW_S = 100.0


def latest(name: str, **more: Any) -> Step:
    """A step that asks one question."""
    return Step(name=name, kind=Kind.LATEST, target=NameRef(id="x"), **more)


def calls(name: str, **more: Any) -> Step:
    return Step(
        name=name,
        kind=Kind.CALL,
        instance="e",
        options={"function": "f"},
        args=values.pack([[], {}]),
        **more,
    )


class Hand:
    """Whoever answers a run by hand."""

    def __init__(self, *steps: Step, spec: PlanSpec | None = None, **more: Any) -> None:
        spec = spec or PlanSpec(steps=steps).check()
        order = m.DoRun(key="k", run=7, spec=spec.to_json(), left_s=60.0, **more)
        self.drive = Drive(order, node=NodeId("me"), host=HostId("h"), now_s=NOW_S)
        self.now_s = NOW_S
        self.open: dict[int, m.Message] = {}
        self.said: list[m.Message] = []
        self.others: list[Instruction] = []

    def take(self, told: list[Instruction]) -> list[m.Message]:
        """Keep what was said; give the requests."""
        new = [one.request for one in told if isinstance(one, Say)]
        self.said += new
        self.open |= {
            one.number: one.request
            for one in told
            if isinstance(one, Say) and one.number
        }
        self.others += [one for one in told if not isinstance(one, Say)]
        return new

    def begin(self) -> list[m.Message]:
        return self.take(self.drive.begin())

    def answer(self, value: m.Wire | TensorCastError | None) -> list[m.Message]:
        """Answer the oldest request."""
        number = min(self.open)
        del self.open[number]
        rid = NO_RID
        answer = m.Answer(rid=rid)
        if isinstance(value, TensorCastError):
            answer = m.Answer(rid=rid, fault=m.Fault.of(value))
        elif value is not None:
            answer = m.Answer(rid=rid, value=msgspec.Raw(m.encode(value)))
        return self.take(self.drive.answered(number, answer, now_s=self.now_s))

    def let(self, **more: Any) -> list[m.Message]:
        """Let the step begin that asks for leave."""
        return self.answer(m.StepState(left_s=30.0, **more))

    def pass_to(self, now_s: float) -> list[m.Message]:
        self.now_s = now_s
        return self.take(self.drive.tick(now_s=now_s))


def begin(step: str, **more: Any) -> m.BeginStep:
    return m.BeginStep(rid=NO_RID, key="k", run=7, step=step, node="me", **more)


def end(**ended: m.StepOutcome) -> m.EndPlan:
    return m.EndPlan(rid=NO_RID, key="k", run=7, ended=ended)


def nothing(**more: Any) -> m.StepOutcome:
    return m.StepOutcome(status=DONE, node="me", attempts=1, **more)


def found(*, attempts: int = 1, seconds: float = 0.0) -> m.StepOutcome:
    return m.StepOutcome(
        status=DONE,
        kind="ArtifactInfo",
        value=m.encode(INFO),
        node="me",
        attempts=attempts,
        seconds=seconds,
    )


QUESTION = m.Resolve(rid=NO_RID, id=ArtifactId("x"), published=True)


def test_steps_that_only_hand_on_are_told_with_the_last_word() -> None:
    hand = Hand(spec=chain("a", "b"))
    assert hand.begin() == [end(a=nothing(), b=nothing())]
    state = m.PlanState(key="k", run=7, digest="", status=m.RunStatus.DONE)
    assert hand.answer(state) == []
    assert hand.drive.over


def test_a_step_asks_for_leave_then_for_what_it_wants_then_the_run_is_over() -> None:
    hand = Hand(latest("a"))
    assert hand.begin() == [begin("a")]
    assert hand.let() == [QUESTION]
    hand.now_s += 0.5
    assert hand.answer(INFO) == [end(a=found(seconds=0.5))]


def test_a_step_that_has_leave_with_the_order_asks_at_once() -> None:
    hand = Hand(latest("a"), begun={"a": m.StepState(left_s=30.0)})
    assert hand.begin() == [QUESTION]


def test_how_a_step_ended_is_told_with_the_question_for_the_next() -> None:
    hand = Hand(latest("a"), latest("b", after=("a",)))
    hand.begin()
    hand.let()
    assert hand.answer(INFO) == [begin("b", ended={"a": found()})]


def test_with_nothing_else_to_say_the_end_of_a_step_is_told_alone() -> None:
    hand = Hand(latest("a"), latest("b"))
    assert hand.begin() == [begin("a"), begin("b")]
    hand.let()
    hand.let()
    (told,) = hand.answer(INFO)
    assert told == m.EndStep(rid=NO_RID, key="k", run=7, step="a", outcome=found())
    # The last word waits until the catalog has that one.
    hand.open = dict(sorted(hand.open.items()))
    assert hand.answer(INFO) == [
        m.EndStep(rid=NO_RID, key="k", run=7, step="b", outcome=found())
    ]
    assert hand.answer(found()) == []
    assert hand.answer(found()) == [end()]


def test_what_the_catalog_knows_of_a_step_counts() -> None:
    hand = Hand(latest("a"), noop("b", "a"))
    hand.begin()
    skipped = m.StepOutcome(status=m.StepStatus.SKIPPED)
    assert hand.answer(m.StepState(outcome=skipped)) == [begin("b")]


def test_no_more_steps_are_under_way_than_may_be() -> None:
    hand = Hand(latest("a"), latest("b"), latest("c"), concurrency=2)
    assert hand.begin() == [begin("a"), begin("b")]
    hand.let()
    hand.let()
    told = hand.answer(INFO)
    assert told == [begin("c", ended={"a": found()})]


def test_what_has_ended_before_is_not_done_again() -> None:
    hand = Hand(latest("a"), latest("b", after=("a",)), outcomes={"a": found()})
    assert hand.begin() == [begin("b")]


def test_errors_that_may_pass_are_tried_again_after_a_while() -> None:
    hand = Hand(latest("a", retries=1))
    hand.begin()
    hand.let()
    assert hand.answer(PeerLost("away")) == []
    assert hand.drive.next_s() == NOW_S + 0.05
    assert hand.pass_to(NOW_S + 0.04) == []
    assert hand.pass_to(NOW_S + 0.05) == [QUESTION]
    (told,) = hand.answer(PeerLost("away"))
    assert isinstance(told, m.EndPlan)
    outcome = told.ended["a"]
    assert (outcome.status, outcome.attempts) == (m.StepStatus.FAILED, 2)
    assert outcome.fault is not None
    assert outcome.fault.kind == "PeerLost"


def test_other_errors_end_a_step_at_once() -> None:
    hand = Hand(latest("a"))
    hand.begin()
    hand.let()
    (told,) = hand.answer(StaleOwner("of yesterday"))
    assert isinstance(told, m.EndPlan)
    assert told.ended["a"].attempts == 1


def test_each_change_has_its_place_and_a_later_attempt_its_number() -> None:
    publish = Step(name="a", kind=Kind.PUBLISH, target=NameRef(id="x"))
    hand = Hand(publish)
    hand.begin()
    assert isinstance(hand.let()[0], m.Resolve)
    (effect,) = hand.answer(INFO)
    assert isinstance(effect, m.StepEffect)
    assert (effect.step, effect.number, effect.attempt) == ("a", 1, 1)
    hand.answer(CapacityError("full"))
    hand.pass_to(NOW_S + 1)
    (again,) = hand.answer(INFO)
    assert isinstance(again, m.StepEffect)
    assert (again.number, again.attempt) == (1, 2)


def test_steps_that_undo_run_in_reverse_when_the_plan_failed() -> None:
    hand = Hand(
        noop("a"),
        noop("b"),
        noop("undo-a", compensates="a"),
        noop("undo-b", compensates="b"),
        latest("c", after=("a", "b"), retries=0),
        noop("undo-c", compensates="c"),
    )
    hand.begin()
    hand.let()
    (told,) = hand.answer(StaleOwner("no"))
    assert isinstance(told, m.EndPlan)
    assert list(told.ended) == ["c", "undo-b", "undo-a"]


def test_a_plan_that_is_done_undoes_nothing() -> None:
    hand = Hand(noop("a"), noop("undo-a", compensates="a"))
    assert hand.begin() == [end(a=nothing())]


@pytest.mark.parametrize("word", ["begin", "tell"])
def test_a_run_that_is_not_ours_any_more_is_left_at_once(word: str) -> None:
    hand = Hand(latest("a"), latest("b"))
    hand.begin()
    if word == "tell":
        hand.let()
        hand.let()
        hand.answer(INFO)
        hand.open = {max(hand.open): m.NodesAsked(rid=NO_RID)}  # the EndStep
    left = m.EndPlan(rid=NO_RID, key="k", run=7, left="this run is over")
    assert hand.answer(StaleOwner("this run is over")) == [left]
    assert hand.drive.over


def test_what_the_catalog_cannot_take_is_told_again_with_all_of_it() -> None:
    hand = Hand(noop("a"))
    told = hand.begin()
    assert hand.answer(CatalogUnavailable("the journal is full")) == []
    assert hand.drive.next_s() == NOW_S + AGAIN_S
    assert hand.pass_to(NOW_S + AGAIN_S) == told


def test_leave_that_the_catalog_cannot_give_is_asked_for_again() -> None:
    hand = Hand(noop("a"), latest("b", after=("a",)))
    asked = hand.begin()
    assert asked == [begin("b", ended={"a": nothing()})]
    (told,) = hand.answer(CatalogUnavailable("the journal is full"))
    assert isinstance(told, m.EndStep)
    assert hand.pass_to(NOW_S + AGAIN_S) == [begin("b")]


def test_an_answer_that_does_not_come_ends_the_step_and_is_nothing_when_it_comes() -> (
    None
):
    hand = Hand(latest("a"))
    hand.begin()
    hand.let()
    late = min(hand.open)
    assert hand.drive.next_s() == NOW_S + 30.0 + GRACE_S
    (told,) = hand.pass_to(NOW_S + 30.0 + GRACE_S)
    assert isinstance(told, m.EndPlan)
    fault = told.ended["a"].fault
    assert fault is not None
    assert fault.kind == "DeadlineExceeded"
    hand.open = {late: hand.open[late]}
    assert hand.answer(INFO) == []


def test_a_run_whose_time_is_long_over_is_left() -> None:
    hand = Hand(latest("a"))
    hand.begin()
    assert hand.drive.next_s() == NOW_S + 60.0 + LEAVE_S
    assert hand.pass_to(NOW_S + 60.0 + LEAVE_S) == []
    assert hand.drive.over


PLACE = {"e": m.InstancePlace(attachment="life", card=CARD)}


def test_a_call_goes_to_the_life_that_the_order_names_and_can_be_given_up() -> None:
    hand = Hand(calls("a"), places=PLACE)
    assert hand.begin() == [begin("a", attachment="life")]
    hand.let(since=5, attachment="life")
    (made,) = hand.others
    assert isinstance(made, Make)
    assert made.card == CARD
    request = made.request
    assert (request.attachment, request.key) == ("life", "k/a/5/0")
    assert request.deadline_s == 30.0
    assert hand.pass_to(NOW_S + 30.0) == []
    assert hand.others[1:] == [GiveUp(number=made.number)]
    value = values.pack(3)
    told = hand.take(hand.drive.called(made.number, value, now_s=NOW_S + 30.0))
    outcome = m.StepOutcome(
        status=DONE, kind="plain", value=value, node="n1", attempts=1, seconds=30.0
    )
    assert told == [end(a=outcome)]


def test_a_call_that_may_have_been_made_is_unknown_when_its_instance_is_gone() -> None:
    hand = Hand(calls("a"), places=PLACE)
    hand.begin()
    hand.let(since=5, again=True, attachment="life")
    (made,) = hand.others
    assert isinstance(made, Make)
    gone = OwnerGone("it is gone")
    (told,) = hand.take(hand.drive.called(made.number, gone, now_s=NOW_S))
    assert isinstance(told, m.EndPlan)
    fault = told.ended["a"].fault
    assert fault is not None
    assert fault.kind == "Unknown"


def test_results_stand_in_the_place_of_steps() -> None:
    pin = Step(name="b", kind=Kind.PUBLISH, target=StepRef(step="a"))
    hand = Hand(latest("a"), pin)
    hand.begin()
    hand.let()
    hand.answer(INFO)
    (effect,) = hand.let()
    assert isinstance(effect, m.StepEffect)
    asked = m.decode(effect.request, m.Publish)
    assert asked.generation == INFO.generation


def test_what_a_store_does_not_do_is_an_error_of_the_step() -> None:
    save = Step(
        name="a", kind=Kind.SAVE, target=NameRef(id="x"), options={"path": "/p"}
    )
    hand = Hand(save)
    hand.begin()
    hand.let()
    (told,) = hand.answer(msgspec.structs.replace(INFO, view=b"v"))
    assert isinstance(told, m.EndPlan)
    fault = told.ended["a"].fault
    assert fault is not None
    assert fault.kind == "Unimplemented"
    assert "executor='graph'" in fault.message
