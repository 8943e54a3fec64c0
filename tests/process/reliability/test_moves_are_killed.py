"""P26: a migration whose target, or source, is killed at each instant of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.exceptions import (
    DeadlineExceeded,
    NotFound,
    PeerLost,
    TensorCastError,
)
from tests.kit.baseline import baseline
from tests.kit.eventually import eventually
from tests.kit.faulty import (
    Faults,
    faulty_cluster,
    holders,
    others,
    store_pid,
    whole,
)

CONTENT = np.random.default_rng(26).integers(0, 255, 3 << 20, np.uint8)


@pytest.fixture(scope="module")
def strangers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[tc.Session, Faults]]:
    with (
        faulty_cluster(
            tmp_path_factory.mktemp("run"),
            3,
            separate_hosts=True,
            settings={"lease": {"ttl": "2s"}, "transfer": {"chunk-bytes": "512 KiB"}},
        ) as (cluster, faults),
        tc.connect(cluster) as session,
    ):
        whole(session, 3)
        yield session, faults


def reads(artifact: tc.Artifact) -> bool:
    got = artifact.tensor(framework="numpy", deadline=30)
    return bool(got.tobytes() == CONTENT.tobytes())


@pytest.mark.parametrize(
    "instant",
    ["put.reserved", "copy.arrived@3", "put.before_commit"],
    ids=["before the copy", "in the copy", "after the copy"],
)
def test_p26_a_target_that_is_killed_leaves_the_source_and_a_third_node_takes_it(
    strangers: tuple[tc.Session, Faults], instant: str
) -> None:
    session, faults = strangers
    with baseline(session, nodes=False):
        artifact = session.put({"x": CONTENT}, "m")
        (source,) = holders(artifact)
        target, third = others(session, artifact)
        point, _, hits = instant.partition("@")
        pid = store_pid(session, target.node)
        with (
            faults.armed(f"{point}[pid:{pid}]=kill@{hits or 1}"),
            pytest.raises((PeerLost, DeadlineExceeded)),
        ):
            session.migrate(artifact, source, target, deadline=20)
        assert holders(artifact) == [source]
        assert reads(artifact)
        catalog = session.debug_state()["catalog"]
        assert not catalog["pins"]
        assert not catalog["moves"]
        session.migrate(artifact, source, third, deadline=30)
        assert holders(artifact) == [third.node]
        assert reads(artifact)
        session.destroy("m")
        whole(session, 3)


def test_p26_a_source_that_is_killed_after_the_switch_was_not_needed(
    strangers: tuple[tc.Session, Faults],
) -> None:
    session, faults = strangers
    with baseline(session, nodes=False):
        artifact = session.put({"x": CONTENT}, "m")
        (source,) = holders(artifact)
        target, _ = others(session, artifact)
        pid = store_pid(session, source)
        with faults.armed(f"destroy.before_drop[pid:{pid}]=kill"):
            session.migrate(artifact, source, target, deadline=30)
        eventually(lambda: holders(artifact) == [target.node], within_s=20)
        assert reads(artifact)
        session.destroy("m")
        whole(session, 3)


def test_p26_to_itself_is_nothing_and_to_nobody_or_from_nobody_a_typed_error(
    strangers: tuple[tc.Session, Faults],
) -> None:
    session, _ = strangers
    with baseline(session):
        artifact = session.put({"x": CONTENT}, "m")
        (source,) = holders(artifact)
        target, _ = others(session, artifact)
        moved = session.migrate(artifact, source, source).result()
        assert moved.moved_bytes == 0
        for wrong in ((source, "nobody"), ("nobody", target), (target, source)):
            with pytest.raises(TensorCastError) as refused:
                session.migrate(artifact, *wrong, deadline=10)
            assert isinstance(refused.value, NotFound)
        assert holders(artifact) == [source]
        assert reads(artifact)
        session.destroy("m")
