"""The catalog: one state machine, so that every answer is linearizable."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorcast_dask.scheduler_plugin.state.events import (
        CatalogSettings,
        Event,
        Instruction,
        Recovered,
    )
    from tensorcast_dask.tensors.ids import ClusterId, Epoch


class Catalog:
    """All that is known of artifacts, versions, replicas, nodes and sessions.

    Parameters
    ----------
    settings : CatalogSettings
        Limits and secrets.
    recovered : Recovered
        What the journal found, with the epoch of this life.
    """

    def __init__(self, settings: CatalogSettings, recovered: Recovered) -> None:
        self.settings = settings
        self.cluster: ClusterId = recovered.cluster
        self.epoch: Epoch = recovered.epoch

    def handle(self, event: Event, *, now_s: float) -> list[Instruction]:
        """Absorb one event and say what must be done about it."""
        raise NotImplementedError
