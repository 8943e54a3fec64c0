from __future__ import annotations

from tensorcast_dask.exceptions import NotFound, PeerLost, StaleOwner
from tensorcast_dask.store.state.pull import (
    Arrived,
    AskMap,
    Cancelled,
    Dropped,
    Event,
    Failed,
    Fetch,
    Finished,
    Instruction,
    Leave,
    Lost,
    Mapped,
    Pull,
    Steal,
    TimePassed,
)
from tensorcast_dask.tensors.messages import Fault

CHUNK = 100


def planner(
    sources: int = 1, *, chunks: int = 4, window: int = 2, deadline_s: float = 100.0
) -> Pull:
    return Pull(
        sources=sources,
        nbytes=chunks * CHUNK - 1,
        window=window,
        stall_s=2.0,
        deadline_s=deadline_s,
    )


def mapped(
    source: int, *, chunks: int = 4, have: bytes = b"", **more: object
) -> Mapped:
    how: dict[str, object] = {
        "nbytes": chunks * CHUNK - 1,
        "chunk_bytes": CHUNK,
        "index": b"i",
        "have": have,
        **more,
    }
    return Mapped(source=source, **how)  # type: ignore[arg-type]


def arrived(
    source: int, chunk: int, *, digest: int = 7, claimed: int = 7, stamp: int = 0
) -> Arrived:
    return Arrived(
        source=source, chunk=chunk, digest=digest, claimed=claimed, stamp=stamp
    )


def lost(source: int, error: Exception | None = None, **more: bool) -> Lost:
    fault = Fault.of(error or PeerLost("gone"))  # type: ignore[arg-type]
    return Lost(source=source, fault=fault, **more)


def fetches(told: list[Instruction]) -> list[tuple[int, int]]:
    return [(i.source, i.chunk) for i in told if isinstance(i, Fetch)]


def run(plan: Pull, *events: Event, at_s: float = 0.0) -> list[Instruction]:
    told: list[Instruction] = []
    for event in events:
        told = plan.handle(event, now_s=at_s)
    return told


def failed(told: list[Instruction]) -> str:
    (last,) = (i for i in told if isinstance(i, Failed))
    return last.fault.kind


def test_every_source_is_asked_for_its_map_first() -> None:
    assert planner(2).start(now_s=0.0) == [AskMap(source=0), AskMap(source=1)]


def test_chunks_come_from_one_pool_each_once_and_the_end_is_said_once() -> None:
    plan = planner()
    plan.start(now_s=0.0)
    assert fetches(run(plan, mapped(0))) == [(0, 0), (0, 1)]
    assert fetches(run(plan, arrived(0, 0))) == [(0, 2)]
    assert fetches(run(plan, arrived(0, 1))) == [(0, 3)]
    assert run(plan, arrived(0, 2)) == []
    assert plan.done_bytes == 3 * CHUNK
    assert run(plan, arrived(0, 3)) == [Finished()]
    assert run(plan, arrived(0, 3), TimePassed()) == []
    assert plan.done_bytes == 4 * CHUNK - 1
    assert (plan.length(3), plan.have(), plan.share()) == (CHUNK - 1, b"\x0f", [4])
    assert (plan.index, plan.sums) == (b"i", [7, 7, 7, 7])


def test_sources_begin_at_different_places() -> None:
    plan = planner(2, window=1)
    plan.start(now_s=0.0)
    assert fetches(run(plan, mapped(0))) == [(0, 0)]
    assert fetches(run(plan, mapped(1))) == [(1, 2)]
    # A fast source takes what is left, also from the other's half.
    assert fetches(run(plan, arrived(1, 2))) == [(1, 3)]
    assert fetches(run(plan, arrived(1, 3))) == [(1, 1)]


def test_nothing_is_pulled_where_there_are_no_bytes() -> None:
    plan = Pull(sources=1, nbytes=0, window=1, stall_s=1.0, deadline_s=9.0)
    plan.start(now_s=0.0)
    empty = Mapped(source=0, nbytes=0, chunk_bytes=CHUNK, index=b"i")
    assert run(plan, empty) == [Finished()]


