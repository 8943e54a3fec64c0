"""What the machine says of its memory, as the store's budget takes it."""

from __future__ import annotations

from tensorcast_dask.dataplane import machine
from tensorcast_dask.store.state.budget import Headroom

__all__ = ["Machine"]


class Machine(machine.Machine):
    """Reads the machine's headroom."""

    def headroom(self) -> Headroom:
        """Return what is free now."""
        return Headroom(**self.limits()._asdict())
