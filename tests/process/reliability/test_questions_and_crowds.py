"""P24, P33: questions that leave no trace, and many threads that each keep their own count."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.exceptions import NotFound, TensorCastError
from tests.kit.baseline import at_rest, idle_state
from tests.kit.eventually import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

THREADS = 16
#: How long they race.
RACE_S = 5.0


@pytest.mark.parametrize("size", [50, 300_000])
def test_p24_questions_pin_and_lease_nothing(cast: tc.Session, size: int) -> None:
    artifact = cast.put({"x": np.arange(float(size))}, "asked")
    artifact.publish()
    view = artifact.view({"x": tc.s_[:10]}, name="asked/view")
    asked = eventually(lambda: at_rest(cast), within_s=20)
    questions: list[Callable[[], Any]] = [
        lambda: cast.exists("asked"),
        lambda: cast.exists("nobody"),
        lambda: cast.list("as"),
        lambda: cast.artifact("asked"),
        lambda: cast.artifact("asked/view"),
        lambda: cast.latest("asked"),
        lambda: cast.explain("asked"),
        lambda: cast.locations(artifact),
        artifact.tensor_meta,
        view.tensor_meta,
        cast.nodes,
        cast.pool,
        lambda: cast.sql("select * from pins"),
    ]
    for question in questions:
        for _ in range(15):
            question()
    with pytest.raises(NotFound):
        cast.explain("nobody")
    now = idle_state(cast)
    assert now == asked  # at once: there was nothing to give back
    assert now["catalog"]["pins"] == 0


def test_p24_pins_are_seen_and_gone_when_taken_back_or_over(cast: tc.Session) -> None:
    artifact = cast.put({"x": np.zeros(300_000)}, "pinned")

    def pinned_bytes() -> int:
        tiers = cast.debug_state()["stores"].values()
        return sum(t["tiers"]["host"]["pinned_bytes"] for t in tiers)

    first, _ = cast.pin(artifact), cast.pin(artifact, ttl=0.5)
    assert cast.debug_state()["catalog"]["pins"] == 2
    eventually(pinned_bytes, within_s=20)
    eventually(lambda: cast.debug_state()["catalog"]["pins"] == 1, within_s=20)
    cast.unpin(artifact, first.pin)
    eventually(lambda: not pinned_bytes(), within_s=20)
    assert cast.debug_state()["catalog"]["pins"] == 0


class Crowd:
    """Threads that publish versions of their own and look at everything."""

    def __init__(self, cast: tc.Session) -> None:
        self.cast = cast
        self.over = threading.Event()
        self.wrong: list[str] = []
        self.counts = [0] * THREADS

    def run(self, number: int) -> None:
        try:
            while not self.over.is_set():
                self.turn(number)
        except (TensorCastError, AssertionError) as error:
            self.wrong.append(f"{number}: {error!r}")
            self.over.set()

    def turn(self, number: int) -> None:
        cast, name = self.cast, f"crowd/{number}"
        count = self.counts[number] + 1
        size = 40_000 if count % 8 == 0 else 20
        made = cast.put({"n": np.full(size, count)}, name, version="next")
        assert made.version == count
        if count > 1:
            assert cast.latest(name).version == count - 1
        made.publish()
        self.counts[number] = count
        latest = cast.latest(name)
        assert latest.version == count
        assert (latest.tensor(framework="numpy") == count).all()
        listed = {one.id: one.version for one in cast.list(name)}
        assert listed[name] == count
        rows = cast.sql(
            f"select max(version), count(*) from versions where id = '{name}'"
        ).rows
        assert [tuple(row) for row in rows] == [(count, count)]
        other = (number + count) % THREADS
        seen = self.counts[other]
        try:
            assert cast.latest(f"crowd/{other}").version >= seen
        except NotFound:
            assert seen == 0


@pytest.mark.parametrize("cluster", ["one host"], indirect=True)
def test_p33_a_crowd_gets_its_own_answers(
    cluster: tc.LocalCluster, cast: tc.Session
) -> None:
    del cluster
    crowd = Crowd(cast)
    threads = [threading.Thread(target=crowd.run, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    crowd.over.wait(RACE_S)
    crowd.over.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not crowd.wrong
    assert all(crowd.counts)
    for number, count in enumerate(crowd.counts):
        assert cast.latest(f"crowd/{number}").version == count
