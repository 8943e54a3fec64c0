"""What the pulls of a store may have under way, all together."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Flights"]


class Flights:
    """All pulls of one store: what may be under way is shared out evenly among their sources.

    A pull that begins takes its share at once; the others come down to theirs with the
    chunks that arrive. One chunk a source is always allowed: nobody waits for another's end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sources = 0

    @contextlib.contextmanager
    def joined(self, sources: int) -> Iterator[None]:
        """Count a pull's sources in for the length of a block."""
        with self._lock:
            self.sources += sources
        try:
            yield
        finally:
            with self._lock:
                self.sources -= sources
