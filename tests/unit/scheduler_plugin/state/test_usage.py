from __future__ import annotations

import pytest

from tensorcast_dask.scheduler_plugin.state.usage import (
    HALF_LIFE_S,
    MAX_CONSUMERS,
    MAX_HEATS,
    Usage,
)
from tensorcast_dask.tensors.ids import ArtifactId, Version

X, Y = ArtifactId("x"), ArtifactId("y")


def test_heat_decays_to_nothing_by_itself() -> None:
    usage = Usage()
    assert usage.heat(X, now_s=0.0) == 0.0
    usage.read(X, 100, now_s=0.0)
    first = usage.heat(X, now_s=0.0)
    assert usage.heat(X, now_s=HALF_LIFE_S) == pytest.approx(first / 2, rel=1e-2)
    assert usage.heat(X, now_s=100 * HALF_LIFE_S) == 0.0


def test_a_consumer_is_known_by_what_it_has_last() -> None:
    usage = Usage()
    usage.uses("i", X, Version(1), now_s=1.0, epoch=3)
    usage.uses("i", X, Version(2), now_s=2.0, epoch=3)
    usage.uses("k", X, Version(1), now_s=3.0, epoch=1)
    found = [(who, one.version, one.at_s) for who, _, one in usage.consumers()]
    assert found == [("i", 2, 2.0), ("k", 1, 3.0)]
    usage.left("i")
    assert [who for who, _, _ in usage.consumers()] == ["k"]
    usage.read(X, 1, now_s=3.0)
    usage.forget(X)
    assert len(usage) == 0


def test_memory_is_bounded_and_the_longest_unheard_of_goes() -> None:
    usage = Usage()
    for number in range(MAX_HEATS + 1):
        usage.read(ArtifactId(f"a{number}"), 1, now_s=0.0)
    for number in range(MAX_CONSUMERS + 1):
        usage.uses(f"c{number}", Y, Version(1), now_s=0.0, epoch=0)
    assert len(usage) == MAX_HEATS + MAX_CONSUMERS
    assert usage.heat(ArtifactId("a0"), now_s=0.0) == 0.0
    assert next(usage.consumers())[0] == "c1"
