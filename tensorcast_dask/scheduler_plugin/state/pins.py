"""Promises not to evict.

Rules:

1. A pin ends at its time, when it is taken back, or with its version; look-ups and reads
   make none.
2. A pin with a node holds there; without one, wherever the version lies.
3. Pinned bytes of a node stay under its limit, or the pin is refused whole.
4. A pin's number is never used twice, also over restarts: it carries the epoch.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorcast_dask.exceptions import CapacityError
from tensorcast_dask.scheduler_plugin.state.events import Row
from tensorcast_dask.scheduler_plugin.state.names import Names
from tensorcast_dask.scheduler_plugin.state.outbox import Outbox
from tensorcast_dask.scheduler_plugin.state.placement import capacity_bytes
from tensorcast_dask.scheduler_plugin.state.records import (
    NodeRecord,
    PinRecord,
    PinRow,
    VersionRecord,
    packed,
)
from tensorcast_dask.scheduler_plugin.state.timers import Timers
from tensorcast_dask.tensors.ids import Generation, NodeId

__all__ = ["Pins"]


class Pins:
    """All pins that run.

    Attributes
    ----------
    on_change : callable
        Told of each version whose pins have changed (its nodes must be told).
    """

    on_change: Callable[[VersionRecord], None]

    def __init__(
        self, outbox: Outbox, timers: Timers, names: Names, *, limit_fraction: float
    ) -> None:
        self._outbox = outbox
        self._timers = timers
        self._names = names
        self._limit = limit_fraction
        self._count = 0
        self._pins: dict[int, PinRecord] = {}
        self._of: dict[Generation, dict[int, PinRecord]] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def until_s(self, generation: Generation, node: NodeId) -> float:
        """Until when a version is pinned at a node; 0.0 = it is not."""
        pins = self._of.get(generation)
        if not pins:
            return 0.0
        return max(
            (p.until_s for p in pins.values() if p.node in ("", node)), default=0.0
        )

    def holds(self, generation: Generation) -> bool:
        """Whether a version is pinned anywhere."""
        return generation in self._of

    def check(self, record: VersionRecord, nodes: list[NodeRecord]) -> None:
        """Refuse what a node cannot promise.

        Raises
        ------
        CapacityError
            When the pinned bytes of a node would pass its limit.
        """
        for node in nodes:
            if self.until_s(record.generation, node.node):
                continue
            limit = int(capacity_bytes(node) * self._limit)
            held = self._bytes_at(node.node)
            if held + record.nbytes > limit:
                message = (
                    f"node {node.label} cannot pin {record.nbytes} bytes more: {held} of "
                    f"at most {limit} are pinned; unpin others or raise the limit"
                )
                raise CapacityError(message, {"pinned": held, "limit": limit})

    def _bytes_at(self, node: NodeId) -> int:
        total = 0
        for generation in self._of:
            record = self._names.versions.get(generation)
            if record is None or node not in record.holders:
                continue
            if self.until_s(generation, node):
                total += record.nbytes
        return total

    def add(
        self, record: VersionRecord, node: NodeId, ttl_s: float, *, pin: int = 0
    ) -> int:
        """Pin for a time; `pin` is given for one that the journal brought."""
        if not pin:
            self._count += 1
        number = pin or self._names.numbers.epoch << 40 | self._count
        until_s = self._outbox.now_s + ttl_s
        one = PinRecord(
            pin=number, generation=record.generation, node=node, until_s=until_s
        )
        self._pins[number] = one
        self._of.setdefault(record.generation, {})[number] = one
        if not pin:
            row = PinRow(number, record.generation, node, ttl_s)
            self._outbox.persist(packed("pin", str(number), row), record.generation)
        self._timers.at(until_s, lambda: self._expire(number))
        self.on_change(record)
        return number

    def _expire(self, pin: int) -> None:
        one = self._pins.get(pin)
        if one is not None:
            self.remove(one.generation, pin)

    def remove(self, generation: Generation, pin: int = 0) -> None:
        """Take one pin back, or all of a version; unknown ones are fine."""
        pins = self._of.get(generation, {})
        for number in [pin] if pin else list(pins):
            if pins.pop(number, None) is not None:
                del self._pins[number]
                gone = Row(kind="pin", key=str(number), blob=None)
                self._outbox.persist(gone, generation)
        if not pins:
            self._of.pop(generation, None)
        record = self._names.versions.get(generation)
        if record is not None:
            self.on_change(record)
