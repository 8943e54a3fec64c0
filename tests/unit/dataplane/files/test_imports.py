"""The store process reads and writes files: nothing here may load an array library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import tensorcast_dask.dataplane.files as room

FORBIDDEN = {
    "numpy",
    "torch",
    "dask",
    "distributed",
    "tornado",
    "duckdb",
    "ml_dtypes",
    "safetensors",
    "asyncio",
}


def test_the_room_loads_no_array_library_and_no_dask() -> None:
    folder = Path(room.__file__).parent
    modules = [f"{room.__name__}.{path.stem}" for path in folder.glob("*.py")]
    code = f"import sys, {', '.join(modules)}\nprint(*sys.modules)"
    child = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
        cwd=folder.parents[2],
    )
    assert FORBIDDEN.isdisjoint(child.stdout.split())
