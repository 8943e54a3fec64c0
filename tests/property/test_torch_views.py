from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
import torch

from tensorcast_dask.dataplane.arrays import canonical, copy_into, copy_out, materialise
from tensorcast_dask.tensors.views import View
from tests.kit.segments import segment, stored
from tests.kit.strategies import slices

kinds = st.sampled_from(
    [
        torch.bfloat16,
        torch.float8_e5m2,
        torch.float32,
        torch.complex64,
        torch.complex128,
    ]
)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bits of some dtype, seen through any chain of torch views."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    kind = draw(kinds)
    nbytes = int(np.prod(shape, dtype=int)) * kind.itemsize
    data = draw(st.binary(min_size=nbytes, max_size=nbytes))
    tensor = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).reshape(shape)
        if nbytes
        else torch.empty(shape, dtype=kind)
    )
    for _ in range(draw(st.integers(0, 3))):
        how = draw(st.sampled_from(["cut", "permute", "expand", "conj", "imag"]))
        if how == "cut":
            steps = [
                draw(slices(n).filter(lambda s: (s.step or 1) > 0))
                for n in tensor.shape
            ]
            tensor = tensor[tuple(steps)] if steps else tensor
        elif how == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
        elif how == "expand":
            tensor = tensor.expand(draw(st.integers(0, 3)), *tensor.shape)
        elif how == "conj":
            tensor = tensor.conj()
        elif tensor.is_complex():
            tensor = tensor.imag
    return tensor


def bits(tensor: torch.Tensor) -> bytes:
    """Element by element; the lazy bits by flipping the sign in the element's last byte."""
    parts = 2 if tensor.is_complex() else 1
    width = tensor.dtype.itemsize // parts
    plain = torch.empty(0, dtype=INTEGERS[width]).set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * parts,
        (*tensor.shape, parts),
        (*(n * parts for n in tensor.stride()), 1),
    )
    found = bytearray()
    for number, element in enumerate(plain.reshape(-1).tolist()):
        data = bytearray(element.to_bytes(width, "little", signed=width > 1))
        imaginary = parts == 2 and number % 2
        if tensor.is_neg() != (tensor.is_conj() and bool(imaginary)):
            data[-1] ^= 0x80
        found += data
    return bytes(found)


@given(st.lists(tensors(), max_size=3))
def test_what_comes_back_are_the_logical_values_bit_for_bit(
    given_: list[torch.Tensor],
) -> None:
    named = {str(at): tensor for at, tensor in enumerate(given_)}
    memory, index = stored(named)
    made = materialise(memory, index, framework="torch")
    targets = {
        name: torch.empty(
            tensor.T.shape if tensor.ndim == 2 else tensor.shape, dtype=tensor.dtype
        )
        for name, tensor in named.items()
    }
    targets = {n: t.T if t.ndim == 2 else t for n, t in targets.items()}
    copy_out(memory, index, targets)
    for name, tensor in named.items():
        found = made[name]
        assert isinstance(found, torch.Tensor)
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        assert bits(found) == bits(tensor)
        assert bits(targets[name]) == bits(tensor)


@given(st.data())
def test_torch_reads_a_view_as_numpy_does(data: st.DataObject) -> None:
    start = np.arange(60, dtype=np.int32).reshape(3, 4, 5)
    key = tuple(data.draw(slices(n)) for n in start.shape)
    order = tuple(data.draw(st.permutations(range(3))))
    view = View.of({"tensor": key}).then(View.transpose({"tensor": order}))
    memory, index = stored(start)
    made = materialise(memory, index, framework="torch", view=view)["tensor"]
    assert isinstance(made, torch.Tensor)
    assert made.numpy().tolist() == start[key].transpose(order).tolist()


@given(st.integers(0, 5), st.integers(1, 3))
def test_sources_can_be_copied_again(rows: int, threads: int) -> None:
    tensor = torch.arange(rows * 3.0).view(rows, 3).T
    index, sources = canonical({"a": tensor, "b": tensor[0].clone()})
    copies = [segment(index.nbytes) for _ in range(2)]
    for copy in copies:
        copy_into(sources, index, copy, threads=threads)
    assert copies[0][:] == copies[1][:]
