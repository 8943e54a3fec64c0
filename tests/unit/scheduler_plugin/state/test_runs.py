from __future__ import annotations

import msgspec
import pytest

from tensorcast_dask.exceptions import InvalidArgument, InvalidName, Mismatch
from tensorcast_dask.scheduler_plugin.state.runs import (
    PlanRow,
    Run,
    StepRow,
    bounded,
    check_plan,
    failure_of,
    row_of,
    step_row,
    to_do_again,
)
from tensorcast_dask.tensors.ids import RequestId
from tensorcast_dask.tensors.messages import (
    Fault,
    OpenPlan,
    StepOutcome,
    StepStatus,
)
from tensorcast_dask.tensors.plans import MAX_PAYLOAD_BYTES, MAX_VALUES_BYTES, PlanSpec
from tests.kit.plans import chain, noop

DONE = StepOutcome(status=StepStatus.DONE)
FAILED = StepOutcome(
    status=StepStatus.FAILED, fault=Fault(kind="Gone", message="it went")
)


def run(spec: PlanSpec, **outcomes: StepOutcome) -> Run:
    return Run(
        key="k",
        life=5,
        run=6,
        digest=spec.digest(),
        spec=spec,
        raw=spec.to_json(),
        payloads={"a": b"p"},
        until_s=30.0,
        poll=False,
        report="r",
        steps={one.name: one for one in spec.steps},
        outcomes=outcomes,
    )


def ask(spec: PlanSpec, **more: object) -> OpenPlan:
    given: dict[str, object] = {
        "rid": RequestId("r"),
        "key": "k",
        "digest": spec.digest(),
        "spec": spec.to_json(),
        "deadline_s": 1.0,
    }
    return OpenPlan(**(given | more))  # type: ignore[arg-type]


def test_a_plan_that_fits_its_digest_is_taken() -> None:
    assert check_plan(ask(chain("a"))) == chain("a")
    with pytest.raises(Mismatch):
        check_plan(ask(chain("a"), digest="x"))
    with pytest.raises(InvalidName):
        check_plan(ask(chain("a"), key=" "))
    with pytest.raises(InvalidArgument, match="as artifacts"):
        check_plan(ask(chain("a"), payloads={"a": bytes(MAX_PAYLOAD_BYTES + 1)}))


def test_rows_hold_a_run_with_what_was_left_of_its_deadline() -> None:
    one = run(chain("a"), a=DONE)
    row = row_of(one, now_s=10.0)
    assert (row.kind, row.key) == ("plan", "k")
    assert row.blob is not None
    kept = msgspec.msgpack.decode(row.blob, type=PlanRow)
    assert (kept.life, kept.run, kept.left_s, kept.payloads) == (
        5,
        6,
        20.0,
        {"a": b"p"},
    )
    step = step_row(one, "a")
    assert step.blob is not None
    assert msgspec.msgpack.decode(step.blob, type=StepRow) == StepRow(
        key="k", step="a", kind="noop", outcome=DONE
    )
    del one.outcomes["a"]
    assert step_row(one, "a").blob is None


def test_a_failure_names_what_ran_what_did_not_and_what_was_undone() -> None:
    spec = PlanSpec(
        steps=(
            noop("a"),
            noop("u", compensates="a"),
            noop("v", compensates="a"),
            noop("b"),
            noop("c", "b"),
        )
    ).check()
    one = run(
        spec,
        a=DONE,
        b=FAILED,
        c=StepOutcome(status=StepStatus.SKIPPED),
        u=DONE,
        v=FAILED,
    )
    assert failure_of(one).message == (
        "plan 'k' failed: step 'b' failed because it went; done: 'a'; skipped: 'c'; "
        "undone by: 'u'; not undone: 'v'"
    )
    assert sorted(to_do_again(one)) == ["a", "b", "c", "u", "v"]


def test_values_that_are_held_are_counted() -> None:
    one = run(chain("a", "b"))
    three = StepOutcome(status=StepStatus.DONE, value=b"abc")
    one.note("a", three)
    one.note("b", three)
    one.note("a", StepOutcome(status=StepStatus.DONE, value=b"abcd"))
    assert one.held_bytes == 7
    assert bounded(one, one.steps["b"], three) is three
    one.held_bytes = MAX_VALUES_BYTES
    assert bounded(one, one.steps["b"], three).status is StepStatus.FAILED
    one.note("a", None)
    assert (one.held_bytes, list(one.outcomes)) == (MAX_VALUES_BYTES - 4, ["b"])


def test_what_is_done_and_stands_is_not_done_again() -> None:
    assert to_do_again(run(chain("a", "b"), a=DONE, b=FAILED)) == ["b"]
