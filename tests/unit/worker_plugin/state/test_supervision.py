"""How a worker comes to a store, keeps it and lets it go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensorcast_dask.tensors.ids import HostId, Incarnation, NodeId
from tensorcast_dask.tensors.messages import NodeCard
from tensorcast_dask.worker_plugin.state.supervision import (
    MAX_DELAY_S,
    MOST_RIVALS,
    Adopt,
    Adopted,
    Closing,
    ControlEnded,
    Event,
    Found,
    LetGo,
    Look,
    Phase,
    Refused,
    Report,
    Start,
    Started,
    StartFailed,
    Supervision,
    TimePassed,
    WakeAt,
)


def card(name: str) -> NodeCard:
    return NodeCard(
        node=NodeId(name), incarnation=Incarnation(1), host=HostId("h"), socket=""
    )


A, B, NEW = card("a"), card("b"), card("new")


def attending(node: NodeCard = A) -> Supervision:
    state = Supervision()
    state.handle(TimePassed(), now_s=0)
    state.handle(Found(cards=(node,)), now_s=0)
    state.handle(Adopted(card=node), now_s=0)
    assert state.phase is Phase.ATTENDING
    return state


def test_a_free_store_comes_before_a_new_one() -> None:
    state = Supervision()
    assert state.handle(TimePassed(), now_s=0) == [Look()]
    assert state.handle(Found(cards=(A, B)), now_s=0) == [Adopt(card=A)]
    assert state.handle(Refused(node=A.node, why="held"), now_s=0) == [Adopt(card=B)]
    assert state.handle(Adopted(card=B), now_s=0) == [
        Report(phase=Phase.ATTENDING, node=B.node, why="")
    ]
    assert state.card == B


def test_a_store_is_started_when_none_is_free() -> None:
    state = Supervision()
    state.handle(TimePassed(), now_s=0)
    assert state.handle(Found(cards=(A,)), now_s=0) == [Adopt(card=A)]
    assert state.handle(Refused(node=A.node, why="held"), now_s=0) == [Start()]
    assert state.handle(Started(card=NEW), now_s=0) == [Adopt(card=NEW)]


def test_a_start_that_nobody_asked_for_changes_nothing() -> None:
    state = attending()
    assert state.handle(Started(card=NEW), now_s=1) == []
    assert state.handle(StartFailed(why="late"), now_s=1) == []
    assert (state.phase, state.card, state.why) == (Phase.ATTENDING, A, "")


def test_a_store_that_goes_away_is_replaced_at_once_and_reported() -> None:
    state = attending()
    report, wake = state.handle(ControlEnded(node=A.node, why="killed"), now_s=5)
    assert isinstance(report, Report)
    assert "killed" in report.why
    assert wake == WakeAt(at_s=5)
    assert state.card is None
    assert state.handle(TimePassed(), now_s=5) == [Look()]


def test_the_started_store_may_be_snatched_and_another_is_started() -> None:
    state = Supervision()
    state.handle(TimePassed(), now_s=0)
    state.handle(Found(cards=()), now_s=0)
    for _ in range(MOST_RIVALS):
        state.handle(Started(card=NEW), now_s=0)
        assert state.handle(Refused(node=NEW.node, why="held"), now_s=0) == [Start()]
    state.handle(Started(card=NEW), now_s=0)
    _, wake = state.handle(Refused(node=NEW.node, why="held"), now_s=0)
    assert wake == WakeAt(at_s=0)


def test_each_failure_in_a_row_waits_longer_up_to_a_bound() -> None:
    state = Supervision()
    delays = []
    now_s = 0.0
    for _ in range(9):
        state.handle(TimePassed(), now_s=now_s)
        state.handle(Found(cards=()), now_s=now_s)
        _, wake = state.handle(StartFailed(why="no memory"), now_s=now_s)
        assert isinstance(wake, WakeAt)
        delays.append(wake.at_s - now_s)
        now_s = wake.at_s
    assert delays == [0, 1, 2, 4, 8, 16, MAX_DELAY_S, MAX_DELAY_S, MAX_DELAY_S]


def test_a_store_that_lived_long_clears_the_record() -> None:
    state = attending()
    state.failures = 5
    _, wake = state.handle(ControlEnded(node=A.node, why="killed"), now_s=100)
    assert wake == WakeAt(at_s=100)


def test_a_closing_worker_lets_its_store_go_once() -> None:
    state = attending()
    assert state.handle(Closing(orphan=False, why="retired"), now_s=1) == [
        LetGo(orphan=False, why="retired")
    ]
    assert state.handle(Closing(orphan=True, why="again"), now_s=1) == []
    assert state.handle(ControlEnded(node=A.node, why=""), now_s=1) == []
    assert state.handle(TimePassed(), now_s=9) == []


def test_a_store_that_was_adopted_too_late_is_given_back() -> None:
    state = Supervision()
    state.handle(TimePassed(), now_s=0)
    state.handle(Found(cards=(A,)), now_s=0)
    assert state.handle(Closing(orphan=False, why="bye"), now_s=0) == []
    (let_go,) = state.handle(Adopted(card=A), now_s=0)
    assert isinstance(let_go, LetGo)


def test_late_news_of_another_store_changes_nothing() -> None:
    state = attending()
    assert state.handle(ControlEnded(node=B.node, why=""), now_s=0) == []
    assert state.handle(Refused(node=B.node, why=""), now_s=0) == []
    assert state.card == A


cards = st.sampled_from([A, B, NEW])
events: st.SearchStrategy[Event] = st.one_of(
    st.just(TimePassed()),
    st.lists(cards, max_size=2).map(lambda found: Found(cards=tuple(found))),
    cards.map(lambda c: Started(card=c)),
    st.just(StartFailed(why="w")),
    cards.map(lambda c: Adopted(card=c)),
    cards.map(lambda c: Refused(node=c.node, why="w")),
    cards.map(lambda c: ControlEnded(node=c.node, why="w")),
    st.booleans().map(lambda orphan: Closing(orphan=orphan, why="w")),
)


@given(st.lists(events, max_size=30))
def test_whatever_arrives_there_is_a_card_or_a_reason(sequence: list[Event]) -> None:
    state = Supervision()
    closed = False
    for now_s, event in enumerate(sequence):
        instructions = state.handle(event, now_s=now_s)
        assert (state.phase is Phase.ATTENDING) == (state.why == "")
        if closed:
            assert not any(
                isinstance(i, Look | Start | Adopt | WakeAt) for i in instructions
            )
        closed = closed or isinstance(event, Closing)
