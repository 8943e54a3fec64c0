"""Our own metadata in a file are believed no more than the rest of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from xxhash import xxh3_64_intdigest

from tensorcast_dask.dataplane.files.layout import plan_read, plan_write, split, sums_of
from tensorcast_dask.dataplane.files.model import open_model
from tensorcast_dask.dataplane.files.safetensors import (
    Entry,
    encode_header,
    read_header,
)
from tensorcast_dask.exceptions import CorruptFile, InvalidName, UnsupportedDtype
from tensorcast_dask.tensors.dtypes import dtype
from tensorcast_dask.tensors.specs import Index

if TYPE_CHECKING:
    from pathlib import Path

INDEX = Index(
    ["a", "tied", "z"],
    [dtype("float32"), dtype("complex128")],
    [(2,), (1,)],
    entry_of=[0, 0, 1],
    offsets=[0, 64],
    nbytes=96,
)
DATA = bytes(range(24))


def lying(path: Path, **claims: Any) -> Path:
    """Write a file of ours whose own metadata say `claims`, under a right seal."""
    plan = plan_write(INDEX, metadata={}, chunk_bytes=4096)
    own = msgspec.structs.replace(plan.own, **claims)
    sums = claims.pop("sums", None)
    head = dataclasses.replace(plan, own=own).head([xxh3_64_intdigest(DATA)])
    if sums is not None:
        head = head.replace(f"{xxh3_64_intdigest(DATA):016x}".encode(), sums.encode())
    path.write_bytes(head + DATA)
    return path


def test_the_truth_is_believed(tmp_path: Path) -> None:
    index, (pieces,) = plan_read([read_header(lying(tmp_path / "f"))])
    assert index == INDEX
    assert [(piece.segment_offset, piece.nbytes) for piece in pieces] == [
        (64, 16),
        (0, 8),
    ]


@pytest.mark.parametrize(
    "claims",
    [
        {"v": 2},
        {"tensors": {"z": ("complex128", (2,))}},
        {"tensors": {"z": ("complex128", (-1,))}},
        {"tensors": {"a": ("int64", (1,))}},
        {"tensors": {"z": ("complex64", (1,))}},
        {"ties": {"tied": ("absent", 1)}},
        {"ties": {"tied": ("z", 0)}},
        {"offsets": [0]},
        {"offsets": [0, 3]},
        {"offsets": [64, 64]},
        {"offsets": [0, 1 << 40]},
        {"offsets": [-64, 0]},
        {"nbytes": 1 << 50},
        {"nbytes": -1},
        {"nbytes": 79},
        {"chunk_bytes": 1},
        {"chunk_bytes": -4096},
        {"tensors": {"z": ("complex128", (1 << 62, 1 << 62))}},
    ],
    ids=str,
)
def test_a_claim_that_contradicts_the_tensors_is_refused(
    tmp_path: Path, claims: dict[str, Any]
) -> None:
    path = lying(tmp_path / "f", **claims)
    with pytest.raises(CorruptFile) as caught:
        open_model(path)
    assert str(path) in str(caught.value)


def test_a_dtype_that_no_release_knows_is_named(tmp_path: Path) -> None:
    path = lying(tmp_path / "f", tensors={"z": ("int512", (1,))})
    with pytest.raises(UnsupportedDtype, match="int512") as caught:
        open_model(path)
    assert caught.value.data == {"file": str(path), "tensor": "z"}


def test_a_name_that_comes_twice_or_is_not_legal_is_named(tmp_path: Path) -> None:
    for claims in (
        {"ties": {"z": ("a", 1)}},
        {"renamed": {"z": "a"}},
        {"renamed": {"z": " "}},
    ):
        path = lying(tmp_path / "f", **claims)
        with pytest.raises(InvalidName, match=str(path)):
            open_model(path)


def foreign(
    path: Path, name: str, code: str, shape: tuple[int, ...], nbytes: int
) -> Path:
    entry = Entry(name=name, dtype=code, shape=shape, begin=0, end=nbytes)
    path.write_bytes(encode_header([entry], metadata={}) + bytes(nbytes))
    return path


def test_what_no_artifact_can_hold_is_refused_by_its_own_type(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedDtype, match="F4"):
        open_model(foreign(tmp_path / "f", "x", "F4", (2,), 1))
    for name in ("", "a\nb", "x" * 513):
        with pytest.raises(InvalidName, match=str(tmp_path)):
            open_model(foreign(tmp_path / "f", name, "U8", (1,), 1))
    with pytest.raises(CorruptFile):
        open_model(foreign(tmp_path / "f", "x", "U8", (1,) * 65, 1))


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"v": "1"}', '{"v": 1, "ties": []}', "null"]
)
def test_metadata_under_our_key_that_are_not_ours_are_refused(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "f"
    path.write_bytes(encode_header([], metadata={"tensorcast": text}))
    with pytest.raises(CorruptFile, match="tensorcast"):
        open_model(path)


def test_sums_of_other_length_are_refused(tmp_path: Path) -> None:
    plan = plan_write(INDEX, metadata={}, chunk_bytes=4096)
    head = plan.head([1, 2])
    (tmp_path / "f").write_bytes(head + DATA)
    with pytest.raises(CorruptFile, match="checksums"):
        sums_of(read_header(tmp_path / "f"))


def test_shards_are_cut_in_order_and_none_is_empty() -> None:
    index = Index(
        [f"t{n}" for n in range(5)],
        [dtype("uint8")] * 5,
        [(3,), (3,), (9,), (0,), (1,)],
    )
    assert split(index, max_bytes=None) == [range(5)]
    assert split(index, max_bytes=6) == [range(2), range(2, 3), range(3, 5)]
    assert split(index, max_bytes=1) == [
        range(1),
        range(1, 2),
        range(2, 3),
        range(3, 5),
    ]
    assert split(Index([], [], []), max_bytes=1) == [range(0)]
