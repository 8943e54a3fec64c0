"""Defects that were planted are found: what the simulator drives and asks is worth its time.

Each is one promise taken out of the product, and a mixture of faults and habits that such a
defect needs. The same mixture without the defect finds nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from tensorcast_dask.dataplane.carried import CarriedSession
from tensorcast_dask.instance.state.calls import Calls
from tensorcast_dask.scheduler_plugin.state.creations import Creations
from tensorcast_dask.scheduler_plugin.state.inventories import Inventories
from tensorcast_dask.scheduler_plugin.state.nodes import Nodes
from tensorcast_dask.scheduler_plugin.state.outcomes import Outcomes
from tensorcast_dask.scheduler_plugin.state.replicas import Replicas
from tensorcast_dask.store.state import eviction
from tensorcast_dask.store.state.pull import Pull
from tensorcast_dask.store.state.replicas import Life, Replica
from tensorcast_dask.tensors.messages import Tier
from tests.kit.sim_faults import CALM, Faults
from tests.kit.sim_rest import check_rest
from tests.kit.sim_workload import Habits
from tests.kit.world import World

#: In which a defect is to be found: the rarest shows in one of fifty, and all are tried only
#: where it is not found.
SEEDS = 400
#: Worlds of each mixture that must be clean without the defect.
CLEAN = 10

Patch = pytest.MonkeyPatch


def last_copies_may_go(patch: Patch) -> None:
    patch.setattr(Replicas, "may_drop", lambda *_: True)


def creations_outlive_their_sessions(patch: Patch) -> None:
    patch.setattr(Creations, "session_gone", lambda *_: None)


def answers_are_not_journaled(patch: Patch) -> None:
    real = Outcomes.answered

    def answered(self: Outcomes, *args: Any, **options: Any) -> None:
        real(self, *args, **options)

    patch.setattr(Outcomes, "answered", answered)


def contents_are_mixed(patch: Patch) -> None:
    real = Pull.handle

    def handle(self: Pull, event: Any, *, now_s: float) -> Any:
        if hasattr(event, "stamp"):
            event = msgspec.structs.replace(event, stamp=0)
        return real(self, event, now_s=now_s)

    patch.setattr(Pull, "handle", handle)


def unheard_nodes_are_not_waited_for(patch: Patch) -> None:
    patch.setattr(Nodes, "is_unheard", lambda *_: False)


def destroyed_numbers_are_taken_back(patch: Patch) -> None:
    patch.setattr(Inventories, "ended", lambda *_: None)


def marks_count_as_copies(patch: Patch) -> None:
    def backed(replica: Replica, tier: Tier) -> bool:
        return any(
            copy.life is Life.COMMITTED and copy.tier is not tier
            for copy in replica.copies
        )

    patch.setattr(eviction, "backed", backed)


def keys_are_forgotten(patch: Patch) -> None:
    patch.setattr(Calls, "ended", lambda *_: None)


def what_waits_is_called_on_half_an_update(patch: Patch) -> None:
    real = Calls.known

    def known(self: Calls, call: Any) -> Any:
        why, self.poisoned = self.poisoned, ""
        try:
            return real(self, call)
        finally:
            self.poisoned = why

    patch.setattr(Calls, "known", known)


def what_was_not_answered_is_not_asked_again(patch: Patch) -> None:
    real = CarriedSession.heard_of

    def heard_of(self: CarriedSession, *, up: bool, greeting: int = 0) -> None:
        sent = [one for one in self._asked.values() if one.sent]
        real(self, up=up, greeting=greeting)
        for one in sent:
            one.sent = True

    patch.setattr(CarriedSession, "heard_of", heard_of)


def who_was_given_up_stays_so(patch: Patch) -> None:
    real = Nodes._extend

    def extend(self: Nodes, record: Any) -> None:
        if record.gone != "its lease has lapsed":
            real(self, record)

    patch.setattr(Nodes, "_extend", extend)


@dataclass(frozen=True)
class Planted:
    """One defect, and the world in which it shows."""

    plant: Callable[[Patch], None]
    faults: Faults
    liking: str

    def world(self, seed: int) -> World:
        habits = Habits.of(self.liking, pages=12, chunk_s=0.1, rest_s=0.1)
        return World(random.Random(seed), self.faults, habits)


PLANTED = (
    Planted(last_copies_may_go, Faults(squeeze=1.0), "crowding"),
    Planted(marks_count_as_copies, Faults(squeeze=3.0), "crowding"),
    Planted(creations_outlive_their_sessions, Faults(session_death=0.3), "everything"),
    Planted(
        answers_are_not_journaled,
        Faults(crash_at_sync=0.03, scheduler_restart=0.1),
        "naming",
    ),
    Planted(contents_are_mixed, CALM, "lending"),
    Planted(
        unheard_nodes_are_not_waited_for,
        Faults(scheduler_restart=0.9, delay=0.1, drop_link=1.5),
        "ending",
    ),
    Planted(
        destroyed_numbers_are_taken_back,
        Faults(scheduler_restart=0.2, journal_loss=1.0, drop_link=0.25),
        "ending",
    ),
    Planted(keys_are_forgotten, Faults(drop_link=1.0), "calling"),
    Planted(what_waits_is_called_on_half_an_update, CALM, "calling"),
    Planted(
        what_was_not_answered_is_not_asked_again,
        Faults(drop_link=2.0, delay=0.3),
        "calling",
    ),
    Planted(who_was_given_up_stays_so, Faults(all_lapse=0.2), "moving"),
)


def lives(world: World) -> bool:
    """Whether a world comes to its end with every promise kept."""
    try:
        world.run()
        world.heal()
        check_rest(world)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("planted", PLANTED, ids=lambda one: one.plant.__name__)
def test_a_planted_defect_is_found_and_nothing_where_there_is_none(
    planted: Planted, monkeypatch: Patch
) -> None:
    assert all(lives(planted.world(seed)) for seed in range(CLEAN))
    planted.plant(monkeypatch)
    assert not all(lives(planted.world(seed)) for seed in range(SEEDS))
