"""One card for each noun that a notebook shows.

Rule: a card is drawn from values that are at hand; asking is the caller's. What is not known is left out.
"""

from __future__ import annotations

from time import localtime, strftime
from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.notebook.markup import (
    TIERS,
    Html,
    bar,
    card,
    chip,
    facts,
    joined,
    link,
    markup,
    table,
)
from tensorcast_dask.tensors.quantities import human_bytes
from tensorcast_dask.tensors.secrets import labels_shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tensorcast_dask.exceptions import TensorCastError
    from tensorcast_dask.tensors.contexts import Context
    from tensorcast_dask.tensors.messages import (
        ArtifactInfo,
        InstanceState,
        Location,
        NodeState,
        Rows,
        StepOutcome,
        TierUse,
    )
    from tensorcast_dask.tensors.signals import Signal
    from tensorcast_dask.tensors.specs import TensorSpec

__all__ = [
    "artifact_card",
    "chip_of_tier",
    "error_card",
    "instance_card",
    "node_card",
    "operation_card",
    "plan_card",
    "result_card",
    "rows_card",
    "session_card",
    "signals_card",
    "use_bar",
]

_TENSORS: Final = 8
#: Plans of more steps are a table only.
_DRAWN: Final = 60
_BLUE: Final = TIERS["host"]


def session_card(
    scheduler: str,
    *,
    state: str,
    dashboard: str = "",
    nodes: Sequence[NodeState] | None = None,
) -> str:
    """Show a session, with the nodes of its cluster where they are known."""
    rows = {
        "scheduler": scheduler,
        "dashboard": link(dashboard) if dashboard else "",
        "nodes": None if nodes is None else len(nodes),
    }
    return card(
        "session",
        facts(rows),
        _nodes(nodes) if nodes else "",
        kind="tensorcast",
        state=state,
    )


def _nodes(nodes: Sequence[NodeState]) -> Html:
    tiers = [tier for tier in TIERS if any(tier in one.uses for one in nodes)]
    rows = [
        (
            one.card.name or one.card.node[:8],
            *(use_bar(tier, one.uses.get(tier)) for tier in tiers),  # type: ignore[call-overload]
            "" if one.attended else "without a worker",
        )
        for one in sorted(nodes, key=lambda node: node.card.name)
    ]
    return table(("node", *tiers, ""), rows, most=20)


def use_bar(tier: str, use: TierUse | None, *, wide: str = "7em") -> Html:
    """Show how full a tier is; nothing where there is none."""
    if use is None or not use.capacity_bytes:
        return Html("")
    shares = [(TIERS.get(tier, _BLUE), use.used_bytes / use.capacity_bytes)]
    says = f"{human_bytes(use.used_bytes)} of {human_bytes(use.capacity_bytes)}"
    return bar(shares, says, wide=wide)


def node_card(node: NodeState) -> str:
    """Show a node."""
    rows: dict[str, object] = {
        "node": node.card.node,
        "worker": node.card.worker or "none now",
        "roles": ", ".join(node.card.roles),
        **{tier: use_bar(tier, use) for tier, use in node.uses.items()},
    }
    return card(node.card.name or node.card.node[:8], facts(rows), kind="worker")


def artifact_card(
    info: ArtifactInfo,
    *,
    places: Sequence[Location] = (),
    specs: Sequence[TensorSpec] = (),
) -> str:
    """Show an artifact version or a view, with what is known of its places and tensors."""
    where = [
        joined((chip_of_tier(one.tier), Html(" "), one.card.name or one.card.node[:8]))
        for one in places
    ]
    rows = {
        "version": info.version,
        "view of": info.base if info.view else "",
        "tensors": info.tensors,
        "bytes": f"{human_bytes(info.nbytes)} ({info.nbytes:,})",
        "owner": info.owner,
        "labels": _labels(info.labels),
        "degraded": info.degraded,
        "lies in": joined(where, ", ") if where else "",
    }
    tensors = [
        (spec.name, spec.dtype.name, " x ".join(map(str, spec.shape)) or "scalar")
        for spec in specs[:_TENSORS]
    ]
    inside = (
        table(("tensor", "dtype", "shape"), tensors, more=max(0, len(specs) - _TENSORS))
        if tensors
        else ""
    )
    kind = "view" if info.view else "artifact"
    return card(info.id, facts(rows), inside, kind=kind, state=str(info.stage))


def chip_of_tier(tier: str) -> Html:
    """Give a tier's name behind a spot of its colour."""
    colour = TIERS.get(tier, _BLUE)
    style = f"display:inline-block;width:.7em;height:.7em;border-radius:2px;background:{colour}"
    return Html(f"<span style='{style}'></span> {markup(tier)}")


