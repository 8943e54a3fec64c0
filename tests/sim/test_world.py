"""The whole cluster under faults: promises after every step, and at rest after healing.

A seed that fails prints the end of its history and is repeated with `--sim-seed N`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.kit import sim_faults
from tests.kit.sim_rest import check_rest
from tests.kit.sim_watch import Watch
from tests.kit.world import World


@contextmanager
def told(world: World, how: str) -> Iterator[None]:
    """Add the end of the history to whatever fails."""
    try:
        yield
    except AssertionError as error:
        message = f"{error}\n{how}, with {world.start}\n{world.time.story(30)}"
        raise AssertionError(message) from error


def live(world: World, how: str) -> Watch:
    """Run a world to its end."""
    with told(world, how):
        world.run()
        world.heal()
        check_rest(world)
    return world.watch


def world_of(seed: int) -> World:
    rng = random.Random(seed)
    return World(rng, sim_faults.some(rng))


def test_every_promise_is_kept_whatever_fails(sim_seed: int) -> None:
    live(world_of(sim_seed), f"repeat it with --sim-seed {sim_seed}")


def test_a_calm_cluster_does_what_it_is_asked() -> None:
    counts: dict[str, int] = {}
    for seed in range(5):
        watch = live(World(random.Random(seed), sim_faults.CALM), f"calm {seed}")
        for what, count in watch.counts.items():
            counts[what] = counts.get(what, 0) + count
    refused = {what.split()[1] for what in counts if what[0].isupper()}
    assert refused <= {
        "ok",
        "AlreadyExists",
        "CapacityError",
        "DeadlineExceeded",
        "Gone",
        "Incomplete",
        "Mismatch",
        "NotFound",
        "PeerLost",  # of nodes that were drained and ended
    }
    for call in ("CommitCreated", "Publish", "Ensure", "Migrate", "Destroy", "Locate"):
        assert counts[f"{call} ok"] > 5, counts
    assert counts["read"] > 20


def test_the_same_seed_gives_the_same_history() -> None:
    for seed in range(3):
        stories = []
        for _ in range(2):
            world = world_of(seed)
            live(world, f"seed {seed}")
            stories.append((world.time.story(400), world.watch.counts))
        assert stories[0] == stories[1]


@pytest.mark.slow
@hypothesis.settings(
    max_examples=20,
    suppress_health_check=list(hypothesis.HealthCheck),
    deadline=None,
)
@hypothesis.given(rng=st.randoms(use_true_random=False))
def test_what_fails_shrinks(rng: random.Random) -> None:
    """The same world, from chance that hypothesis can shrink to a short history."""
    world = World(rng, sim_faults.ROUGH)
    with told(world, "shrunk"):
        world.run(4.0)
        world.heal()
        check_rest(world)
