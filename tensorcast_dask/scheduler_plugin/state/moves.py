"""Bytes on their way from holders to a node.

Rules:

1. One move at a time for one (generation, node, tier): whoever wants the same joins it.
   A move lives while somebody wants it.
2. A move that ends because somebody could not be reached is tried again while sources are
   left and somebody has time. Any other fault ends it, so that who wished it can choose
   another node; a target that is gone ends it with PeerLost.
3. A replica counts when its node says so, after verifying it (`ReplicaReady`, before the
   task's end). A task that ended well and left nothing that is listed is tried again.
4. Nothing is brought to a node that is still dropping an earlier copy of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from tensorcast_dask.exceptions import (
    AbsentError,
    Gone,
    PeerLost,
    ReachError,
    TensorCastError,
)
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.placement import promise
from tensorcast_dask.scheduler_plugin.state.records import NodeRecord, VersionRecord
from tensorcast_dask.scheduler_plugin.state.tasks import Task
from tensorcast_dask.tensors.ids import Generation, NodeId
from tensorcast_dask.tensors.messages import (
    DoPull,
    Location,
    Moved,
    TaskDone,
    Tier,
)

__all__ = ["Brought", "Move", "Moves", "Wish"]

#: How often one move is tried, and how long it rests in between.
ATTEMPTS: Final = 4
REST_S: Final = 0.1

Brought: TypeAlias = Callable[["Moved | TensorCastError"], None]
Key: TypeAlias = tuple[Generation, NodeId, Tier]


@dataclass(slots=True, eq=False)
class Wish:
    """Somebody wants a move."""

    move: Move | None
    done: Brought
    until_s: float


@dataclass(slots=True, eq=False, kw_only=True)
class Move:
    """One copy under way."""

    record: VersionRecord
    node: NodeRecord
    tier: Tier
    why: str
    started_s: float
    wishes: list[Wish] = field(default_factory=list)
    task: Task | None = None
    attempts: int = 0

    @property
    def key(self) -> Key:
        """What makes two wishes the same."""
        return self.record.generation, self.node.node, self.tier

    def progress(self) -> tuple[int, int]:
        """(done, total) bytes."""
        done = self.task.done_bytes if self.task is not None else 0
        return done, self.record.nbytes


class Moves:
    """All copies under way."""

    def __init__(self, ground: Ground) -> None:
        self._outbox = ground.outbox
        self._timers = ground.timers
        self._names = ground.names
        self._nodes = ground.nodes
        self._leaving = ground.leaving
        self._holders = ground.holders
        self._tasks = ground.tasks
        self._stories = ground.stories
        self._moves: dict[Key, Move] = {}

    def __len__(self) -> int:
        return len(self._moves)

    @property
    def under_way(self) -> list[Move]:
        """All of them, oldest first."""
        return list(self._moves.values())

    def of(self, generation: Generation) -> list[Move]:
        """List the moves of one version."""
        return [move for key, move in self._moves.items() if key[0] == generation]

    # ------------------------------------------------------------ wishes
    def bring(
        self,
        record: VersionRecord,
        node: NodeRecord,
        tier: Tier,
        *,
        why: str,
        until_s: float,
        done: Brought,
    ) -> Wish:
        """Have a replica on a live node; `done` is told once, maybe before the return."""
        replica = record.holders.get(node.node)
        if replica is not None and not replica.suspect and tier in replica.tiers:
            done(
                Moved(
                    location=Location(card=node.card, tier=tier),
                    moved_bytes=0,
                    seconds=0.0,
                    via="here",
                )
            )
            return Wish(None, done, until_s)
        key = (record.generation, node.node, tier)
        move = self._moves.get(key)
        fresh = move is None
        if move is None:
            move = self._moves[key] = Move(
                record=record,
                node=node,
                tier=tier,
                why=why,
                started_s=self._outbox.now_s,
            )
            promise(node, tier, record.nbytes)
        wish = Wish(move, done, until_s)
        move.wishes.append(wish)
        if fresh:
            self._start(move)
        return wish

    def leave(self, wish: Wish) -> None:
        """Want it no more; the last one to leave stops the move."""
        move, wish.move = wish.move, None
        if move is None:
            return
        move.wishes.remove(wish)
        if not move.wishes and self._moves.get(move.key) is move:
            del self._moves[move.key]
            if move.task is not None:
                self._tasks.cancel(move.task, move.node)

    def record_gone(self, record: VersionRecord) -> list[NodeRecord]:
        """End the moves of a version that is over; return the nodes that were to get it."""
        moves = self.of(record.generation)
        for move in moves:
            if move.task is not None:
                self._tasks.cancel(move.task, move.node)
            message = f"version {record.version} of {record.id!r} was destroyed"
            self._end(move, Gone(message, {"generation": record.generation}))
        return [move.node for move in moves]

    # ------------------------------------------------------------ one move
    def _start(self, move: Move) -> None:
        record, node = move.record, move.node
        if self._leaving.has(record, node):
            self._rest(move)
            return
        move.attempts += 1
        sources = tuple(
            one
            for one in self._holders.locations(record, host=node.host)
            if one.card.node != node.node
        )
        if not sources and node.node not in record.holders:
            self._end(move, self._holders.absence(record))
            return
        left_s = max(wish.until_s for wish in move.wishes) - self._outbox.now_s

        def make(number: int) -> DoPull:
            return DoPull(
                task=number,
                generation=record.generation,
                id=record.id,
                version=record.version,
                nbytes=record.nbytes,
                tier=move.tier,
                sources=sources,
                deadline_s=max(left_s, 0.0),
                labels=record.labels,
                published=record.published,
            )

        move.task = self._tasks.start(node, make, lambda done: self._ended(move, done))

    def _ended(self, move: Move, done: TaskDone) -> None:
        move.task = None
        record, node = move.record, move.node
        error: TensorCastError
        if done.fault is not None:
            error = done.fault.error()
        elif self._brought(move, done):
            return
        else:
            message = f"what node {node.label} got of {record.id!r} is gone again"
            error = PeerLost(message, {"node": node.node})
        now_s = self._outbox.now_s
        # A node that no longer has it was left by another move; the version itself lives.
        passing = isinstance(error, AbsentError) or (
            isinstance(error, ReachError) and error.retryable
        )
        again = (
            passing
            and node.live
            and move.attempts < ATTEMPTS
            and any(wish.until_s > now_s + REST_S for wish in move.wishes)
        )
        if again:
            self._rest(move)
        else:
            self._end(move, error)

    def _brought(self, move: Move, done: TaskDone) -> bool:
        """End a move whose replica is listed (rule 3)."""
        record, node = move.record, move.node
        replica = record.holders.get(node.node)
        if replica is None or replica.suspect:
            return False
        tier = move.tier if move.tier in replica.tiers else replica.nearest
        self._tell(move, done)
        moved = Moved(
            location=Location(card=node.card, tier=tier),
            moved_bytes=done.moved_bytes,
            seconds=done.seconds,
            via=done.via,
            sources=done.sources,
        )
        self._end(move, moved)
        return True

    def _rest(self, move: Move) -> None:
        at_s = self._outbox.now_s + REST_S
        self._timers.at(at_s, lambda: self._again(move))

    def _again(self, move: Move) -> None:
        if self._moves.get(move.key) is not move or move.task is not None:
            return
        try:
            self._nodes.live(move.node.node)
        except TensorCastError as error:
            self._end(move, error)
        else:
            self._start(move)

    def _tell(self, move: Move, done: TaskDone) -> None:
        record, node = move.record, move.node
        self._stories.tell(
            self._outbox.now_s,
            (record.id, node.node),
            "version {} copied to {} ({}) from {} by {}: {} bytes in {:.3f} s",
            record.version,
            node.label,
            move.why,
            ", ".join(self._nodes.label(name) for name in done.sources) or "itself",
            done.via or "?",
            done.moved_bytes,
            done.seconds,
        )
        if done.left:
            self._stories.tell(
                self._outbox.now_s, (record.id, node.node), "by {}", done.left
            )
            self._outbox.emit(
                "way_left",
                id=record.id,
                version=record.version,
                node=node.node,
                why=done.left,
            )
        self._outbox.emit(
            "moved",
            id=record.id,
            version=record.version,
            node=node.node,
            nbytes=done.moved_bytes,
            seconds=done.seconds,
            via=done.via,
            why=move.why,
        )

    def _end(self, move: Move, how: Moved | TensorCastError) -> None:
        if self._moves.get(move.key) is move:
            del self._moves[move.key]
        wishes, move.wishes = move.wishes, []
        for wish in wishes:
            wish.move = None
            wish.done(how)
