from __future__ import annotations

import threading

import numpy as np
import pytest

from tensorcast_dask.dataplane.arrays import Source, canonical, copy_into
from tensorcast_dask.dataplane.arrays.numpy_backend import NumpyBackend
from tests.kit.segments import segment


class Failing(NumpyBackend):
    """Fails to write what is not flat."""

    def write(self, sources: object, out: object) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_in_a_copy_is_raised_once_no_thread_is_left(threads: int) -> None:
    rest = {str(at): np.ones(1 << 20, np.uint8) for at in range(20)}
    index, sources = canonical({"bad": np.ones((4, 4)).T, **rest})
    bad = sources[0]
    sources[0] = Source(Failing(), bad.value, bad.dtype, bad.shape, bad.flat)
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError):
        copy_into(sources, index, segment(index.nbytes), threads=threads)
    assert (
        not set(threading.enumerate()) - before
    )  # an earlier test's may end meanwhile
