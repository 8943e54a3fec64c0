from __future__ import annotations

import math

import msgspec
import pytest

from tensorcast_dask.exceptions import InvalidArgument, InvalidName
from tensorcast_dask.tensors.contexts import MAX_PRIORITY, Context, check_ddl


@pytest.mark.parametrize("ddl", [None, 0, 0.0, 1e-9, 5, math.inf])
def test_p34_a_ddl_is_none_nothing_or_seconds(ddl: float | None) -> None:
    assert check_ddl(ddl) == ddl
    assert Context(ddl=ddl).ddl == ddl


@pytest.mark.parametrize("ddl", [-1, -1e-9, math.nan, -math.inf, "5", True, [1]])
def test_p34_any_other_ddl_is_refused(ddl: object) -> None:
    with pytest.raises(InvalidArgument, match="ddl"):
        check_ddl(ddl)
    with pytest.raises(InvalidArgument):
        Context(ddl=ddl)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", " a", "a\n", "x" * 513, "\ud800", 5])
def test_ids_and_keys_are_legal_names(name: object) -> None:
    with pytest.raises(InvalidName):
        Context(id=name)  # type: ignore[arg-type]
    if name != "":
        with pytest.raises(InvalidName):
            Context(key=name)  # type: ignore[arg-type]


@pytest.mark.parametrize("priority", [True, 1.5, "1", MAX_PRIORITY + 1])
def test_a_priority_is_a_whole_number(priority: object) -> None:
    with pytest.raises(InvalidArgument, match="priority"):
        Context(priority=priority)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "more",
    [
        {"tags": ["a"]},
        {"tags": ("a",) * 65},
        {"labels": [("a", "b")]},
        {"labels": {"a": 1}},
        {"labels": {str(at): "" for at in range(65)}},
    ],
)
def test_tags_and_labels_are_few_and_text(more: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        Context(**more)  # type: ignore[arg-type]


def test_a_context_is_itself_again() -> None:
    context = Context(
        id="r", ddl=2.5, key="k", priority=3, tags=("a",), labels={"b": "c"}
    )
    raw = msgspec.json.encode(context)
    assert msgspec.json.decode(raw, type=Context) == context
