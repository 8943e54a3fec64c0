"""What must be true of a simulated cluster that has healed and come to rest.

Each function is one promise and takes the World. Counts are compared with their baseline:
whatever is above it has leaked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.scheduler_plugin.state.catalog import Catalog
from tensorcast_dask.store.state.replicas import Life
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ArtifactId
from tests.kit import oracles
from tests.kit.sim_timeline import Process
from tests.kit.sim_workload import open_at, put, read

if TYPE_CHECKING:
    from tests.kit.sim_instance import SimInstance
    from tests.kit.world import World

__all__ = ["check_rest"]

#: Counts of `Catalog.debug_state` that an idle catalog has at zero.
IDLE = (
    "held",
    "creations",
    "tasks",
    "moves",
    "endings",
    "operations",
    "pins",
    "plans",
    "plans_waiting",
    "plan_claims",
)
#: What is at zero besides when everybody has left.
EMPTY = (*IDLE, "sessions", "outcome_sessions", "outcomes", "instances", "plans_kept")


def check_rest(world: World) -> None:
    """Ask every promise of the end, then close all programs and ask for the baseline."""
    catalog = _catalog(world)
    every_request_has_its_answer(world)
    nothing_has_leaked(world, catalog)
    catalog_and_nodes_agree(world, catalog)
    names_are_of_one_life(world, catalog)
    nothing_destroyed_has_survived(world)
    nothing_acknowledged_is_gone(world, catalog)
    oracles.check_catalog(catalog, world.watch.told_of)
    the_cluster_still_works(world)
    sessions_leave_nothing(world)


def _catalog(world: World) -> Catalog:
    assert world.scheduler is not None
    return world.scheduler.catalog


def every_request_has_its_answer(world: World) -> None:
    """Every request is answered, or its session is gone."""
    for program in world.programs:
        if program.life.alive:
            waiting = [asking.request for asking in program.pending.values()]
            assert not waiting, f"{program.name} still waits for {waiting}"


def nothing_has_leaked(world: World, catalog: Catalog) -> None:
    """Leases, tasks, pins, creations, reservations are back at their baseline."""
    state = catalog.debug_state()
    left = {key: state[key] for key in IDLE if state[key]}
    assert not left, f"the catalog is idle, and yet: {left}"
    assert state["seq"] == state["durable"]
    for node in world.alive():
        table, jobs = node.store.table, node.jobs
        assert not table.fillings, f"{node.name} still fills {table.fillings}"
        assert not table.leased, f"{node.name} still leases {table.leased}"
        table.check()
        assert not jobs.running, f"{node.name} still works at {jobs.running}"
        assert not jobs.drops
        assert not jobs.flights
        assert not jobs.outcomes, f"{node.name} keeps outcomes {jobs.outcomes}"
        assert not node.asked
        assert not node.plans.drives, f"{node.name} still drives {node.plans.drives}"
        waiting = (node.desk.attachments.waiting, len(node.desk.waits))
        assert waiting == (0, 0), f"calls still wait at {node.name}: {waiting}"
        pins = {g for g, ends_s in table.pins.items() if ends_s > node.now_s()}
        assert not pins, f"{node.name} still pins {pins}"


def catalog_and_nodes_agree(world: World, catalog: Catalog) -> None:
    """What the catalog lists lies there, and what lies there it lists."""
    live = {name: one for name, one in catalog.nodes.records.items() if one.live}
    alive = {node.node: node for node in world.alive()}
    lenders = {one.node: one for one in world.lenders if one.life.alive}
    assert sorted(live) == sorted({**alive, **lenders}), "the catalog knows other nodes"
    for name, lender in lenders.items():
        listed_here = sorted(catalog.replicas.by_node.get(name, {}))
        assert listed_here == sorted(lender.lent), f"{name} lends {lender.lent}"
    for name, node in alive.items():
        held: dict[int, list[m.Tier]] = {}
        for generation, tier in node.store.committed():
            held.setdefault(generation, []).append(tier)
        listed = {
            generation: sorted(record.holders[name].tiers)
            for generation, record in catalog.replicas.by_node.get(name, {}).items()
            if not record.holders[name].suspect
        }
        found = {generation: sorted(tiers) for generation, tiers in held.items()}
        assert found == listed, f"{node.name} holds {found}, listed is {listed}"
        for generation, replica in node.store.table.replicas.items():
            record = catalog.names.versions[generation]
            assert replica.published == record.published, (
                f"{node.name} was not told that {generation} is published"
            )
            for copy in replica.copies:
                assert copy.life is Life.COMMITTED
                values = node.store.look(copy)
                assert values == world.watch.content(generation, len(values))


def names_are_of_one_life(world: World, catalog: Catalog) -> None:
    """Every instance that lives is attached and listed, or was let go; one of a name is not."""
    living = [one for one in world.instances if not one.over]
    names = [one.name for one in living]
    assert len(names) == len(set(names)), f"{names} live side by side"
    for one in living:
        assert one.attached, f"{one.attachment} is not attached"
        place = catalog.instances.place(one.name)
        assert place is not None, f"{one.attachment} is not listed"
        assert place.attachment == one.attachment, f"{place} is not {one.attachment}"
    assert len(catalog.instances) == len(living)
    for node in world.alive():
        there = [one.attachment for one in living]
        assert sorted(node.desk.here) == sorted(set(node.desk.here) & set(there))
    for name in {one.name for one in world.instances}:
        # Of lives on two hosts the catalog may hear in another order than they came in.
        hosts = {one.host for one in world.instances if one.name == name}
        assert name in names or len(hosts) > 1, f"all that were {name} were let go"


def nothing_destroyed_has_survived(world: World) -> None:
    """No replica of a destroyed generation is left."""
    for generation in world.watch.destroyed:
        assert not world.watch.copies(generation), f"{generation} lives on"


def nothing_acknowledged_is_gone(world: World, catalog: Catalog) -> None:
    """What was acknowledged can be read, or is said to be lost."""
    watch = world.watch
    assert world.scheduler is not None
    watch.nothing_told_is_forgotten(world.scheduler)
    for generation in watch.committed:
        record = catalog.names.versions.get(generation)
        if record is None:
            continue
        if watch.copies(generation):
            assert catalog.holders.is_readable(record)
        else:
            assert generation in watch.lost, f"{generation} has no copy left"
            assert record.said_lost, f"nobody was told that {generation} is lost"


def the_cluster_still_works(world: World) -> None:
    """Destroying everything gives every byte back; then a put and a read succeed."""
    program = next(one for one in world.programs if one.life.alive)
    catalog = _catalog(world)
    done: list[m.ArtifactInfo] = []

    def script() -> Process:
        for instance in world.instances:
            if not instance.over:
                yield from session_of(instance)
        for name in list(catalog.names.artifacts):
            ask = m.Destroy(rid=program.rid(), id=name, deadline_s=5.0)
            ended = yield from program.ask(ask)
            assert isinstance(ended, m.Destroyed), f"{name} is not destroyed: {ended}"
        yield 1.0  # a shared copy lets go of the other node's memory a moment later
        nothing_is_held(world)
        info = yield from put(world, program, name=ArtifactId("after"))
        assert isinstance(info, m.ArtifactInfo), f"a healed cluster refuses: {info}"
        done.append(info)
        yield from read(world, program)
        located = yield from program.ask(
            m.Locate(rid=program.rid(), generation=info.generation)
        )
        node = world.node(located.locations[0].card.node)
        assert (yield from open_at(world, program, node, info.generation))

    ended = world.time.spawn(program.life, script())
    until_s = world.time.now_s + 20.0
    while not ended.fired and world.time.now_s < until_s:
        world.time.run(world.time.now_s + 0.5)
    assert ended.fired, "a healed cluster does not answer"
    assert done


def session_of(instance: SimInstance) -> Process:
    """The session of an instance works, whatever has become of its nodes."""
    ask = m.InstancesAsked(rid=instance.session.next_rid())
    try:
        yield from instance.ask_catalog(ask, m.Instances, 5.0)
    except TensorCastError as error:
        message = f"{instance.attachment} asks the catalog in vain: {error}"
        raise AssertionError(message) from error


def nothing_is_held(world: World) -> None:
    """All memory is free, or warm; nothing is lent."""
    assert not any(one.lent for one in world.lenders if one.life.alive)
    for node in world.alive():
        assert not node.store.maps
        for tier, use in node.store.uses().items():
            held = (use.used_bytes, use.reserved_bytes, use.lingering_bytes)
            assert held == (0, 0, 0), f"{node.name} holds {held} in {tier}"
        assert not node.store.table.replicas
        assert not node.store.lent


def sessions_leave_nothing(world: World) -> None:
    """When all programs have closed, nothing of them is left after a while."""
    for program in world.programs:
        if program.life.alive:
            world.time.spawn(program.life, program.close())
    for instance in world.instances:
        instance.detach()
    for node in world.alive():
        node.plans.end()
    world.time.run(world.time.now_s + 16.0)
    state = _catalog(world).debug_state()
    left = {key: state[key] for key in EMPTY if state[key]}
    assert not left, f"everybody has gone, and yet: {left}"
