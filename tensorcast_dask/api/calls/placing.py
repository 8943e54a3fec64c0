"""Calls that say where replicas are to be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorcast_dask.api.actions import moves, names, reads
from tensorcast_dask.api.artifact import Artifact
from tensorcast_dask.api.calls.base import Calls, Node, ref_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tensorcast_dask.api.connection.operation import Operation
    from tensorcast_dask.api.worker import Worker


__all__ = ["Placing"]


class Placing(Calls):
    """What says where replicas are to be."""

    def prefetch(
        self,
        artifact: Artifact | str,
        *,
        worker: Node = None,
        device: str = "host",
        deadline: float | None = None,
        wait: bool = False,
        progress: bool = False,
    ) -> Any:
        """Bring a replica to a node; by default returns at once with an `Operation`.

        `progress` shows how far it is, in a terminal or a notebook.
        """
        return self._bring(
            "prefetch",
            artifact,
            worker,
            device,
            deadline=deadline,
            wait=wait,
            progress=progress,
        )

    def replicate(
        self,
        artifact: Artifact | str,
        worker: Node,
        *,
        device: str = "host",
        deadline: float | None = None,
        wait: bool = True,
        progress: bool = False,
    ) -> Any:
        """Make a further replica at a node. Returns an `Operation` of `Moved`.

        `progress` shows how far it is, in a terminal or a notebook.
        """
        return self._bring(
            "replicate",
            artifact,
            worker,
            device,
            deadline=deadline,
            wait=wait,
            progress=progress,
        )

    def migrate(
        self,
        artifact: Artifact | str,
        source: Node,
        target: Node,
        *,
        device: str = "host",
        deadline: float | None = None,
        wait: bool = True,
        progress: bool = False,
    ) -> Any:
        """Copy, verify, switch the catalog, free the source. Returns an `Operation` of `Moved`.

        A failure leaves the source as it was.
        """
        limit = self._core.deadline(deadline)
        where = moves.where(self._core, device)

        async def action(operation: Operation[Any]) -> Any:
            info = await self._info(artifact, limit)
            operation.tally.total = info.nbytes
            return await moves.migrate(
                self._core,
                operation,
                info.generation,
                source=await self._node(source, limit),
                node=await self._node(target, limit),
                where=where,
                limit=limit,
            )

        return self._operate(
            "migrate", ref_of(artifact), action, wait=wait, progress=progress
        )

    def release(
        self,
        artifact: Artifact | str,
        *,
        worker: Node = None,
        deadline: float | None = None,
        wait: bool = True,
    ) -> Any:
        """Drop one node's replica, or (caller-leased) end the registration.

        Raises
        ------
        Mismatch
            For the last replica of a system-owned version: destroy it instead.
        """
        limit = self._core.deadline(deadline)

        async def action(operation: Operation[None]) -> None:
            info = await self._info(artifact, limit)
            node = await self._node(worker, limit)
            await moves.release(
                self._core, operation, info.generation, node=node, limit=limit
            )
            if isinstance(artifact, Artifact) and artifact._registration is not None:  # noqa: SLF001
                await self._core.in_thread(artifact._registration.close)  # noqa: SLF001

        return self._operate("release", ref_of(artifact), action, wait=wait)

    def pin(
        self,
        artifact: Artifact | str,
        *,
        ttl: float = float("inf"),
        worker: Node = None,
        deadline: float | None = None,
    ) -> Any:
        """Promise that its replicas are not evicted for `ttl` seconds, by default without end.

        It holds over restarts and after the program's end: give a `ttl`, or `unpin`. `destroy`
        ends a pinned version too, and the pin with it.

        Returns
        -------
        Pinned
            With the number that `unpin` takes.

        Raises
        ------
        CapacityError
            When a node's pinned bytes would pass what it may promise.
        """
        limit = self._core.deadline(deadline)

        async def work() -> Any:
            info = await self._info(artifact, limit)
            node = await self._node(worker, limit)
            return await names.pin(
                self._core, info.generation, ttl_s=ttl, node=node, limit=limit
            )

        return self._core.call(work)

    def unpin(
        self, artifact: Artifact | str, pin: int = 0, *, deadline: float | None = None
    ) -> Any:
        """Take back one pin, or (0) all pins of the artifact; idempotent.

        A pin that was taken back before, or has run out, is no error.
        """
        limit = self._core.deadline(deadline)

        async def work() -> None:
            info = await self._info(artifact, limit)
            await names.unpin(self._core, info.generation, pin, limit)

        return self._core.call(work)

    def drain(
        self,
        worker: Worker | str,
        *,
        end: bool = True,
        deadline: float | None = None,
        wait: bool = True,
    ) -> Any:
        """Empty a node; the operation's result is the receipt (`Drained`)."""
        limit = self._core.deadline(deadline)

        async def action(operation: Operation[Any]) -> Any:
            node = await self._node(worker, limit)
            drained = await moves.drain(
                self._core, operation, node, end=end, limit=limit
            )
            operation.tally.total = drained.moved_bytes
            return drained

        return self._operate("drain", str(worker), action, wait=wait)

    def save(
        self,
        artifact: Artifact | str,
        path: str | Path,
        *,
        metadata: Mapping[str, str] | None = None,
        max_shard_bytes: int | str = 0,
        worker: Node = None,
        deadline: float | None = None,
        wait: bool = True,
        progress: bool = False,
    ) -> Any:
        """Write safetensors, atomically; `max_shard_bytes` ("5 GB") writes shards and an index.

        A holder's store writes, on its own host; a view is written by this process. A path
        that ends in a slash is a folder. Returns an `Operation` of `Moved`, whose `path` stands
        for the model, and whose `files` are all that were written.
        """
        limit = self._core.deadline(deadline)
        shard = moves.check_shard(max_shard_bytes)

        async def action(operation: Operation[Any]) -> Any:
            info = await self._info(artifact, limit)
            operation.tally.total = info.nbytes
            if info.view:
                return await reads.save_view(
                    self._core,
                    info,
                    path,
                    metadata=metadata,
                    max_shard_bytes=shard,
                    limit=limit,
                )
            return await moves.save(
                self._core,
                operation,
                info.generation,
                path,
                node=await self._node(worker, limit),
                metadata=metadata,
                max_shard_bytes=shard,
                limit=limit,
            )

        return self._operate(
            "save", ref_of(artifact), action, wait=wait, progress=progress
        )

    def _bring(
        self,
        why: str,
        artifact: Artifact | str,
        worker: Node,
        device: str,
        *,
        deadline: float | None,
        wait: bool,
        progress: bool,
    ) -> Any:
        limit = self._core.deadline(deadline)
        where = moves.where(self._core, device)

        async def action(operation: Operation[Any]) -> Any:
            info = await self._info(artifact, limit)
            operation.tally.total = info.nbytes
            node = await self._node(worker, limit)
            return await moves.ensure(
                self._core,
                operation,
                info.generation,
                node=node,
                where=where,
                why=why,
                limit=limit,
            )

        return self._operate(
            why, ref_of(artifact), action, wait=wait, progress=progress
        )
