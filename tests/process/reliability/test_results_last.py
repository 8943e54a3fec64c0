"""P09, P14, P22, P37: what was read stays, by whatever name, however finely it was cut."""

from __future__ import annotations

import numpy as np
import pytest

import tensorcast_dask as tc
from tests.kit.baseline import no_lease_lost
from tests.kit.strategies import ODD_IDS


def noise(size: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, size, np.uint8)


@pytest.mark.parametrize("size", [1000, 8 << 20])
def test_p09_p22_a_result_outlives_the_destroy_and_the_reuse_of_its_memory(
    cast: tc.Session, size: int
) -> None:
    content = noise(size)
    artifact = cast.put({"x": content}, "held")
    held = artifact.tensor(framework="numpy")
    part = artifact.view({"x": tc.s_[::7]}).tensor(framework="numpy")
    cast.destroy("held")
    for number in range(20):
        cast.put({"x": noise(4 << 20, number)}, f"noise/{number}")
    assert held.tobytes() == content.tobytes()
    assert part.tobytes() == content[::7].tobytes()
    del held, part


def test_p14_every_legal_id_is_its_own_artifact(cast: tc.Session) -> None:
    for number, name in enumerate(ODD_IDS):
        cast.put({"x": np.full((30, 200_000)[number % 2], number)}, name)
    for number, name in enumerate(ODD_IDS):
        assert (cast.artifact(name).tensor(framework="numpy") == number).all()
    assert sorted(one.id for one in cast.list()) == sorted(ODD_IDS)


def test_p35_a_view_of_single_bytes_is_read_and_costs_no_node_its_lease(
    cast: tc.Session,
) -> None:
    content = noise(3_000_000)
    artifact = cast.put({"x": content}, "fine")
    with no_lease_lost(cast.client, cast.nodes()):
        part = artifact.view({"x": tc.s_[::3]}).tensor(framework="numpy", deadline=120)
    assert part.tobytes() == content[::3].tobytes()
    del part


def test_p37_bytes_are_counted_once_and_views_cost_none(cast: tc.Session) -> None:
    content = noise(1 << 20).reshape(1024, 1024)

    def used_bytes() -> int:
        stores = cast.debug_state()["stores"].values()
        return sum(store["resident_bytes"] for store in stores)

    rows = cast.put({"x": content}, "rows")
    one = used_bytes()
    views = [rows.view({"x": tc.s_[n]}) for n in range(100)]
    assert used_bytes() == one
    assert np.array_equal(views[70].tensor(framework="numpy"), content[70])
    assert cast.put({"x": noise(8 << 20)[:4]}, "four").nbytes == 4
    many = cast.put({f"row{n}": row for n, row in enumerate(content)}, "many")
    assert many.nbytes == content.nbytes
