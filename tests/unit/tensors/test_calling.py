from __future__ import annotations

import msgspec
import pytest

from tensorcast_dask.exceptions import (
    CallFailed,
    Mismatch,
    NotFound,
    OwnerGone,
    PeerLost,
    Unknown,
)
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors import values
from tensorcast_dask.tensors.calling import Calling, arguments, found
from tensorcast_dask.tensors.plans import ArtifactRef, Kind, Step, StepRef
from tensorcast_dask.tensors.wants import NO_RID, Ask, Call
from tests.kit.steps import CARD, INFO, driven

STEP = Step(
    name="a",
    kind=Kind.CALL,
    instance="e",
    options={"function": "f"},
    args=values.pack([[], {}]),
)


def there(attachment: str) -> m.Instances:
    record = m.InstanceRecord(name="e", attachment=attachment)
    return m.Instances(instances=(m.InstanceState(record=record, card=CARD),))


def the_call(key: str) -> Call:
    request = m.CallInstance(
        rid=NO_RID,
        instance="e",
        attachment="life",
        function="f",
        args=b"args",
        key=key,
        deadline_s=0.0,
    )
    return Call(CARD, request)


def caller(*, again: bool = False, card: m.NodeCard | None = CARD) -> Calling:
    return Calling(STEP, "life", "k/a/1", card=card, again=again)


def test_a_call_names_life_and_key_and_gives_what_was_returned() -> None:
    wants, outcome = driven(caller().make(b"args"), b"value")
    assert wants == [the_call("k/a/1/0")]
    assert outcome == m.StepOutcome(
        status=m.StepStatus.DONE, kind="plain", value=b"value", node="n1"
    )


def test_an_instance_elsewhere_is_asked_for_and_its_successor_is_not_called() -> None:
    asked = Ask(m.InstancesAsked(rid=NO_RID), m.Instances)
    wants, _ = driven(caller(card=None).make(b"args"), there("life"), b"")
    assert wants == [asked, the_call("k/a/1/0")]
    with pytest.raises(OwnerGone, match="is gone; the one that is there now"):
        driven(caller(card=None).make(b"args"), there("other"))


def test_only_a_failure_that_the_instance_told_makes_another_call() -> None:
    calling = caller()
    with pytest.raises(PeerLost):
        driven(calling.make(b"args"), PeerLost("the way was lost"))
    wants, _ = driven(calling.make(b"args"), b"")
    assert wants == [the_call("k/a/1/0")]
    with pytest.raises(CallFailed):
        driven(calling.make(b"args"), CallFailed("it failed", {"carried_out": True}))
    wants, _ = driven(calling.make(b"args"), b"")
    assert wants == [the_call("k/a/1/1")]


def test_of_an_instance_that_is_gone_it_is_unknown_only_if_it_may_have_been_asked() -> (
    None
):
    with pytest.raises(OwnerGone):
        driven(caller().make(b"args"), NotFound("gone"))
    with pytest.raises(Unknown, match="may have been carried out"):
        driven(caller(again=True).make(b"args"), NotFound("gone"))
    calling = caller()
    with pytest.raises(PeerLost):
        driven(calling.make(b"args"), PeerLost("the way was lost"))
    with pytest.raises(Unknown):
        driven(calling.make(b"args"), OwnerGone("gone"))


def test_an_instance_that_was_never_there_is_not_found() -> None:
    nobody = Calling(STEP, "", "k/a/1", card=None, again=False)
    with pytest.raises(NotFound, match="no instance 'e' is attached"):
        driven(nobody.make(b"args"), m.Instances(instances=()))
    with pytest.raises(NotFound, match="there was no instance 'e'"):
        driven(nobody.make(b"args"), there("life"))


def test_instances_are_found_by_name() -> None:
    assert found(there("life").instances, "e").record.attachment == "life"


def test_arguments_have_results_in_the_place_of_steps_and_the_target_first() -> None:
    given = [[StepRef(step="b")], {"x": ArtifactRef.of(INFO)}]
    step = msgspec.structs.replace(STEP, args=values.pack(given))
    packed = arguments(step, INFO, {"b": 5}.__getitem__)
    artifact = ArtifactRef.of(INFO).info()
    assert packed == values.pack([[INFO, 5], {"x": artifact}])


def test_arguments_of_another_form_are_refused() -> None:
    step = msgspec.structs.replace(STEP, args=values.pack({"x": 1}))
    with pytest.raises(Mismatch, match="a list of arguments and a dict"):
        arguments(step, None, str)
