"""Why it is as it is now: where versions lie and may go, what requests and plans wait for.

What happened is told by `stories`; this is the present, read from the truth when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isinf
from typing import Final

from tensorcast_dask.scheduler_plugin.state.creations import Creations
from tensorcast_dask.scheduler_plugin.state.endings import Endings
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.moves import Moves
from tensorcast_dask.scheduler_plugin.state.operations import Operation
from tensorcast_dask.scheduler_plugin.state.plans import Plans
from tensorcast_dask.scheduler_plugin.state.records import VersionRecord, info_of
from tensorcast_dask.tensors.ids import ArtifactId, Generation, NodeId, RequestId

__all__ = ["Explaining"]

MAX_LINES: Final = 64


class Explaining:
    """Sentences about the present."""

    def __init__(
        self,
        ground: Ground,
        *,
        creations: Creations,
        moves: Moves,
        endings: Endings,
        plans: Plans,
    ) -> None:
        self._outbox = ground.outbox
        self._names = ground.names
        self._nodes = ground.nodes
        self._holders = ground.holders
        self._pins = ground.pins
        self._replicas = ground.replicas
        self._tasks = ground.tasks
        self._operations = ground.operations
        self._creations = creations
        self._moves = moves
        self._endings = endings
        self._plans = plans

    def now(self, ref: str) -> list[str]:
        """Say how what is called so stands."""
        lines = [
            *self._artifact(ArtifactId(ref)),
            *self._operation(RequestId(ref)),
            *self._plans.waits(ref),
            *self._node(NodeId(ref)),
        ]
        return lines[:MAX_LINES]

    # ------------------------------------------------------------ artifacts
    def _artifact(self, name: ArtifactId) -> Iterator[str]:
        artifact = self._names.artifacts.get(name)
        for number, record in sorted(artifact.versions.items()) if artifact else ():
            info = info_of(record, lost=self._holders.is_lost(record))
            where = ", ".join(
                f"{node.label} ({record.holders[node.node].nearest})"
                for node in self._holders.listed(record)
            )
            line = f"version {number} is {info.stage}, {record.nbytes} bytes, on "
            yield line + (where or "no node") + f" {record.degraded}".rstrip()
            yield from self._stays(record)
            yield from self._on_its_way(record.generation)
        for ending in self._endings.of(name):
            nodes = ", ".join(node.label for node in ending.nodes.values())
            yield (
                f"version {ending.record.version} is destroyed; its end waits for "
                f"{nodes or 'the journal'} to drop it"
            )

    def _stays(self, record: VersionRecord) -> Iterator[str]:
        """Say what keeps its copies from being evicted, and which may go."""
        if record.creating:
            yield from self._creations.waits(record)
            return
        spare = []
        for node in self._holders.listed(record):
            until_s = self._pins.until_s(record.generation, node.node)
            if until_s:
                left_s = until_s - self._outbox.now_s
                how_long = (
                    "until it is unpinned" if isinf(left_s) else f"{left_s:.1f} s"
                )
                yield f"  pinned on {node.label}: {how_long}, it is not evicted there"
            elif self._replicas.spare(record, node):
                spare.append(node.label)
        if spare:
            yield f"  may be evicted from {', '.join(spare)}: enough other hosts hold it"

    def _on_its_way(self, generation: Generation) -> Iterator[str]:
        for move in self._moves.of(generation):
            done, total = move.progress()
            how = f"{done} of {total} bytes"
            if move.task is None:
                how = "it rests before another try"
            elif not done:
                how = "its node has not said that bytes came"
            yield (
                f"  on its way to {move.node.label} ({move.why}), try {move.attempts}: {how}"
            )

    # ------------------------------------------------------------ operations, nodes
    def _operation(self, rid: RequestId) -> Iterator[str]:
        operation = self._operations.find(rid)
        if operation is None:
            return
        until_s = self._outbox.now_s if operation.open else operation.ended_s
        what = f"{operation.kind} of {operation.id or operation.node!r}"
        line = f"{what} is {operation.status}, {until_s - operation.started_s:.3f} s"
        if not operation.open:
            if operation.id and operation.node:
                line += f", at {self._nodes.label(operation.node)}"
            if operation.via:
                line += f", {operation.moved_bytes} bytes by {operation.via}"
            yield f"{line} {operation.message}".rstrip()
            return
        left_s = operation.until_s - self._outbox.now_s
        yield f"{line}, at most {left_s:.1f} s more"
        yield from self._waits(operation)

    def _waits(self, operation: Operation) -> Iterator[str]:
        record = self._names.versions.get(operation.generation)
        if record is None:
            for ending in self._endings.of(operation.id):
                for node in ending.nodes.values():
                    yield f"  waits for {node.label} to drop version {ending.record.version}"
            return
        if record.creating:
            yield from self._creations.waits(record)
        elif self._holders.is_awaited(record):
            yield "  waits for its holders to come back and claim it"
        yield from self._on_its_way(operation.generation)

    def _node(self, name: NodeId) -> Iterator[str]:
        node = self._nodes.records.get(name)
        if node is None:
            return
        state = "live" if node.live else "gone: its lease has lapsed"
        facts = [
            *(
                []
                if node.attended
                else ["without a worker: it is read from, not placed on"]
            ),
            *(["being drained"] if node.draining else []),
            *([] if node.link or not node.live else ["its link is down"]),
        ]
        yield f"node {node.label} is {', '.join([state, *facts])}"
        for task in self._tasks.of(name):
            record = self._names.versions.get(task.order.generation)
            what = f"{record.id!r} v{record.version}" if record else "what is no more"
            kind = type(task.order).__name__.removeprefix("Do").lower()
            since_s = self._outbox.now_s - task.started_s
            yield f"  has had to {kind} {what} for {since_s:.1f} s"
