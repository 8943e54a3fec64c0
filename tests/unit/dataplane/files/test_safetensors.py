"""P10: what a header claims is checked before anything is believed."""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING

import pytest
import safetensors.numpy
from safetensors import SafetensorError

from tensorcast_dask.dataplane.files.safetensors import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    Entry,
    encode_header,
    read_header,
)
from tensorcast_dask.exceptions import CorruptFile, InvalidArgument, NotFound

if TYPE_CHECKING:
    from pathlib import Path


def file_of(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def one(
    dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)
) -> object:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


A = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}

#: The twelve of P10, then more of the same kind. All of them are refused upstream too.
BAD = {
    "prefix_too_big": struct.pack("<Q", 1 << 63) + b"{}",
    "seven_bytes": b"\0" * 7,
    "shape_overflow": file_of(one("F32", [1 << 33, 1 << 33], [0, 4]), b"1234"),
    "shape_against_bytes": file_of(one("F32", [1000, 1000], [0, 4]), b"1234"),
    "overlap": file_of({"q": A, "k": {**A, "data_offsets": [2, 6]}}, b"123456"),
    "hole": file_of({"q": A, "k": {**A, "data_offsets": [5, 9]}}, b"123456789"),
    "trailing_bytes": file_of(one(), b"12345"),
    "reversed_offsets": file_of(one("F32", [1], [4, 0]), b"1234"),
    "unknown_dtype": file_of(one("F99"), b"1234"),
    "offsets_as_floats": file_of(one("F32", [1], [0.0, 4.0]), b"1234"),
    "header_not_an_object": file_of([1, 2]),
    "invalid_utf8": file_of(
        b'{"\xff":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"1234"
    ),
    # ---
    "empty_file": b"",
    "prefix_of_the_whole_file": struct.pack("<Q", 10) + b"{}",
    "header_over_the_limit": struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}",
    "header_of_no_bytes": struct.pack("<Q", 0),
    "header_not_json": file_of(b"{]"),
    "header_cut_short": file_of(b'{"x":{"dtype":"F32","shape":[1],"data_offs'),
    "text_behind_the_header": file_of(b"{} x"),
    "shares_all_bytes": file_of({"q": A, "k": A}, b"1234"),
    "same_begin": file_of(
        {"q": A, "k": {**A, "shape": [2], "data_offsets": [0, 2]}}, b"1234"
    ),
    "begins_late": file_of(one("F32", [1], [4, 8]), b"12345678"),
    "ends_behind_the_file": file_of(one("F32", [2], [0, 8]), b"1234"),
    "bytes_and_no_tensor": file_of({}, b"1234"),
    "offsets_as_bools": file_of(one("U8", [1], [False, True]), b"1"),
    "offsets_as_text": file_of(one("U8", [1], ["0", "1"]), b"1"),
    "offsets_negative": file_of(one("U8", [1], [-1, 0]), b""),
    "offset_minus_zero": file_of(
        b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[-0,0]}}'
    ),
    "offsets_three": file_of(one("U8", [1], [0, 1, 1]), b"1"),
    "offsets_one": file_of(one("U8", [1], [1]), b"1"),
    "offsets_huge": file_of(one("U8", [1], [0, 1 << 80]), b"1"),
    "shape_negative": file_of(one("U8", [-1, -1], [0, 1]), b"1"),
    "shape_as_float": file_of(one("U8", [1.0], [0, 1]), b"1"),
    "shape_as_bool": file_of(one("U8", [True], [0, 1]), b"1"),
    "shape_as_number": file_of(one("U8", 1, [0, 1]), b"1"),
    "shape_null": file_of(one("U8", None, [0, 1]), b"1"),
    "half_a_byte": file_of(one("F4", [1], [0, 1]), b"1"),
    "dtype_lower_case": file_of(one("f32"), b"1234"),
    "dtype_as_number": file_of(one(32), b"1234"),
    "dtype_as_list": file_of(one(["F32"]), b"1234"),
    "entry_null": file_of({"x": None}),
    "entry_a_list": file_of({"x": []}),
    "entry_without_shape": file_of(
        {"x": {"dtype": "U8", "data_offsets": [0, 1]}}, b"1"
    ),
    "entry_with_a_shape_twice": file_of(
        b'{"x":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}', b"1"
    ),
    "metadata_not_text": file_of({"__metadata__": {"a": 1}}),
    "metadata_a_list": file_of({"__metadata__": ["a"]}),
    "metadata_nested": file_of({"__metadata__": {"a": {"b": "c"}}}),
    "not_a_number": file_of(
        b'{"x":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"1"
    ),
    "trailing_comma": file_of(
        b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},}', b"1"
    ),
    "lone_surrogate": file_of(
        b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1"
    ),
    "control_character": file_of(
        b'{"\n":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1"
    ),
    "byte_order_mark": file_of(
        b'\xef\xbb\xbf{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1"
    ),
    "deep_nesting": file_of(b'{"x":' + b"[" * 100_000),
}

