"""How a bar is judged: pairs in one run, the median of their ratios, one JSON line.

1. Product and reference alternate in one run, at least seven pairs; each pair gives one
   ratio, *product / reference*, and the median of the ratios is compared with the bar.
2. Quartiles on both sides of the bar are *undecided*: the pairs are run again, up to three
   times, and three undecided runs are a miss.
3. `value` and `reference` are the medians in `unit`; `reference` is null where the bar is
   about the value itself.
4. A bench that could not run says why and is not met; a peer that cannot be
   installed here is reported so and blocks nothing.
5. Who measures speed measures it alone: no bench starts while another one runs.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

__all__ = [
    "Better",
    "Measured",
    "Verdict",
    "absolute",
    "emit",
    "failed",
    "judge",
    "paired",
    "seconds",
    "section",
    "unavailable",
    "versions",
]

Better = Literal["lower", "higher"]
Verdict = Literal["pass", "miss", "undecided", "error", "unavailable"]

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dask", "distributed", "duckdb", "numpy", "torch", "msgspec", "xxhash")
MAX_RUNS = 3
MIN_PAIRS = 7


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One line of ``make bench``."""

    bench: str
    value: float | None
    unit: str
    reference: float | None
    ratio: float | None
    quartiles: tuple[float, float] | None
    bar: float
    better: Better
    met: bool | None
    verdict: Verdict
    pairs: int = 0
    runs: int = 0
    notes: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def line(self) -> str:
        """The JSON line, with versions and commit."""
        return json.dumps(
            {**dataclasses.asdict(self), "versions": versions(), "commit": commit()},
            default=str,
        )

    def sentence(self) -> str:
        """The same for people."""
        if self.value is None:
            return f"{self.verdict:>11}  {self.bench}: {self.notes.get('why', '')}"
        than = "at most" if self.better == "lower" else "at least"
        shown = f"{self.value:.4g} {self.unit}"
        if self.ratio is not None:
            shown += f" against {self.reference:.4g}, ratio {self.ratio:.3g}"
        return f"{self.verdict:>11}  {self.bench}: {shown} (bar: {than} {self.bar:g})"


def judge(samples: list[float], *, bar: float, better: Better) -> Verdict:
    """Compare samples with a bar.

    Parameters
    ----------
    samples : list of float
        Ratios of the pairs, or plain values.
    bar : float
        What is promised.
    better : {"lower", "higher"}
        Which side of the bar is good.

    Returns
    -------
    Verdict
        "undecided" when the quartiles lie on both sides of the bar.
    """
    low, high = quartiles(samples)

    def good(value: float) -> bool:
        return value <= bar if better == "lower" else value >= bar

    if good(low) != good(high):
        return "undecided"
    return "pass" if good(statistics.median(samples)) else "miss"


def quartiles(samples: list[float]) -> tuple[float, float]:
    """First and third quartile."""
    if len(samples) < 2:
        return samples[0], samples[0]
    cuts = statistics.quantiles(samples, n=4, method="inclusive")
    return cuts[0], cuts[2]


def paired(
    name: str,
    product: Callable[[], float],
    reference: Callable[[], float],
    *,
    bar: float,
    better: Better,
    unit: str = "ms",
    pairs: int = MIN_PAIRS,
    warm: int = 1,
    notes: Mapping[str, object] | None = None,
) -> Measured:
    """Run pairs until the bar is decided.

    Parameters
    ----------
    name : str
        The bench.
    product, reference : callable
        Each returns one figure in `unit`.
    bar : float
        For the ratio product / reference.
    better : {"lower", "higher"}
        Which ratio is good.
    unit : str
        Of the figures.
    pairs : int
        In each run.
    warm : int
        Pairs that are thrown away first.
    notes : mapping, optional
        Said beside the figures.

    Returns
    -------
    Measured
        The line.
    """
    for _ in range(warm):
        product(), reference()
    said = dict(notes or {})
    values: list[float] = []
    references: list[float] = []
    ratios: list[float] = []
    verdict: Verdict = "undecided"
    run = 0
    while verdict == "undecided" and run < MAX_RUNS:
        run += 1
        values, references = [], []
        for pair in range(pairs):
            # The order is turned round in every other pair: neither always goes first.
            if pair % 2:
                references.append(reference())
                values.append(product())
            else:
                values.append(product())
                references.append(reference())
        ratios = [a / b for a, b in zip(values, references, strict=True)]
        verdict = judge(ratios, bar=bar, better=better)
    said |= {"values": rounded(values), "references": rounded(references)}
    return Measured(
        bench=name,
        value=statistics.median(values),
        unit=unit,
        reference=statistics.median(references),
        ratio=statistics.median(ratios),
        quartiles=quartiles(ratios),
        bar=bar,
        better=better,
        met=verdict == "pass",
        verdict=_final(verdict, run),
        pairs=pairs,
        runs=run,
        notes=said,
    )


