from __future__ import annotations

from tensorcast_dask.scheduler_plugin.state.events import Persist, Reply, Row
from tensorcast_dask.scheduler_plugin.state.outbox import Outbox
from tensorcast_dask.tensors.ids import ArtifactId, RequestId, SessionId

ROW = Row(kind="k", key="1", blob=b"b")
NAME = ArtifactId("x")


def reply(outbox: Outbox, number: int, after: int) -> None:
    outbox.reply(SessionId("s"), RequestId(str(number)), None, after=after)


def replies(outbox: Outbox) -> list[str]:
    return [one.rid for one in outbox.take(None) if isinstance(one, Reply)]


def test_rows_of_one_step_go_out_as_one_batch_with_the_next_number() -> None:
    outbox = Outbox(seq=7)
    outbox.persist(ROW)
    outbox.persist(ROW)
    outbox.issue(b"d", 3)
    (batch,) = outbox.take(None)
    assert isinstance(batch, Persist)
    assert (batch.seq, len(batch.rows), len(batch.issued)) == (8, 2, 1)
    assert outbox.take(None) == []


def test_an_answer_is_held_until_the_journal_has_what_it_shows() -> None:
    outbox = Outbox(seq=0)
    outbox.persist(ROW, NAME)
    reply(outbox, 1, outbox.pending(NAME))
    reply(outbox, 2, outbox.pending(ArtifactId("other")))
    assert replies(outbox) == ["2"]
    assert outbox.waiting == 1
    outbox.durable_to(1)
    assert replies(outbox) == ["1"]
    assert outbox.pending(NAME) == 0


def test_a_name_waits_for_its_last_change_not_for_its_first() -> None:
    outbox = Outbox(seq=0)
    outbox.persist(ROW, NAME)
    outbox.take(None)
    outbox.persist(ROW, NAME)
    outbox.take(None)
    outbox.durable_to(1)
    assert outbox.pending(NAME) == 2
    outbox.durable_to(2)
    assert outbox.pending(NAME) == 0


def test_a_journal_that_claims_more_than_it_was_given_is_not_believed() -> None:
    outbox = Outbox(seq=3)
    outbox.durable_to(99)
    assert outbox.durable == 3


def test_a_message_to_a_node_without_a_link_is_dropped() -> None:
    from tensorcast_dask.tensors.messages import TaskSeen

    outbox = Outbox(seq=0)
    outbox.send(0, TaskSeen(task=1))
    assert outbox.take(None) == []


def test_a_batch_is_lazy_when_nobody_waits_for_any_of_its_rows() -> None:
    outbox = Outbox(seq=0)
    outbox.persist(ROW, lazy=True)
    (batch,) = outbox.take(None)
    assert isinstance(batch, Persist)
    assert (batch.lazy, outbox.seq, outbox.firm) == (True, 1, 0)
    outbox.persist(ROW, lazy=True)
    outbox.persist(ROW)
    (batch,) = outbox.take(None)
    assert isinstance(batch, Persist)
    assert (batch.lazy, outbox.seq, outbox.firm) == (False, 2, 2)
    outbox.persist(ROW, lazy=True)
    outbox.issue(b"d", 1)
    (batch,) = outbox.take(None)
    assert isinstance(batch, Persist)
    assert not batch.lazy
