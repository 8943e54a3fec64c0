"""What arrives on links: nodes that join, and what they say.

Rules:

1. A node of another cluster, of another protocol, or of a life that has been replaced is
   refused by name, loudly, and told not to try again.
2. A node that has seen a higher epoch than this catalog raises it: no generation is ever
   minted twice, also when the journal was lost.
"""

from __future__ import annotations

from tensorcast_dask.exceptions import (
    StaleOwner,
    TensorCastError,
    Unimplemented,
    WrongPeer,
)
from tensorcast_dask.scheduler_plugin.state.events import (
    CloseLink,
    ToNodeSend,
)
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.instances import Instances
from tensorcast_dask.scheduler_plugin.state.inventories import Inventories
from tensorcast_dask.scheduler_plugin.state.observed import Observed
from tensorcast_dask.scheduler_plugin.state.records import NodeRecord
from tensorcast_dask.tensors.ids import ClusterId, Epoch
from tensorcast_dask.tensors.messages import (
    PROTOCOL,
    Fault,
    FromNode,
    InstanceGone,
    InstanceLoad,
    InstancesHere,
    Inventory,
    LinkRefused,
    MayDrop,
    NodeHello,
    NodeWelcome,
    Renew,
    ReplicaDropped,
    ReplicaReady,
    TaskDone,
    TaskProgress,
)

__all__ = ["Links"]


class Links:
    """The talk with nodes."""

    def __init__(
        self,
        ground: Ground,
        inventories: Inventories,
        observed: Observed,
        instances: Instances,
        *,
        cluster: ClusterId,
    ) -> None:
        self._cluster = cluster
        self._observed = observed
        self._outbox = ground.outbox
        self._names = ground.names
        self._nodes = ground.nodes
        self._replicas = ground.replicas
        self._tasks = ground.tasks
        self._inventories = inventories
        self._instances = instances

    def joined(self, link: int, hello: NodeHello) -> None:
        """Let a node in, or refuse it."""
        refusal = self._refusal(hello)
        if refusal is not None:
            error, retry = refusal
            self._outbox.log("error", f"node {hello.card.node} refused: {error}")
            self._outbox.emit("node_refused", node=hello.card.node, why=error.message)
            refused = LinkRefused(fault=Fault.of(error), retry=retry)
            self._outbox.tell(ToNodeSend(link=link, message=refused))
            self._outbox.tell(CloseLink(link=link, why=error.message))
            return
        if self._names.numbers.seen(
            Epoch(max(hello.epoch, hello.counter >> 40)),
            hello.counter & ((1 << 40) - 1),
        ):
            self._outbox.raise_epoch(self._names.numbers.epoch)
            self._outbox.log(
                "warning",
                f"node {hello.card.node} has seen a later epoch than this journal: it "
                f"is {self._names.numbers.epoch} now",
            )
        node, fresh = self._nodes.join(link, hello)
        self._replicas.forget_told(node)
        if fresh:
            self._replicas.suspect(node)
        self._outbox.send(
            link,
            NodeWelcome(
                cluster=self._cluster,
                epoch=self._names.numbers.epoch,
                lease_ttl_s=self._nodes.lease_ttl_s,
                need_index=self._inventories.rebuilding,
            ),
        )
        self._tasks.again(node)
        self._outbox.emit(
            "node_joined", node=node.node, name=node.card.name, fresh=fresh
        )

    def _refusal(self, hello: NodeHello) -> tuple[TensorCastError, bool] | None:
        card = hello.card
        if hello.cluster and hello.cluster != self._cluster:
            message = (
                f"this store belongs to cluster {hello.cluster!r}, the scheduler to "
                f"{self._cluster!r}; start the store afresh, or give the scheduler the "
                "journal of that cluster"
            )
            return WrongPeer(message, {"cluster": self._cluster}), False
        if card.protocol != PROTOCOL:
            message = f"this scheduler speaks protocol {PROTOCOL}, not {card.protocol}"
            return Unimplemented(message), False
        if self._nodes.is_stale(card):
            message = f"incarnation {card.incarnation} of this node has been replaced"
            return StaleOwner(message), False
        return None

    def said(self, node: NodeRecord, message: FromNode) -> None:
        """Take a message of a node that is in."""
        match message:
            case Renew():
                self._nodes.renew(node, message)
                self._observed.renewed(node, message)
            case ReplicaReady():
                self._inventories.ready(node, message)
            case ReplicaDropped():
                self._inventories.dropped(node, message)
            case Inventory():
                self._inventories.inventory(node, message)
            case MayDrop():
                self._inventories.may_drop(node, message)
            case TaskProgress():
                self._tasks.progress(node, message)
            case TaskDone():
                self._tasks.done(node, message)
            case InstancesHere() | InstanceLoad() | InstanceGone():
                self._of_instances(node, message)
            case _:
                self._outbox.log("debug", f"node {node.label} said hello twice")

    def _of_instances(
        self, node: NodeRecord, message: InstancesHere | InstanceLoad | InstanceGone
    ) -> None:
        match message:
            case InstancesHere():
                self._instances.here(node, message)
            case InstanceLoad():
                self._instances.load(node, message)
                self._observed.pushed(node, message)
            case InstanceGone():
                self._observed.instance_gone(message)
