"""A process that attaches as an instance, for tests that kill it.

python engine_process.py NAME RUN_DIR    until stdin ends
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

from tensorcast_dask.instance import attach


class Engine:
    """Weights, and nothing else."""

    def __init__(self) -> None:
        self._weights = {"w": np.zeros(1 << 18)}

    def weights(self) -> dict[str, np.ndarray]:
        """The live weights."""
        return self._weights


def main() -> None:
    name, run_dir = sys.argv[1:]
    engine = Engine()
    with attach(name, engine=engine, run_dir=run_dir) as instance:

        @instance.function
        def pid() -> int:
            return os.getpid()

        @instance.function
        def note(path: str, until: str = "") -> int:
            """Write that it began; end when the file `until` is there."""
            with Path(path).open("a") as file:
                file.write(f"{os.getpid()}\n")
            while until and not Path(until).exists():
                time.sleep(0.01)
            return os.getpid()

        @instance.function
        def total() -> float:
            return float(engine.weights()["w"].sum())

        sys.stdout.write("attached\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
