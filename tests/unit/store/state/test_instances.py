from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import (
    DeadlineExceeded,
    InvalidName,
    NotFound,
    OwnerGone,
    Poisoned,
    StaleOwner,
    Unimplemented,
)
from tensorcast_dask.store.state.instances import (
    Answer,
    Attachments,
    HangUp,
    Instruction,
    Say,
    Tell,
)
from tensorcast_dask.tensors.ids import RequestId, SessionId
from tensorcast_dask.tensors.messages import (
    Call,
    CallAnswered,
    CallDropped,
    CallEnded,
    CallInstance,
    Dial,
    Fault,
    InstanceGone,
    InstanceLoad,
    InstanceRecord,
    InstancesHere,
    Load,
    Replaced,
    Seen,
    SessionIn,
    SessionOut,
)


def record(attachment: str = "a1", name: str = "e", **more: object) -> InstanceRecord:
    given = {"functions": ("f",), "engine": ("transform_into",), "pid": 7} | more
    return InstanceRecord(name=name, attachment=attachment, **given)  # type: ignore[arg-type]


def ask(function: str = "f", **more: object) -> CallInstance:
    given = {"instance": "e", "args": b"x", "deadline_s": 9.0} | more
    return CallInstance(rid=RequestId("r"), function=function, **given)  # type: ignore[arg-type]


def attached() -> Attachments:
    here = Attachments()
    here.attach(record())
    return here


def faults(done: list[Instruction]) -> list[tuple[int, str]]:
    return [
        (one.asker, one.outcome.kind)
        for one in done
        if isinstance(one, Answer) and isinstance(one.outcome, Fault)
    ]


def test_the_catalog_is_told_of_whoever_attaches() -> None:
    here = Attachments()
    assert here.attach(record()) == [Tell(message=InstancesHere(records=(record(),)))]
    assert len(here) == 1


def test_a_name_that_is_not_legal_changes_nothing() -> None:
    here = Attachments()
    with pytest.raises(InvalidName):
        here.attach(record(name=" e"))
    with pytest.raises(InvalidName):
        here.attach(record(attachment=""))
    assert len(here) == 0


def test_the_later_life_has_the_name_and_the_earlier_is_let_go() -> None:
    here = attached()
    here.call(1, ask())
    done = here.attach(record("a2"))
    why = "another process is instance 'e' by now"
    assert done[:2] == [
        Say(attachment="a1", message=Replaced(why=why)),
        HangUp(attachment="a1"),
    ]
    assert faults(done) == [(1, "Unknown")]
    assert done[-2:] == [
        Tell(message=InstancesHere(records=(), gone={"a1": why})),
        Tell(message=InstancesHere(records=(record("a2"),))),
    ]
    assert here.call(2, ask())[0] == Say(
        attachment="a2",
        message=Call(number=2, function="f", args=b"x", deadline_s=9.0),
    )


def test_who_was_let_go_does_not_take_the_name_back_when_it_hears_of_that_late() -> (
    None
):
    here = attached()
    here.attach(record("a2"))
    with pytest.raises(StaleOwner, match="another process"):
        here.attach(record("a1", term=5))
    assert here.find(Dial(rid=RequestId("r"), instance="e", attachment="")) == "a2"
    assert len(here) == 1


def test_a_session_is_carried_after_the_greeting_that_it_is_of_and_ends_with_its_life() -> (
    None
):
    here = attached()
    said = SessionIn(session=SessionId("s"), raw=b"x", greeting=1)
    out = SessionOut(session=SessionId("s"), raw=b"y")
    assert here.carried("a1", said) == []  # nobody listens
    here.all_here()
    assert here.greeted() == [Say(attachment="a1", message=Seen(greeting=1))]
    assert here.answered(out) == []
    assert here.carried("a1", said) == [Tell(message=said)]
    assert here.answered(out) == [Say(attachment="a1", message=out)]
    away = Say(attachment="a1", message=Seen(up=False))
    assert (here.left(), here.left()) == ([away], [])
    assert here.carried("a1", said) == []
    here.all_here()
    # Meant for the catalog of before: there it would arrive before the session is opened.
    assert here.carried("a1", said) == []
    again = SessionIn(session=SessionId("s"), raw=b"x", greeting=2)
    assert here.carried("a1", again) == [Tell(message=again)]
    over = SessionIn(session=SessionId("s"), raw=b"")
    assert here.gone("a1", "dead")[-1] == Tell(message=over)


def test_a_call_is_handed_over_and_its_outcome_goes_to_who_asked() -> None:
    here = attached()
    assert here.call(5, ask(key="k")) == [
        Say(
            attachment="a1",
            message=Call(number=1, function="f", args=b"x", key="k", deadline_s=9.0),
        )
    ]
    done = here.ended("a1", CallEnded(number=1, value=b"v"))
    assert done == [Answer(asker=5, outcome=CallAnswered(value=b"v"))]
    assert here.ended("a1", CallEnded(number=1, value=b"v")) == []
    assert here.waiting == 0


