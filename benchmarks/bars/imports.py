"""``import tensorcast_dask``: loads nothing heavy, and costs at most 40 ms."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.harness import ROOT, absolute, emit, seconds
from benchmarks.sizes import Sizes, parse

HEAVY = ("numpy", "dask", "distributed", "duckdb", "tornado", "torch", "asyncio")


def python(code: str) -> str:
    """Run a line of code in a new interpreter; what it printed."""
    return subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=30,
    ).stdout


def heavy() -> float:
    """How many of the heavy modules the import loads."""
    loaded = python("import sys, tensorcast_dask; print(*sys.modules)").split()
    return float(sum(name in loaded for name in HEAVY))


def extra_ms() -> float:
    """One pair: with the import, and without."""
    with_it = seconds(lambda: python("import tensorcast_dask"))
    without = seconds(lambda: python("pass"))
    return (with_it - without) * 1e3


def main(sizes: Sizes) -> None:
    """Two lines."""
    emit(
        absolute(
            "import loads heavy modules",
            heavy,
            bar=0,
            better="lower",
            unit="modules",
            times=1,
            notes={"of": HEAVY},
        )
    )
    emit(
        absolute(
            "import, more than python -c pass",
            extra_ms,
            bar=40,
            better="lower",
            unit="ms",
            times=max(sizes.pairs, 3) * 2,
            warm=2,
        )
    )


if __name__ == "__main__":
    main(parse())
