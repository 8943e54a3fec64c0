"""How many copies there are, and where: floors that are repaired, and more of what is read."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import ClassVar

from tensorcast_dask.policies.views import (
    ArtifactView,
    Copy,
    NodeView,
    Role,
    View,
    Wanted,
)

__all__ = ["Popular", "ReplicaFloor"]


class _Room:
    """What is left where, as this decision spends it."""

    def __init__(self, view: View) -> None:
        self.nodes = {one.node: one for one in view.nodes}
        self._free = {one.node: one.free_bytes for one in view.nodes if one.placeable}

    def hosts(self, artifact: ArtifactView) -> set[str]:
        return {self.nodes[one].host for one in artifact.holders if one in self.nodes}

    def take(self, artifact: ArtifactView, hosts: set[str]) -> NodeView | None:
        """Take room for a copy on a host that has none; the emptiest, ties by identity."""
        able = [
            (-free, node)
            for node, free in self._free.items()
            if free >= artifact.nbytes and self.nodes[node].host not in hosts
        ]
        if not able:
            return None
        node = min(able)[1]
        self._free[node] -= artifact.nbytes
        return self.nodes[node]


class ReplicaFloor:
    """Repair: as many hosts hold a version as were asked for with `put(..., replicas=)`.

    Of several versions those with the fewest copies first. What has no copy left cannot be
    repaired.

    Parameters
    ----------
    most : int
        Most copies that one decision begins.
    """

    role: ClassVar[Role] = Role.REPLICATE

    def __init__(self, *, most: int = 8) -> None:
        self.most = most

    def decide(self, view: View, wanted: Wanted | None = None) -> list[Copy]:  # noqa: ARG002
        """Choose what is missing."""
        room = _Room(view)
        short = [one for one in view.artifacts if 0 < one.hosts < one.wanted]
        short.sort(key=lambda one: (one.hosts, one.id, one.version))
        found: list[Copy] = []
        for artifact in short:
            for copy in _copies(artifact, artifact.wanted, room, "repair"):
                if len(found) == self.most:
                    return found
                found.append(copy)
        return found


class Popular:
    """A copy for each so many reads a second, of the version that a name means now.

    Copies that are there stay: when they are not needed any more they are evicted as spare
    ones when room is wanted.

    Parameters
    ----------
    reads_per_s : float
        Reads that one copy is to serve.
    most : int
        Most copies of one version.
    at_once : int
        Most copies that one decision begins.
    """

    role: ClassVar[Role] = Role.REPLICATE

    def __init__(
        self, *, reads_per_s: float = 10.0, most: int = 4, at_once: int = 4
    ) -> None:
        self.reads_per_s = reads_per_s
        self.most = most
        self.at_once = at_once

    def decide(self, view: View, wanted: Wanted | None = None) -> list[Copy]:  # noqa: ARG002
        """Choose what is read most."""
        room = _Room(view)
        hot = [one for one in view.artifacts if one.current and one.hosts]
        hot.sort(key=lambda one: (-one.reads_per_s, one.id))
        found: list[Copy] = []
        for artifact in hot:
            count = min(self.most, ceil(artifact.reads_per_s / self.reads_per_s))
            for copy in _copies(artifact, count, room, "popular"):
                if len(found) == self.at_once:
                    return found
                found.append(copy)
        return found


def _copies(
    artifact: ArtifactView, count: int, room: _Room, why: str
) -> Iterator[Copy]:
    hosts = room.hosts(artifact)
    for _ in range(count - artifact.hosts):
        node = room.take(artifact, hosts)
        if node is None:
            return
        hosts.add(node.host)
        yield Copy(generation=artifact.generation, node=node.node, why=why)
