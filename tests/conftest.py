"""Options, profiles and fixtures of every floor.

Rules:

1. A run on CI is derandomised and larger; both follow from the variable `CI` alone.
2. `--sim-seed N` repeats exactly one simulated history; `--sim-seeds N` sets their number.
3. A test takes the argument `sim_seed` to be run once per seed.
4. A test has the marker of the floor that its file lies on.
5. SIGINT interrupts, here and in what a test starts, also when a shell ran all this in the
   background and had it ignored.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.kit.leaks import no_leaks

_ON_CI = bool(os.environ.get("CI"))
_SEEDS = 200 if _ON_CI else 50
_TESTS = Path(__file__).parent
_MARKED_FLOORS = {"sim", "cluster", "process", "gpu"}

hypothesis.settings.register_profile("dev", max_examples=50, deadline=None)
hypothesis.settings.register_profile(
    "ci", max_examples=200, deadline=None, derandomize=True, print_blob=True
)
hypothesis.settings.register_profile("nightly", max_examples=5000, deadline=None)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if _ON_CI else "dev")
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tensorcast")
    group.addoption("--slow", action="store_true", help="also run tests marked slow")
    group.addoption(
        "--sim-seeds",
        type=int,
        default=_SEEDS,
        metavar="N",
        help="run each simulation with the seeds 0 to N-1",
    )
    group.addoption(
        "--sim-seed",
        type=int,
        default=None,
        metavar="N",
        help="run each simulation with this one seed",
    )


def pytest_configure() -> None:
    # Only the main thread may, and xdist's workers are not always on it.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sim_seed" in metafunc.fixturenames:
        one = metafunc.config.getoption("--sim-seed")
        many = range(metafunc.config.getoption("--sim-seeds"))
        metafunc.parametrize("sim_seed", many if one is None else [one])


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    slow = config.getoption("--slow")
    skip = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        floor = item.path.relative_to(_TESTS).parts[0]
        if floor in _MARKED_FLOORS:
            item.add_marker(floor)
        if item.get_closest_marker("slow") and not slow:
            item.add_marker(skip)


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """The test ends with the processes and descriptors that it began with."""
    with no_leaks():
        yield
