from __future__ import annotations

from tensorcast_dask.tensors.messages import Rows


def test_rows_are_a_table_as_text() -> None:
    rows = Rows(columns=("id", "version"), rows=(("toy/weights", 1), ("a", None)))
    assert str(rows).splitlines() == [
        "id           version",
        "toy/weights  1",
        "a            None",
    ]
    assert str(Rows(columns=("id",), rows=())) == "id"
