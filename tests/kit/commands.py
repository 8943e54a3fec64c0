"""The `tensorcast` command as a person meets it: its output, its errors, its status.

Rules:

1. Every command has a run directory of the test's own, and a bound.
2. Whatever a command says, it never says it with a traceback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from tensorcast_dask.cli import main

__all__ = ["Commands"]

_WITHIN_S = 50.0
_SETTINGS = {
    "TENSORCAST_MEMORY__RESERVE_MIN": "1MiB",
    "TENSORCAST_STORE__RELEASED_TTL": "2s",
}
#: Would name a cluster to the commands, or another run directory.
_FOREIGN = ("TENSORCAST_SCHEDULER", "DASK_SCHEDULER_ADDRESS", "XDG_RUNTIME_DIR")


class Commands:
    """Runs commands against one run directory.

    Parameters
    ----------
    folder : Path
        Short: sockets live below it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        kept = {k: v for k, v in os.environ.items() if k not in _FOREIGN}
        self.env = (
            kept
            | _SETTINGS
            | {
                "TENSORCAST_RUN_DIR": str(self.run_dir),
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            }
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command that stays."""
        return subprocess.Popen(
            [sys.executable, "-m", "tensorcast_dask.cli", *words],
            env=self.env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, status: int = 0) -> tuple[str, str]:
        """Run a command as a process to its end; give its output and its errors."""
        process = self.start(*words)
        try:
            out, err = process.communicate(timeout=_WITHIN_S)
        finally:
            process.kill()
        assert "Traceback" not in err, err
        assert process.returncode == status, (words, process.returncode, out, err)
        return out, err

    def __call__(self, *words: str, status: int = 0) -> tuple[str, str]:
        """Do the same in this process, where everything is imported already."""
        ended = CliRunner().invoke(main, words, env=self.env)
        assert ended.exception is None or isinstance(ended.exception, SystemExit), (
            ended.exception
        )
        assert ended.exit_code == status, (words, ended.exit_code, ended.output)
        return ended.stdout, ended.stderr

    def json(self, *words: str) -> Any:
        """Run a command with `--json`; its standard output is one JSON value."""
        return json.loads(self(*words, "--json")[0], parse_constant=_no_constant)


def _no_constant(word: str) -> None:
    problem = f"{word} is no JSON"
    raise AssertionError(problem)