def test_a_lost_source_gives_its_chunks_back_to_the_others() -> None:
    plan = planner(2)
    plan.start(now_s=0.0)
    run(plan, mapped(0), mapped(1))
    assert fetches(run(plan, lost(1))) == []  # the first has its window full
    run(plan, arrived(0, 0))
    assert fetches(run(plan, arrived(0, 1))) == [(0, 3)]


def test_a_damaged_chunk_is_its_sources_fault_and_comes_from_another() -> None:
    plan = planner(2, chunks=1, window=1)
    plan.start(now_s=0.0)
    maps = (mapped(0, chunks=1), mapped(1, chunks=1))
    told = run(plan, *maps, arrived(0, 0, digest=8))
    assert [i.source for i in told if isinstance(i, Leave)] == [0]
    assert fetches(told) == [(1, 0)]
    assert run(plan, arrived(1, 0)) == [Finished()]
    assert plan.share() == [0, 1]


def test_a_chunk_must_hash_to_what_any_map_promised() -> None:
    plan = planner(2, chunks=1, window=1)
    plan.start(now_s=0.0)
    promised = mapped(1, chunks=1, sums=(9).to_bytes(8, "little"))
    run(plan, mapped(0, chunks=1), promised)
    told = run(plan, arrived(0, 0, digest=7, claimed=7))
    assert any(isinstance(i, Leave) for i in told)
    assert run(plan, arrived(1, 0, digest=9, claimed=9)) == [Finished()]


def test_a_map_that_contradicts_what_is_known_is_left() -> None:
    for wrong in (
        {"index": b"other"},
        {"nbytes": 5},
        {"chunk_bytes": 50},
        {"have": b"\x01\x02"},
        {"sums": b"short"},
    ):
        plan = planner(2)
        plan.start(now_s=0.0)
        told = run(plan, mapped(0), mapped(1, **wrong))
        assert [i.source for i in told if isinstance(i, Leave)] == [1], wrong


def test_a_silent_source_is_left_and_asked_again_after_a_rest() -> None:
    plan = planner(chunks=1)
    plan.start(now_s=0.0)
    run(plan, mapped(0, chunks=1))
    assert run(plan, TimePassed(), at_s=1.9) == []
    told = run(plan, TimePassed(), at_s=2.0)
    assert [type(i) for i in told] == [Leave]
    assert run(plan, TimePassed(), at_s=5.0) == []  # until no byte can come any more
    assert run(plan, lost(0), at_s=5.0) == [AskMap(source=0)]


def test_a_source_that_never_answers_is_left_too() -> None:
    plan = planner(chunks=1)
    plan.start(now_s=0.0)
    assert [type(i) for i in run(plan, TimePassed(), at_s=2.0)] == [Leave]


def test_after_three_faults_the_only_source_is_given_up() -> None:
    plan = planner(chunks=1)
    plan.start(now_s=0.0)
    assert run(plan, lost(0), at_s=0.0) == []
    assert run(plan, TimePassed(), at_s=0.1) == [AskMap(source=0)]
    assert run(plan, lost(0), at_s=0.1) == []
    assert run(plan, TimePassed(), at_s=0.4) == [AskMap(source=0)]
    assert failed(run(plan, lost(0), at_s=0.4)) == "PeerLost"


def test_a_fault_that_cannot_pass_ends_it_at_once_with_its_own_kind() -> None:
    plan = planner()
    plan.start(now_s=0.0)
    assert failed(run(plan, lost(0, NotFound("no such generation")))) == "NotFound"
    plan = planner(2)
    plan.start(now_s=0.0)
    run(plan, lost(0, NotFound("no")))
    assert failed(run(plan, lost(1, StaleOwner("old")))) == "PeerLost"
    plan = planner()
    plan.start(now_s=0.0)
    assert failed(run(plan, lost(0, for_ever=True))) == "PeerLost"


def test_without_sources_it_fails_at_once() -> None:
    assert failed(planner(0).start(now_s=0.0)) == "PeerLost"


def test_the_deadline_and_a_cancel_end_it_typed() -> None:
    plan = planner(deadline_s=3.0)
    plan.start(now_s=0.0)
    run(plan, mapped(0), arrived(0, 0), at_s=1.9)
    assert failed(run(plan, TimePassed(), at_s=3.0)) == "DeadlineExceeded"
    plan = planner()
    plan.start(now_s=0.0)
    assert failed(run(plan, Cancelled(why="test"))) == "DeadlineExceeded"