def absolute(
    name: str,
    product: Callable[[], float],
    *,
    bar: float,
    better: Better,
    unit: str,
    times: int = MIN_PAIRS,
    warm: int = 0,
    notes: Mapping[str, object] | None = None,
) -> Measured:
    """Judge the value itself, where a bar has no reference.

    Parameters
    ----------
    name, bar, better, unit, warm, notes
        As in `paired`; the bar is in `unit`.
    product : callable
        Returns one figure.
    times : int
        How many figures a run takes.

    Returns
    -------
    Measured
        The line, without reference and ratio.
    """
    for _ in range(warm):
        product()
    values: list[float] = []
    verdict: Verdict = "undecided"
    run = 0
    while verdict == "undecided" and run < MAX_RUNS:
        run += 1
        values = [product() for _ in range(times)]
        verdict = judge(values, bar=bar, better=better)
    return Measured(
        bench=name,
        value=statistics.median(values),
        unit=unit,
        reference=None,
        ratio=None,
        quartiles=quartiles(values),
        bar=bar,
        better=better,
        met=verdict == "pass",
        verdict=_final(verdict, run),
        pairs=times,
        runs=run,
        notes=dict(notes or {}) | {"values": rounded(values)},
    )


def failed(
    name: str, why: str, *, bar: float = 0.0, better: Better = "lower"
) -> Measured:
    """A bench that could not be run: not met."""
    return _nothing(name, why, "error", bar=bar, better=better, met=False)


def unavailable(
    name: str, why: str, *, bar: float = 0.0, better: Better = "lower"
) -> Measured:
    """A peer that cannot be had here: said, and nothing is held up by it."""
    return _nothing(name, why, "unavailable", bar=bar, better=better, met=None)


def _nothing(
    name: str,
    why: str,
    verdict: Verdict,
    *,
    bar: float,
    better: Better,
    met: bool | None,
) -> Measured:
    return Measured(
        bench=name,
        value=None,
        unit="",
        reference=None,
        ratio=None,
        quartiles=None,
        bar=bar,
        better=better,
        met=met,
        verdict=verdict,
        notes={"why": why},
    )


def _final(verdict: Verdict, run: int) -> Verdict:
    return "miss" if verdict == "undecided" and run == MAX_RUNS else verdict


def rounded(values: list[float]) -> list[float]:
    """Four digits are enough to read."""
    return [float(f"{value:.4g}") for value in values]


def seconds(action: Callable[[], object]) -> float:
    """How long it takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def versions() -> dict[str, str]:
    """What was measured with."""
    found = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": str(os.cpu_count()),
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "-"
    return found


def commit() -> str:
    """The commit that was measured, with a plus when the tree was changed."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"],
            check=True,
            capture_output=True,
            text=True,
            timeout=10,
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            check=True,
            capture_output=True,
            text=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + ("+" if changed else "")


def section(name: str, work: Callable[[], object]) -> None:
    """Run one part of a bench; its failure is a line, and the other parts go on."""
    try:
        work()
    except Exception as error:
        traceback.print_exc()
        emit(failed(name, f"{type(error).__name__}: {error}"[:300]))


def emit(measured: Measured) -> None:
    """The line on stdout, the sentence on stderr."""
    print(measured.line(), flush=True)
    print(measured.sentence(), file=sys.stderr, flush=True)
