from __future__ import annotations

import asyncio
import itertools
import json

from tensorcast_dask.dashboard import board as module
from tensorcast_dask.dashboard.board import EVERY_S, INTEREST_S, STRIDE, Board
from tensorcast_dask.dashboard.data.events import LINES, Words
from tensorcast_dask.dashboard.data.memory import Page
from tensorcast_dask.dashboard.data.placement import ROWS, Place
from tensorcast_dask.dashboard.data.search import Grouping, Wanted
from tests.kit.catalogs import Desk
from tests.kit.crowds import crowd
from tests.kit.eventually import eventually_async
from tests.kit.loops import on_loop


class Clock:
    """Time by hand; each look at it takes a little."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.costs_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.costs_s
        return self.now_s


def scene(desk: Desk) -> tuple[Board, Clock]:
    clock = Clock()
    return Board(lambda: desk.catalog, clock), clock


def test_what_is_asked_for_alike_is_made_once_a_tick() -> None:
    d = Desk()
    d.node("a")
    board, clock = scene(d)
    first = board.see(Page())
    d.node("b")
    assert board.see(Page()) is first
    assert board.see(Words()) is not first
    clock.now_s += EVERY_S
    assert len(board.see(Page()).told.columns["rows"]["y"]) == 2


def test_parts_are_json_of_what_is_told() -> None:
    d = Desk()
    d.node("a")
    d.program().put("<script>")
    board, _ = scene(d)
    seen = board.see(Place())
    assert json.loads(seen.parts["columns/rows"]) == seen.told.columns["rows"]
    assert json.loads(seen.parts["texts"]) == seen.told.texts
    assert json.loads(seen.parts["counts"]) == seen.told.counts


def test_a_small_catalog_is_looked_through_at_once_and_no_timer_runs() -> None:
    board, _ = scene(crowd(500))
    assert board.see(Place()).told.texts["found"].startswith("artifacts 1 to 30 of 500")
    assert board.idle


@on_loop
async def test_a_large_one_is_looked_through_in_slices_and_says_how_far_it_is() -> None:
    board, clock = scene(crowd(4000))
    clock.costs_s = module.FIRST_S / 3
    told = board.see(Place()).told
    assert told.texts["found"] == f"looking: {4 * STRIDE:,} of 4,000 artifacts"
    assert told.counts["rows"] == 30
    clock.costs_s = 0.0
    assert not board.idle
    await eventually_async(lambda: board.idle, within_s=20)
    clock.now_s += EVERY_S
    found = board.see(Place()).told.texts["found"]
    assert found.startswith("artifacts 1 to 30 of 4,000")


@on_loop
async def test_of_a_hundred_thousand_no_turn_of_the_loop_looks_at_many_or_draws_many() -> (
    None
):
    board, clock = scene(crowd(100_000, nodes=3, copies=1))
    clock.costs_s = module.SLICE_S / 40
    first = board.see(Place()).told

    def looked_at() -> int:
        running = board._searches[Wanted()].running
        return 100_000 if running is None else running.seen

    seen = [looked_at()]
    assert seen[0] <= (module.FIRST_S / clock.costs_s + 2) * STRIDE
    while seen[-1] < 100_000:
        await asyncio.sleep(0)
        seen.append(looked_at())
    most = (module.SLICE_S / clock.costs_s + 2) * STRIDE
    assert max(after - before for before, after in itertools.pairwise(seen)) <= most
    clock.costs_s = 0.0
    for page in (0, 1, 3333, 10_000):
        clock.now_s += EVERY_S
        told = board.see(Place(page=page)).told
        assert 0 < len(told.columns["rows"]["y"]) == told.counts["rows"] <= ROWS
        assert "of 100,000" in told.texts["found"]
    assert first.counts["rows"] == ROWS
    assert len(board.see(Words()).told.columns["events"]["at"]) <= LINES
    board.close()


@on_loop
async def test_nobody_who_looks_ends_a_search_that_is_under_way() -> None:
    board, clock = scene(crowd(4000))
    clock.costs_s = module.FIRST_S / 3
    board.see(Place(Wanted(group=Grouping.NAME)))
    clock.costs_s = module.SLICE_S
    clock.now_s += INTEREST_S + 1
    await eventually_async(lambda: board.idle, within_s=20)
    clock.costs_s = 0.0
    found = board.see(Place(Wanted(group=Grouping.NAME))).told.texts["found"]
    assert found.startswith("groups 1 to 30 of 50")


def test_a_search_is_done_again_when_the_catalog_has_changed_and_not_before() -> None:
    d = Desk()
    d.node("a")
    p = d.program()
    p.put("x")
    board, clock = scene(d)
    assert "of 1," in board.see(Place()).told.texts["found"]
    search = board._searches[Wanted()].shown
    clock.now_s += EVERY_S
    board.see(Place())
    assert board._searches[Wanted()].shown is search
    p.put("y")
    clock.now_s += EVERY_S
    assert "of 2," in board.see(Place()).told.texts["found"]


def test_wishes_are_bounded_the_oldest_goes_first() -> None:
    board, clock = scene(crowd(10))
    for number in range(module.MOST_SEARCHES + 5):
        clock.now_s += 0.001
        board.see(Place(Wanted(name=str(number))))
    assert len(board._searches) == module.MOST_SEARCHES


def test_another_catalog_is_looked_at_anew_and_none_is_said() -> None:
    desks: list[Desk | None] = [crowd(10)]
    clock = Clock()
    board = Board(lambda: desks[0].catalog if desks[0] is not None else None, clock)
    assert "of 10" in board.see(Place()).told.texts["found"]
    desks[0] = crowd(3)
    assert "of 3" in board.see(Place()).told.texts["found"]
    desks[0] = None
    told = board.see(Place()).told
    assert told.texts["empty"].startswith("The catalog of this cluster is closing")
    assert told.counts["rows"] == told.counts["nodes"] == 0
    board.close()
