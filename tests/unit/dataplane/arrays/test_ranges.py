"""Ranges of a segment that exists only as its sources."""

from __future__ import annotations

import numpy as np
import pytest

from tensorcast_dask.dataplane import arrays


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    flat = rng.integers(0, 255, 1000, np.uint8)
    return {
        "flat": flat,
        "none": np.zeros((0, 3)),
        "tied": flat,
        "turned": rng.standard_normal((30, 20)).T,
        "odd": rng.integers(0, 9, 7, np.uint8),
        "big-endian": np.arange(50, dtype=">i4"),
        "scalar": np.array(2.5),
    }


@pytest.mark.parametrize("nbytes", [1, 7, 64, 300, 100_000])
def test_ranges_side_by_side_are_the_segment(nbytes: int) -> None:
    index, sources = arrays.canonical(tensors())
    whole = bytearray(index.nbytes)
    arrays.copy_into(sources, index, whole)
    reader = arrays.RangeReader(sources, index)
    parts = [
        reader.read(at, min(nbytes, index.nbytes - at)).tobytes()
        for at in range(0, index.nbytes, nbytes)
    ]
    assert b"".join(parts) == bytes(whole)


def test_no_bytes_are_no_bytes() -> None:
    index, sources = arrays.canonical({"none": np.zeros(0)})
    assert arrays.RangeReader(sources, index).read(0, 0).nbytes == 0
