"""The demo as a newcomer runs it, into a pipe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.kit.commands import Commands
from tests.kit.eventually import eventually
from tests.kit.local import stores_in

STEPS = [
    "cluster",
    "import",
    "check",
    "map",
    "view",
    "replicate",
    "kill -9",
    "lose a node",
    "version",
]


@pytest.mark.timeout(180)
def test_the_demo_tells_its_story_into_a_pipe_and_ends(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tensorcast = Commands(tmp_path_factory.mktemp("c"))
    model: Path = tensorcast.folder / "small.safetensors"
    save_file(
        {
            "embed": np.arange(1 << 21, dtype=np.float32).reshape(-1, 64),
            "bias": np.linspace(0, 1, 64, dtype=np.float16),
            "steps": np.arange(10),
        },
        model,
    )
    command = [
        sys.executable,
        "-m",
        "tensorcast_dask.cli",
        "demo",
        "--model",
        str(model),
    ]
    ended = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$@" | cat', "-", *command],
        env=tensorcast.env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    told = [line for line in ended.stdout.splitlines() if line.startswith("  ")]
    assert [line[2:14].rstrip() for line in told][: len(STEPS)] == STEPS
    assert "all of it in" in ended.stdout
    eventually(
        lambda: not stores_in(tensorcast.run_dir), within_s=20, what="no store is left"
    )
