"""Promises of a simulated cluster that hold at every instant; each takes the World.

Those of one catalog alone stand in `oracles`, those that need a memory of what was told in
`sim_watch`, those of the end in `sim_rest`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import NodeId
from tests.kit import oracles

if TYPE_CHECKING:
    from tests.kit.sim_node import SimNode
    from tests.kit.sim_scheduler import SimScheduler
    from tests.kit.world import World

__all__ = ["check_instant"]

#: What a node may take to be believed again, or not any more: a lease, its doubt, and messages
#: that are late on each way.
BACK_S = 12.0


def check_instant(world: World, scheduler: SimScheduler) -> None:
    """Ask every promise of the instant."""
    oracles.check_catalog(scheduler.catalog, world.watch.told_of)
    creations_belong_to_sessions(scheduler)
    dead_instances_are_forgotten(world, scheduler)
    for node in world.alive():
        who_lives_is_believed_to(world, node, scheduler)
        tiers_keep_their_budget(node)
        fenced_before_given_up(node, scheduler)
        nothing_listed_is_about_to_go(node, scheduler)


def who_lives_is_believed_to(
    world: World, node: SimNode, scheduler: SimScheduler
) -> None:
    """A store that lives is live for the catalog, a moment after nothing is in the way any more.

    Also when all were given up at once.
    """
    if world.time.now_s - max(world.troubled_until_s, node.born_s) > BACK_S:
        record = scheduler.catalog.nodes.records.get(node.node)
        assert record is not None, f"{node.name} is not known"
        assert record.live or record.ended, (
            f"{node.name} lives, and is given up: {record.gone}"
        )


def dead_instances_are_forgotten(world: World, scheduler: SimScheduler) -> None:
    """Nothing of an instance that has died is listed, or readable, after a moment."""
    catalog = scheduler.catalog
    for instance in world.instances:
        if world.time.now_s - max(world.troubled_until_s, instance.died_s) < BACK_S:
            continue
        place = catalog.instances.place(instance.name)
        assert place is None or place.attachment != instance.attachment, (
            f"{instance.attachment} is dead, and is listed"
        )
        lender = catalog.nodes.records.get(NodeId(instance.attachment))
        assert lender is None or not lender.live, (
            f"{instance.attachment} is dead, and lends"
        )


def tiers_keep_their_budget(node: SimNode) -> None:
    """Bytes held are at most the budget, in each tier; of a lost device only readers hold some."""
    for tier, stock in node.store.table.tiers.items():
        if not stock.row.capacity_bytes:
            found = [one for one in node.store.committed() if one[1] is tier]
            assert not found, f"{node.name} has {found} on a device that is lost"
            continue
        assert stock.held_bytes <= stock.row.capacity_bytes, (
            f"{node.name} holds {stock.held_bytes} in {tier}"
        )


def creations_belong_to_sessions(scheduler: SimScheduler) -> None:
    """A creation does not outlive its session."""
    catalog = scheduler.catalog
    for generation, creation in catalog.creations._open.items():
        session = creation.session
        assert session is None or catalog.sessions.get(session.session) is session, (
            f"the session of creation {generation} is over"
        )


def fenced_before_given_up(node: SimNode, scheduler: SimScheduler) -> None:
    """A node that the catalog has given up takes no bytes any more."""
    record = scheduler.catalog.nodes.records.get(node.node)
    if record is None or record.live or not node.greeted:
        return
    if node.seen_epoch == scheduler.catalog.epoch:
        left_s = node.lease_left_s()
        assert left_s <= 0.0 or node.ended or record.ended, (
            f"{node.name} was given up with {left_s} s of its lease left"
        )


def nothing_listed_is_about_to_go(node: SimNode, scheduler: SimScheduler) -> None:
    """What a node is about to drop at the catalog's word, the catalog does not list.

    Else another copy could be given up for one that is not there in a moment.
    """
    if not node.jobs.drops or node.link is None:
        return
    catalog = scheduler.catalog
    record = catalog.nodes.records.get(node.node)
    if record is None or scheduler.links.get(record.link) is not node.link.other:
        return
    for order in node.jobs.drops:
        if isinstance(order, m.DropGranted):
            meant = order.generations
        else:
            meant = (order.generation,)
        for generation in meant:
            version = catalog.names.versions.get(generation)
            replica = None if version is None else version.holders.get(node.node)
            assert replica is None or replica.suspect, (
                f"{node.name} is about to drop {generation}, which is listed there"
            )