def test_a_partial_source_gives_what_it_has_and_is_asked_again() -> None:
    plan = planner()
    plan.start(now_s=0.0)
    assert fetches(run(plan, mapped(0, have=b"\x05"))) == [(0, 0), (0, 2)]
    run(plan, arrived(0, 0), at_s=1.0)
    assert run(plan, arrived(0, 2), at_s=1.0) == []
    assert run(plan, TimePassed(), at_s=1.1) == [AskMap(source=0)]
    assert fetches(run(plan, mapped(0, have=b"\x0f"), at_s=1.2)) == [(0, 1), (0, 3)]


def test_the_last_chunk_of_a_slow_source_is_taken_over_by_an_idle_one() -> None:
    plan = planner(2, chunks=2, window=1)
    plan.start(now_s=0.0)
    run(plan, mapped(0, chunks=2), mapped(1, chunks=2))
    assert run(plan, arrived(0, 0), at_s=0.1) == []
    assert run(plan, TimePassed(), at_s=0.4) == []
    assert run(plan, TimePassed(), at_s=0.6) == [Steal(source=1, chunk=1)]
    assert run(plan, TimePassed(), at_s=0.6) == [Steal(source=1, chunk=1)]
    assert fetches(run(plan, Dropped(source=1, chunk=1), at_s=0.7)) == [(0, 1)]
    assert run(plan, arrived(0, 1), at_s=0.8) == [Finished()]


def test_a_late_arrival_of_a_chunk_that_was_given_back_is_ignored() -> None:
    plan = planner(2, chunks=2, window=1)
    plan.start(now_s=0.0)
    run(plan, mapped(0, chunks=2), mapped(1, chunks=2), arrived(0, 0))
    assert fetches(run(plan, Dropped(source=1, chunk=1))) == [(0, 1)]
    assert run(plan, arrived(1, 1)) == []
    assert run(plan, arrived(0, 1)) == [Finished()]


def test_what_is_here_is_said_chunk_by_chunk() -> None:
    plan = planner(2)
    plan.start(now_s=0.0)
    sums = (9).to_bytes(8, "little") + bytes(24)
    run(plan, mapped(0, sums=sums), mapped(1, sums=sums))
    assert plan.have() == b"\x00"
    run(plan, arrived(0, 1))
    assert plan.have() == b"\x02"
    run(plan, Dropped(source=1, chunk=0))  # nobody asked it of that one
    assert plan.have() == b"\x02"


def test_what_came_before_a_change_by_its_owner_is_thrown_away() -> None:
    plan = planner(chunks=3, window=1)
    plan.start(now_s=0.0)
    assert fetches(run(plan, mapped(0, chunks=3, stamp=2))) == [(0, 0)]
    assert fetches(run(plan, arrived(0, 0, stamp=2))) == [(0, 1)]
    told = run(plan, arrived(0, 1, stamp=4))  # over another connection
    assert [type(i) for i in told] == [Leave]
    assert run(plan, TimePassed(), at_s=0.2) == [AskMap(source=0)]
    assert plan.done_bytes == CHUNK
    told = run(plan, mapped(0, chunks=3, stamp=4), at_s=0.2)
    assert plan.done_bytes == 0
    assert fetches(told) == [(0, 0)]
    again = [arrived(0, n, digest=9, claimed=9, stamp=4) for n in range(3)]
    assert run(plan, *again, at_s=0.3) == [Finished()]
    assert plan.sums == [9, 9, 9]


def test_an_owner_that_changes_it_all_the_time_ends_it_typed() -> None:
    plan = planner(chunks=3, window=2)
    plan.start(now_s=0.0)
    told: list[Instruction] = []
    for stamp in (2, 4, 6):
        at_s = float(stamp)
        run(plan, TimePassed(), mapped(0, chunks=3, stamp=stamp), at_s=at_s)
        told = run(plan, arrived(0, 0, stamp=stamp + 2), lost(0), at_s=at_s)
    assert failed(told) == "Incomplete"


def test_two_contents_are_never_mixed_from_two_sources() -> None:
    plan = planner(2, window=1)
    plan.start(now_s=0.0)
    run(plan, mapped(0, stamp=2))
    (told,) = run(plan, mapped(1, stamp=4))
    assert isinstance(told, Leave)
    assert told.source == 1
