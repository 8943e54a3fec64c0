from __future__ import annotations

from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ArtifactId, Generation, NodeId, RequestId
from tensorcast_dask.tensors.wants import (
    NO_RID,
    Ask,
    Effects,
    Ticket,
    ask,
    fitted,
    pause_s,
)
from tests.kit.steps import NODES, driven

RID = RequestId("s:4")


def test_a_request_gets_its_id_and_what_is_left_of_the_deadline() -> None:
    drain = m.DrainNode(rid=NO_RID, node=NodeId("n"), deadline_s=0.0)
    assert fitted(drain, RID, 2.5) == m.DrainNode(
        rid=RID, node=NodeId("n"), deadline_s=2.5
    )
    publish = m.Publish(rid=NO_RID, generation=Generation(7))
    assert fitted(publish, RID, 2.5) == m.Publish(rid=RID, generation=Generation(7))


def test_changes_are_named_by_their_place_and_questions_are_not() -> None:
    effects = Effects(Ticket("k", 9), "a", 2)
    publish = m.Publish(rid=NO_RID, generation=Generation(7))
    sent = m.Publish(rid=RID, generation=Generation(7))
    question = m.Resolve(rid=NO_RID, id=ArtifactId("x"))
    for number in (1, 2):
        assert effects.wrapped(question, RID, 1.0) == m.Resolve(
            rid=RID, id=ArtifactId("x")
        )
        assert effects.wrapped(publish, RID, 1.0) == m.StepEffect(
            rid=RID,
            key="k",
            run=9,
            step="a",
            number=number,
            attempt=2,
            request=m.encode(sent),
        )


def test_an_answer_is_what_the_asker_gets() -> None:
    question = m.NodesAsked(rid=NO_RID)
    assert driven(ask(question, m.Nodes), NODES) == ([Ask(question, m.Nodes)], NODES)


def test_pauses_grow_up_to_a_limit() -> None:
    assert [pause_s(n) for n in (1, 2, 3, 9, 101)] == [0.05, 0.1, 0.2, 2.0, 2.0]
