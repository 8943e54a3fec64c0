"""Reads, copies and releases while the bytes wander: nothing is ever lost, nor said to be."""

from __future__ import annotations

import contextlib
import random
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.exceptions import Mismatch, NotFound, TensorCastError
from tests.kit.baseline import baseline
from tests.kit.eventually import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tc.Session]:
    run = tmp_path_factory.mktemp("run")
    run.chmod(0o700)
    with (
        tc.LocalCluster(
            3,
            threads_per_worker=1,
            host_memory="128 MiB",
            separate_hosts=True,
            settings={"run-dir": str(run)},
        ) as cluster,
        tc.connect(cluster) as made,
    ):
        eventually(lambda: len(made.workers()) == 3, within_s=60)
        yield made


class Wanderer:
    """What several threads do at once to one artifact of three nodes."""

    def __init__(self, session: tc.Session, content: np.ndarray) -> None:
        self.session = session
        self.content = content
        self.dice = random.Random(content.size)
        self.wrong: list[str] = []
        self.over = threading.Event()

    def read(self) -> None:
        got = self.session.artifact("m").tensor(framework="numpy", deadline=60)
        assert got.tobytes() == self.content.tobytes()

    def read_view(self) -> None:
        view = self.session.artifact("m").view({"x": tc.s_[5:50]})
        got = view.tensor(framework="numpy", deadline=60)
        assert got.tobytes() == self.content[5:50].tobytes()

    def copy_and_release(self) -> None:
        artifact = self.session.artifact("m")
        worker = self.dice.choice(self.session.workers())
        self.session.replicate(artifact, worker, deadline=60)
        # It may be the last copy by now, or have been moved away.
        with contextlib.suppress(Mismatch, NotFound):
            self.session.release(artifact, worker=worker)

    def migrate(self) -> None:
        artifact = self.session.artifact("m")
        source = self.dice.choice(artifact.locations()).card.node
        target = self.dice.choice(self.session.workers())
        with contextlib.suppress(Mismatch, NotFound):
            self.session.migrate(artifact, source, target, deadline=60)

    def repeat(self, act: Callable[[], None]) -> None:
        while not self.over.is_set():
            try:
                act()
            except (TensorCastError, AssertionError) as error:
                self.wrong.append(f"{act.__name__}: {error!r}")
                self.over.set()


@pytest.mark.parametrize("size", [1000, 2 << 20])
def test_p26_an_artifact_that_moves_all_the_time_is_read_all_the_time(
    session: tc.Session, size: int
) -> None:
    content = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    wanderer = Wanderer(session, content)
    acts = (wanderer.read, wanderer.read_view, wanderer.copy_and_release)
    with baseline(session):
        artifact = session.put({"x": content}, "m")
        threads = [
            threading.Thread(target=wanderer.repeat, args=(act,))
            for act in (*acts, wanderer.migrate, wanderer.migrate)
        ]
        for thread in threads:
            thread.start()
        wanderer.over.wait(4)  # how long they race
        wanderer.over.set()
        for thread in threads:
            thread.join(120)
        assert not wanderer.wrong
        assert artifact.tensor(framework="numpy").tobytes() == content.tobytes()
        session.destroy("m")
