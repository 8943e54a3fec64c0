from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import UnsupportedDtype
from tensorcast_dask.tensors.dtypes import DTYPES, dtype, from_safetensors


@pytest.mark.parametrize("name", list(DTYPES))
def test_every_dtype_is_found_by_its_own_name(name: str) -> None:
    assert dtype(name).name == name


@pytest.mark.parametrize(
    "name",
    [
        "object",
        "str",
        "datetime64[ns]",
        "timedelta64[s]",
        "void8",
        "float128",
        "qint8",
        "",
    ],
)
def test_what_is_not_dense_numbers_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedDtype):
        dtype(name)


def test_safetensors_names_are_unique_and_lead_back() -> None:
    named = [entry for entry in DTYPES.values() if entry.safetensors is not None]
    assert len({entry.safetensors for entry in named}) == len(named)
    for entry in named:
        assert entry.safetensors is not None
        assert from_safetensors(entry.safetensors) is entry


@pytest.mark.parametrize("code", ["F4", "f32", "", "I128"])
def test_an_unknown_safetensors_dtype_is_refused(code: str) -> None:
    with pytest.raises(UnsupportedDtype):
        from_safetensors(code)


def test_numpys_names_have_the_itemsize_that_numpy_gives_them() -> None:
    numpy = pytest.importorskip("numpy")
    for entry in DTYPES.values():
        if entry.numpy is not None and not entry.needs_ml_dtypes:
            assert numpy.dtype(entry.numpy).itemsize == entry.itemsize


def test_every_dense_torch_dtype_is_in_the_table() -> None:
    torch = pytest.importorskip("torch")
    dense = {
        str(found).removeprefix("torch.")
        for found in vars(torch).values()
        if isinstance(found, torch.dtype)
    }
    sub_byte = {f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)}
    bits = {"bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"}
    quantised = {"qint8", "qint32", "quint8", "quint4x2", "quint2x4"}
    assert dense - sub_byte - bits - quantised <= set(DTYPES)
    for entry in DTYPES.values():
        found = getattr(torch, entry.torch, None)
        assert found is None or found.itemsize == entry.itemsize
