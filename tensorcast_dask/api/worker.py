"""A node with a live Dask worker, and the paper's calls on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorcast_dask.notebook.cards import node_card
from tensorcast_dask.tensors.messages import Tier

if TYPE_CHECKING:
    from tensorcast_dask.api.artifact import Artifact
    from tensorcast_dask.tensors.messages import NodeState

__all__ = ["Worker"]


class Worker:
    """A store with its Dask worker.

    Attributes
    ----------
    name : str
        The Dask worker's name.
    address : str
        The Dask worker's address.
    node : str
        Identity of the node: its store's uuid, which outlives the worker.
    roles : tuple of str
        `basic`, `gateway`, `shard_home`.
    device : str
        UUID of the node's device; "" where it has no device tier.
    """

    def __init__(self, state: NodeState, session: Any) -> None:
        self._state = state
        self._session = session
        self.name = state.card.name
        self.address = state.card.worker
        self.node = state.card.node
        self.roles = state.card.roles
        use = state.uses.get(Tier.DEVICE)
        self.device = "" if use is None else use.device

    def prefetch(
        self, artifact: Artifact | str, device: str = "host", **options: Any
    ) -> Any:
        """Begin to bring a replica here; returns at once with an `Operation`."""
        return self._session.prefetch(artifact, worker=self, device=device, **options)

    def publish(
        self, artifact: Artifact | str, version: int | None = None, **options: Any
    ) -> Any:
        """Make a version visible to `latest`."""
        return self._session.publish(artifact, version, **options)

    def latest(self, artifact_id: str, **options: Any) -> Any:
        """Give the newest published version."""
        return self._session.latest(artifact_id, **options)

    def replicate(
        self,
        artifact: Artifact | str,
        dst_worker: Worker | str | None = None,
        **options: Any,
    ) -> Any:
        """Make a replica at `dst_worker`; without one, here."""
        return self._session.replicate(artifact, dst_worker or self, **options)

    def migrate(self, *args: Any, **options: Any) -> Any:
        """Move a replica.

        The paper's `migrate(src_worker, dst_worker, artifact)`, or from here with
        `migrate(artifact, dst_worker)`.
        """
        first, *rest = args
        if len(rest) == 2:
            source, target, artifact = first, rest[0], rest[1]
        else:
            source, target, artifact = self, rest[0], first
        return self._session.migrate(artifact, source, target, **options)

    def destroy(self, artifact: Artifact | str, **options: Any) -> Any:
        """End an artifact version, or all of an id."""
        return self._session.destroy(artifact, **options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Worker) and self.node == other.node

    def __hash__(self) -> int:
        return hash(self.node)

    def __repr__(self) -> str:
        return f"<Worker {self.name!r} {self.address}>"

    def _repr_html_(self) -> str:
        return node_card(self._state)
