"""What nodes and instances report of the system's state, on its way to signals.

Rules:

1. Reports are taken in here, kept in small bounded parts, and told by `signals`.
2. Of a version that is gone, or of a node that is not here, nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tensorcast_dask.scheduler_plugin.state.bandwidths import Bandwidths
from tensorcast_dask.scheduler_plugin.state.events import Emit
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.loads import Loads
from tensorcast_dask.scheduler_plugin.state.plans import Plans
from tensorcast_dask.scheduler_plugin.state.readings import Readings
from tensorcast_dask.scheduler_plugin.state.records import NodeRecord
from tensorcast_dask.scheduler_plugin.state.sessions import Sessions
from tensorcast_dask.scheduler_plugin.state.signals import Signals
from tensorcast_dask.scheduler_plugin.state.usage import Usage
from tensorcast_dask.tensors.ids import ArtifactId, Version
from tensorcast_dask.tensors.messages import (
    InstanceGone,
    InstanceLoad,
    Renew,
    TaskDone,
)
from tensorcast_dask.tensors.signals import Reading, Signal

__all__ = ["MAX_OF_RUN", "Observed"]

#: What a run of a plan tells that it changed, and how much of it at most.
_OF_RUNS: Final = ("node/", "link/", "instance/", "event/")
MAX_OF_RUN: Final = 256


class Observed:
    """What is reported, and the signals made of it."""

    def __init__(self, ground: Ground, plans: Plans, sessions: Sessions) -> None:
        self._outbox = ground.outbox
        self._names = ground.names
        self._ground = ground
        self._plans = plans
        self._sessions = sessions
        self.bandwidths = Bandwidths()
        self.usage = Usage()
        self.loads = Loads()
        self.readings = Readings(ground, self.bandwidths, self.usage, self.loads)
        self.readings.more["catalog/"] = self._of_catalog
        self.readings.more["plan/"] = plans.readings
        self.signals = Signals(ground, self.readings)
        plans.mark = self._mark
        plans.changes = self._changes
        ground.tasks.on_done = self._transferred
        ground.outbox.on_emit = self._happened

    # ------------------------------------------------------------ nodes
    def joined(self, node: NodeRecord) -> None:
        """Take a node's first word."""
        self.signals.arrived(self.readings.of_node(node))

    def renewed(self, node: NodeRecord, message: Renew) -> None:
        """Take what a renewal says: room, and what was read."""
        now_s = self._outbox.now_s
        for generation, count in message.reads.items():
            record = self._names.versions.get(generation)
            if record is not None and count > 0:
                self.usage.read(record.id, count, now_s=now_s)
                self.usage.uses(
                    node.node,
                    record.id,
                    record.version,
                    now_s=now_s,
                    epoch=node.incarnation,
                )
        self.signals.arrived(self.readings.of_node(node))

    def _transferred(self, node: NodeRecord, done: TaskDone) -> None:
        if done.sources:
            self.bandwidths.transferred(node.node, done, now_s=self._outbox.now_s)
            self.signals.arrived(self.readings.of_links_into(node.node, done.sources))

    # ------------------------------------------------------------ instances
    def pushed(self, node: NodeRecord, message: InstanceLoad) -> None:
        """Take an instance's own numbers."""
        now_s = self._outbox.now_s
        if not self.loads.pushed(node.node, message, now_s=now_s):
            return
        load = self.loads.get(message.instance)
        assert load is not None, "signals: a push was taken and is not there"
        for name, version in load.said.versions.items():
            if ArtifactId(name) in self._names.artifacts:
                self.usage.uses(
                    message.instance,
                    ArtifactId(name),
                    Version(version),
                    now_s=now_s,
                    epoch=message.epoch,
                )
        self.signals.arrived([self.readings.of_instance(load)])

    def instance_gone(self, message: InstanceGone) -> None:
        """Forget an instance."""
        if self.loads.gone(message.instance, message.epoch):
            self.usage.left(message.instance)

    # ------------------------------------------------------------ events
    def _happened(self, emit: Emit) -> None:
        self.signals.happened(emit)
        if emit.topic == "destroyed":
            name = ArtifactId(str(emit.facts["id"]))
            if name not in self._names.artifacts:
                self.usage.forget(name)

    # ------------------------------------------------------------ plans
    def _mark(self) -> int:
        """Read what a run may change, as it was before."""
        self.signals.look_again(_OF_RUNS)
        return self.signals.number

    def _changes(self, since: int, at_once: bool) -> tuple[Signal, ...]:  # noqa: FBT001
        """Tell what has changed, as it is, or as it was a moment ago."""
        self.signals.look_again(_OF_RUNS, at_once=at_once)
        return tuple(self.signals.changes(since, _OF_RUNS, MAX_OF_RUN))

    # ------------------------------------------------------------ the catalog's own
    def _of_catalog(self) -> Iterator[tuple[str, Reading]]:
        ground = self._ground
        yield (
            "catalog/counts",
            {
                "sessions": len(self._sessions),
                "operations": len(ground.operations),
                "tasks": len(ground.tasks),
                "pins": len(ground.pins),
                "plans": len(self._plans),
                "held": ground.outbox.waiting,
                "artifacts": len(ground.names.artifacts),
                "nodes": sum(node.live for node in ground.nodes.records.values()),
            },
        )
