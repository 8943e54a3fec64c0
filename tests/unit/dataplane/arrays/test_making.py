from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tensorcast_dask.dataplane.arrays import (
    backend_named,
    default_framework,
    materialise,
)
from tensorcast_dask.exceptions import UnsupportedPlatform
from tests.kit.segments import stored
from tests.kit.source import ROOT

#: Runs in a fresh interpreter in which torch may not be imported; prints nothing.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import numpy as np
from tensorcast_dask.dataplane.arrays import canonical, copy_into, copy_out, materialise
from tensorcast_dask.exceptions import UnsupportedPlatform
tensors = {"a": np.arange(6.0).reshape(2, 3).T, "b": np.float32(1)}
index, sources = canonical(tensors)
memory = bytearray(index.nbytes)
copy_into(sources, index, memory)
made = materialise(memory, index)
assert all(np.array_equal(made[name], tensors[name]) for name in tensors)
target = np.zeros((3, 2))
copy_out(memory, index, {"a": target})
assert np.array_equal(target, tensors["a"])
try:
    materialise(memory, index, framework="torch")
except UnsupportedPlatform:
    pass
else:
    raise SystemExit("torch was found")
"""

#: torch is installed here, and nobody asked for it.
TORCH_UNASKED = """
import sys
import numpy as np
from tensorcast_dask.dataplane.arrays import canonical, copy_into, default_framework, materialise
index, sources = canonical(np.arange(6.0))
memory = bytearray(index.nbytes)
copy_into(sources, index, memory)
default_framework()
materialise(memory, index, framework="numpy")
materialise(memory, index, framework="raw")
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    "code", [WITHOUT_TORCH, TORCH_UNASKED], ids=["absent", "unasked"]
)
def test_torch_is_optional_and_never_imported_unasked(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("framework", ["jax", "", "Numpy", "cupy"])
def test_an_unknown_framework_is_refused(framework: str) -> None:
    memory, index = stored(np.ones(3))
    with pytest.raises(UnsupportedPlatform):
        backend_named(framework)
    with pytest.raises(UnsupportedPlatform):
        materialise(memory, index, framework=framework)


def test_without_a_framework_torch_is_used_where_it_is_there() -> None:
    memory, index = stored(np.ones(3))
    made = materialise(memory, index)["tensor"]
    assert type(made).__module__.partition(".")[0] == default_framework()
