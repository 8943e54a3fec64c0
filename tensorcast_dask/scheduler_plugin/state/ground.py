"""What every part that answers requests stands on: one bundle instead of long signatures."""

from __future__ import annotations

from dataclasses import dataclass

from tensorcast_dask.scheduler_plugin.state.holders import Holders
from tensorcast_dask.scheduler_plugin.state.leaving import Leaving
from tensorcast_dask.scheduler_plugin.state.names import Names
from tensorcast_dask.scheduler_plugin.state.nodes import Nodes
from tensorcast_dask.scheduler_plugin.state.operations import Operations
from tensorcast_dask.scheduler_plugin.state.outbox import Outbox
from tensorcast_dask.scheduler_plugin.state.outcomes import Outcomes
from tensorcast_dask.scheduler_plugin.state.pins import Pins
from tensorcast_dask.scheduler_plugin.state.replicas import Replicas
from tensorcast_dask.scheduler_plugin.state.stories import Stories
from tensorcast_dask.scheduler_plugin.state.tasks import Tasks
from tensorcast_dask.scheduler_plugin.state.timers import Timers

__all__ = ["Ground"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """The lower parts of one catalog."""

    outbox: Outbox
    timers: Timers
    stories: Stories
    outcomes: Outcomes
    names: Names
    nodes: Nodes
    holders: Holders
    pins: Pins
    replicas: Replicas
    leaving: Leaving
    tasks: Tasks
    operations: Operations