def test_a_fault_is_an_outcome() -> None:
    here = attached()
    here.call(5, ask())
    fault = Fault(kind="CallFailed", message="no")
    done = here.ended("a1", CallEnded(number=1, fault=fault))
    assert done == [Answer(asker=5, outcome=fault)]


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (ask(instance="other"), NotFound),
        (ask(instance="other", attachment="a0"), OwnerGone),
        (ask(attachment="a0"), OwnerGone),
        (ask("g"), Unimplemented),
        (ask("manifest"), Unimplemented),
        (ask(deadline_s=0.0), DeadlineExceeded),
    ],
)
def test_what_cannot_be_called_is_refused_and_nothing_has_begun(
    asked: CallInstance, error: type[Exception]
) -> None:
    here = attached()
    with pytest.raises(error):
        here.call(1, asked)
    assert here.waiting == 0


def test_calls_of_a_life_that_is_over_are_unknown_and_go_to_nobody_else() -> None:
    here = attached()
    here.call(1, ask())
    here.call(2, ask())
    here.gave_up(2)
    done = here.gone("a1", "its process ended")
    assert faults(done) == [(1, "Unknown")]
    assert done[-1] == Tell(
        message=InstancesHere(records=(), gone={"a1": "its process ended"})
    )
    assert here.gone("a1", "again") == []
    assert here.ended("a1", CallEnded(number=1)) == []
    with pytest.raises(NotFound):
        here.call(3, ask())


def test_a_caller_that_gives_up_is_told_and_the_call_must_not_begin() -> None:
    here = attached()
    here.call(1, ask())
    done = here.gave_up(1)
    assert faults(done) == [(1, "DeadlineExceeded")]
    assert done[1:] == [Say(attachment="a1", message=CallDropped(number=1))]
    assert here.gave_up(1) == []
    assert here.ended("a1", CallEnded(number=1, value=b"late")) == []


def test_a_poisoned_instance_does_only_what_mends_it() -> None:
    here = attached()
    here.changed("a1", record(poisoned="half of m v2"))
    with pytest.raises(Poisoned, match="half of m v2"):
        here.call(1, ask())
    assert here.call(2, ask("transform_into"))
    here.changed("a1", record())
    assert here.call(3, ask())


def test_what_an_instance_says_anew_changes_neither_name_nor_process_nor_term() -> None:
    here = attached()
    here.seen("a1", 8)
    said = record("a9", name="other", pid=1, term=99, functions=("g",))
    (told,) = here.changed("a1", said)
    now = record(functions=("g",), term=8)
    assert told == Tell(message=InstancesHere(records=(now,)))
    assert here.record("a1") == now
    assert here.changed("a9", said) == []


def test_the_term_of_a_life_is_handed_on_and_told_to_a_catalog_that_comes_anew() -> (
    None
):
    here = attached()
    assert here.seen("a1", 8) == [Say(attachment="a1", message=Seen(term=8))]
    assert here.seen("a2", 9) == []
    assert here.all_here() == InstancesHere(records=(record(term=8),), whole=True)


def loaded(number: int, age_s: float, **values: float) -> Instruction:
    load = InstanceLoad(
        instance="e",
        epoch=8,
        number=number,
        values=values,
        age_s=age_s,
        versions={"m": 2},
    )
    return Tell(message=load)


def test_the_last_load_is_told_once_a_tick_with_its_age() -> None:
    here = attached()
    here.changed("a1", record(holds={"m": 2}))
    here.pushed("a1", Load(values={"queue": 3.0}), now_s=2.0)
    assert here.tick(now_s=1.0) == [], "the catalog has given no term yet"
    here.seen("a1", 8)
    here.pushed("a1", Load(values={"tokens": 9.0}), now_s=2.5)
    here.pushed("a2", Load(values={"queue": 1.0}), now_s=2.5)
    assert here.tick(now_s=3.0) == [loaded(2, 0.5, tokens=9.0)]
    assert here.tick(now_s=4.0) == []


def test_a_catalog_that_comes_anew_is_told_the_last_load() -> None:
    here = attached()
    here.changed("a1", record(holds={"m": 2}))
    here.seen("a1", 8)
    here.pushed("a1", Load(values={"queue": 3.0}), now_s=2.0)
    here.tick(now_s=2.0)
    here.all_here()
    assert here.tick(now_s=5.0) == [loaded(1, 3.0, queue=3.0)]


def test_the_signals_of_a_life_end_with_it() -> None:
    here = attached()
    here.seen("a1", 8)
    assert here.gone("a1", "its process ended")[-1] == Tell(
        message=InstanceGone(instance="e", epoch=8)
    )


def test_a_caller_is_led_to_the_life_that_it_means_and_to_no_other() -> None:
    here = attached()
    dial = Dial(rid=RequestId("r"), instance="e", attachment="a1")
    assert here.find(dial) == "a1"
    here.attach(record("a2"))
    with pytest.raises(OwnerGone):
        here.find(dial)
