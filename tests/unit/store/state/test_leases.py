from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import StaleOwner
from tensorcast_dask.store.state.leases import check_lease


@pytest.mark.parametrize("left_s", [0.001, 5.0, float("inf")])
def test_a_node_with_a_lease_or_without_a_catalog_takes_bytes(left_s: float) -> None:
    check_lease(left_s)


@pytest.mark.parametrize("left_s", [0.0, -1.0])
def test_at_its_expiry_instant_a_lease_has_ended(left_s: float) -> None:
    with pytest.raises(StaleOwner, match="lost its lease"):
        check_lease(left_s)
