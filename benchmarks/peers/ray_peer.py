"""Ray in an environment of its own, driven over a pipe.

The environment is made at the first use (``.bench-venv``; a setting keeps it from being
tried: ``BENCH_RAY=no``). Where it cannot be made the bar says so.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import ROOT

__all__ = ["NotInstallable", "Ray"]

RAY = "ray==2.60.0"
FOLDER = ROOT / ".bench-venv"


class NotInstallable(Exception):
    """Why there is no Ray here."""


def environment() -> Path:
    """The interpreter of Ray's environment; made when missing."""
    python = FOLDER / "bin" / "python"
    if os.environ.get("BENCH_RAY") == "no":
        msg = "BENCH_RAY=no"
        raise NotInstallable(msg)
    try:
        if not python.exists():
            subprocess.run(
                [sys.executable, "-m", "venv", str(FOLDER)],
                check=True,
                capture_output=True,
                timeout=60,
            )
        seen = subprocess.run(
            [str(python), "-c", "import ray, numpy"],
            check=False,
            capture_output=True,
            timeout=60,
        )
        if seen.returncode:
            subprocess.run(
                [str(python), "-m", "pip", "install", "-qq", RAY, "numpy"],
                check=True,
                capture_output=True,
                timeout=240,
            )
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(FOLDER, ignore_errors=True)
        said = getattr(error, "stderr", b"") or b""
        msg = f"{RAY} cannot be installed here: {said.decode()[-200:] or error}"
        raise NotInstallable(msg) from error
    return python


class Ray:
    """A Ray of two cores, with the array in its store."""

    def __init__(self, size: int) -> None:
        python = environment()
        side = Path(__file__).with_name("ray_side.py")
        self._process = subprocess.Popen(
            [str(python), str(side), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        answer = self._answer()
        if not answer.get("ready"):
            self.close()
            msg = "Ray did not start"
            raise NotInstallable(msg)
        self.version = str(answer["version"])

    def seconds(self, op: str) -> float:
        """``put`` or ``get``, once."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"op": op}) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, object]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        return json.loads(line) if line else {}

    def close(self) -> None:
        """End it and what it started: they are in a session of their own."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(5)
