from __future__ import annotations

import msgspec
import pytest

from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.tensors.contexts import Context
from tensorcast_dask.tensors.ids import ArtifactId, Generation, Version
from tensorcast_dask.tensors.messages import (
    ArtifactInfo,
    Fault,
    Owner,
    Stage,
    StepOutcome,
    StepStatus,
)
from tensorcast_dask.tensors.plans import (
    MAX_STEPS,
    ArtifactRef,
    Kind,
    NameRef,
    PlanSpec,
    Step,
    StepRef,
    report_key,
    task_key,
)
from tests.kit.plans import chain, noop

X = NameRef(id="x")


def plan(*steps: Step) -> PlanSpec:
    return PlanSpec(steps=steps).check()


BAD: dict[str, tuple[Step, ...]] = {
    "a later step": (noop("a", "b"), noop("b")),
    "itself": (noop("a", "a"),),
    "twice": (noop("a"), noop("a")),
    "no name": (noop(""),),
    "a result that is not there": (
        Step(name="a", kind=Kind.PUBLISH, target=StepRef(step="b")),
    ),
    "no artifact": (Step(name="a", kind=Kind.PUBLISH),),
    "an artifact too many": (Step(name="a", kind=Kind.DRAIN, target=X),),
    "a bad id": (Step(name="a", kind=Kind.PUBLISH, target=NameRef(id="")),),
    "an unknown option": (
        Step(name="a", kind=Kind.PUBLISH, target=X, options={"speed": 1}),
    ),
    "an option of another type": (
        Step(name="a", kind=Kind.PREFETCH, target=X, options={"device": 1}),
    ),
    "a flag for a number": (
        Step(name="a", kind=Kind.PUBLISH, target=X, options={"version": True}),
    ),
    "a missing option": (Step(name="a", kind=Kind.SAVE, target=X),),
    "no token": (Step(name="a", kind=Kind.SUBMIT),),
    "a token too many": (Step(name="a", kind=Kind.NOOP, token="t"),),
    "no view": (Step(name="a", kind=Kind.VIEW, target=X),),
    "bytes that are no view": (Step(name="a", kind=Kind.VIEW, target=X, view=b"junk"),),
    "no source": (Step(name="a", kind=Kind.MIGRATE, target=X),),
    "negative retries": (noop("a", retries=-1),),
    "an undoing of an undoing": (
        noop("a"),
        noop("b", compensates="a"),
        noop("c", compensates="b"),
    ),
    "a step after an undoing": (noop("a"), noop("b", compensates="a"), noop("c", "b")),
    "once for what always is": (noop("a", once=True),),
    "a pin of no step": (
        Step(name="a", kind=Kind.UNPIN, target=X, options={"pinned": "b"}),
    ),
}


@pytest.mark.parametrize("steps", BAD.values(), ids=BAD)
def test_what_cannot_be_run_is_refused_and_named(steps: tuple[Step, ...]) -> None:
    with pytest.raises(InvalidArgument, match=r"step|steps|called|refers"):
        plan(*steps)


def test_a_plan_has_a_limit() -> None:
    step = noop("a")
    with pytest.raises(InvalidArgument, match="at most"):
        PlanSpec(steps=(step,) * (MAX_STEPS + 1)).check()


def test_needs_are_what_a_step_takes_and_waits_for_once() -> None:
    step = Step(
        name="d",
        kind=Kind.SUBMIT,
        token="t",
        uses=("a", "b"),
        after=("b", "c"),
    )
    assert step.needs == ("a", "b", "c")
    publish = Step(name="d", kind=Kind.PUBLISH, target=StepRef(step="a"), after=("a",))
    assert publish.needs == ("a",)


def test_who_asks_is_not_in_the_digest_and_what_is_done_is() -> None:
    one = chain("a", "b")
    other = PlanSpec(context=Context(id="z", ddl=1, key="k"), steps=one.steps)
    assert other.digest() == one.digest()
    assert plan(noop("a"), noop("b")).digest() != one.digest()
    assert plan(noop("a", node="n")).digest() != plan(noop("a")).digest()
    here = Step(name="a", kind=Kind.SUBMIT, token="t1")
    there = Step(name="a", kind=Kind.SUBMIT, token="t2")
    assert plan(here).digest() != plan(there).digest()


def test_the_digest_of_a_plan_is_for_ever() -> None:
    digest = "e6e8c25d9b88a13024bba53284bc70b0"
    assert chain("a", "b").digest() == digest


def test_a_reference_holds_what_of_a_handle_never_changes() -> None:
    info = ArtifactInfo(
        id=ArtifactId("x"),
        version=Version(3),
        generation=Generation(9),
        stage=Stage.PUBLISHED,
        owner=Owner.SYSTEM,
        nbytes=5,
        tensors=1,
        index_digest="d",
        labels={"a": "b"},
        degraded="one host",
        base=ArtifactId("b"),
        view=b"v",
    )
    plain = msgspec.structs.replace(info, stage=Stage.COMMITTED, labels={}, degraded="")
    assert ArtifactRef.of(info).info() == plain


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        '{"steps": [{}]}',
        '{"steps": [{"name": "a", "kind": "dance"}]}',
        '{"steps": [{"name": "a", "kind": "noop", "run": "rm"}]}',
        '{"steps": [{"name": "a", "kind": "noop", "target": {"is": "x"}}]}',
        '{"context": {"ddl": -1}}',
        '{"context": {"id": ""}}',
        '{"format": 2}',
        '{"nothing": 1}',
        '{"steps": [{"name": "\\ud800", "kind": "noop"}]}',
        b"\xff\xfe",
        "[" * 100_000,
    ],
)
def test_json_that_is_no_plan_is_a_typed_error(text: str | bytes) -> None:
    with pytest.raises(InvalidArgument):
        PlanSpec.from_json(text)


def test_a_kind_that_is_none_is_refused_by_those_that_there_are() -> None:
    with pytest.raises(InvalidArgument, match=r"'pubish'.*publish"):
        PlanSpec.from_json('{"steps": [{"name": "a", "kind": "pubish"}]}')


def test_a_plan_of_absurd_length_is_not_even_read() -> None:
    with pytest.raises(InvalidArgument, match="bytes of JSON"):
        PlanSpec.from_json(bytes((64 << 20) + 1))


def test_tasks_are_named_after_their_steps_keys_and_runs() -> None:
    assert task_key("load", "roll-out", "7f") == "load-roll-out-7f"
    assert report_key("roll-out", "7f") == "report-roll-out-7f"


def test_a_step_is_skipped_for_the_first_reason_there_was() -> None:
    spec = chain("a", "b", "c")
    fault = Fault(kind="Gone", message="it was destroyed")
    outcomes = {"a": StepOutcome(status=StepStatus.FAILED, fault=fault)}
    said = spec.why_not(spec.steps[1], outcomes)
    assert said == "skipped: step 'a' failed because it was destroyed"
    skipped = Fault(kind="PlanFailed", message=said)
    outcomes["b"] = StepOutcome(status=StepStatus.SKIPPED, fault=skipped)
    assert spec.why_not(spec.steps[2], outcomes) == said
    outcomes["b"] = StepOutcome(status=StepStatus.CANCELLED)
    assert "cancelled" in spec.why_not(spec.steps[2], outcomes)
    assert not spec.why_not(spec.steps[0], outcomes)


def test_ordinary_steps_are_those_that_undo_nothing() -> None:
    spec = plan(noop("a"), noop("b", compensates="a"))
    assert [one.name for one in spec.ordinary] == ["a"]
    assert spec.step("b") == spec.steps[1]
    assert spec.step("c") is None
