from __future__ import annotations

import warnings

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from tensorcast_dask.dataplane.arrays import canonical, copy_out, materialise
from tensorcast_dask.exceptions import InvalidArgument, Mismatch, UnsupportedDtype
from tensorcast_dask.tensors.dtypes import DTYPES
from tests.kit.contracts import ArraysContract, noise
from tests.kit.segments import stored

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental",
    "ignore:.*NestedTensor.*",
    "ignore:.*sparse.*",
)


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(value: object) -> bytes:
    assert isinstance(value, torch.Tensor)
    plain = value.detach().cpu().resolve_conj().resolve_neg()
    # As integers: torch's own copy of a bool makes 1 of every other byte than 0.
    plain = plain.view(INTEGERS.get(plain.dtype.itemsize, plain.dtype))
    flat = plain.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


class TestTorch(ArraysContract):
    framework = "torch"

    def dtypes(self) -> list[str]:
        return [name for name, entry in DTYPES.items() if hasattr(torch, entry.torch)]

    def make(self, name: str, shape: tuple[int, ...], data: bytes) -> object:
        if not data:
            return torch.empty(shape, dtype=getattr(torch, name))
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()
        return flat.view(getattr(torch, name)).reshape(shape)

    def bits(self, value: object) -> bytes:
        assert isinstance(value, torch.Tensor)
        return bits_of(value)

    def meta(self, value: object) -> tuple[str, tuple[int, ...]]:
        assert isinstance(value, torch.Tensor)
        return str(value.dtype).removeprefix("torch."), tuple(value.shape)

    def address(self, value: object) -> int:
        assert isinstance(value, torch.Tensor)
        return int(
            value.untyped_storage().data_ptr() + value.storage_offset() * value.itemsize
        )

    def owned_bytes(self, value: object) -> int:
        assert isinstance(value, torch.Tensor)
        return int(value.untyped_storage().nbytes())

    def layouts(self, value: object) -> dict[str, object]:
        assert isinstance(value, torch.Tensor)
        return {
            "transposed": value.T,
            "stepped": value[::2, 1::2],
            "part": value[1:3],
            "columns": value[:, 2:4],
            "expanded": value[1].expand(3, -1),
            "scalar view": value[2, 3],
            "new axis": value[:, None, ::3],
            "channels last": value.as_strided((1, 2, 2, 6), (24, 1, 12, 2)),
            "overlapping": value.as_strided((5, 4), (3, 2)),
        }

    def fill(self, value: object, number: int) -> None:
        assert isinstance(value, torch.Tensor)
        value.fill_(number)

    def rows(self, value: object) -> list[object]:
        assert isinstance(value, torch.Tensor)
        return list(value.unbind())

    def broadcast(self, value: object, shape: tuple[int, ...]) -> object:
        assert isinstance(value, torch.Tensor)
        return value.expand(shape)


COMPLEX = [torch.complex32, torch.complex64, torch.complex128]


def complex_noise(kind: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(noise(8 * kind.itemsize)), dtype=kind)


@pytest.mark.parametrize("kind", COMPLEX, ids=str)
def test_lazily_conjugated_tensors_are_stored_by_their_values(
    kind: torch.dtype,
) -> None:
    value = complex_noise(kind)
    lazy = {
        "conj": value.conj(),
        "conj of a part": value[::2].conj(),
        "imag of conj": value.conj().imag,
        "real of conj": value.conj().real,
        "neg of conj": torch._neg_view(value.conj()),
        "conj of conj": value.conj().conj(),
    }
    assert lazy["conj"].is_conj()
    assert lazy["imag of conj"].is_neg()
    memory, index = stored(lazy)
    made = materialise(memory, index, framework="torch")
    whole = np.frombuffer(bits_of(value), f"<u{kind.itemsize // 2}").reshape(-1, 2)
    sign = 1 << (4 * kind.itemsize - 1)
    flipped = whole ^ np.array([0, sign], whole.dtype)
    expected = {
        "conj": flipped,
        "conj of a part": flipped[::2],
        "imag of conj": flipped[:, 1],
        "real of conj": whole[:, 0],
        "neg of conj": flipped ^ np.array(sign, whole.dtype),
        "conj of conj": whole,
    }
    for name, values in expected.items():
        tensor = made[name]
        assert isinstance(tensor, torch.Tensor)
        assert not tensor.is_conj()
        assert not tensor.is_neg()
        assert bits_of(tensor) == values.tobytes(), name


def test_lazily_negated_tensors_are_stored_by_their_values() -> None:
    value = torch.tensor([1.0, -0.0, float("inf"), float("nan")])
    memory, index = stored(
        {"neg": torch._neg_view(value), "int": torch._neg_view(torch.arange(3))}
    )
    made = materialise(memory, index, framework="torch")
    assert bits_of(made["neg"]) == bits_of(-value)
    assert bits_of(made["int"]) == bits_of(-torch.arange(3))


def test_a_conjugated_view_is_not_tied_to_its_base() -> None:
    value = complex_noise(torch.complex64)
    index, _ = canonical({"a": value, "b": value.conj(), "c": value.conj()})
    assert index.ties == (("b", "c"),)


def test_lazily_conjugated_and_negated_targets_are_refused() -> None:
    memory, index = stored(
        {"c": complex_noise(torch.complex64), "r": torch.arange(4.0)}
    )
    targets = {
        "c": torch.zeros(8, dtype=torch.complex64).conj(),
        "r": torch._neg_view(torch.zeros(4)),
    }
    with pytest.raises(Mismatch, match=r"'c' is a lazily .* 'r' is a lazily"):
        copy_out(memory, index, targets)


