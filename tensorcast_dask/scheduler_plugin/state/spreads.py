"""Enough copies on enough hosts, for those who asked for them.

Rules:

1. The floor counts distinct hosts with a listed replica.
2. A shortfall is a sentence, not an error: the version exists and says that it is
   degraded, and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tensorcast_dask.exceptions import CapacityError, TensorCastError
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.moves import Moves, Wish
from tensorcast_dask.scheduler_plugin.state.placement import choose
from tensorcast_dask.scheduler_plugin.state.records import VersionRecord
from tensorcast_dask.tensors.ids import HostId
from tensorcast_dask.tensors.messages import Moved, Tier

__all__ = ["Spread", "Spreads"]


@dataclass(slots=True, eq=False, kw_only=True)
class Spread:
    """Copies of one version being made."""

    record: VersionRecord
    until_s: float
    then: Callable[[str], None] | None
    wishes: list[Wish] = field(default_factory=list)
    tried: set[HostId] = field(default_factory=set)
    open: int = 0
    why: str = ""


class Spreads:
    """The making of wanted copies."""

    def __init__(self, ground: Ground, moves: Moves) -> None:
        self._names = ground.names
        self._nodes = ground.nodes
        self._holders = ground.holders
        self._moves = moves

    def start(
        self, record: VersionRecord, *, until_s: float, then: Callable[[str], None]
    ) -> Spread:
        """Make what is missing; `then` gets the shortfall, "" when there is none."""
        spread = Spread(record=record, until_s=until_s, then=then)
        self._go_on(spread)
        return spread

    def stop(self, spread: Spread, why: str) -> None:
        """Time is up: what is there has to do."""
        spread.why = spread.why or why
        wishes, spread.wishes = spread.wishes, []
        for wish in wishes:
            self._moves.leave(wish)
        self._finish(spread)

    def _go_on(self, spread: Spread) -> None:
        record = spread.record
        while spread.then is not None and record.generation in self._names.versions:
            hosts = self._holders.hosts(record)
            if len(hosts) + spread.open >= record.replicas:
                break
            try:
                node, _ = choose(
                    self._nodes.records.values(),
                    nbytes=record.nbytes,
                    host=HostId(""),
                    avoid_hosts=hosts | spread.tried,
                )
            except CapacityError as error:
                spread.why = spread.why or error.message
                break
            spread.tried.add(node.host)
            spread.open += 1
            wish = self._moves.bring(
                record,
                node,
                Tier.HOST,
                why="replicate",
                until_s=spread.until_s,
                done=lambda how: self._brought(spread, how),
            )
            spread.wishes.append(wish)
        if not spread.open:
            self._finish(spread)

    def _brought(self, spread: Spread, how: Moved | TensorCastError) -> None:
        spread.open -= 1
        if isinstance(how, TensorCastError):
            spread.why = how.message
        if spread.then is not None:
            self._go_on(spread)

    def _finish(self, spread: Spread) -> None:
        then, spread.then = spread.then, None
        if then is None:
            return
        record = spread.record
        have = len(self._holders.hosts(record))
        if have >= record.replicas:
            then("")
        else:
            then(f"{have} of {record.replicas} hosts hold it: {spread.why}")
