from __future__ import annotations

from random import Random

from tensorcast_dask.policies import ArtifactView, Lru, ValueAware, View


def version(generation: int, **more: object) -> ArtifactView:
    given = {"nbytes": 1000, "hosts": 2, "reads_per_s": 1.0, **more}
    return ArtifactView(id=f"x{generation}", version=1, generation=generation, **given)  # type: ignore[arg-type]


def test_lru_weighs_nothing() -> None:
    assert Lru().decide(View(now_s=0.0, artifacts=(version(1),))) == {}


def test_the_weight_is_reuse_times_cost_for_each_byte() -> None:
    policy = ValueAware(bytes_per_s=1000.0, latency_s=1.0, alone=4.0)
    assert policy.weight(version(1)) == 1.0 * (1.0 + 1.0) / 1000
    assert policy.weight(version(1, refetch_s=3.0)) == 4.0 / 1000
    assert policy.weight(version(1, hosts=1)) == 8.0 / 1000
    assert policy.weight(version(1, reads_per_s=0.5)) == 1.0 / 1000
    assert policy.weight(version(1, current=False)) == 0.0
    assert policy.weight(version(1, nbytes=0)) == 0.0
    view = View(now_s=0.0, artifacts=(version(1), version(2, reads_per_s=0.0)))
    assert policy.decide(view) == {1: 0.002}


def missed_s(*, by_value: bool, seed: int) -> float:
    """Seconds that getting back costs, in a cache of a third of what is read."""
    random = Random(seed)
    sizes = [random.choice([1, 1, 1, 8, 8, 32]) * 1_000_000 for _ in range(200)]
    popularity = [1.0 / (n + 1) for n in range(200)]
    policy = ValueAware(bytes_per_s=1e9, latency_s=0.005)
    room, cost = sum(sizes) // 3, 0.0
    held: dict[int, int] = {}
    seen = [0] * 200
    for now in range(1, 6000):
        (one,) = random.choices(range(200), popularity)
        seen[one] += 1
        if one in held:
            held[one] = held.pop(one)
            continue
        cost += 0.005 + sizes[one] / 1e9
        held[one] = sizes[one]
        while sum(held.values()) > room:
            weights = {
                other: policy.weight(
                    version(other, nbytes=sizes[other], reads_per_s=seen[other] / now)
                )
                for other in held
                if other != one
            }
            victims = list(weights)
            victim = min(victims, key=weights.__getitem__) if by_value else victims[0]
            del held[victim]
    return cost


def test_value_aware_misses_cost_no_more_than_those_of_lru() -> None:
    for seed in range(3):
        assert missed_s(by_value=True, seed=seed) < missed_s(by_value=False, seed=seed)
