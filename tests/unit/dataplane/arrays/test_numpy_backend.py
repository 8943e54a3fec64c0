from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest

from tensorcast_dask.dataplane.arrays import canonical, copy_out, materialise
from tensorcast_dask.dataplane.arrays.numpy_backend import numpy_dtype
from tensorcast_dask.exceptions import Mismatch, UnsupportedDtype
from tensorcast_dask.tensors.dtypes import DTYPES
from tests.kit.contracts import ArraysContract, noise
from tests.kit.segments import stored

Array = np.ndarray[Any, np.dtype[Any]]


def array_of(value: object) -> Array:
    assert isinstance(value, np.ndarray)
    return value


class TestNumpy(ArraysContract):
    framework = "numpy"

    def dtypes(self) -> list[str]:
        names = [name for name, entry in DTYPES.items() if entry.numpy is not None]
        try:
            import ml_dtypes  # noqa: F401 - an optional library
        except ImportError:
            return [name for name in names if not DTYPES[name].needs_ml_dtypes]
        return names

    def make(self, name: str, shape: tuple[int, ...], data: bytes) -> object:
        made = np.empty(shape, numpy_dtype(DTYPES[name]))
        made.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
        return made

    def bits(self, value: object) -> bytes:
        array = array_of(value)
        return array.astype(array.dtype.newbyteorder("<"), order="C").tobytes()

    def meta(self, value: object) -> tuple[str, tuple[int, ...]]:
        array = array_of(value)
        return array.dtype.name, array.shape

    def address(self, value: object) -> int:
        return int(array_of(value).__array_interface__["data"][0])

    def owned_bytes(self, value: object) -> int:
        return array_of(value).nbytes

    def layouts(self, value: object) -> dict[str, object]:
        a = array_of(value)
        found: dict[str, object] = {
            "transposed": a.T,
            "fortran": np.asfortranarray(a),
            "stepped": a[::2, 1::2],
            "reversed": a[::-1, ::-1],
            "part": a[1:3],
            "columns": a[:, 2:4],
            "broadcast": np.broadcast_to(a[1], (3, a.shape[1])),
            "read-only": np.broadcast_to(a, a.shape),
            "scalar view": a[2, 3, ...],
            "new axis": a[:, None, ::3],
            "matrix": a.view(np.matrix) if a.dtype.kind != "V" else a,
        }
        if a.dtype.itemsize > 1 and a.dtype.kind in "iufc" and a.dtype.isbuiltin == 1:
            found["swapped"] = a.astype(a.dtype.newbyteorder(">"))
            found["swapped and stepped"] = a.astype(a.dtype.newbyteorder(">"))[
                ::3, ::-2
            ]
        return found

    def fill(self, value: object, number: int) -> None:
        array_of(value)[...] = number

    def rows(self, value: object) -> list[object]:
        return list(array_of(value))

    def broadcast(self, value: object, shape: tuple[int, ...]) -> object:
        array = array_of(value)
        strides = (0,) * len(shape)
        return np.lib.stride_tricks.as_strided(array, shape, strides, writeable=True)


REFUSED: list[object] = [
    np.array([None, "x"], object),
    np.array(["text"]),
    np.array([b"bytes"]),
    np.array(["2026-01-01"], "datetime64[D]"),
    np.array([5], "timedelta64[s]"),
    np.zeros(2, [("a", "f4"), ("b", "i4")]),
    np.zeros(2, "V4"),
    np.zeros(2, np.longdouble),
    np.zeros(2, np.clongdouble),
    np.ma.masked_array([1, 2], [True, False]),
    np.zeros(2, [("a", "f4")]).view(np.recarray),
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: str(value.dtype))
def test_what_has_no_plain_numbers_is_refused_before_anything(value: object) -> None:
    with pytest.raises(UnsupportedDtype, match="'x'"):
        canonical({"fine": np.zeros(3), "x": value})