def test_parameters_and_tensors_that_need_gradients_are_tensors() -> None:
    layer = torch.nn.Linear(3, 4)
    layer.register_buffer("steps", torch.tensor(3))
    memory, index = stored(dict(layer.named_parameters()) | dict(layer.named_buffers()))
    made = materialise(memory, index)
    assert list(made) == ["weight", "bias", "steps"]
    with torch.no_grad():
        before = bits_of(layer.weight)
        layer.weight.zero_()
    copy_out(memory, index, dict(layer.named_parameters()))
    assert bits_of(layer.weight) == before
    assert layer.weight.requires_grad
    transposed = torch.nn.Parameter(torch.zeros(3, 4)).T
    copy_out(memory, index, {"weight": transposed})
    assert bits_of(transposed) == before


def test_a_state_dict_with_tied_weights_loads_into_a_tied_model() -> None:
    embed, head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
    head.weight = embed.weight
    model = torch.nn.ModuleDict({"embed": embed, "head": head})
    memory, index = stored(model.state_dict())
    assert index.ties == (("embed.weight", "head.weight"),)
    made = materialise(memory, index)
    model.load_state_dict(made)
    assert model["embed"].weight is model["head"].weight
    assert bits_of(model["head"].weight) == bits_of(made["head.weight"])


def test_a_tensor_saves_its_own_bytes_only() -> None:
    memory, index = stored(
        {str(at): torch.full((256,), float(at)) for at in range(100)}
    )
    made = materialise(memory, index, framework="torch")
    storages = {t.untyped_storage().data_ptr() for t in made.values()}  # type: ignore[attr-defined]
    assert len(storages) == 100


class Wrapper(torch.Tensor):  # type: ignore[misc]
    """A subclass without bytes of its own."""

    @classmethod
    def __torch_dispatch__(cls, *_: object, **__: object) -> None:
        raise NotImplementedError


def refused() -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "sparse": torch.eye(3).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(),
            "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
            "meta": torch.empty(3, device="meta"),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "jagged": torch.nested.nested_tensor(
                [torch.ones(2), torch.ones(3)], layout=torch.jagged
            ),
            "mkldnn": torch.ones(3).to_mkldnn(),
            "wrapper": torch.Tensor._make_wrapper_subclass(Wrapper, (3,)),
            "sub-byte": torch.zeros(3, dtype=torch.uint8).view(torch.uint4),
            "bits": torch.zeros(3, dtype=torch.uint8).view(torch.bits8),
        }


@pytest.mark.parametrize("kind", list(refused()))
def test_what_is_not_dense_is_refused_before_anything(kind: str) -> None:
    with pytest.raises(UnsupportedDtype, match="'x'"):
        canonical({"fine": torch.ones(3), "x": refused()[kind]})


@pytest.mark.parametrize("kind", ["uint4", "int4", "bits16", "bits1x8"])
def test_a_dtype_that_is_unknown_is_named_and_its_bytes_can_be_stored(
    kind: str,
) -> None:
    found = getattr(torch, kind)
    value = torch.arange(6, dtype=torch.uint8).view(found)
    with pytest.raises(UnsupportedDtype, match=r"x\.view\(torch\.uint8\)") as refusal:
        canonical({"x": value})
    assert f"torch.{kind}" in str(refusal.value)
    assert "dense" not in str(refusal.value)
    memory, index = stored({"x": value.view(torch.uint8)})
    made = materialise(memory, index, framework="torch")["x"]
    assert made.view(found).dtype is found  # type: ignore[attr-defined]
    assert made.tolist() == list(range(6))  # type: ignore[attr-defined]


def test_a_read_only_buffer_is_refused() -> None:
    memory, index = stored(torch.ones(3))
    with pytest.raises(InvalidArgument, match="writable"):
        materialise(memory[:], index, framework="torch")


def test_a_target_is_filled_from_a_read_only_buffer() -> None:
    memory, index = stored(torch.arange(6.0).view(2, 3))
    target = torch.zeros(3, 2).T
    copy_out(memory[:], index, {"tensor": target})
    assert torch.equal(target, torch.arange(6.0).view(2, 3))


def test_arrays_of_both_libraries_mix_and_are_tied_across_them() -> None:
    shared = np.arange(6, dtype=np.float32)
    tensors = {
        "numpy": shared,
        "torch": torch.from_numpy(shared),
        "bf16": torch.ones(2, dtype=torch.bfloat16),
        "part": torch.from_numpy(shared)[1:],
    }
    memory, index = stored(tensors)
    assert index.ties == (("numpy", "torch"),)
    made = materialise(memory, index, framework="numpy", names=["numpy", "part"])
    assert made["numpy"].tolist() == shared.tolist()  # type: ignore[attr-defined]
    assert made["part"].tolist() == shared[1:].tolist()  # type: ignore[attr-defined]


def test_reversed_views_are_copied() -> None:
    from tensorcast_dask.tensors.views import View, s_

    memory, index = stored(torch.arange(6.0).view(2, 3))
    made = materialise(memory, index, view=View.of({"tensor": s_[::-1, ::-2]}))[
        "tensor"
    ]
    assert isinstance(made, torch.Tensor)
    assert made.tolist() == [[5.0, 3.0], [2.0, 0.0]]