def operation_card(
    kind: str,
    ref: str,
    *,
    status: str,
    done: int = 0,
    total: int = 0,
    note: str = "",
    error: BaseException | None = None,
) -> str:
    """Show an operation as it stands."""
    share = done / total if total else 0.0
    says = f"{human_bytes(done)} of {human_bytes(total)}"
    rows = {
        "of": ref,
        "moved": bar([(_BLUE, share)], says) if total else "",
        "note": note,
        "error": "" if error is None else f"{type(error).__name__}: {error}",
    }
    return card(kind, facts(rows), kind="operation", state=status)


def plan_card(key: str, context: Context, text: str, svg: str, *, steps: int) -> str:
    """Show a plan: a picture, and its steps as text to fold out.

    Parameters
    ----------
    key : str
        Its key.
    context : Context
        Who asks.
    text : str
        Its steps as text.
    svg : str
        Its picture, made by `as_svg`.
    steps : int
        How many they are.
    """
    rows = {
        "asked by": context.id,
        "within": None if context.ddl is None else f"{context.ddl:g} s",
        "tags": ", ".join(context.tags),
        "steps": steps,
    }
    picture = Html(svg) if 0 < steps <= _DRAWN else Html("")
    lines = Html("<br/>").join(markup(line) for line in text.splitlines())
    folded = f"<details><summary>steps as text</summary><code>{lines}</code></details>"
    scroll = f"<div style='overflow:auto;max-height:32em'>{picture}</div>"
    return card(key, facts(rows), Html(scroll), Html(folded), kind="plan")


def result_card(
    key: str, status: str, message: str, outcomes: Mapping[str, StepOutcome]
) -> str:
    """Show what a run has come to so far; nothing of it is unpickled."""
    rows = [
        (
            name,
            chip(one.status),
            one.node[:8],
            human_bytes(one.moved_bytes) if one.moved_bytes else "",
            f"{one.seconds:.3f}",
            one.attempts,
            "" if one.fault is None else f"{one.fault.kind}: {one.fault.message}",
        )
        for name, one in outcomes.items()
    ]
    head = ("step", "", "node", "moved", "seconds", "attempts", "why")
    return card(
        key,
        facts({"why": message}),
        table(head, rows) if rows else "no step has ended yet",
        kind="run of plan",
        state=status,
    )


def signals_card(
    title: str, signals: Iterable[Signal], *, events: Sequence[Signal] = ()
) -> str:
    """Show signals by name, and what happened."""
    rows = [
        (one.name, chip(one.freshness), f"{one.staleness:.1f} s", _reading(one))
        for one in signals
    ]
    told = [(_clock(one.as_of), one.name, _reading(one)) for one in events]
    parts = [
        table(("signal", "", "age", "reading"), rows) if rows else Html(""),
        table(("at", "event", "what"), told) if told else Html(""),
    ]
    return card(title, *parts) if rows or told else card(title, "none")


def _reading(signal: Signal) -> str:
    """Say what is in a reading; zeros and blanks only where there is nothing else."""
    says = {name: value for name, value in signal.value.items() if value}
    found = (says or signal.value).items()
    return ", ".join(f"{name} {_number(name, value)}" for name, value in found)


def _number(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith(("bytes", "bytes_per_s")):
        return human_bytes(value) + ("/s" if name.endswith("_per_s") else "")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _labels(labels: Mapping[str, str]) -> str:
    """Write labels; a notebook is kept and sent round, so secrets are not in it."""
    return ", ".join(f"{k}={v}" for k, v in labels_shown(labels).items())


def _clock(at: float) -> str:
    return strftime("%H:%M:%S", localtime(at))


def instance_card(state: InstanceState) -> str:
    """Show an instance."""
    record = state.record
    rows: dict[str, Any] = {
        "at": state.card.name or state.card.node[:8],
        "functions": ", ".join(record.functions),
        "engine": ", ".join(record.engine),
        "labels": _labels(record.labels),
        "poisoned": record.poisoned,
    }
    return card(record.name, facts(rows), kind="instance")


def error_card(error: TensorCastError) -> str:
    """Show an error: what happened, what may be done, and its facts."""
    branch = type(error).__mro__[1].__name__
    again = "the same call may succeed later" if error.retryable else "no, as it stands"
    rows = {"what": error.message, "branch": branch, "try again": again}
    return card(
        error.kind,
        facts(rows),
        facts(dict(error.data)),
        kind="error",
        state="failed",
    )


def rows_card(rows: Rows) -> str:
    """Show what a query gave."""
    says = "more rows than were asked for" if rows.truncated else ""
    return joined((table(rows.columns, rows.rows), says))
