"""`sql()`: the catalog as tables, in a DuckDB of their own, in a thread of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.scheduler_plugin.state.events import Emit, Row, RunQuery
    from tensorcast_dask.tensors.messages import Fault, Rows


class Tables:
    """Read-only tables of what the journal has committed."""

    def absorb(self, rows: tuple[Row, ...]) -> None:
        """Take committed rows over; from any thread, returns at once."""
        raise NotImplementedError

    def note(self, emitted: Emit) -> None:
        """Keep an event for the `events` table (bounded); returns at once."""
        raise NotImplementedError

    def run(self, query: RunQuery, *, done: Callable[[Rows | Fault], None]) -> None:
        """Run one SELECT in the tables' thread; `done` is called from that thread."""
        raise NotImplementedError

    def close(self) -> None:
        """Interrupt what runs and end the thread; blocks shortly."""
        raise NotImplementedError
