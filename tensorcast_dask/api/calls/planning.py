"""Calls that make and find plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorcast_dask.api.calls.base import Calls
from tensorcast_dask.api.plans import run as plan_runs
from tensorcast_dask.api.plans.plan import Plan

if TYPE_CHECKING:
    from tensorcast_dask.tensors.contexts import Context

__all__ = ["Planning"]


class Planning(Calls):
    """What makes and finds plans."""

    def plan(self, context: Context | None = None) -> Plan:
        """Begin a plan: operations put together, carried out across the cluster.

        Parameters
        ----------
        context : Context, optional
            What `tensorcast_dask.context` gave: who asks, by when, under which key.
        """
        return Plan(self._session, context)

    def plan_run(self, key: str) -> Any:
        """Find the run of a plan by its key, whoever began it; a `PlanRun`.

        Raises
        ------
        NotFound
            When no plan of that key is known (any more).
        """
        return self._core.bridge(plan_runs.find, self._session, key)
