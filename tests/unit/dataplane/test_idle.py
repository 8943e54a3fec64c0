from __future__ import annotations

from dataclasses import dataclass

from tensorcast_dask.dataplane.transports.idle import Idle


@dataclass(eq=False)
class Way:
    usable: bool = True
    closed: bool = False

    def close(self) -> None:
        self.closed = True


def test_the_way_that_was_used_last_is_lent_to_one_user() -> None:
    idle: Idle[Way] = Idle()
    ways = [Way() for _ in range(3)]
    for key, way in zip(("a", "a", "b"), ways, strict=True):
        idle.give(key, way)
    assert [idle.take(key) for key in ("a", "a", "a", "b")] == [
        ways[1],
        ways[0],
        None,
        ways[2],
    ]
    assert not any(way.closed for way in ways)


def test_what_is_of_no_use_any_more_is_closed_and_not_lent() -> None:
    idle: Idle[Way] = Idle()
    good, bad = Way(), Way()
    idle.give("a", good)
    idle.give("a", bad)
    bad.usable = False
    assert idle.take("a") is good
    assert bad.closed


def test_a_look_closes_what_is_old_or_of_no_use() -> None:
    idle: Idle[Way] = Idle()
    good, bad = Way(), Way(usable=False)
    idle.give("a", good)
    idle.give("a", bad)
    idle.tick()
    assert (good.closed, bad.closed, len(idle)) == (False, True, 1)
    at_once: Idle[Way] = Idle(idle_s=-1.0)
    at_once.give("a", good)
    at_once.tick()
    assert good.closed


def test_where_too_many_lie_the_oldest_goes() -> None:
    idle: Idle[Way] = Idle(most=2)
    ways = [Way() for _ in range(3)]
    for way in ways:
        idle.give("a", way)
    assert [way.closed for way in ways] == [True, False, False]


def test_after_the_end_nothing_is_kept() -> None:
    idle: Idle[Way] = Idle()
    before, after = Way(), Way()
    idle.give("a", before)
    idle.close()
    idle.give("a", after)
    assert (before.closed, after.closed, idle.take("a")) == (True, True, None)
