"""What policies are shown: nodes, artifacts, links, instances, as they are now.

Rules:

1. A view has what its role decides on, and nothing else.
2. Of artifacts those with too few copies come first, then the most read, at most
   `MAX_ARTIFACTS`: making a view must not hold the loop up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tensorcast_dask.policies.views import (
    ArtifactView,
    InstanceView,
    NodeView,
    RequestView,
    Role,
    View,
)
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.loads import Load
from tensorcast_dask.scheduler_plugin.state.observed import Observed
from tensorcast_dask.scheduler_plugin.state.placement import (
    capacity_bytes,
    free_bytes,
)
from tensorcast_dask.scheduler_plugin.state.records import NodeRecord, VersionRecord
from tensorcast_dask.tensors.ids import Generation
from tensorcast_dask.tensors.messages import Owner, Tier

__all__ = ["MAX_ARTIFACTS", "PolicyViews"]

MAX_ARTIFACTS: Final = 512


class PolicyViews:
    """The making of views."""

    def __init__(self, ground: Ground, observed: Observed) -> None:
        self._outbox = ground.outbox
        self._names = ground.names
        self._nodes = ground.nodes
        self._holders = ground.holders
        self._pins = ground.pins
        self._observed = observed
        #: Versions that are to have several copies, as they come up.
        self._floors: dict[Generation, VersionRecord] = {}
        ground.replicas.on_remark = self._remarked

    def _remarked(self, record: VersionRecord) -> None:
        if record.replicas > 1:
            self._floors[record.generation] = record

    def record(self, generation: int) -> VersionRecord | None:
        """Find a version by the number that a policy names."""
        return self._names.versions.get(Generation(generation))

    def of(self, role: Role) -> View:
        """Make the view of a role."""
        artifacts = role in (Role.EVICT, Role.REPLICATE)
        links = role in (Role.EVICT, Role.REPLICATE, Role.REBALANCE)
        return View(
            now_s=self._outbox.now_s,
            nodes=tuple(self._of_nodes()),
            artifacts=tuple(self._of_artifacts()) if artifacts else (),
            links=tuple(self._of_links()) if links else (),
            instances=tuple(self._of_instances()) if role is Role.REBALANCE else (),
        )

    def _of_nodes(self) -> Iterator[NodeView]:
        for node in self._nodes.records.values():
            host = node.uses.get(Tier.HOST)
            if node.live and node.is_store:
                yield NodeView(
                    node=node.node,
                    host=node.host,
                    name=node.card.name,
                    labels=node.card.labels,
                    capacity_bytes=capacity_bytes(node),
                    free_bytes=max(0, free_bytes(node)),
                    warm_bytes=host.warm_bytes if host is not None else 0,
                    placeable=node.attended and not node.draining and bool(node.link),
                )

    def _of_links(self) -> Iterator[tuple[str, str, float]]:
        for source, node, found in self._observed.bandwidths.items():
            if found.bytes_per_s is not None:
                yield source, node, found.bytes_per_s

    # ------------------------------------------------------------ artifacts
    def _of_artifacts(self) -> Iterator[ArtifactView]:
        seen: dict[Generation, None] = {}
        versions = self._names.versions
        for generation, record in list(self._floors.items()):
            if generation not in versions:
                del self._floors[generation]
            elif (
                self._shows(record)
                and len(seen) < MAX_ARTIFACTS
                and len(self._holders.hosts(record)) < record.replicas
            ):
                seen[generation] = None
                yield self._artifact(record)
        now_s = self._outbox.now_s
        for name in self._observed.usage.hottest(now_s=now_s):
            artifact = self._names.artifacts.get(name)
            for record in artifact.versions.values() if artifact is not None else ():
                if len(seen) == MAX_ARTIFACTS:
                    return
                if self._shows(record) and record.generation not in seen:
                    seen[record.generation] = None
                    yield self._artifact(record)

    def _shows(self, record: VersionRecord) -> bool:
        return not record.creating and record.owner is Owner.SYSTEM

    def _artifact(self, record: VersionRecord) -> ArtifactView:
        nodes = self._holders.listed(record)
        artifact = self._names.artifacts[record.id]
        return ArtifactView(
            id=record.id,
            version=record.version,
            generation=record.generation,
            nbytes=record.nbytes,
            wanted=record.replicas,
            holders=tuple(node.node for node in nodes),
            hosts=len({node.host for node in nodes}),
            published=record.published,
            pinned=self._pins.holds(record.generation),
            current=record.version == (artifact.latest or artifact.newest),
            reads_per_s=self._observed.usage.heat(record.id, now_s=self._outbox.now_s),
            refetch_s=self._refetch_s(record, nodes),
            labels=record.labels,
        )

    def _refetch_s(
        self, record: VersionRecord, nodes: list[NodeRecord]
    ) -> float | None:
        speeds = [self._observed.bandwidths.best_into(node.node) for node in nodes]
        known = [one for one in speeds if one]
        return record.nbytes / max(known) if known else None

    # ------------------------------------------------------------ instances
    def _of_instances(self) -> Iterator[InstanceView]:
        now_s = self._outbox.now_s
        for load in self._observed.loads.values():
            node = self._nodes.records.get(load.node)
            said = load.said
            yield InstanceView(
                instance=said.instance,
                node=load.node,
                epoch=said.epoch,
                values=said.values,
                fresh=node is not None and node.live and load.fresh(now_s),
                draining=said.draining,
                requests=tuple(_requests(load)),
            )


def _requests(load: Load) -> Iterator[RequestView]:
    for one in load.said.requests:
        yield RequestView(
            request=one.request,
            tokens=one.tokens,
            last_active_s=load.as_of_s - one.idle_s,
            migrations=one.migrations,
            running=one.running,
            migrating=one.migrating,
        )
