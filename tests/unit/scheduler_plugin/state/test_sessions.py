from __future__ import annotations

from tensorcast_dask.scheduler_plugin.state.events import CatalogSettings
from tensorcast_dask.tensors import messages as m
from tests.kit.catalogs import Desk


def test_a_session_is_greeted_with_what_it_needs_to_talk_to_stores() -> None:
    d = Desk(settings=CatalogSettings(token=b"secret", chunk_bytes=7))
    d.node("a")
    p = d.program()
    (greeting,) = p.answers.values()
    assert isinstance(greeting, m.SessionOpen)
    assert (greeting.cluster, greeting.epoch, greeting.token) == ("c1", 1, b"secret")
    assert [card.node for card in greeting.nodes] == ["a"]
    assert (greeting.chunk_bytes, greeting.recovery) == (7, "")


def test_a_greeting_says_what_a_recovery_had_to_say() -> None:
    d = Desk().restart(lost=True)
    (greeting,) = d.program().answers.values()
    assert isinstance(greeting, m.SessionOpen)
    assert greeting.recovery == "the journal is lost"


def test_the_newest_comm_of_a_session_counts_and_the_old_one_is_closed() -> None:
    d = Desk()
    d.node("a")
    p = d.program()
    old = p.connection
    p.open()
    assert [one.connection for one in d.ended] == [old]
    created = p.create("x")
    fresh, p.connection = p.connection, old
    p.lose_comm()  # late news of the old comm
    p.connection = fresh
    d.pass_time(5.0)
    assert d.catalog.names.get(created.generation).creating


def test_a_session_that_closes_takes_its_creations_with_it_and_leaves_its_pins() -> (
    None
):
    d = Desk()
    d.node("a")
    p = d.program()
    info = p.put("x")
    p.call(m.Pin(rid=p.rid(), generation=info.generation, ttl_s=60.0), m.Pinned)
    p.create("y")
    p.call(m.CloseSession(rid=p.rid()), type(None))
    state = d.catalog.debug_state()
    assert (state["creations"], state["pins"], state["sessions"]) == (0, 1, 0)
    assert d.ended


def test_answers_of_a_session_that_is_gone_are_forgotten_in_memory_and_on_disk() -> (
    None
):
    d = Desk(settings=CatalogSettings(outcome_ttl_s=20.0))
    d.node("a")
    p = d.program()
    p.put("x")
    p.lose_comm()
    d.pass_time(10.0)
    assert d.catalog.debug_state()["outcome_sessions"] == 1
    d.pass_time(15.0)
    assert d.catalog.debug_state()["outcome_sessions"] == 0
    assert d.restart().catalog.debug_state()["outcome_sessions"] == 0


def test_a_session_that_comes_back_keeps_its_answers() -> None:
    d = Desk(settings=CatalogSettings(outcome_ttl_s=20.0))
    d.node("a")
    p = d.program()
    p.put("x")
    p.lose_comm()
    d.pass_time(10.0)
    p.open()
    d.pass_time(60.0)
    assert d.catalog.debug_state()["outcome_sessions"] == 1
