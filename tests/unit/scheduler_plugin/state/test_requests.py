from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import (
    CatalogUnavailable,
    Mismatch,
    StaleOwner,
    TensorCastError,
    Unknown,
)
from tensorcast_dask.scheduler_plugin.state.events import Asked, CatalogSettings
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ArtifactId, HostId, NodeId, RequestId, SessionId
from tests.kit.catalogs import Desk, Program


def scene(**settings: int) -> tuple[Desk, Program]:
    d = Desk(settings=CatalogSettings(**settings))  # type: ignore[arg-type]
    d.node("a")
    return d, d.program()


def test_a_repeated_request_gets_the_first_answer_and_changes_nothing() -> None:
    _d, p = scene()
    info = p.put("x")
    ask = m.Destroy(rid=p.rid(), id=ArtifactId("x"))
    first = p.call(ask, m.Destroyed)
    p.put("x")
    del p.answers[ask.rid]
    assert p.call(ask, m.Destroyed) == first
    assert p.resolve("x").generation > info.generation


def test_a_repeat_gets_the_first_answer_also_after_a_restart() -> None:
    d, p = scene()
    info = p.put("x")
    ask = m.Destroy(rid=p.rid(), id=ArtifactId("x"))
    publish = m.Publish(rid=p.rid(), generation=info.generation)
    published = p.call(publish, m.ArtifactInfo)
    first = p.call(ask, m.Destroyed)
    p.put("x")
    d = d.restart()
    for node in d.nodes.values():
        node.join()
    p.open()
    p.answers.clear()
    assert p.call(ask, m.Destroyed) == first
    assert p.call(publish, m.ArtifactInfo) == published
    assert p.resolve("x").version == 2


def test_a_refusal_is_a_first_answer_too() -> None:
    _, p = scene()
    p.put("x")
    created = m.Create(
        rid=p.rid(),
        id=ArtifactId("x"),
        nbytes=1,
        index=b"",
        index_digest="",
        tensors=1,
    )
    with pytest.raises(TensorCastError) as first:
        p.call(created, m.Created)
    p.destroy("x")
    with pytest.raises(TensorCastError) as second:
        p.call(created, m.Created)
    assert (first.value.kind, first.value.message) == (
        second.value.kind,
        second.value.message,
    )


def test_another_payload_under_a_used_id_is_refused() -> None:
    _, p = scene()
    info = p.put("x")
    ask = m.Publish(rid=p.rid(), generation=info.generation)
    p.call(ask, m.ArtifactInfo)
    with pytest.raises(Mismatch):
        p.call(m.Destroy(rid=ask.rid, id=ArtifactId("x")), m.Destroyed)
    assert p.resolve("x", published=True).generation == info.generation


def test_a_running_request_that_is_repeated_is_answered_once_it_ends() -> None:
    d, p = scene()
    created = p.create("x")
    ask = m.CommitCreated(rid=p.rid(), generation=created.generation, deadline_s=9.0)
    p.ask(ask)
    p.lose_comm()
    p.open()
    p.ask(ask)
    p.fill("x", created)
    d.flush()
    assert p.result(ask.rid, m.ArtifactInfo).version == 1


def test_a_change_that_was_settled_long_ago_is_not_run_again() -> None:
    _, p = scene()
    info = p.put("x")
    ask = m.Publish(rid=p.rid(), generation=info.generation)
    p.call(ask, m.ArtifactInfo)
    p.open(settled=p.count + 1)
    with pytest.raises(Unknown):
        p.call(ask, m.ArtifactInfo)


def test_a_session_that_is_not_open_here_is_told_to_open_again() -> None:
    d, p = scene()
    look = m.Resolve(rid=RequestId("z-1"), id=ArtifactId("x"))
    d.tell(Asked(session=p.session, connection=p.connection + 77, request=look))
    with pytest.raises(StaleOwner):
        p.result(look.rid, m.ArtifactInfo)
    stranger = Program(d, SessionId("stranger"), HostId(""))
    d.programs[stranger.session] = stranger
    with pytest.raises(StaleOwner):
        stranger.call(look, m.ArtifactInfo)


def test_a_second_opening_inside_a_session_is_refused() -> None:
    _, p = scene()
    again = m.OpenSession(rid=p.rid(), session=p.session, pid=1, host=HostId(""))
    with pytest.raises(Mismatch):
        p.call(again, m.SessionOpen)


def test_while_the_journal_is_away_changes_are_refused_and_nothing_is_lost() -> None:
    d, p = scene()
    d.node("b")
    info = p.put("x", node=NodeId("a"))
    d.auto = False
    pending = m.Publish(rid=p.rid(), generation=info.generation)
    p.ask(pending)
    d.stall("no space left")
    refused = m.Destroy(rid=p.rid(), id=ArtifactId("x"))
    with pytest.raises(CatalogUnavailable, match="no space left"):
        p.call(refused, m.Destroyed)
    assert not p.answered(pending.rid)
    moved = m.Ensure(
        rid=p.rid(), generation=info.generation, node=NodeId("b"), deadline_s=5.0
    )
    p.call(moved, m.Moved)  # reads go on
    d.unstall()
    assert p.result(pending.rid, m.ArtifactInfo).stage is m.Stage.PUBLISHED
    assert p.call(refused, m.Destroyed).versions == (1,)  # the same request, now done


def test_the_state_of_an_idle_catalog_is_at_its_baseline() -> None:
    d, p = scene()
    before = d.catalog.debug_state()
    for _ in range(20):
        p.put("x", replicas=1)
        p.destroy("x")
    after = d.catalog.debug_state()
    moving = {"seq", "durable", "outcomes", "outcome_sessions"}
    assert {k: v for k, v in after.items() if k not in moving} == {
        k: v for k, v in before.items() if k not in moving
    }
    state = p.call(m.CatalogStateAsked(rid=p.rid()), m.StateJson)
    assert b'"epoch":1' in state.json
