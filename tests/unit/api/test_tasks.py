"""What counts as a Future among the things that can be put."""

from __future__ import annotations

import numpy as np
import pytest

from tensorcast_dask.api.actions.tasks import holds_future


def test_a_dense_torch_tensor_is_no_mapping_of_futures() -> None:
    torch = pytest.importorskip("torch")

    assert not holds_future(torch.ones(4))


def test_arrays_and_mappings_of_arrays_hold_no_future() -> None:
    assert not holds_future(np.ones(4))
    assert not holds_future({"a": np.ones(4)})
