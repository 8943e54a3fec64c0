from __future__ import annotations

import msgspec
import pytest

from tensorcast_dask.exceptions import (
    CorruptFile,
    InvalidArgument,
    InvalidName,
    NotFound,
    UnsupportedDtype,
)
from tensorcast_dask.tensors.dtypes import DType, dtype
from tensorcast_dask.tensors.specs import (
    ALIGN_BYTES,
    Entry,
    Index,
    TensorSpec,
    nbytes_of,
)

F32 = dtype("float32")
U8 = dtype("uint8")
BF16 = dtype("bfloat16")


def small() -> Index:
    return Index(
        ["embed", "head", "bias", "empty", "scalar"],
        [BF16, F32, U8, F32],
        [(3, 5), (7,), (0, 4), ()],
        entry_of=[0, 0, 1, 2, 3],
    )


def columns(**changes: object) -> bytes:
    """The encoded small index with some columns replaced."""
    order = [
        "format",
        "names",
        "entry_of",
        "dtypes",
        "dtype_of",
        "shapes",
        "shape_of",
        "offsets",
        "nbytes",
    ]
    wire = dict(zip(order, msgspec.msgpack.decode(small().encode()), strict=True))
    assert set(changes) <= set(wire)
    return msgspec.msgpack.encode(list((wire | changes).values()))


@pytest.mark.parametrize(
    ("shape", "nbytes"), [((), 4), ((0,), 0), ((2, 0), 0), ((1, 1), 4), ((3, 5), 60)]
)
def test_nbytes_follow_from_dtype_and_shape(
    shape: tuple[int, ...], nbytes: int
) -> None:
    assert nbytes_of(F32, shape) == nbytes
    assert TensorSpec("t", F32, shape).nbytes == nbytes
    assert repr(TensorSpec("t", F32, shape)) == f"<'t' float32 {list(shape)}>"


@pytest.mark.parametrize(
    "shape",
    [(-1,), (0, -1), (1 << 62,), (1 << 33, 1 << 33), (1 << 62, 1 << 62, 0), (1,) * 65],
)
def test_a_shape_that_no_library_can_make_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument):
        nbytes_of(F32, shape)


def test_the_largest_size_is_the_last_one_allowed() -> None:
    assert nbytes_of(U8, ((1 << 63) - 1,)) == (1 << 63) - 1
    with pytest.raises(InvalidArgument):
        nbytes_of(U8, (1 << 63,))


def test_specs_are_packed_in_the_order_given() -> None:
    index = Index.of([TensorSpec("b", U8, (3,)), TensorSpec("a", F32, (2,))])
    assert index == Index(["b", "a"], [U8, F32], [(3,), (2,)])
    assert index.entry("a") == Entry(F32, (2,), 64, 8)


def test_entries_are_packed_in_put_order_at_aligned_offsets() -> None:
    index = small()
    assert index.offsets == (0, 64, 128, 128)
    assert index.sizes == (30, 28, 0, 4)
    assert index.nbytes == 132
    assert index.content_bytes == 62
    assert all(offset % ALIGN_BYTES == 0 for offset in index.offsets)


def test_gaps_and_entries_together_cover_the_segment_once() -> None:
    index = small()
    pieces = [*index.gaps(), *zip(index.offsets, index.sizes, strict=True)]
    covered = sorted(at for offset, n in pieces for at in range(offset, offset + n))
    assert covered == list(range(index.nbytes))


def test_bytes_after_the_last_entry_are_a_gap() -> None:
    index = Index(["a"], [U8], [(3,)], nbytes=10)
    assert list(index.gaps()) == [(3, 7)]
    assert not index.packed


def test_an_artifact_without_tensors_is_empty_and_round_trips() -> None:
    index = Index([], [], [])
    assert (index.nbytes, len(index), list(index.gaps())) == (0, 0, [])
    assert Index.decode(index.encode()) == index


def test_tied_names_share_an_entry_and_are_listed_as_ties() -> None:
    index = small()
    assert index.position("embed") == index.position("head")
    assert index.ties == (("embed", "head"),)
    assert [spec.name for spec in index.specs()] == list(index.names)
    assert index.spec("head") == TensorSpec("head", BF16, (3, 5))


def test_an_unknown_name_is_not_found() -> None:
    with pytest.raises(NotFound, match="'nobody'"):
        small().entry("nobody")
    assert "nobody" not in small()


def test_an_index_equals_what_it_decodes_to() -> None:
    index = small()
    assert Index.decode(index.encode()) == index
    assert hash(Index.decode(index.encode())) == hash(index)
    assert Index.decode(index.encode()).encode() == index.encode()
    assert index != "index"
    assert repr(index) == "Index(5 names, 4 entries, 132 bytes)"


def test_a_files_own_layout_survives_the_codec() -> None:
    index = Index(["a", "b"], [U8, F32], [(3,), (2,)], offsets=[16, 4], nbytes=100)
    assert Index.decode(index.encode()) == index
    assert not index.packed
    assert list(index.gaps()) == [(0, 4), (12, 4), (19, 81)]


def test_offsets_that_packing_would_give_are_packed() -> None:
    index = small()
    same = Index(
        index.names,
        index.dtypes,
        index.shapes,
        entry_of=index.entry_of,
        offsets=index.offsets,
        nbytes=index.nbytes,
    )
    assert same.encode() == index.encode()


