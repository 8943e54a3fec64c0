"""The page *events*: what happened, newest first, searched by words.

Rule: an event fits when each word is somewhere in its name or its facts. Events are what the
catalog keeps of them (`state.signals`); facts name artifacts, nodes, plans and sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.dashboard.data.shared import (
    Told,
    columns,
    headline,
    short,
)
from tensorcast_dask.scheduler_plugin.state.signals import EVENT, MAX_EVENTS
from tensorcast_dask.tensors.ids import NodeId
from tensorcast_dask.tensors.quantities import human_bytes
from tensorcast_dask.tensors.secrets import is_secret

if TYPE_CHECKING:
    from tensorcast_dask.scheduler_plugin.state.catalog import Catalog
    from tensorcast_dask.tensors.signals import Reading

__all__ = ["LINES", "Words", "events"]

#: Most events that are listed.
LINES: Final = 200
#: What is shown in a column of its own, or is of no use to people.
_APART: Final = ("id", "version", "node", "name", "generation", "plan")
_BYTES: Final = "nbytes"


class Words(msgspec.Struct, frozen=True):
    """What is searched for."""

    words: str = ""


def events(catalog: Catalog, wanted: Words, *, zero_s: float) -> Told:
    """Make the page.

    Parameters
    ----------
    catalog : Catalog
        Of which.
    wanted : Words
        What is searched for.
    zero_s : float
        When the catalog's clock showed 0, in seconds since 1970.
    """
    words = wanted.words.casefold().split()
    rows = columns("at", "event", "subject", "node", "facts", "link")
    fits = kept = 0
    for at_s, signal in catalog.observed.signals.events:
        kept += 1
        value = signal.value
        name = signal.name.removeprefix(EVENT)
        node = str(value.get("node") or "")
        label = catalog.nodes.label(NodeId(node)) if node else ""
        facts = _facts(value)
        subject = str(value.get("id") or value.get("plan") or value.get("name") or "")
        if words:
            line = f"{name} {subject} {node} {label} {facts}".casefold()
            if not all(one in line for one in words):
                continue
        fits += 1
        if fits > LINES:
            continue
        number = value.get("version")
        rows["at"].append(round((zero_s + at_s) * 1000))
        rows["event"].append(name)
        rows["subject"].append(short(subject, 60) + (f" v{number}" if number else ""))
        rows["node"].append(short(label, 32))
        rows["facts"].append(short(facts, 300))
        rows["link"].append(str(value.get("id") or ""))
    said = f"{fits:,} of {kept:,} kept events fit" if words else f"{kept:,} events"
    if fits > LINES:
        said += f", the newest {LINES} are listed"
    if kept == MAX_EVENTS:
        said += f"; older ones than the last {MAX_EVENTS:,} are forgotten"
    empty = ""
    if not fits:
        empty = (
            "No event that is kept has all of these words."
            if kept
            else "Nothing has happened yet. Puts, moves, evictions, losses, nodes that come and "
            "go, and steps of plans are listed here."
        )
    return Told(
        columns={"events": rows},
        texts={"head": headline(catalog), "found": said, "empty": empty},
        counts={"rows": len(rows["at"])},
    )


def _facts(value: Reading) -> str:
    parts = []
    for name, fact in value.items():
        if name in _APART or fact in ("", None) or is_secret(name):
            continue
        if name == _BYTES and isinstance(fact, int):
            parts.append(human_bytes(fact))
        elif isinstance(fact, float):
            parts.append(f"{name} {fact:.3g}")
        else:
            parts.append(f"{name} {fact}")
    return ", ".join(parts)
