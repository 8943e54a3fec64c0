"""The page *plans*: runs that are known, the steps of one of them in time, and what failed.

Rules:

1. Runs under way come first, then the newest. One of them is chosen by its key; without a
   choice the first is.
2. Times of steps are of this life of the scheduler; a step that ended before it is listed
   without a bar, and that is said.
3. Of a failure its kind and its message are shown, never arguments, payloads or values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.dashboard.data.shared import (
    Columns,
    Told,
    columns,
    duration,
    headline,
    short,
    text,
)
from tensorcast_dask.tensors.ids import NodeId
from tensorcast_dask.tensors.messages import RunStatus, StepStatus
from tensorcast_dask.tensors.quantities import human_bytes

if TYPE_CHECKING:
    from tensorcast_dask.scheduler_plugin.state.catalog import Catalog
    from tensorcast_dask.scheduler_plugin.state.runs import Run
    from tensorcast_dask.tensors.plans import Step

__all__ = ["RUNS", "STEPS", "Chosen", "plans"]

#: Most runs that are listed, and most steps of one that are drawn.
RUNS: Final = 100
STEPS: Final = 200


class Chosen(msgspec.Struct, frozen=True):
    """Which run is looked at; "" the first."""

    key: str = ""


def plans(catalog: Catalog, chosen: Chosen) -> Told:
    """Make the page."""
    known = list(catalog.plans.runs.values())
    running = [one for one in known if one.status is RunStatus.RUNNING]
    over = [one for one in known if one.status is not RunStatus.RUNNING]
    listed = [*running, *reversed(over)][:RUNS]
    rows = columns(
        "key", "status", "steps", "done", "failed", "left", "moved", "time", "message", "link",
    )  # fmt: skip
    now_s = catalog.outbox.now_s
    for run in listed:
        _run(rows, run, now_s)
    one = next((run for run in listed if run.key == chosen.key), None)
    one = one or (listed[0] if listed else None)
    gantt = columns(
        "y",
        "name",
        "left",
        "right",
        "status",
        "node",
        "what",
        "attempts",
        "text",
        "said",
    )
    if one is not None:
        _steps(catalog, gantt, one)
    said = f"{len(running):,} running, {len(over):,} over" if known else ""
    if len(known) > RUNS:
        said += f", {RUNS} are listed"
    return Told(
        columns={"runs": rows, "steps": gantt},
        texts={
            "head": headline(catalog),
            "found": said,
            "chosen": _chosen(one),
            "failure": _failure(one),
            "empty": ""
            if known
            else "No plan has been run, or its time under its key is over. Plans that run or "
            "ended are listed here, and the steps of one are drawn in time.",
        },
        counts={"steps": len(gantt["y"]), "runs": len(listed)},
    )


def _run(rows: Columns, run: Run, now_s: float) -> None:
    ended = [one.status for one in run.outcomes.values()]
    begun_s = min([*run.begun_s.values(), *run.over_s.values()], default=0.0)
    until_s = now_s if run.status is RunStatus.RUNNING else run.ended_s
    rows["key"].append(short(run.key, 60))
    rows["status"].append(str(run.status))
    rows["steps"].append(len(run.steps))
    rows["done"].append(ended.count(StepStatus.DONE))
    rows["failed"].append(ended.count(StepStatus.FAILED))
    rows["left"].append(len(run.steps) - len(ended))
    rows["moved"].append(
        human_bytes(sum(one.moved_bytes for one in run.outcomes.values()))
    )
    known = begun_s and until_s >= begun_s
    rows["time"].append(duration(until_s - begun_s) if known else "-")
    rows["message"].append(
        short(run.fault.message if run.fault is not None else "", 300)
    )
    rows["link"].append(run.key)


def _steps(catalog: Catalog, gantt: Columns, run: Run) -> None:
    now_s = catalog.outbox.now_s
    times = {step.name: _time(run, step, now_s) for step in run.spec.steps}
    zero_s = min((one[0] for one in times.values() if one is not None), default=now_s)
    for y, step in enumerate(run.spec.steps[:STEPS]):
        outcome, time = run.outcomes.get(step.name), times[step.name]
        status = str(outcome.status) if outcome is not None else "waits"
        if outcome is None and step.name in run.begun_s:
            status = "running" if run.status is RunStatus.RUNNING else "left"
        left_s, right_s = time if time is not None else (zero_s, zero_s)
        node = outcome.node if outcome is not None else step.node
        said = duration(right_s - left_s) if time is not None else ""
        if outcome is not None and time is None and outcome.attempts:
            said = f"{duration(outcome.seconds)}, before this start of the scheduler"
        message = ""
        if outcome is not None and outcome.fault is not None:
            message = f"{outcome.fault.kind}: {outcome.fault.message}"
        gantt["y"].append(y)
        gantt["name"].append(short(step.name, 32))
        gantt["left"].append(round(left_s - zero_s, 4))
        gantt["right"].append(round(right_s - zero_s, 4))
        gantt["status"].append(status)
        gantt["node"].append(
            short(catalog.nodes.label(NodeId(node)), 40) if node else "any"
        )
        gantt["what"].append(
            f"{step.kind}{', undoes ' + short(step.compensates) if step.compensates else ''}"
        )
        gantt["attempts"].append(outcome.attempts if outcome is not None else 0)
        gantt["said"].append(short(" · ".join(filter(None, [said, message])), 72))
        gantt["text"].append(short("; ".join(filter(None, [said, message])), 300))


def _time(run: Run, step: Step, now_s: float) -> tuple[float, float] | None:
    """Give when a step began and ended, as far as it is known (rule 2)."""
    over_s = run.over_s.get(step.name)
    begun_s = run.begun_s.get(step.name)
    if over_s is None:
        running = run.status is RunStatus.RUNNING
        end_s = now_s if running else max(run.ended_s, begun_s or 0.0)
        return None if begun_s is None else (begun_s, end_s)
    seconds = run.outcomes[step.name].seconds
    return (begun_s if begun_s is not None else over_s - seconds), over_s


def _chosen(run: Run | None) -> str:
    if run is None:
        return ""
    more = len(run.spec.steps) - STEPS
    said = f"<b>{text(run.key, 80)}</b> is {run.status}"
    return said + (f"; its first {STEPS} steps, {more:,} more" if more > 0 else "")


def _failure(run: Run | None) -> str:
    if run is None or run.fault is None:
        return ""
    return f"<b>{text(run.fault.kind)}</b>: {text(run.fault.message, 2000)}"
