from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import InvalidArgument, WrongPeer
from tensorcast_dask.tensors.ids import ArtifactId, Generation, Version
from tensorcast_dask.tensors.messages import ArtifactInfo, Owner, Stage
from tensorcast_dask.tensors.plans import ArtifactRef, StepRef
from tensorcast_dask.tensors.values import MAX_BYTES, pack, references, unpack

REF = ArtifactRef(id=ArtifactId("x"), version=Version(2), generation=Generation(7))
INFO = ArtifactInfo(
    id=ArtifactId("x"),
    version=Version(2),
    generation=Generation(7),
    stage=Stage.COMMITTED,
    owner=Owner.SYSTEM,
    nbytes=3,
    tensors=1,
)


def same(reference: object) -> object:
    return reference


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        1.5,
        "é",
        b"\x00",
        [],
        {},
        [1, [2, {"a": None}]],
        {"b": 1, "a": 2},
    ],
)
def test_plain_values_are_themselves_again(value: object) -> None:
    assert unpack(pack(value), same) == value


def test_a_tuple_becomes_a_list() -> None:
    assert unpack(pack((1, (2,))), same) == [1, [2]]


def test_equal_values_are_equal_bytes_in_whichever_order_they_were_made() -> None:
    assert pack({"a": 1, "b": 2}) == pack({"b": 2, "a": 1})


def test_whoever_unpacks_says_what_becomes_of_references() -> None:
    raw = pack([{"w": REF}, StepRef(step="s"), INFO])
    assert references(raw) == [REF, StepRef(step="s"), INFO]
    assert unpack(raw, lambda one: type(one).__name__) == [
        {"w": "ArtifactRef"},
        "StepRef",
        "ArtifactInfo",
    ]


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, {1: 2}, 1 << 70, [lambda: None], 3j, "x" * MAX_BYTES]
)
def test_what_is_not_plain_or_too_large_is_refused_with_advice(value: object) -> None:
    with pytest.raises(InvalidArgument, match=r"artifact|cannot be sent"):
        pack(value)


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(InvalidArgument):
        pack(value)


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\xd4\x09\x00", b"\xd4\x01\x00"])
def test_what_is_no_value_is_the_peers_fault(raw: bytes) -> None:
    with pytest.raises(WrongPeer):
        unpack(raw, same)