#: Refused here although the format's own loader lets them pass.
STRICTER = {
    "space_before_the_header": file_of(b" {}"),
    "a_name_twice": file_of(
        b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
        b'"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"1",
    ),
    "an_unknown_member": file_of(
        {"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], "y": 1}}, b"1"
    ),
    "zero_times_absurd": file_of(one("U8", [0, 1 << 62, 8], [0, 0])),
}


@pytest.mark.parametrize("name", [*BAD, *STRICTER])
def test_a_header_that_lies_is_a_corrupt_file_that_names_the_file(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / f"{name}.safetensors"
    path.write_bytes((BAD | STRICTER)[name])
    with pytest.raises(CorruptFile) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert caught.value.data["file"] == str(path)


@pytest.mark.parametrize("name", BAD)
def test_the_formats_own_loader_refuses_it_too(name: str) -> None:
    with pytest.raises((SafetensorError, OverflowError)):
        safetensors.numpy.load(BAD[name])


def test_the_twelve_hand_made_files_are_small() -> None:
    assert all(len(content) < 200 for content in list(BAD.values())[:12])


@pytest.mark.parametrize(
    "name", ["overlap", "hole", "unknown_dtype", "shape_against_bytes"]
)
def test_the_tensor_to_blame_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(BAD[name])
    with pytest.raises(CorruptFile) as caught:
        read_header(path)
    assert caught.value.data["tensor"] in {"x", "k", "q"}


def test_a_file_by_the_formats_own_writer_is_read_as_it_was_meant(
    tmp_path: Path,
) -> None:
    torch = pytest.importorskip("torch")
    reference = pytest.importorskip("safetensors.torch")
    tensors = {
        "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "scalar": torch.tensor(True),
        "empty": torch.zeros(2, 0),
        "ünï": torch.arange(5, dtype=torch.int16),
        "c": torch.tensor([1 + 2j]),
        "f8": torch.ones(3).to(torch.float8_e4m3fn),
    }
    path = tmp_path / "m.safetensors"
    reference.save_file(tensors, path, metadata={"format": "pt", "é": "\n"})
    header = read_header(path)
    assert {entry.name: entry.shape for entry in header.entries} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert dict(header.metadata) == {"format": "pt", "é": "\n"}
    data = path.read_bytes()[header.data_start :]
    for entry in header.entries:
        raw = (
            tensors[entry.name]
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .numpy()
            .tobytes()
        )
        assert data[entry.begin : entry.end] == raw


def test_what_is_written_here_is_read_by_the_formats_own_loader(tmp_path: Path) -> None:
    entries = (
        Entry(name="b", dtype="F32", shape=(2,), begin=4, end=12),
        Entry(name="a", dtype="U8", shape=(4,), begin=0, end=4),
        Entry(name='q"\n\u2028é', dtype="BOOL", shape=(), begin=12, end=13),
    )
    head = encode_header(entries, metadata={"k": "v"}, align_bytes=64)
    assert len(head) % 64 == 0
    path = tmp_path / "m.safetensors"
    path.write_bytes(head + bytes(range(4)) + struct.pack("<2f", 1.5, -2) + b"\1")
    loaded = safetensors.numpy.load_file(path)
    assert loaded["a"].tolist() == [0, 1, 2, 3]
    assert loaded["b"].tolist() == [1.5, -2.0]
    assert loaded['q"\n\u2028é'].shape == ()
    header = read_header(path)
    assert header.entries == entries
    assert dict(header.metadata) == {"k": "v"}


def test_odd_but_legal_headers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for content, names in (
        (file_of({}), []),
        (file_of(b"{ }   "), []),
        (file_of({"__metadata__": None}), []),
        (file_of({"__metadata__": {}}), []),
        (file_of({"": A}, b"1234"), [""]),
        (
            file_of(
                b'{ "a" : {"shape":[ ], "data_offsets":[0 , 1],"dtype" : "U8"} } ', b"1"
            ),
            ["a"],
        ),
        (
            file_of(
                {"z": {**A, "shape": [0], "data_offsets": [4, 4]}, "a": A}, b"1234"
            ),
            ["z", "a"],
        ),
        (file_of(one("F4", [2], [0, 1]), b"1"), ["x"]),
    ):
        safetensors.numpy.load(content) if names != ["x"] else None
        path.write_bytes(content)
        assert [entry.name for entry in read_header(path).entries] == names


def test_every_dtype_of_the_format_is_known(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for dtype, bits in DTYPE_BITS.items():
        content = file_of(one(dtype, [8], [0, bits]), bytes(bits))
        path.write_bytes(content)
        with safetensors.safe_open(path, "np") as file:
            assert file.get_slice("x").get_dtype() == dtype
        assert read_header(path).entries[0].dtype == dtype


def test_a_descriptor_keeps_its_position(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(file_of({"x": A}, b"1234"))
    fd = os.open(path, os.O_RDONLY)
    try:
        assert read_header(fd, name="here").path == "here"
        assert os.lseek(fd, 0, os.SEEK_CUR) == 0
    finally:
        os.close(fd)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_header(tmp_path / "absent")
    with pytest.raises(InvalidArgument):
        read_header(tmp_path)
    with pytest.raises(InvalidArgument):
        read_header("a\0b")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InvalidArgument):
        read_header(tmp_path / "fifo")
