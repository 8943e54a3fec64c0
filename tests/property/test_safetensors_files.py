"""Whatever bytes a file has, it is read right or refused by type (P10), and what is saved comes back."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from tensorcast_dask.dataplane.files.model import open_model
from tensorcast_dask.dataplane.files.reading import read_into
from tensorcast_dask.dataplane.files.safetensors import DTYPE_BITS, parse_header
from tensorcast_dask.dataplane.files.save import save
from tensorcast_dask.exceptions import (
    CorruptFile,
    FileError,
    InvalidName,
    UnsupportedDtype,
)
from tensorcast_dask.tensors.dtypes import DTYPES
from tensorcast_dask.tensors.specs import Index
from tests.kit.models import Sample, fill

GOOD: dict[str, Any] = {
    "__metadata__": {"format": "pt", "é": "\\"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BOOL", "shape": [], "data_offsets": [24, 25]},
    "z": {"dtype": "I64", "shape": [0, 7], "data_offsets": [25, 25]},
}
GOOD_RAW = json.dumps(GOOD, separators=(",", ":")).encode() + b"  "
NBYTES = 25

edits = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 400), st.integers(0, 255)),
    st.tuples(
        st.just("insert"),
        st.integers(0, 400),
        st.sampled_from(list(b'{}[]",:0-.e \\u\x00')),
    ),
    st.tuples(st.just("delete"), st.integers(0, 400), st.integers(1, 8)),
    st.tuples(st.just("copy"), st.integers(0, 400), st.integers(1, 60)),
)


def apply(raw: bytes, changes: list[tuple[str, int, int]]) -> bytes:
    for kind, place, what in changes:
        at = place % (len(raw) + 1)
        match kind:
            case "set":
                raw = raw[:at] + bytes([what]) + raw[at + 1 :]
            case "insert":
                raw = raw[:at] + bytes([what]) + raw[at:]
            case "delete":
                raw = raw[:at] + raw[at + what :]
            case _:
                raw = raw[:at] + raw[at : at + what] + raw[at:]
    return raw


def upstream_takes(raw: bytes, nbytes: int) -> bool:
    content = struct.pack("<Q", len(raw)) + raw + bytes(nbytes)
    try:
        safetensors.deserialize(content)
    except (safetensors.SafetensorError, OverflowError):
        return False
    return True


def takes(raw: bytes, nbytes: int) -> bool:
    try:
        header = parse_header(raw, file_size=8 + len(raw) + nbytes, path="f")
    except CorruptFile:
        return False
    assert sum(entry.nbytes for entry in header.entries) == nbytes
    return True


@given(
    st.lists(edits, min_size=1, max_size=4),
    st.sampled_from([NBYTES, NBYTES, 0, 24, 33]),
)
def test_an_edited_header_is_taken_only_where_the_formats_own_loader_takes_it(
    changes: list[tuple[str, int, int]], nbytes: int
) -> None:
    raw = apply(GOOD_RAW, changes)
    if takes(raw, nbytes):
        assert upstream_takes(raw, nbytes)


numbers = st.one_of(
    st.integers(-2, 40),
    st.sampled_from([2**31, 2**32, 2**53, 2**63, 2**64, 2**64 + 1, 10**30]),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
)
shapes = st.one_of(
    st.lists(st.integers(0, 5), max_size=4), st.lists(numbers, max_size=4), numbers
)
offsets = st.one_of(
    st.tuples(st.integers(0, 60), st.integers(0, 60)), st.lists(numbers, max_size=3)
)
entries = st.one_of(
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from([*DTYPE_BITS, "F99"]),
            "shape": shapes,
            "data_offsets": offsets,
        }
    ),
    st.dictionaries(
        st.sampled_from(["dtype", "shape", "data_offsets", "x"]), shapes, max_size=4
    ),
    shapes,
)


@given(st.dictionaries(st.text(max_size=3), entries, max_size=4), st.integers(0, 60))
def test_a_made_up_header_is_taken_only_where_the_formats_own_loader_takes_it(
    document: dict[str, object], nbytes: int
) -> None:
    raw = json.dumps(document).encode()
    if takes(raw, nbytes):
        assert upstream_takes(raw, nbytes)


@given(st.binary(max_size=200), st.integers(0, 8))
def test_noise_is_refused_by_type(raw: bytes, nbytes: int) -> None:
    if takes(raw, nbytes):
        assert upstream_takes(raw, nbytes)


# ------------------------------------------------------------------ whole files


@st.composite
def indices(draw: st.DrawFn) -> Index:
    count = draw(st.integers(0, 8))
    names = [f"t{n}" for n in range(count)]
    dtypes = draw(
        st.lists(st.sampled_from(list(DTYPES.values())), min_size=count, max_size=count)
    )
    shape = st.lists(st.sampled_from([0, 1, 2, 3, 8, 32]), max_size=3).map(tuple)
    drawn = draw(st.lists(shape, min_size=count, max_size=count))
    entry_of = list(range(count))
    for n in range(draw(st.integers(0, 4)) if count else 0):
        owner = draw(st.integers(0, count - 1))
        at = draw(st.integers(entry_of.index(owner) + 1, len(names)))
        names.insert(at, f"tied{n}")
        entry_of.insert(at, owner)
    return Index(names, dtypes, drawn, entry_of=entry_of)


@given(indices(), st.one_of(st.none(), st.integers(1, 3000)), st.integers(0, 9))
def test_what_is_saved_comes_back_with_its_index(
    tmp_path_factory: pytest.TempPathFactory,
    index: Index,
    shard_bytes: int | None,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("saved")
    artifact = fill(index, seed)
    save(folder, index, memoryview(artifact.segment), max_shard_bytes=shard_bytes)
    with open_model(folder) as model:
        segment = bytearray(b"\xaa" * model.index.nbytes)
        report = read_into(model, memoryview(segment), threads=1)
        assert Sample(model.index, bytes(segment)) == artifact
    assert report.verified


@given(st.lists(edits, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_a_damaged_file_of_ours_never_gives_other_bytes_as_verified(
    tmp_path_factory: pytest.TempPathFactory,
    changes: list[tuple[str, int, int]],
    random: Any,
) -> None:
    path = tmp_path_factory.mktemp("saved") / "m.safetensors"
    artifact = fill(
        Index.of(
            Index(
                ["a", "b"], [DTYPES["complex128"], DTYPES["int8"]], [(3,), (5,)]
            ).specs()
        ),
        1,
    )
    save(path, artifact.index, memoryview(artifact.segment))
    start = random.randrange(path.stat().st_size)
    content = path.read_bytes()
    path.write_bytes(content[:start] + apply(content[start:], changes))
    try:
        with open_model(path) as model:
            segment = bytearray(model.index.nbytes)
            report = read_into(model, memoryview(segment), threads=1)
    except (FileError, UnsupportedDtype, InvalidName):
        return
    if report.verified:
        assert Sample(model.index, bytes(segment)) == artifact


# ---------------------------------------------------------------------- memory

_MEASURE = """
import resource, sys
from tensorcast_dask.dataplane.files.safetensors import read_header
from tensorcast_dask.exceptions import CorruptFile
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_header(sys.argv[1])
except CorruptFile:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(
    "head",
    [
        b'{"x":' + b"[" * (16 << 20),
        b'{"x":[' + b"[]," * (5 << 20),
        b'{"x":{"dtype":"U8","shape":[' + b"1," * (8 << 20),
        b'{"__metadata__":[' + b"{}," * (5 << 20),
        b'{"__metadata__":{"a":{' + b'"b":1,' * (3 << 20),
    ],
    ids=["nested", "lists", "dimensions", "metadata_list", "metadata_object"],
)
def test_memory_stays_in_proportion_to_a_hostile_header(
    tmp_path: Path, head: bytes
) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(head)) + head)
    child = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(path)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert int(child.stdout) * 1024 < 5 * len(head)
