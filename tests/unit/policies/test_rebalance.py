from __future__ import annotations

from math import exp

import pytest

from tensorcast_dask.policies import (
    InstanceView,
    MoveRequest,
    Rebalance,
    RequestView,
    View,
)


def request(name: str, tokens: int = 100, **more: object) -> RequestView:
    given = {"last_active_s": 0.0, **more}
    return RequestView(request=name, tokens=tokens, **given)  # type: ignore[arg-type]


def instance(name: str, load: float, *names: str, **more: object) -> InstanceView:
    given = {"requests": tuple(request(one) for one in names), "epoch": 1, **more}
    return InstanceView(instance=name, values={"queue": load}, **given)  # type: ignore[arg-type]


def tick(policy: Rebalance, *instances: InstanceView, now_s: float = 0.0) -> list[str]:
    moves = policy.decide(View(now_s=now_s, instances=instances))
    return [f"{one.request}: {one.source} -> {one.target}" for one in moves]


def test_one_request_goes_from_the_fullest_to_the_emptiest() -> None:
    full, middle, empty = (
        instance("a", 20.0, "r"),
        instance("b", 10.0, "s"),
        instance("c", 1.0, "t"),
    )
    moves = Rebalance().decide(View(now_s=0.0, instances=(middle, empty, full)))
    assert moves == [
        MoveRequest(
            request="r",
            source="a",
            target="c",
            source_epoch=1,
            target_epoch=1,
            why="load 20 against 1",
        )
    ]


@pytest.mark.parametrize(
    ("full", "empty", "moves"),
    [
        (8.0, 4.0, True),  # gap 4 >= 4, ratio 2 >= 1.5
        (7.9, 4.0, False),  # the gap is too small
        (12.0, 8.0, True),  # both exactly: gap 4, ratio 1.5
        (13.0, 9.0, False),  # the ratio is too small
        (4.0, 0.0, True),  # ratio against 1, not against 0
        (1.4, 0.0, False),
        (0.0, 0.0, False),
    ],
)
def test_nothing_moves_below_either_threshold(
    full: float, empty: float, *, moves: bool
) -> None:
    policy = Rebalance(theta_abs=4.0, theta_rel=1.5)
    found = tick(policy, instance("a", full, "r"), instance("b", empty))
    assert bool(found) is moves


def test_loads_are_smoothed_and_begin_with_the_first_one() -> None:
    policy = Rebalance(alpha=0.25, theta_abs=11.0, theta_rel=1.0)
    a, b = instance("a", 8.0, "r"), instance("b", 0.0)
    assert tick(policy, a, b) == []
    assert policy.smoothed(a) == 8.0
    peak = instance("a", 16.0, "r")
    assert tick(policy, peak, b) == [], "one peak is not enough"
    assert policy.smoothed(peak) == 10.0
    assert tick(policy, peak, b) == ["r: a -> b"]


def test_another_attachment_begins_anew_and_one_that_is_away_is_forgotten() -> None:
    policy = Rebalance(alpha=0.5)
    tick(policy, instance("a", 100.0), instance("b", 0.0))
    again = instance("a", 10.0, epoch=2)
    tick(policy, again, instance("b", 0.0))
    assert policy.smoothed(again) == 10.0
    tick(policy, instance("b", 0.0))
    back = instance("a", 40.0, epoch=2)
    tick(policy, back, instance("b", 0.0))
    assert policy.smoothed(back) == 40.0


def test_the_request_with_the_greatest_score_moves() -> None:
    policy = Rebalance(horizon_s=10.0, damping=1.0)
    requests = (
        request("old", 1000, last_active_s=0.0),  # 1000 * exp(-5)
        request("moved", 100, last_active_s=50.0, migrations=9),  # 100 / 10
        request("good", 30, last_active_s=50.0),  # 30
        request("running", 10_000, running=True),
        request("migrating", 10_000, migrating=True),
    )
    a = instance("a", 20.0, requests=requests)
    assert tick(policy, a, instance("b", 0.0), now_s=50.0) == ["good: a -> b"]
    scores = [policy.score(one, 50.0) for one in requests[:3]]
    assert scores == [1000 * exp(-5.0), 10.0, 30.0]


def test_ties_go_to_the_name_that_sorts_first() -> None:
    found = tick(
        Rebalance(),
        instance("d", 1.0),
        instance("c", 1.0),
        instance("b", 9.0, "z", "y"),
        instance("a", 9.0, "x", "w"),
    )
    assert found == ["w: a -> c"]


def test_a_chosen_request_is_left_alone_until_the_signals_have_followed() -> None:
    policy = Rebalance(settle_s=5.0)
    a, b = instance("a", 20.0, "r", "s"), instance("b", 0.0)
    assert tick(policy, a, b, now_s=0.0) == ["r: a -> b"]
    assert tick(policy, a, b, now_s=1.0) == ["s: a -> b"]
    assert tick(policy, a, b, now_s=2.0) == []
    assert tick(policy, a, b, now_s=5.0) == ["r: a -> b"]


def test_stale_instances_and_those_without_the_number_take_no_part() -> None:
    full, empty = instance("a", 20.0, "r"), instance("b", 0.0)
    late = instance("a", 20.0, "r", fresh=False)
    assert tick(Rebalance(), late, empty) == []
    assert tick(Rebalance(), full, instance("b", 0.0, fresh=False)) == []
    other = InstanceView(instance="b", values={"else": 0.0})
    assert tick(Rebalance(), full, other) == []
    assert tick(Rebalance(load="else"), full, other) == []
    policy = Rebalance()
    tick(policy, full, empty)
    tick(policy, late, empty)
    assert policy.smoothed(full) == 20.0, "what is late changes nothing"


def test_draining_instances_give_and_take_nothing() -> None:
    draining = instance("b", 0.0, draining=True)
    assert tick(Rebalance(), instance("a", 20.0, "r"), draining) == []
    leaving = instance("a", 20.0, "r", draining=True)
    assert tick(Rebalance(), leaving, instance("b", 0.0)) == ["r: a -> b"]


def test_alone_or_with_nothing_to_move_nothing_moves() -> None:
    assert tick(Rebalance()) == []
    assert tick(Rebalance(), instance("a", 50.0, "r")) == []
    assert tick(Rebalance(), instance("a", 50.0), instance("b", 0.0)) == []


def test_a_move_is_asked_about_again_when_it_is_carried_out() -> None:
    a, b = instance("a", 20.0, "r"), instance("b", 0.0)
    then = View(now_s=0.0, instances=(a, b))
    (move,) = Rebalance().decide(then)
    assert Rebalance.still_holds(then, move)
    for now in (
        (a,),
        (b,),
        (instance("a", 20.0, "r", fresh=False), b),
        (a, instance("b", 0.0, fresh=False)),
        (a, instance("b", 0.0, draining=True)),
        (instance("a", 20.0, "r", epoch=2), b),
        (a, instance("b", 0.0, epoch=2)),
        (instance("a", 20.0, "other"), b),
        (instance("a", 20.0, requests=(request("r", running=True),)), b),
        (instance("a", 20.0, requests=(request("r", migrating=True),)), b),
    ):
        assert not Rebalance.still_holds(View(now_s=1.0, instances=now), move)
