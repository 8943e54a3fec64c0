from __future__ import annotations

from tensorcast_dask.store.state.replicas import Copy, Life, Replica
from tensorcast_dask.tensors.ids import ArtifactId, Generation, Version
from tensorcast_dask.tensors.messages import Tier


def test_a_replica_has_one_copy_in_a_tier_and_is_committed_by_any() -> None:
    host, disk = Copy(Tier.HOST, 1, 0, 10), Copy(Tier.DISK, 2, 0, 10)
    replica = Replica(Generation(1), ArtifactId("a"), Version(1), 10, {}, (host, disk))
    assert replica.copy(Tier.DISK) is disk
    assert replica.copy(Tier.DEVICE) is None
    assert not replica.committed
    disk.life = Life.COMMITTED
    assert replica.committed
    disk.life = Life.DROPPING
    assert not replica.committed


def test_a_copys_life_only_goes_forward() -> None:
    lives = [Life.RESERVED, Life.FILLING, Life.COMMITTED, Life.DROPPING]
    assert sorted(lives) == lives
