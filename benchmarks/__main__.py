"""``python -m benchmarks``: every bar, one after the other, each in a process of its own.

A bench has a deadline and a process group; what hangs or leaves something behind is
ended and reported as an error, and the next one starts on a quiet machine.
Exit status 0 only when every bar is met (or its peer cannot be installed here).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import ROOT, emit, failed

#: Name of the module under `bars`, and the seconds it may take.
BARS: dict[str, int] = {
    "imports": 60,
    "materialise": 180,
    "put": 240,
    "pull": 300,
    "ucx": 180,
    "replicate": 120,
    "staging": 90,
    "gpu": 240,
    "many_tensors": 120,
    "many_artifacts": 420,
    "catalog": 120,
    "loop_lag": 330,
    "busy_tasks": 300,
    "plans": 120,
    "signals": 300,
    "metrics": 120,
    "dashboard": 300,
    "instances": 180,
    "rebalance": 120,
    "worker_death": 120,
    "scheduler_death": 120,
}
TOTAL_S = 30 * 60


@dataclasses.dataclass(slots=True)
class Tally:
    """What came out so far."""

    lines: list[dict[str, object]] = dataclasses.field(default_factory=list)

    def add(self, text: str) -> None:
        """Take one line of a bench's output."""
        line = json.loads(text)
        self.lines.append(line)
        print(text, flush=True)

    @property
    def met(self) -> bool:
        """All of them, and there are some."""
        return bool(self.lines) and all(line["met"] is not False for line in self.lines)


def run(name: str, options: list[str], within_s: float, tally: Tally) -> None:
    """One bench in its own session; its JSON lines go to the tally."""
    command = [sys.executable, "-m", f"benchmarks.bars.{name}", *options]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    )
    try:
        out, _ = process.communicate(timeout=within_s)
        why = f"ended with status {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        why = f"not done after {within_s:.0f} s"
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
    for text in out.splitlines():
        if text.startswith("{"):
            tally.add(text)
    if why:
        line = failed(name, why)
        emit(line)
        tally.lines.append(json.loads(line.line()))


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", choices=sorted(BARS), metavar="NAME")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, no verdicts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the lines here")
    parser.add_argument("--list", action="store_true", help="name the benches and end")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        print("\n".join(BARS))
        return 0
    tally, started = Tally(), time.monotonic()
    for name in chosen.only or BARS:
        left = TOTAL_S - (time.monotonic() - started)
        if left < 5:
            line = failed(name, "the 30 minutes of the whole run were over")
            emit(line)
            tally.lines.append(json.loads(line.line()))
            continue
        options = ["--smoke"] if chosen.smoke else []
        run(name, options, min(BARS[name], left), tally)
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text("".join(json.dumps(ln) + "\n" for ln in tally.lines))
    spent = time.monotonic() - started
    met = sum(line["met"] is True for line in tally.lines)
    print(f"{met} of {len(tally.lines)} bars met in {spent:.0f} s", file=sys.stderr)
    return 0 if tally.met or (chosen.smoke and _ran(tally)) else 1


def _ran(tally: Tally) -> bool:
    """A smoke run asks only that every bench produced its figures."""
    return all(line["verdict"] != "error" for line in tally.lines)


if __name__ == "__main__":
    sys.exit(main())