def test_the_digest_is_the_same_in_every_release() -> None:
    assert small().digest() == "f57feb78e2bd6ec4f2167f02aaab4873"


def test_any_difference_changes_the_digest() -> None:
    base = Index(["a", "b"], [F32, F32], [(2,), (3,)])
    others = [
        Index(["b", "a"], [F32, F32], [(2,), (3,)]),
        Index(["a", "b"], [BF16, F32], [(2,), (3,)]),
        Index(["a", "b"], [F32, F32], [(3,), (2,)]),
        Index(["a", "b"], [F32, F32], [(2,), (3, 1)]),
        Index(["a", "b"], [F32, F32], [(2,), (3,)], offsets=[0, 8]),
        Index(["a", "b"], [F32], [(2,)], entry_of=[0, 0]),
        Index(["a", "b"], [F32, F32], [(2,), (3,)], nbytes=4096),
    ]
    assert (
        len({base.digest(), *(other.digest() for other in others)}) == len(others) + 1
    )


@pytest.mark.parametrize(
    "name",
    ["", " a", "a ", "a\n", "\n", "a\nb", "\x00", "\ud800", "é" * 300, "a" * 513],
)
def test_illegal_tensor_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidName):
        Index(["fine", name], [F32, F32], [(), ()])


@pytest.mark.parametrize(
    "name", ["a", "a b", "model.layers.0", "é" * 256, "a" * 512, "重み/0"]
)
def test_any_printable_text_of_at_most_512_bytes_is_a_name(name: str) -> None:
    assert Index([name, "other"], [F32, F32], [(), ()]).names[0] == name


def test_a_name_that_is_not_text_is_refused() -> None:
    with pytest.raises(InvalidName):
        Index([3], [F32], [()])  # type: ignore[list-item]


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(InvalidName, match="twice"):
        Index(["a", "a"], [F32, F32], [(), ()])


def test_a_dtype_that_is_not_of_the_table_is_refused() -> None:
    with pytest.raises(UnsupportedDtype):
        Index(["a"], [DType("float12", 2, None, None, "float12")], [()])


@pytest.mark.parametrize(
    "arguments",
    [
        {"entry_of": [0, 2]},
        {"entry_of": [1, 0]},
        {"entry_of": [0, 0]},
        {"entry_of": [0, -1]},
        {"entry_of": [0]},
        {"offsets": [0]},
        {"offsets": [-4, 0]},
        {"offsets": [0, 4]},
        {"offsets": [0, 66]},
        {"nbytes": 71},
        {"nbytes": 1 << 63},
    ],
)
def test_a_contradictory_index_cannot_be_made(arguments: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        Index(["a", "b"], [F32, F32], [(2,), (2,)], **arguments)  # type: ignore[arg-type]


def test_uneven_columns_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        Index(["a", "b"], [F32], [(2,)])


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"format": -1},
        {"names": ["a"]},
        {"names": ["a", "a", "b", "c", "d"]},
        {"names": ["a", "", "b", "c", "d"]},
        {"names": [1, 2, 3, 4, 5]},
        {"entry_of": None},
        {"entry_of": [0, 0, 1, 2, 4]},
        {"entry_of": [3, 2, 1, 0, 0]},
        {"dtypes": ["object", "float32", "uint8"]},
        {"dtypes": ["bfloat16"]},
        {"dtype_of": b"\x00\x01\x02\x09"},
        {"dtype_of": b"\x00"},
        {"shapes": [[3, 5], [7], [0, -4], []]},
        {"shapes": [[1 << 33, 1 << 33], [7], [0, 4], []]},
        {"shapes": [[1 << 63, 1], [7], [0, 4], []]},
        {"shapes": [[3.5, 5], [7], [0, 4], []]},
        {"shape_of": [0, 1, 2, -1]},
        {"shape_of": [0, 1, 2, 9]},
        {"offsets": [0, 0, 0, 64]},
        {"offsets": [0, 28, 64, 128]},
        {"offsets": [0, 32, 64, -4]},
        {"offsets": [0, 32, 64, 1 << 63]},
        {"offsets": [0, 33, 64, 128]},
        {"nbytes": 131},
        {"nbytes": -1},
        {"nbytes": 1 << 63},
        {"nbytes": "132"},
    ],
)
def test_an_inconsistent_encoding_is_a_corrupt_file(changes: dict[str, object]) -> None:
    with pytest.raises(CorruptFile):
        Index.decode(columns(**changes))


def test_the_unchanged_columns_decode() -> None:
    assert Index.decode(columns()) == small()


@pytest.mark.parametrize("data", [b"", b"\x00", b"\xc1", b"{}", b"\x99" + b"\x00" * 9])
def test_bytes_that_are_no_index_are_a_corrupt_file(data: bytes) -> None:
    with pytest.raises(CorruptFile):
        Index.decode(data)


def test_no_prefix_of_an_index_is_an_index() -> None:
    data = small().encode()
    for cut in range(len(data)):
        with pytest.raises(CorruptFile):
            Index.decode(data[:cut])
    with pytest.raises(CorruptFile):
        Index.decode(data + b"\x00")
