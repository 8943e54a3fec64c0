"""Orders to nodes, each with a number, each ended exactly once.

Rules:

1. A number is never used twice, also over restarts: it carries the epoch.
2. An order ends by its `TaskDone`, or when its node's lease lapses (PeerLost), whichever
   is first; later news of it is thanked for and ignored.
3. A node that comes back gets its open orders again, under the same numbers: a node takes
   a number once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from tensorcast_dask.scheduler_plugin.state.names import Names
from tensorcast_dask.scheduler_plugin.state.outbox import Outbox
from tensorcast_dask.scheduler_plugin.state.records import NodeRecord
from tensorcast_dask.scheduler_plugin.state.stories import Stories
from tensorcast_dask.tensors.ids import Generation, NodeId
from tensorcast_dask.tensors.messages import (
    DoCancel,
    DoDrop,
    DoLoad,
    DoPull,
    DoSave,
    Fault,
    TaskDone,
    TaskProgress,
    TaskSeen,
    Tier,
)

__all__ = ["Order", "Task", "Tasks"]

#: Most lines of one order that stories hold.
MAX_LINES: Final = 12

Order: TypeAlias = DoPull | DoDrop | DoLoad | DoSave
Ended: TypeAlias = Callable[[TaskDone], None]


@dataclass(slots=True, kw_only=True)
class Task:
    """One order."""

    number: int
    node: NodeId
    order: Order
    on_end: Ended
    started_s: float
    done_bytes: int = 0
    total_bytes: int = 0


class Tasks:
    """The open orders.

    Attributes
    ----------
    on_done : callable
        Told of the end of each order, as its node says it, before who gave the order.
    """

    on_done: Callable[[NodeRecord, TaskDone], None]

    def __init__(self, outbox: Outbox, names: Names, stories: Stories) -> None:
        self._outbox = outbox
        self._stories = stories
        self._names = names
        self.on_done = _nobody
        self._count = 0
        self._open: dict[int, Task] = {}
        self._by_node: dict[NodeId, dict[int, Task]] = {}
        #: Cancelled, and the node has not said yet how it ended: it may have been done.
        self._stopping: dict[int, tuple[NodeId, Generation]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def of(self, node: NodeId) -> list[Task]:
        """List the open orders of a node."""
        return list(self._by_node.get(node, {}).values())

    def start(
        self, node: NodeRecord, make: Callable[[int], Order], on_end: Ended
    ) -> Task:
        """Give an order to a live node."""
        self._count += 1
        number = self._names.numbers.epoch << 40 | self._count
        task = Task(
            number=number,
            node=node.node,
            order=make(number),
            on_end=on_end,
            started_s=self._outbox.now_s,
        )
        self._open[number] = task
        self._by_node.setdefault(node.node, {})[number] = task
        self._outbox.send(node.link, task.order)
        return task

    def drop(
        self,
        node: NodeRecord,
        generation: Generation,
        *,
        why: str,
        final: bool = False,
        tier: Tier | None = None,
        on_end: Ended | None = None,
    ) -> None:
        """Order a node to drop a replica; a node without a lease needs no order."""
        if not node.live:
            if on_end is not None:
                on_end(TaskDone(task=0))
            return

        def make(number: int) -> DoDrop:
            return DoDrop(
                task=number, generation=generation, tier=tier, final=final, why=why
            )

        self.start(node, make, on_end if on_end is not None else _ignore)

    def is_stopping(self, node: NodeId, generation: Generation) -> bool:
        """Whether a cancelled order may still bring a generation to a node."""
        return (node, generation) in self._stopping.values()

    def _stopped(self, node: NodeRecord) -> None:
        for number, (name, _) in list(self._stopping.items()):
            if name == node.node:
                del self._stopping[number]

    def is_ending(self, node: NodeId, generation: Generation) -> bool:
        """Whether a node was ordered to end a generation, and has not said that it has."""
        return any(
            isinstance(one.order, DoDrop)
            and one.order.final
            and one.order.generation == generation
            for one in self.of(node)
        )

    def drops(self, generation: Generation) -> bool:
        """Whether a node is still dropping a generation."""
        return any(
            isinstance(one.order, DoDrop) and one.order.generation == generation
            for one in self._open.values()
        )

    def progress(self, node: NodeRecord, message: TaskProgress) -> None:
        """Take note of how far an order is."""
        task = self._open.get(message.task)
        if task is not None and task.node == node.node:
            task.done_bytes = message.done_bytes
            task.total_bytes = message.total_bytes

    def done(self, node: NodeRecord, message: TaskDone) -> None:
        """End an order; thank the node in any case."""
        self._outbox.send(node.link, TaskSeen(task=message.task))
        self._stopping.pop(message.task, None)
        task = self._open.get(message.task)
        if task is not None and task.node == node.node:
            self._close(task)
            self._tell(node, task.order, message)
            self.on_done(node, message)
            task.on_end(message)

    def _tell(self, node: NodeRecord, order: Order, done: TaskDone) -> None:
        """Have stories hold what the node tells of an order."""
        record = self._names.versions.get(order.generation)
        subjects = (node.node, "" if record is None else record.id)
        for ago_s, line in done.lines[:MAX_LINES]:
            at_s = self._outbox.now_s - max(0.0, ago_s)
            self._stories.tell(at_s, subjects, "node {}: {}", node.label, line)

    def cancel(self, task: Task, node: NodeRecord | None) -> None:
        """Nobody wants it any more: it ends now, and the node is told."""
        if task.number in self._open:
            self._close(task)
            if node is not None:
                self._stopping[task.number] = node.node, task.order.generation
                self._outbox.send(node.link, DoCancel(task=task.number))

    def again(self, node: NodeRecord) -> None:
        """Repeat the open orders of a node that is back, and what was cancelled."""
        for number, (name, _) in self._stopping.items():
            if name == node.node:
                self._outbox.send(node.link, DoCancel(task=number))
        self._stopped(node)
        for task in self._by_node.get(node.node, {}).values():
            self._outbox.send(node.link, task.order)

    def lapsed(self, node: NodeRecord) -> None:
        """End the orders of a node that is gone."""
        self._stopped(node)
        for task in list(self._by_node.get(node.node, {}).values()):
            self._close(task)
            message = f"node {node.label} is gone: {node.gone}"
            fault = Fault(
                kind="PeerLost", message=message, data={"node": str(node.node)}
            )
            task.on_end(TaskDone(task=task.number, fault=fault))

    def _close(self, task: Task) -> None:
        del self._open[task.number]
        of_node = self._by_node[task.node]
        del of_node[task.number]
        if not of_node:
            del self._by_node[task.node]


def _nobody(node: NodeRecord, done: TaskDone) -> None:
    """Nobody measures."""


def _ignore(done: TaskDone) -> None:
    """Nobody waits for the end of this order."""
