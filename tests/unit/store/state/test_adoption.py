from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import StaleOwner
from tensorcast_dask.store.state.adoption import (
    Adoption,
    Asked,
    ConnectionEnded,
    EndAsked,
    EndNow,
    Granted,
    LetGoAsked,
    Lingered,
    Standing,
    TimePassed,
    Unattended,
    WorkerDied,
)
from tensorcast_dask.tensors.ids import Epoch, Incarnation

INF = float("inf")


def asked(n: int, *, dead: bool = False, epoch: int = 0, pid: int = 0) -> Asked:
    return Asked(
        link=n,
        worker=f"w{n}",
        pid=pid or 100 + n,
        grant_epoch=Epoch(epoch),
        holder_dead=dead,
    )


def held() -> Adoption:
    store = Adoption(orphan_ttl_s=300.0)
    assert store.handle(asked(1), now_s=0.0) == [Granted(incarnation=Incarnation(1))]
    return store


def snapshot(store: Adoption) -> tuple[object, ...]:
    return (store.standing, store.incarnation, store.worker, store.pid, store.ends_s)


def refused(store: Adoption, event: Asked | LetGoAsked | EndAsked) -> None:
    before = snapshot(store)
    with pytest.raises(StaleOwner):
        store.handle(event, now_s=0.0)
    assert snapshot(store) == before


def test_a_free_store_is_the_first_askers_and_nobody_elses() -> None:
    store = held()
    refused(store, asked(2))
    assert store.standing is Standing.HELD


def test_a_store_whose_holder_is_dead_is_given_away_with_a_new_incarnation() -> None:
    store = held()
    assert store.handle(asked(2, dead=True), now_s=0.0) == [
        Granted(incarnation=Incarnation(2))
    ]
    assert store.worker == "w2"


def test_what_a_former_worker_says_is_refused_and_its_end_is_no_news() -> None:
    store = held()
    store.handle(asked(2, dead=True), now_s=0.0)
    refused(store, LetGoAsked(link=1, ttl_s=1.0))
    refused(store, EndAsked(link=1, why="x", control=True))
    assert store.handle(ConnectionEnded(link=1), now_s=0.0) == []
    assert store.handle(WorkerDied(incarnation=Incarnation(1)), now_s=0.0) == []
    assert store.standing is Standing.HELD
    store.check(2)


def test_the_same_worker_may_ask_again() -> None:
    store = held()
    again = Asked(link=5, worker="w1", pid=101)
    assert store.handle(again, now_s=0.0) == [Granted(incarnation=Incarnation(2))]
    store.check(5)


def test_a_grant_needs_a_higher_epoch_than_any_before() -> None:
    store = held()
    store.handle(asked(2, epoch=3), now_s=0.0)
    refused(store, asked(3, epoch=3))
    store.handle(asked(3, epoch=4), now_s=0.0)
    assert store.worker == "w3"


@pytest.mark.parametrize(
    "news", [ConnectionEnded(link=1), WorkerDied(incarnation=Incarnation(1))]
)
def test_a_lost_worker_orphans_the_store_which_ends_in_its_time(
    news: ConnectionEnded | WorkerDied,
) -> None:
    store = held()
    (told,) = store.handle(news, now_s=10.0)
    assert isinstance(told, Unattended)
    assert (store.standing, told.ttl_s) == (Standing.ORPHANED, 300.0)
    assert store.handle(TimePassed(), now_s=309.9) == []
    (ended,) = store.handle(TimePassed(), now_s=310.0)
    assert isinstance(ended, EndNow)
    assert store.handle(TimePassed(), now_s=311.0) == []
    refused(store, asked(2, dead=True))


def test_an_orphan_goes_to_who_asks_once_the_holder_is_dead() -> None:
    store = held()
    store.handle(ConnectionEnded(link=1), now_s=0.0)
    refused(store, asked(2))  # the holder lives: it may come back
    assert store.handle(asked(2, dead=True), now_s=1.0)
    assert store.ends_s == INF


def test_workers_of_one_process_follow_each_other() -> None:
    store = held()
    store.handle(ConnectionEnded(link=1), now_s=0.0)
    assert store.handle(asked(2, pid=101), now_s=1.0)


def test_a_released_store_is_anybodys_until_its_time() -> None:
    store = held()
    (told,) = store.handle(LetGoAsked(link=1, ttl_s=10.0), now_s=0.0)
    assert isinstance(told, Unattended)
    assert store.standing is Standing.RELEASED
    assert store.handle(ConnectionEnded(link=1), now_s=1.0) == []
    assert store.handle(asked(2), now_s=9.0)
    assert store.handle(TimePassed(), now_s=100.0) == []


def test_a_time_is_extended_and_never_shortened() -> None:
    store = held()
    assert store.handle(Lingered(ttl_s=1.0), now_s=0.0) == []
    assert store.ends_s == INF
    store.handle(LetGoAsked(link=1, ttl_s=10.0), now_s=0.0)
    store.handle(Lingered(ttl_s=300.0), now_s=5.0)
    assert store.ends_s == 305.0
    store.handle(Lingered(ttl_s=1.0), now_s=6.0)
    assert store.ends_s == 305.0


def test_an_end_message_ends_it_once() -> None:
    store = held()
    assert store.handle(EndAsked(link=1, why="close", control=True), now_s=0.0) == [
        EndNow(why="close")
    ]
    assert store.handle(EndAsked(link=0, why="down"), now_s=0.0) == []
    assert store.standing is Standing.ENDING


def test_a_free_store_waits_for_ever_unless_told_how_long() -> None:
    assert Adoption(orphan_ttl_s=1.0).handle(TimePassed(), now_s=1e9) == []
    store = Adoption(orphan_ttl_s=1.0, free_ends_s=60.0)
    assert store.handle(TimePassed(), now_s=59.0) == []
    assert store.handle(TimePassed(), now_s=60.0)


def test_a_refusal_names_the_holder() -> None:
    with pytest.raises(StaleOwner, match="w1") as error:
        held().handle(asked(2), now_s=0.0)
    assert error.value.data == {"worker": "w1", "pid": 101}
