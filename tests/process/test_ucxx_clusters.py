"""A Dask cluster whose own messages go over UCX: nothing of ours is different.

`distributed-ucxx` 0.52 asks for one release of Dask (2026.7.1) and works with the pinned one
too when it is installed without its dependencies, as `.ci/install-ucx` does.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.kit.leaks import no_leaks

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        importlib.util.find_spec("distributed_ucxx") is None,
        reason="distributed-ucxx is not installed (.ci/install-ucx)",
    ),
]

_CODE = """
import numpy as np
import tensorcast_dask as tc

if __name__ == "__main__":
    with (
        tc.LocalCluster(n_workers=2, protocol="ucxx", host_memory="64 MiB") as cluster,
        tc.connect(cluster) as cast,
    ):
        assert cluster.scheduler_address.startswith("ucxx://"), cluster
        first, second = cast.workers()
        held = cast.put({"x": np.arange(1 << 20)}, "a/x", worker=first)
        held.publish()
        second.replicate(held).result()
        assert len(held.locations()) == 2
        assert cast.client.submit(sum, [1, 2, 3]).result() == 6
        found = held.tensor_dict(framework="numpy")["x"]
        assert (found == np.arange(1 << 20)).all()
    print("done")
"""


def test_everything_works_on_a_cluster_that_speaks_ucxx() -> None:
    with TemporaryDirectory(prefix="tc-", dir="/tmp") as folder, no_leaks():
        script = Path(folder) / "on_ucxx.py"
        script.write_text(_CODE)
        ended = subprocess.run(
            [sys.executable, str(script)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "TENSORCAST_RUN_DIR": f"{folder}/run",
            },
            capture_output=True,
            text=True,
            timeout=80,
            check=False,
        )
    assert ended.stdout.endswith("done\n"), ended.stderr[-3000:]
