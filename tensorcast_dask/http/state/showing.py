"""From what the catalog says to what answers show."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import msgspec

from tensorcast_dask.http.state import shapes
from tensorcast_dask.http.state.ranges import etag_of
from tensorcast_dask.tensors.messages import (
    ArtifactInfo,
    InstanceState,
    Location,
    NodeCard,
    NodeState,
)
from tensorcast_dask.tensors.secrets import labels_shown
from tensorcast_dask.tensors.signals import Reading, Signal
from tensorcast_dask.tensors.specs import TensorSpec

__all__ = [
    "artifact",
    "cursor_of",
    "instance",
    "node",
    "plain",
    "plan_listed",
    "replica",
    "signal",
    "tensor",
    "value",
]

#: The largest integer up to which a double holds all of them.
_EXACT: Final = (1 << 53) - 1
_COUNTED: Final = ("steps", "done", "failed", "skipped", "cancelled")


def plain(value: Reading) -> Reading:
    """Give a reading that every JSON reader can hold: large integers as text, no infinity."""
    return {name: _plain(one) for name, one in value.items()}


def _plain(
    value: str | int | float | None,  # noqa: PYI041 - mypy tells them apart
) -> str | int | float | bool | None:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and abs(value) > _EXACT:
        return str(value)
    return value


def artifact(info: ArtifactInfo) -> shapes.Artifact:
    """Show one version."""
    return shapes.Artifact(
        id=info.id,
        version=info.version,
        generation=str(info.generation),
        stage=str(info.stage),
        owner=str(info.owner),
        bytes=info.nbytes,
        tensors=info.tensors,
        labels=labels_shown(info.labels),
        degraded=info.degraded,
        base=info.base,
    )


def tensor(info: ArtifactInfo, spec: TensorSpec) -> shapes.Tensor:
    """Show one tensor of a version."""
    return shapes.Tensor(
        name=spec.name,
        dtype=spec.dtype.name,
        shape=list(spec.shape),
        bytes=spec.nbytes,
        etag=etag_of(info.generation, info.index_digest, spec.name),
    )


def replica(at: Location) -> shapes.Replica:
    """Show where a replica is."""
    return shapes.Replica(
        node=at.card.node, name=at.card.name, host=at.card.host, tier=str(at.tier)
    )


def node(state: NodeState) -> shapes.Node:
    """Show a node."""
    card = state.card
    return shapes.Node(
        node=card.node,
        name=card.name,
        host=card.host,
        worker=card.worker,
        kind=card.kind,
        roles=list(card.roles),
        labels=labels_shown(card.labels),
        attended=state.attended,
        lease_left_s=state.lease_left_s,
        tiers={
            str(tier): shapes.TierRoom(
                capacity_bytes=use.capacity_bytes,
                used_bytes=use.used_bytes,
                reserved_bytes=use.reserved_bytes,
                pinned_bytes=use.pinned_bytes,
                evictable_bytes=use.evictable_bytes,
                replicas=use.replicas,
            )
            for tier, use in state.uses.items()
        },
    )


def instance(state: InstanceState) -> shapes.Instance:
    """Show an instance."""
    record = state.record
    return shapes.Instance(
        name=record.name,
        node=state.card.node,
        labels=labels_shown(record.labels),
        functions=list(record.functions),
        engine=list(record.engine),
        holds=dict(record.holds),
        load={
            name: number for name, number in state.load.items() if math.isfinite(number)
        },
        load_age_s=state.load_age_s,
        draining=state.draining,
        poisoned=record.poisoned,
    )


def signal(one: Signal) -> shapes.Signal:
    """Show a signal."""
    return shapes.Signal(
        name=one.name,
        value=plain(one.value),
        as_of=one.as_of,
        staleness=one.staleness,
        epoch=str(one.epoch),
        freshness=str(one.freshness),
    )


def plan_listed(one: Signal) -> shapes.PlanListed:
    """Show a run as its signal counts it."""
    counted = {name: int(one.value.get(name) or 0) for name in _COUNTED}
    return shapes.PlanListed(
        key=one.name.removeprefix("plan/"),
        status=str(one.value.get("status", "")),
        **counted,
    )


def value(given: object) -> object:
    """Show what a step of a plan gave; of a node only what names it."""
    shown: object
    match given:
        case ArtifactInfo():
            shown = artifact(given)
        case NodeCard():
            shown = {"node": given.node, "name": given.name, "host": given.host}
        case msgspec.Struct():
            fields = given.__struct_fields__
            shown = {field: value(getattr(given, field)) for field in fields}
        case dict():
            shown = {str(name): value(one) for name, one in given.items()}
        case list() | tuple():
            shown = [value(one) for one in given]
        case bytes():
            shown = given.hex()
        case None | str() | int() | float():
            shown = _plain(given)
        case _:
            shown = str(given)
    return shown


def cursor_of(infos: Iterable[ArtifactInfo], limit: int) -> str:
    """Say after which artifact the next page begins; "" where there is none."""
    page = list(infos)
    if len(page) < limit:
        return ""
    return f"{page[-1].version}:{page[-1].id}"
