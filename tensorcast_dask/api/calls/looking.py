"""Calls that look at the cluster."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.api.actions import instances, names, reads
from tensorcast_dask.api.calls.base import Calls, ref_of
from tensorcast_dask.api.instance import InstanceHandle
from tensorcast_dask.api.policies import PolicyBook
from tensorcast_dask.api.signals import SignalBook
from tensorcast_dask.api.worker import Worker
from tensorcast_dask.exceptions import DeadlineExceeded, InvalidArgument
from tensorcast_dask.tensors.messages import CatalogStateAsked, StateJson

if TYPE_CHECKING:
    from tensorcast_dask.api.artifact import Artifact
    from tensorcast_dask.api.connection.deadlines import Deadline

__all__ = ["Looking"]

_LOOK_AGAIN_S: Final = 0.1


class Looking(Calls):
    """What looks at the cluster."""

    def workers(self, *, deadline: float | None = None) -> Any:
        """Nodes with a live Dask worker, ordered by name."""
        limit = self._core.deadline(deadline)

        return self._core.call(lambda: self._workers(limit))

    async def _workers(self, limit: Deadline) -> list[Worker]:
        states = (await names.nodes(self._core, limit)).nodes
        alive = [s for s in states if s.attended and s.card.kind == "store"]
        return [
            Worker(state, self._session)
            for state in sorted(alive, key=lambda s: s.card.name)
        ]

    def wait_for_workers(
        self, n_workers: int = 1, *, deadline: float | None = None
    ) -> Any:
        """Wait until so many nodes have a live Dask worker; give all there are, by name.

        Parameters
        ----------
        n_workers : int
            At least how many.
        deadline : float, optional
            Seconds; None the session's default, 0 looks once.

        Returns
        -------
        list of Worker

        Raises
        ------
        DeadlineExceeded
            When there are fewer; it says how many.
        """
        if isinstance(n_workers, bool) or not isinstance(n_workers, int):
            message = f"n_workers must be a whole number, not {n_workers!r}"
            raise InvalidArgument(message)
        limit = self._core.deadline(deadline)

        async def work() -> list[Worker]:
            while True:
                found = await self._workers(limit)
                if len(found) >= n_workers:
                    return found
                if not limit.left_s():
                    message = (
                        f"{len(found)} of {n_workers} workers are there; start more, or wait "
                        "longer with deadline="
                    )
                    raise DeadlineExceeded(message, {"workers": len(found)})
                await asyncio.sleep(min(_LOOK_AGAIN_S, limit.left_s()))

        return self._core.call(work)

    def nodes(self, *, deadline: float | None = None) -> Any:
        """All nodes whose lease runs, unattended ones too: a list of `NodeState`."""
        limit = self._core.deadline(deadline)

        async def work() -> list[Any]:
            return list((await names.nodes(self._core, limit)).nodes)

        return self._core.call(work)

    def instances(self, *, deadline: float | None = None) -> Any:
        """Give the processes that are attached to nodes, ordered by name."""
        limit = self._core.deadline(deadline)

        async def work() -> list[InstanceHandle]:
            states = await instances.listed(self._core, limit)
            return [InstanceHandle(state, self._session) for state in states]

        return self._core.call(work)

    def instance(self, name: str, *, deadline: float | None = None) -> Any:
        """Find the instance of a name.

        Raises
        ------
        NotFound
            When none is attached under it.
        """
        limit = self._core.deadline(deadline)

        async def work() -> InstanceHandle:
            state = await instances.find(self._core, name, limit)
            return InstanceHandle(state, self._session)

        return self._core.call(work)

    def pool(self, *, deadline: float | None = None) -> Any:
        """Give the cluster as one pool: a `TierUse` for each tier, summed over nodes."""
        limit = self._core.deadline(deadline)

        async def work() -> dict[Any, Any]:
            return reads.pool(await names.nodes(self._core, limit))

        return self._core.call(work)

    @property
    def signals(self) -> SignalBook:
        """Facts about the running system: `snapshot`, `watch`, `history`."""
        return SignalBook(self._session)

    @property
    def policies(self) -> PolicyBook:
        """What decides: `install`, `list`, `remove`, and quotas."""
        return PolicyBook(self._session)

    def sql(
        self, query: str, *, limit: int = 10_000, deadline: float | None = None
    ) -> Any:
        """Run one SELECT over the catalog.

        Tables: artifacts, versions, replicas, nodes, leases, pins, aliases, views, plans,
        steps, instances, operations, transfers, events. `SELECT * FROM versions` shows a table's columns,
        as does the refusal of one that is not there. The `ttl_s` of a pin without end is null.

        Returns
        -------
        Rows
            With `columns` and `rows`.
        """
        within = self._core.deadline(deadline)
        return self._core.call(
            lambda: names.query(self._core, query, rows=limit, limit=within)
        )

    def explain(
        self, ref: Artifact | Worker | str, *, deadline: float | None = None
    ) -> Any:
        """Why is it as it is: sentences, oldest first.

        Parameters
        ----------
        ref : Artifact, Worker or str
            An artifact or its id (also why its copies stay, may go, or are on their way), a node
            (also what it has to do), the id of a request (also what it waits for), `plan:KEY`,
            `plan:KEY/STEP`, or `context:ID`.
        deadline : float, optional
            Seconds.

        Returns
        -------
        list of str

        Raises
        ------
        NotFound
            When nothing is called so.
        """
        limit = self._core.deadline(deadline)
        named = ref.node if isinstance(ref, Worker) else ref_of(ref)
        return self._core.bridge(self._core.told_of, named, limit)

    def debug_state(self, *, deadline: float | None = None) -> Any:
        """State of the catalog and of every store, as one dict; equal to its baseline at rest."""
        limit = self._core.deadline(deadline)

        async def work() -> dict[str, Any]:
            request = CatalogStateAsked(rid=self._core.link.next_rid())
            catalog = await self._core.ask(request, StateJson, limit)
            return await reads.debug_state(self._core, catalog.json, limit)

        return self._core.call(work)
