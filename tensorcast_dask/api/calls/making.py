"""Calls that make artifacts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorcast_dask.api.actions import drafts, lending, moves, puts, tasks
from tensorcast_dask.api.actions.names import warn_of_shortfall
from tensorcast_dask.api.artifact import Artifact
from tensorcast_dask.api.calls.base import Calls, Node
from tensorcast_dask.tensors.requests import check_replicas

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tensorcast_dask.api.connection.operation import Operation


__all__ = ["Making"]


class Making(Calls):
    """What makes artifacts."""

    def put(
        self,
        tensors: Any,
        id: str,  # noqa: A002 - the field's word
        *,
        labels: Mapping[str, str] | None = None,
        replicas: int = 1,
        version: int | str | None = None,
        worker: Node = None,
        deadline: float | None = None,
        wait: bool = True,
        progress: bool = False,
    ) -> Any:
        """Copy tensors into the cluster as a system-owned artifact.

        When it returns, the artifact is readable and later writes to `tensors` never show.

        Parameters
        ----------
        tensors : array, mapping of str to array, or Dask Future of one
            numpy or torch, any layout; tied tensors are stored once and come back tied. For
            a Future the put runs where its result lies.
        id : str
            Name of the artifact.
        labels : mapping of str to str, optional
            To find it by.
        replicas : int
            On how many hosts. With fewer hosts it keeps what it can; the artifact is
            `degraded`, and a warning is logged.
        version : int or "next", optional
            Commit another version of an id that exists; not shown before `publish`.
        worker : Worker or str, optional
            At which node; default by policy, `explain` says why.
        deadline : float, optional
            Seconds; None the session's default.
        wait : bool
            Whether to return only when it is readable. Else the tensors are not to be
            changed before the operation has ended.
        progress : bool
            Whether to show how far it is, in a terminal or a notebook.

        Returns
        -------
        Artifact
            With `wait=False` an `Operation` of it.

        Raises
        ------
        AlreadyExists
            When the id holds other content (equal content gives the artifact there is).
        UnsupportedDtype, InvalidName, CapacityError, CatalogUnavailable, DeadlineExceeded
        """
        check_replicas(replicas)
        limit = self._core.deadline(deadline)

        async def action(operation: Operation[Artifact]) -> Artifact:
            if tasks.holds_future(tensors):
                info = await tasks.put_where_it_lies(
                    self._core,
                    tensors,
                    id,
                    {"labels": labels, "replicas": replicas, "version": version},
                    limit,
                )
            else:
                node = await self._node(worker, limit)
                info = await puts.put(
                    self._core,
                    tensors,
                    id,
                    labels=labels,
                    replicas=replicas,
                    version=version,
                    node=node,
                    limit=limit,
                    tally=operation.tally,
                )
            operation.tally.total = info.nbytes
            operation.note = info.degraded
            warn_of_shortfall(info)
            return Artifact(info, self._session)

        return self._core.operate(
            "put", id, action, wait=wait, progress=progress, value=True
        )

    def create(
        self,
        spec: Any,
        id: str,  # noqa: A002
        *,
        labels: Mapping[str, str] | None = None,
        replicas: int = 1,
        version: int | str | None = None,
        worker: Node = None,
        deadline: float | None = None,
    ) -> Any:
        """Make room for tensors that the caller builds in place; `commit()` copies nothing.

        Parameters
        ----------
        spec : mapping of str to (shape, dtype) or array-like
            What will be built; arrays give shape and dtype only.
        id, labels, replicas, version, worker, deadline
            As for `put`.

        Returns
        -------
        Draft
            With `tensors()`, `commit()` and `abort()`; a context manager that commits.

        Raises
        ------
        UnsupportedPlatform
            When no node is on this host.
        """
        check_replicas(replicas)
        limit = self._core.deadline(deadline)

        async def work() -> drafts.Draft:
            node = await self._node(worker, limit)
            return await drafts.create(
                self._session,
                spec,
                id,
                labels=labels,
                replicas=replicas,
                version=version,
                node=node,
                limit=limit,
            )

        return self._core.call(work)

    def register(
        self,
        tensors: Any,
        id: str,  # noqa: A002
        *,
        labels: Mapping[str, str] | None = None,
        version: int | str | None = None,
        verify: bool = False,
        copy: bool = False,
        deadline: float | None = None,
    ) -> Any:
        """Lend tensors to the cluster without a copy: a caller-leased artifact.

        This process serves them by a thread of its own until `release`, `destroy` or its
        end. They are frozen until then, but inside `with artifact.mutate():`. Tensors on a
        device are lent by handle: who has the device too copies them there.

        Parameters
        ----------
        tensors, id, labels, version
            As for `put`.
        verify : bool
            Hash now, so that a change outside the fence is found instead of served.
        copy : bool
            Lend a copy in host memory of what lies on a device and cannot be lent by handle.
        deadline
            As for `put`.

        Returns
        -------
        Artifact

        Raises
        ------
        UnsupportedPlatform, Unimplemented
            When memory of a device cannot be opened by other processes (a pool of
            cudaMallocAsync, expandable segments): the message names the setting to change.
        """
        limit = self._core.deadline(deadline)

        async def work() -> Artifact:
            info, registration = await lending.register(
                self._core,
                tensors,
                id,
                labels=labels,
                version=version,
                verify=verify,
                copy=copy,
                limit=limit,
            )
            artifact = Artifact(info, self._session)
            artifact._registration = registration  # noqa: SLF001 - the owner's side of the handle
            return artifact

        return self._core.call(work)

    def load(
        self,
        path: str | Path,
        id: str,  # noqa: A002
        *,
        version: int | str | None = None,
        labels: Mapping[str, str] | None = None,
        replicas: int = 1,
        worker: Node = None,
        deadline: float | None = None,
        wait: bool = True,
        progress: bool = False,
    ) -> Any:
        """Import a safetensors file, a directory of them, or an index of shards.

        The node's store reads the file, once, into its memory. `progress` shows how far it
        is, in a terminal or a notebook.

        Returns
        -------
        Operation
            Its result is the `Artifact`: the one there is where the id holds the same
            content already; `note` says so, and why it is `degraded` where it is.

        Raises
        ------
        CorruptFile, FileChanged, NotFound, AlreadyExists, CapacityError
        """
        check_replicas(replicas)
        limit = self._core.deadline(deadline)

        async def action(operation: Operation[Artifact]) -> Artifact:
            info = await moves.load(
                self._core,
                operation,
                path,
                id,
                version=version,
                node=await self._node(worker, limit),
                labels=labels,
                replicas=replicas,
                limit=limit,
            )
            operation.tally.total = info.nbytes
            operation.note = operation.note or info.degraded
            warn_of_shortfall(info)
            return Artifact(info, self._session)

        return self._operate("load", id, action, wait=wait, progress=progress)
