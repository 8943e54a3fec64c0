"""Signals as they are now, read from the truth: nodes, work, links, artifacts, plans.

Rules:

1. A reading is made from the catalog's own records when somebody looks. There is no second
   book that could differ from the first.
2. What only a node or an instance knows is as old as its last word, carries its term, and is
   stale when it is late. It is away `AWAY_S` after its source was given up.
3. Of artifacts the first thousand that fit the question are told, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from tensorcast_dask.scheduler_plugin.state.bandwidths import Bandwidths, Measured
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.loads import Load, Loads
from tensorcast_dask.scheduler_plugin.state.records import NodeRecord
from tensorcast_dask.scheduler_plugin.state.usage import Usage
from tensorcast_dask.tensors.ids import ArtifactId, NodeId
from tensorcast_dask.tensors.messages import DoLoad, DoPull, TierUse
from tensorcast_dask.tensors.signals import Reading, rounded

__all__ = [
    "AWAY_S",
    "LINK_FRESH_S",
    "LINK_KEPT_S",
    "MAX_ARTIFACTS",
    "Readings",
    "Told",
]

#: For how long the last word of a source that is gone is still told, as stale.
AWAY_S: Final = 30.0
#: How long a measured bandwidth counts as of now.
LINK_FRESH_S: Final = 300.0
LINK_KEPT_S: Final = 3600.0
#: How long a consumer counts as one after its last read.
CONSUMER_FRESH_S: Final = 600.0
MAX_ARTIFACTS: Final = 1000


@dataclass(slots=True, frozen=True)
class Told:
    """One signal as it is now."""

    name: str
    value: Reading
    as_of_s: float
    epoch: int
    fresh: bool = True


More: TypeAlias = Callable[[], Iterable[tuple[str, Reading]]]


class Readings:
    """Everything that can be told.

    Attributes
    ----------
    more : dict
        Families that parts above know of: what begins with the key, read by the value.
    """

    def __init__(
        self, ground: Ground, bandwidths: Bandwidths, usage: Usage, loads: Loads
    ) -> None:
        self._outbox = ground.outbox
        self._names = ground.names
        self._nodes = ground.nodes
        self._holders = ground.holders
        self._pins = ground.pins
        self._tasks = ground.tasks
        self._bandwidths = bandwidths
        self._usage = usage
        self._loads = loads
        self.more: dict[str, More] = {}

    def of(self, prefixes: Iterable[str]) -> Iterator[Told]:
        """Read what begins with one of the prefixes; of artifacts the first `MAX_ARTIFACTS`."""
        wanted = tuple(prefixes)
        families: dict[str, Callable[[], Iterable[Told]]] = {
            "node/": self._of_nodes,
            "link/": self._of_links,
            "instance/": self._of_instances,
            "consumer/": self._of_consumers,
        }
        for family, read in families.items():
            if _asked(family, wanted):
                for told in read():
                    if told.name.startswith(wanted):
                        yield told
        for family, more in self.more.items():
            if _asked(family, wanted):
                for name, value in more():
                    if name.startswith(wanted):
                        yield self._now(name, value)
        if _asked("artifact/", wanted):
            yield from self._of_artifacts(wanted)

    def _now(self, name: str, value: Reading) -> Told:
        return Told(name, value, self._outbox.now_s, self._names.numbers.epoch)

    # ------------------------------------------------------------ nodes
    def _of_nodes(self) -> Iterator[Told]:
        for node in self._nodes.records.values():
            yield from self.of_node(node)

    def of_node(self, node: NodeRecord) -> Iterator[Told]:
        """Read one node."""
        now_s = self._outbox.now_s
        ttl_s = self._nodes.lease_ttl_s
        if not node.uses or not node.lease_until_s:
            return  # of an earlier life of the catalog; nothing was heard of it yet
        heard_s = node.lease_until_s - ttl_s
        if now_s - heard_s > ttl_s + AWAY_S:
            return
        fresh = node.live and now_s - heard_s <= ttl_s
        for tier, use in node.uses.items():
            name = f"node/{node.node}/{tier}"
            yield Told(name, _tier(node, use), heard_s, node.incarnation, fresh)
        yield Told(
            f"node/{node.node}/orders",
            self._work(node),
            now_s if node.live else heard_s,
            node.incarnation,
            fresh,
        )

    def _work(self, node: NodeRecord) -> Reading:
        queue = inflight_bytes = 0
        for task in self._tasks.of(node.node):
            queue += 1
            if isinstance(task.order, DoPull):
                inflight_bytes += max(0, task.order.nbytes - task.done_bytes)
            elif isinstance(task.order, DoLoad):
                inflight_bytes += max(0, task.total_bytes - task.done_bytes)
        return {
            "name": node.card.name,
            "live": node.live,
            "attended": node.attended,
            "draining": node.draining,
            "queue": queue,
            "inflight_bytes": inflight_bytes,
            "promised_bytes": sum(node.promised_bytes.values()),
        }

    # ------------------------------------------------------------ links, instances
    def _of_links(self) -> Iterator[Told]:
        for source, node, found in self._bandwidths.items():
            yield from self._of_link(source, node, found)

    def of_links_into(self, node: NodeId, sources: Iterable[NodeId]) -> Iterator[Told]:
        """Read the links from some nodes to one."""
        for source in sources:
            found = self._bandwidths.get(source, node)
            if found is not None:
                yield from self._of_link(source, node, found)

    def _of_link(self, source: NodeId, node: NodeId, found: Measured) -> Iterator[Told]:
        ends = [self._nodes.records.get(one) for one in (source, node)]
        age_s = self._outbox.now_s - found.at_s
        live = all(one is not None and one.live for one in ends)
        if age_s <= (LINK_KEPT_S if live else AWAY_S):
            target = ends[1]
            epoch = 0 if target is None else target.incarnation
            fresh = live and age_s <= LINK_FRESH_S
            name = f"link/{source}/{node}"
            yield Told(name, found.reading, found.at_s, epoch, fresh)

    def _of_instances(self) -> Iterator[Told]:
        self._loads.expire(self._outbox.now_s)
        for load in self._loads.values():
            yield self.of_instance(load)

    def of_instance(self, load: Load) -> Told:
        """Read one instance."""
        node = self._nodes.records.get(load.node)
        heard = load.fresh(self._outbox.now_s)
        fresh = node is not None and node.live and heard
        name = f"instance/{load.said.instance}"
        return Told(name, load.reading, load.as_of_s, load.said.epoch, fresh)

    # ------------------------------------------------------------ artifacts
    def has(self, name: str) -> bool:
        """Whether a signal that was not read, since there are many like it, is there."""
        begin = "artifact/"
        return name.startswith(begin) and name[len(begin) :] in self._names.artifacts

    def _of_artifacts(self, wanted: tuple[str, ...]) -> Iterator[Told]:
        seen = 0
        begin = "artifact/"
        starts = {
            one[len(begin) :] if one.startswith(begin) else ""
            for one in wanted
            if one.startswith(begin) or begin.startswith(one)
        }
        if "" in starts:
            starts = {""}
        for start in sorted(starts):
            for name in self._names.listed.starting(start, at=""):
                if seen == MAX_ARTIFACTS:
                    return
                seen += 1
                yield self._now(f"{begin}{name}", self._artifact(name))

    def _artifact(self, name: ArtifactId) -> Reading:
        artifact = self._names.artifacts[name]
        record = artifact.versions[artifact.latest or artifact.newest]
        nodes = self._holders.listed(record)
        hosts = len({node.host for node in nodes})
        return {
            "latest": artifact.latest,
            "newest": artifact.newest,
            "versions": len(artifact.versions),
            "bytes": record.nbytes,
            "replicas": len(nodes),
            "hosts": hosts,
            "wanted": record.replicas,
            "missing": max(0, record.replicas - hosts),
            "lost": self._holders.is_lost(record),
            "pinned": self._pins.holds(record.generation),
            "reads_per_s": self._usage.heat(name, now_s=self._outbox.now_s),
        }

    def _of_consumers(self) -> Iterator[Told]:
        now_s = self._outbox.now_s
        self._loads.expire(now_s)
        for who, name, consumed in self._usage.consumers():
            artifact = self._names.artifacts.get(name)
            if artifact is None or not self._is_there(who):
                continue
            newest = artifact.latest or artifact.newest
            behind = sum(consumed.version < one <= newest for one in artifact.versions)
            value: Reading = {
                "artifact": name,
                "version": consumed.version,
                "latest": newest,
                "behind": behind,
            }
            fresh = now_s - consumed.at_s <= CONSUMER_FRESH_S
            yield Told(
                f"consumer/{who}/{name}", value, consumed.at_s, consumed.epoch, fresh
            )

    def _is_there(self, who: str) -> bool:
        node = self._nodes.records.get(NodeId(who))
        return node.live if node is not None else self._loads.get(who) is not None


def _asked(family: str, wanted: tuple[str, ...]) -> bool:
    return any(one.startswith(family) or family.startswith(one) for one in wanted)


def _tier(node: NodeRecord, use: TierUse) -> Reading:
    held_bytes = use.used_bytes - use.evictable_bytes + use.reserved_bytes
    free_bytes = max(0, use.capacity_bytes - held_bytes - use.lingering_bytes)
    return {
        "name": node.card.name,
        "capacity_bytes": use.capacity_bytes,
        "used_bytes": use.used_bytes,
        "reserved_bytes": use.reserved_bytes,
        "pinned_bytes": use.pinned_bytes,
        "evictable_bytes": use.evictable_bytes,
        "warm_bytes": use.warm_bytes,
        "lingering_bytes": use.lingering_bytes,
        "shared_bytes": use.shared_bytes,
        "replicas": use.replicas,
        "free_bytes": free_bytes,
        "free_fraction": rounded(free_bytes / max(1, use.capacity_bytes)),
    }