@pytest.mark.parametrize(
    ("value", "advice", "instead"),
    [
        (np.array(["2026-01-01", "NaT"], "M8[D]"), ".view('int64')", "int64"),
        (np.array([[5], [-1]], "m8[25s]"), ".view('int64')", "int64"),
        (np.array([b"ab", b"c"]), ".view('uint8')", "uint8"),
        (np.array("text"), ".view('uint8')", "uint8"),
        (np.ones((2, 3), [("a", "f4"), ("b", "i4")]), ".view('uint8')", "uint8"),
        (np.frombuffer(b"abcdefgh", "V4"), ".view('uint8')", "uint8"),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_a_refusal_says_what_to_give_instead_and_that_comes_back_whole(
    value: np.ndarray, advice: str, instead: str
) -> None:
    with pytest.raises(UnsupportedDtype, match=re.escape(advice)):
        canonical({"x": value})
    memory, index = stored({"x": np.ascontiguousarray(value).view(instead)})
    (made,) = materialise(memory, index, framework="numpy").values()
    back = array_of(made).view(value.dtype).reshape(value.shape)
    assert back.tobytes() == value.tobytes()


@pytest.mark.parametrize("name", ["longdouble", "clongdouble"])
def test_bits_that_other_machines_read_otherwise_are_to_be_converted(name: str) -> None:
    with pytest.raises(UnsupportedDtype, match=r"give its \.astype\('(float|complex)"):
        canonical(np.zeros(2, name))


@pytest.mark.parametrize(
    "name", ["float4_e2m1fn", "int4", "uint4", "float8_e4m3", "float6_e2m3fn"]
)
def test_dtypes_of_ml_dtypes_that_the_table_lacks_are_refused(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(UnsupportedDtype):
        canonical(np.zeros(2, getattr(ml_dtypes, name)))


def test_a_void_dtype_is_not_mistaken_for_another_one() -> None:
    posing = np.dtype((np.void, 2))
    with pytest.raises(UnsupportedDtype):
        canonical(np.zeros(2, posing))


def test_a_numpy_scalar_is_a_tensor_without_dimensions() -> None:
    memory, index = stored({"s": np.float32(-0.0)})
    made = materialise(memory, index, framework="numpy")["s"]
    assert isinstance(made, np.ndarray)
    assert (made.shape, made.dtype, made.tobytes()) == (
        (),
        np.float32,
        b"\x00\x00\x00\x80",
    )


def test_without_ml_dtypes_only_making_the_array_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    memory, index = stored({"w": np.ones(3, ml_dtypes.bfloat16), "v": np.ones(2)})
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    monkeypatch.setattr("tensorcast_dask.dataplane.arrays.numpy_backend._NUMPY_OF", {})
    with pytest.raises(UnsupportedDtype, match="ml_dtypes"):
        materialise(memory, index, framework="numpy")
    assert list(materialise(memory, index, framework="numpy", names=["v"])) == ["v"]
    assert list(materialise(memory, index, framework="raw")) == ["w", "v"]


@pytest.mark.parametrize("name", ["complex32", "float4_e2m1fn_x2"])
def test_a_dtype_that_numpy_lacks_is_refused_when_it_is_made(name: str) -> None:
    with pytest.raises(UnsupportedDtype, match="torch"):
        numpy_dtype(DTYPES[name])


def test_a_read_only_target_is_refused() -> None:
    memory, index = stored(np.ones(3))
    target = np.zeros(3)
    target.setflags(write=False)
    with pytest.raises(Mismatch, match="read-only"):
        copy_out(memory, index, {"tensor": target})


def test_a_byte_swapped_target_gets_the_values() -> None:
    value = np.frombuffer(noise(24), np.float32)
    memory, index = stored(value)
    target = np.zeros(6, ">f4")
    copy_out(memory, index, {"tensor": target})
    assert target.byteswap().tobytes() == value.tobytes()


def test_owners_and_their_views_are_tied_by_memory() -> None:
    w = np.ones((3, 4))
    index, _ = canonical({"w": w, "same": w[:], "other": np.ones((3, 4)), "row": w[0]})
    assert index.ties == (("w", "same"),)


def test_swapped_and_native_readings_of_one_memory_are_two_tensors() -> None:
    w = np.ones(4, "<i4")
    index, _ = canonical({"little": w, "big": w.view(">i4")})
    assert index.ties == ()


def test_arrays_over_a_read_only_buffer_are_read_only() -> None:
    memory, index = stored(np.arange(5))
    made = materialise(memory[:], index, framework="numpy")["tensor"]
    assert isinstance(made, np.ndarray)
    assert not made.flags.writeable
