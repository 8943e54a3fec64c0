"""What a cluster holds and is busy with, to be the same before and after a test.

Rules:

1. Only what must come back counts: numbers that rise for ever (epochs, sequences), memory
   kept warm and connections kept for re-use are left out.
2. Coming to rest takes a moment (leases of readers end with their maps, memory is given back
   by a thread), so an equal state is waited for, with a bound.
3. Nodes that went or came during a test are the test's own affair: `nodes=False` compares
   only what every store that is there must have: nothing under way.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any

from tests.kit.eventually import eventually

__all__ = ["at_rest", "baseline", "idle_state", "no_lease_lost"]

_CATALOG = (
    "stalled",
    "held",
    "artifacts",
    "versions",
    "aliases",
    "views",
    "creations",
    "replicas",
    "nodes",
    "sessions",
    "pins",
    "tasks",
    "moves",
    "endings",
    "operations",
    "plans",
)
_TIER = (
    "used_bytes",
    "reserved_bytes",
    "pinned_bytes",
    "lingering_bytes",
    "replicas",
)


def idle_state(session: Any) -> dict[str, Any]:
    """Give the parts of `debug_state()` that are equal whenever a cluster is at rest."""
    state = session.debug_state()
    catalog = {key: state["catalog"][key] for key in _CATALOG}
    stores: dict[str, Any] = {}
    for node, told in state["stores"].items():
        if "error" in told:
            stores[node] = told
            continue
        if "tiers" not in told:
            continue  # a process that lends memory: it is a node until its session ends
        stores[node] = {
            "busy": told["busy"],
            "generations": told["generations"],
            "tiers": {
                tier: {key: use[key] for key in _TIER}
                for tier, use in told["tiers"].items()
            },
        }
    return {"catalog": catalog, "stores": stores}


def at_rest(session: Any) -> dict[str, Any] | None:
    """Give the same once no store reads any more, as it does for its sums; None until then."""
    state = idle_state(session)
    told = [one for one in state["stores"].values() if "busy" in one]
    return None if any(one["busy"]["leases"] for one in told) else state


@contextlib.contextmanager
def baseline(
    session: Any, *, within_s: float = 30.0, nodes: bool = True
) -> Iterator[None]:
    """Fail when the block leaves the cluster other than it was.

    Parameters
    ----------
    session : Session
        One that stays open, so that it counts before and after.
    within_s : float
        The longest time to come to rest.
    nodes : bool
        Whether the same nodes must be there.
    """
    with contextlib.suppress(AssertionError):  # or it is the test that reads
        eventually(lambda: at_rest(session), within_s=5)
    before = _of(session, nodes=nodes)
    yield

    def same() -> bool:
        gc.collect()  # the test's own tensors are readers
        after = _of(session, nodes=nodes)
        assert after == before, _difference(before, after)
        return True

    eventually(same, within_s=within_s, what="the cluster is at its baseline")


@contextlib.contextmanager
def no_lease_lost(client: Any, nodes: Iterable[Any]) -> Iterator[None]:
    """Fail when the lease of one of the nodes lapses in the block, healed since or not.

    A node that comes back after a lapse has the same incarnation: only the catalog's own
    events tell.

    Parameters
    ----------
    client : Client
        Dask's.
    nodes : iterable of NodeState
        Whose leases count; a process that lends memory lets its lease lapse when it ends.
    """
    watched = {state.card.node for state in nodes}
    assert watched

    def lapses() -> list[Any]:
        told = [event for _, event in client.get_events("tensorcast")]
        return [
            one
            for one in told
            if one.get("topic") == "node_lapsed" and one["node"] in watched
        ]

    before = lapses()
    yield
    assert lapses() == before


def _of(session: Any, *, nodes: bool) -> dict[str, Any]:
    state = idle_state(session)
    if nodes:
        return state
    del state["catalog"]["nodes"]
    busy = {str(told.get("busy", told)) for told in state["stores"].values()}
    return {"catalog": state["catalog"], "busy": sorted(busy)}


def _difference(before: Any, after: Any, path: str = "") -> list[str]:
    if not isinstance(before, dict) or not isinstance(after, dict):
        return [] if before == after else [f"{path}: {before!r} -> {after!r}"]
    return [
        line
        for key in sorted({*before, *after}, key=str)
        for line in _difference(before.get(key), after.get(key), f"{path}/{key}")
    ]
