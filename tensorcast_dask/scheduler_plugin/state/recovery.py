"""The catalog's memory, from the rows of its journal.

Rules:

1. Rows are believed as far as they decode; one that does not is reported and left out.
2. Every replica is suspect until its node's new life claims it.
3. Serial and recovered are the same: what `handle` made and what these rows make differ
   only in what no row holds (leases, links, running requests).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

import msgspec

from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.scheduler_plugin.state.creations import Creations
from tensorcast_dask.scheduler_plugin.state.events import Row
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.outcomes import OutcomeRow
from tensorcast_dask.scheduler_plugin.state.plans import Plans
from tensorcast_dask.scheduler_plugin.state.policies import Policies, PolicyRow
from tensorcast_dask.scheduler_plugin.state.quotas import QuotaRow, Quotas
from tensorcast_dask.scheduler_plugin.state.records import (
    AliasRecord,
    AliasRow,
    CreatingRow,
    NodeRecord,
    NodeRow,
    PinRow,
    Replica,
    VersionRow,
    ViewRecord,
    ViewRow,
    version_of,
)
from tensorcast_dask.scheduler_plugin.state.runs import PlanRow, StepRow
from tensorcast_dask.scheduler_plugin.state.sessions import Sessions
from tensorcast_dask.tensors.ids import HostId, Incarnation, NodeId
from tensorcast_dask.tensors.messages import NodeCard

__all__ = ["Parts", "recover"]

R = TypeVar("R")


class Parts(Protocol):
    """Who has rows of its own."""

    creations: Creations
    sessions: Sessions
    plans: Plans
    quotas: Quotas
    policies: Policies


def recover(rows: Iterable[Row], ground: Ground, parts: Parts) -> list[str]:
    """Fill an empty catalog; returns what has to be said."""
    book = _Book(rows)
    indexes = dict(book.blobs("index"))
    nodes = ground.nodes
    for node in book.unpack("node", NodeRow):
        nodes.records[node.card.node] = NodeRecord(node=node.card.node, card=node.card)
    for one in book.unpack("version", VersionRow):
        book.said += _version(one, indexes, ground)
    _names(book, ground)
    for pin in book.unpack("pin", PinRow):
        record = ground.names.versions.get(pin.generation)
        if record is not None:
            ground.pins.add(record, pin.node, pin.ttl_s, pin=pin.pin)
    for creating in book.unpack("creating", CreatingRow):
        index = indexes.get(str(creating.record.generation))
        if index is not None:
            session = parts.sessions.revived(creating.session)
            parts.creations.revive(creating, index, session)
    for outcome in book.unpack("outcome", OutcomeRow):
        try:
            ground.outcomes.recover(outcome)
        except TensorCastError as error:
            book.said.append(f"the answer to request {outcome.rid!r} is lost: {error}")
    book.said += parts.plans.recover(
        book.unpack("plan", PlanRow), book.unpack("step", StepRow)
    )
    parts.quotas.recover(book.unpack("quota", QuotaRow))
    parts.policies.recover(book.unpack("policy", PolicyRow))
    return book.said


class _Book:
    """The newest blob of each (kind, key), and what could not be read."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.said: list[str] = []
        self._newest: dict[str, dict[str, bytes]] = {}
        for row in rows:
            of_kind = self._newest.setdefault(row.kind, {})
            of_kind.pop(row.key, None)
            if row.blob is not None:
                of_kind[row.key] = row.blob

    def blobs(self, kind: str) -> Iterable[tuple[str, bytes]]:
        """Go through the rows of a kind as they stand."""
        return self._newest.get(kind, {}).items()

    def unpack(self, kind: str, as_type: type[R]) -> list[R]:
        """Unpack the rows of a kind."""
        decoder = msgspec.msgpack.Decoder(as_type)
        found = []
        for key, blob in self.blobs(kind):
            try:
                found.append(decoder.decode(blob))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                self.said.append(
                    f"the journal's {kind} row {key!r} cannot be read: {error}"
                )
        return found


def _names(book: _Book, ground: Ground) -> None:
    names = ground.names
    for view in book.unpack("view", ViewRow):
        if view.base in names.versions:
            names.add_view(
                ViewRecord(
                    id=view.id,
                    base=view.base,
                    view=view.view,
                    index_digest=view.index_digest,
                    nbytes=view.nbytes,
                    tensors=view.tensors,
                )
            )
    for alias in book.unpack("alias", AliasRow):
        names.aliases[alias.name] = AliasRecord(
            name=alias.name,
            target=alias.target,
            target_id=alias.target_id,
            alias_generation=alias.alias_generation,
        )


def _version(row: VersionRow, indexes: dict[str, bytes], ground: Ground) -> list[str]:
    names, nodes, replicas = ground.names, ground.nodes, ground.replicas
    artifact = names.artifacts.get(row.id)
    if artifact is not None and row.version in artifact.versions:
        return [f"version {row.version} of {row.id!r} stands twice in the journal"]
    index = indexes.get(str(row.generation))
    if index is None:
        return [f"the index of version {row.version} of {row.id!r} is lost"]
    record = version_of(row, index, creating=False)
    for node, tiers in row.holders:
        if node not in nodes.records:
            nodes.records[node] = NodeRecord(node=node, card=_unknown(node))
        if tiers:
            record.holders[node] = Replica(node=node, tiers=tiers, suspect=True)
            replicas.by_node.setdefault(node, {})[record.generation] = record
    names.add(record)
    names.numbers.used_up(record.id, record.version)
    return []


def _unknown(node: NodeId) -> NodeCard:
    """Make a card for a node of which only the name is left."""
    return NodeCard(node=node, incarnation=Incarnation(0), host=HostId(""), socket="")
