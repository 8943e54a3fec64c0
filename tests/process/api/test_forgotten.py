"""A program that ends without closing anything, as first programs do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.commands import Commands
from tests.kit.eventually import eventually
from tests.kit.local import stores_in

PROGRAM = """
import numpy as np
import tensorcast_dask as tc

if __name__ == "__main__":
    cluster = tc.LocalCluster(n_workers=1, host_memory="32 MiB")
    cast = tc.connect(cluster)
    artifact = cast.put(np.ones(1 << 20), "forgotten")
    print(artifact.tensor(framework="numpy").sum())
"""


def test_it_ends_quietly_and_leaves_nothing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    environment = Commands(tmp_path_factory.mktemp("f"))
    program: Path = environment.folder / "program.py"
    program.write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, str(program)],
        env=environment.env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "1048576.0\n"), ended.stderr
    assert "Traceback" not in ended.stderr
    eventually(
        lambda: not stores_in(environment.run_dir), within_s=10, what="no store is left"
    )
    assert not list(environment.run_dir.rglob("catalog.duckdb*"))
