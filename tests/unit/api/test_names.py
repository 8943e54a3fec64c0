"""Arguments that are looked at before anything is asked."""

from __future__ import annotations

from typing import Any

import pytest

from tensorcast_dask.api.actions.drafts import index_of
from tensorcast_dask.api.actions.names import check_labels
from tensorcast_dask.exceptions import InvalidArgument


@pytest.mark.parametrize("bad", [["a"], "ab", {"a": 1}, 3, [("a", "b")], {"a": None}])
def test_labels_map_text_to_text(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="label"):
        check_labels(bad)
    assert check_labels({"a": "b"}) == {"a": "b"}
    assert check_labels(None) == {}


@pytest.mark.parametrize(
    "bad", [(1.5,), 1.5, None, ("3",), "33", [[1]], (float("nan"),)]
)
def test_a_shape_is_made_of_integers(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="shape of 'x'"):
        index_of({"x": (bad, "float32")})
    assert index_of({"x": ([2, 3], "float32")}).shapes[0] == (2, 3)
    assert index_of({"x": (4, "float32")}).shapes[0] == (4,)
