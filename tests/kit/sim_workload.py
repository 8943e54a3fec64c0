"""What simulated programs do: the calls of the paper, in random order, as the API makes them.

Rules:

1. A call either ends well, or with a fault that its caller may see; anything else fails the
   simulation.
2. What is read is compared with what was put.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, TypeAlias

from tensorcast_dask.exceptions import NotFound, PeerLost, TensorCastError
from tensorcast_dask.store.records import digest_of_index
from tensorcast_dask.store.state.replicas import Filling, Wanted
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ArtifactId, Generation, HostId, NodeId
from tests.kit.sim_calls import call_some, run_some
from tests.kit.sim_lender import Lent, SimLender
from tests.kit.sim_store import CHUNK_BYTES, Reading, index_of, values_of
from tests.kit.sim_timeline import Process, Wait

if TYPE_CHECKING:
    from tests.kit.sim_node import SimNode
    from tests.kit.sim_program import SimProgram
    from tests.kit.world import World

__all__ = ["Habits", "work"]

NAMES = ("x", "y", "z")
SIZES = (
    100,
    CHUNK_BYTES // 2,
    CHUNK_BYTES,
    3 * CHUNK_BYTES - 7,
    5 * CHUNK_BYTES,
    9 * CHUNK_BYTES,
)
Call: TypeAlias = Generator[Wait, bool, None]
Action: TypeAlias = "Callable[[World, SimProgram], Generator[Wait, bool, object]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What programs like to do, and what with."""

    #: How often each call, in the order of `_CALLS`.
    weights: tuple[int, ...]
    #: Memory of a node, in pages.
    pages: int
    #: How long a chunk may take.
    chunk_s: float
    #: Longest rest between two calls.
    rest_s: float

    @classmethod
    def of(cls, liking: str, *, pages: int, chunk_s: float, rest_s: float) -> Habits:
        """Give those of programs that like one kind of work."""
        return cls(
            weights=_WEIGHTS[liking], pages=pages, chunk_s=chunk_s, rest_s=rest_s
        )

    @classmethod
    def drawn(cls, rng: Random) -> Habits:
        """Draw some: all calls alike, or one kind above all."""
        weights = rng.choice(tuple(_WEIGHTS.values()))
        return cls(
            weights=weights,
            pages=rng.choice((12, 18, 24)),
            chunk_s=rng.choice((0.002, 0.1, 0.5)),
            rest_s=rng.choice((0.1, 1.0)),
        )

    @property
    def calls(self) -> bool:
        """Whether there is anybody to be called."""
        return any(self.weights[len(_CALLS) - 2 :])


def work(program: SimProgram) -> Process:
    """Call after call, until the world wants quiet."""
    world, rng = program.world, program.world.rng
    weights = world.habits.weights
    while not world.quiet:
        yield rng.choice((0.01, 0.1, 0.3, world.habits.rest_s))
        (call,) = rng.choices(_CALLS, weights)
        yield from call(world, program)


# -------------------------------------------------------------------- put
def put(
    world: World, program: SimProgram, *, name: str = ""
) -> Generator[Wait, bool, object]:
    """Take a name, fill it, commit it; or give it up on the way. One named is kept."""
    rng = world.rng
    nbytes = CHUNK_BYTES if name else rng.choice(SIZES)
    index, digest = index_of(nbytes)
    device = "" if name or rng.random() < 0.8 else world.some_device()
    created = yield from program.ask(
        m.Create(
            rid=program.rid(),
            id=ArtifactId(name or rng.choice(NAMES)),
            nbytes=nbytes,
            index=index,
            index_digest=digest,
            tensors=1,
            version=rng.choice((0, -1, -1)),
            host=HostId(program.host),
            device=device,
            replicas=1 if name else rng.choice((1, 1, 1, 2, 3)),
            ttl_s=6.0,
        )
    )
    if isinstance(created, m.Fault):
        return created
    node = world.node(created.node.node)
    taken = world.watch.created[created.generation][0]
    wanted = (created.generation, taken, created.version, nbytes, index, device)
    sent = yield from send(world, program, node, wanted)
    if sent and (name or rng.random() < 0.92):
        commit = m.CommitCreated(
            rid=program.rid(), generation=created.generation, deadline_s=6.0
        )
        info = yield from program.ask(commit, 6.0)
        if not isinstance(info, m.Fault):
            return info
    abort = m.AbortCreated(rid=program.rid(), generation=created.generation)
    return (yield from program.ask(abort, 5.0))


def send(
    world: World, program: SimProgram, node: SimNode | None, wanted: tuple
) -> Generator[Wait, bool, bool]:
    """Bring the bytes to a node and freeze them there; whether that is known to be so."""
    yield world.network.latency_s()
    if node is None or not node.life.alive:
        return False
    if not world.network.reaches(program.host, node.host):
        return False
    world.connections += 1
    number = world.connections
    program.connections[number] = lambda: node.store.take_back(number)
    outcome: list[TensorCastError | None] = []

    def carry() -> Process:
        try:
            yield from _fill(world, node, wanted, number)
            outcome.append(None)
        except TensorCastError as error:
            outcome.append(error)

    ended = world.time.spawn(node.life, carry())
    known = yield ended, 5.0
    yield world.network.latency_s()
    del program.connections[number]
    if not known or not world.network.reaches(node.host, program.host):
        node.store.take_back(number)
        return False
    return outcome == [None]


def _fill(world: World, node: SimNode, wanted: tuple, owner: int) -> Call:
    generation, name, version, nbytes, index, device = wanted
    store, tier = node.store, m.Tier.DEVICE if device else m.Tier.HOST
    if device and not store.offers(tier):
        message = "the device of this node is lost"
        raise NotFound(message)
    filling: Filling = yield from store.reserve(
        Wanted(
            generation=generation,
            id=name,
            version=version,
            nbytes=nbytes,
            tier=tier,
            owner=owner,
            deadline_s=node.now_s() + 6.0,
            labels={},
        )
    )
    store.fresh(filling.copy)
    for at, value in enumerate(values_of(generation, nbytes)):
        store.table.filling(generation, tier)  # it may be taken back meanwhile
        store.write(filling.copy, at, value)
        if world.rng.random() < 0.2:
            yield world.rng.choice((0.001, 0.05, 0.5))
        if world.unlucky(world.faults.truncated):
            store.take_back(owner)
            message = "the connection broke off"
            raise PeerLost(message)
    store.commit(generation, tier, index=index, digest=digest_of_index(index))


# -------------------------------------------------------------------- read
def read(world: World, program: SimProgram) -> Call:
    """Resolve a name, find a replica, bring it here if need be, read it."""
    rng = world.rng
    info = yield from program.ask(
        m.Resolve(
            rid=program.rid(),
            id=ArtifactId(rng.choice((*NAMES, "al", "v"))),
            version=rng.choice((0, 0, 1, 2)),
            published=rng.random() < 0.3,
        )
    )
    if isinstance(info, m.Fault):
        return
    located = yield from program.ask(
        m.Locate(rid=program.rid(), generation=info.generation)
    )
    if isinstance(located, m.Fault):
        return
    if rng.random() < 0.3:
        ask = m.Ensure(
            rid=program.rid(),
            generation=info.generation,
            node=NodeId(""),
            host=HostId(program.host),
            deadline_s=4.0,
            why="read",
        )
        moved = yield from program.ask(ask, 4.0)
        if isinstance(moved, m.Fault):
            return
        located = m.Located(info=located.info, locations=(moved.location,))
    for location in located.locations[:2]:
        name = location.card.node
        node = world.node(name) or world.lender(name)
        if (yield from open_at(world, program, node, info.generation)):
            return


def read_lent(
    world: World, lender: SimLender, generation: Generation
) -> Generator[Wait, bool, bool]:
    """Read another process's memory, chunk by chunk (`api.fetching`)."""
    try:
        lent = lender.at_rest(generation)
        stamp, values = lent.stamp, []
        for at in range(len(lent.values)):
            yield world.rng.choice((0.001, 0.001, 0.1))
            if not lender.life.alive or lender.at_rest(generation).stamp != stamp:
                return False
            values.append(lent.values[at])
    except TensorCastError:
        return False
    world.watch.read_lent(lent, stamp, values)
    return True


def open_at(
    world: World,
    program: SimProgram,
    node: SimNode | SimLender | None,
    generation: Generation,
) -> Generator[Wait, bool, bool]:
    """Read a generation at a node, and hold what was read for a while."""
    yield world.network.latency_s()
    if node is None or not node.life.alive:
        return False
    if not world.network.reaches(program.host, node.host):
        return False
    if isinstance(node, SimLender):
        return (yield from read_lent(world, node, generation))
    ended_before = world.watch.is_over(generation)
    on_device = program.host == node.host and world.rng.random() < 0.5
    opened = Opening(node, on_device=on_device)
    world.connections += 1
    number = world.connections
    program.connections[number] = opened.close
    ended = world.time.spawn(node.life, opened.run(generation))
    known = yield ended, 4.0
    del program.connections[number]
    held = opened.held
    if not known or held is None:
        opened.close()
        return False
    if ended_before:
        world.watch.read_after_its_end(node, generation)
    place = node.store.memory[held.copy.tier, held.copy.segment]
    world.watch.read(node, generation, place[held.copy.offset])
    unmap = node.store.map(held.copy.segment)
    opened.close()
    slabs = node.store.table.tiers[m.Tier.HOST].slabs
    if held.copy.tier is m.Tier.DISK or held.copy.segment in slabs:
        unmap()  # small ones, and those of the disk, are copied out
        return True
    program.mapped[number] = unmap
    yield world.rng.choice((0.0, 0.5, 3.0))
    if node.life.alive:  # what is mapped stays, whatever the store has dropped
        world.watch.read(node, generation, place[held.copy.offset])
    program.mapped.pop(number)()
    return True


@dataclass(eq=False)
class Opening:
    """A connection to a store that reads one generation."""

    node: SimNode
    #: Whether the reader has the node's device, and takes a copy there by its handle.
    on_device: bool = False
    held: Reading | None = None
    closed: bool = False

    def run(self, generation: Generation) -> Process:
        """The store's side of it."""
        try:
            if self.on_device and self.node.store.is_in(generation, m.Tier.DEVICE):
                self.held = self.node.store.acquire(generation, m.Tier.DEVICE)
            else:
                self.held = yield from _acquire(self.node, generation)
        except TensorCastError as error:
            self.node.world.time.note(self.node.name, f"not opened: {error}")
        if self.closed:
            self.close()

    def close(self) -> None:
        """End it, now or as soon as it is open."""
        self.closed = True
        held, self.held = self.held, None
        if held is not None:
            self.node.store.release(held)


def _acquire(node: SimNode, generation: Generation) -> Generator[Wait, bool, Reading]:
    held = node.store.acquire(generation)
    if held.copy.tier is m.Tier.HOST:
        return held
    try:
        yield from node.store.restore(generation)
    except TensorCastError:
        return held  # borrowed from the disk, or the device
    node.store.release(held)
    return node.store.acquire(generation, m.Tier.HOST)


# -------------------------------------------------------------------- lent, load, save
def register(world: World, program: SimProgram) -> Call:
    """Lend memory, change it from time to time, perhaps take it back."""
    rng = world.rng
    lender = program.lending()
    waited_s = 0.0
    while not lender.up and waited_s < 10.0:  # as `Lender` does at its start
        waited_s += 0.1
        yield 0.1
    nbytes = rng.choice(SIZES)
    index, digest = index_of(nbytes)
    name = ArtifactId(rng.choice(NAMES))
    created = yield from program.ask(
        m.Create(
            rid=program.rid(),
            id=name,
            nbytes=nbytes,
            index=index,
            index_digest=digest,
            tensors=1,
            version=rng.choice((0, -1, -1)),
            owner=m.Owner.CALLER,
            node=lender.node,
            host=HostId(program.host),
            ttl_s=6.0,
        )
    )
    if isinstance(created, m.Fault):
        return
    lent = lender.lend(
        m.ReplicaRecord(
            generation=created.generation,
            id=name,
            version=created.version,
            tier=m.Tier.HOST,
            nbytes=nbytes,
            index_digest=digest,
            owner=m.Owner.CALLER,
            index=index,
        )
    )
    commit = m.CommitCreated(
        rid=program.rid(), generation=created.generation, deadline_s=6.0
    )
    info = yield from program.ask(commit, 6.0)
    if isinstance(info, m.Fault):
        lender.forget(created.generation)
        abort = m.AbortCreated(rid=program.rid(), generation=created.generation)
        yield from program.ask(abort, 5.0)
        return
    world.time.spawn(program.life, _own(world, program, lent))


def _own(world: World, program: SimProgram, lent: Lent) -> Process:
    """What an owner does with what it lends."""
    rng = world.rng
    for _ in range(rng.randrange(8)):
        yield rng.choice((0.02, 0.2, 1.0))
        yield from lent.mutate([rng.choice((0.0, 0.01, 0.2)) for _ in range(3)])
        if world.quiet:
            return
    if rng.random() < 0.5:
        over = m.Release(
            rid=program.rid(), generation=lent.record.generation, deadline_s=4.0
        )
        yield from program.ask(over, 4.0)


def load(world: World, program: SimProgram) -> Call:
    """Have a node read a file; one of no size is not there."""
    rng = world.rng
    yield from program.ask(
        m.LoadFile(
            rid=program.rid(),
            id=ArtifactId(rng.choice(NAMES)),
            path=str(rng.choice((*SIZES, 0))),
            deadline_s=rng.choice((0.3, 5.0)),
            version=rng.choice((0, -1, -1)),
            host=HostId(program.host),
            replicas=rng.choice((1, 1, 2)),
        ),
        5.0,
    )


def save(world: World, program: SimProgram) -> Call:
    """Have a holder write a file."""
    generation = world.watch.some_generation()
    if generation:
        ask = m.SaveFile(
            rid=program.rid(), generation=generation, path="out", deadline_s=4.0
        )
        yield from program.ask(ask, 4.0)


# -------------------------------------------------------------------- changes
def publish(world: World, program: SimProgram) -> Call:
    """Publish something."""
    generation = world.watch.some_generation()
    if generation:
        yield from program.ask(m.Publish(rid=program.rid(), generation=generation), 8.0)


def destroy(world: World, program: SimProgram) -> Call:
    """End a version, or a whole id."""
    rng = world.rng
    generation = world.watch.some_generation()
    if rng.random() < 0.7 and generation:
        name = world.watch.created[generation][0]
    else:
        generation, name = Generation(0), ArtifactId(rng.choice(NAMES))
    yield from program.ask(
        m.Destroy(rid=program.rid(), id=name, generation=generation, deadline_s=5.0),
        5.0,
    )


def ensure(world: World, program: SimProgram) -> Call:
    """Replicate, prefetch."""
    rng = world.rng
    generation = world.watch.some_generation()
    node = world.some_node() if rng.random() < 0.6 else NodeId("")
    if generation:
        yield from program.ask(
            m.Ensure(
                rid=program.rid(),
                generation=generation,
                node=node,
                deadline_s=rng.choice((0.3, 4.0)),
                tier=rng.choice((*m.Tier, m.Tier.DEVICE, m.Tier.HOST)),
                host=HostId(program.host if rng.random() < 0.3 else ""),
                why="replicate",
            ),
            4.0,
        )


def migrate(world: World, program: SimProgram) -> Call:
    """Move a replica."""
    generation = world.watch.some_generation()
    if generation:
        source = world.holder_of(generation) or world.some_node()
        yield from program.ask(
            m.Migrate(
                rid=program.rid(),
                generation=generation,
                source=source,
                node=world.some_node(),
                deadline_s=world.rng.choice((0.3, 5.0)),
            ),
            5.0,
        )


def release(world: World, program: SimProgram) -> Call:
    """Drop one replica."""
    generation = world.watch.some_generation()
    if generation:
        node = world.holder_of(generation) or world.some_node()
        yield from program.ask(
            m.Release(
                rid=program.rid(), generation=generation, node=node, deadline_s=4.0
            ),
            4.0,
        )


def pin(world: World, program: SimProgram) -> Call:
    """Pin, and perhaps unpin."""
    rng = world.rng
    generation = world.watch.some_generation()
    if not generation:
        return
    pinned = yield from program.ask(
        m.Pin(rid=program.rid(), generation=generation, ttl_s=rng.choice((1.0, 5.0)))
    )
    if not isinstance(pinned, m.Fault) and rng.random() < 0.5:
        yield from program.ask(
            m.Unpin(rid=program.rid(), generation=generation, pin=pinned.pin)
        )


def alias(world: World, program: SimProgram) -> Call:
    """Move the alias by compare-and-set."""
    rng = world.rng
    generation = world.watch.some_generation()
    seen = world.watch.aliases.get(ArtifactId("al"), 0)
    yield from program.ask(
        m.SetAlias(
            rid=program.rid(),
            name=ArtifactId("al"),
            generation=generation if rng.random() < 0.9 else Generation(0),
            expect=rng.choice((-1, seen, seen)),
        )
    )


def view(world: World, program: SimProgram) -> Call:
    """Make a view findable."""
    generation = world.watch.some_generation()
    if generation:
        yield from program.ask(
            m.RegisterView(
                rid=program.rid(),
                id=ArtifactId("v"),
                generation=generation,
                view=b"v",
                index_digest="v",
                nbytes=1,
                tensors=1,
            )
        )


def drain(world: World, program: SimProgram) -> Call:
    """Empty a node and end it."""
    yield from program.ask(
        m.DrainNode(
            rid=program.rid(),
            node=world.some_node(),
            deadline_s=5.0,
            end=world.rng.random() < 0.7,
        ),
        5.0,
    )


def call(world: World, program: SimProgram) -> Call:
    """Call an instance; under a key perhaps again."""
    yield from call_some(world, program)


def plan(world: World, program: SimProgram) -> Call:
    """Have a store drive a plan."""
    yield from run_some(world, program)


def peek(world: World, program: SimProgram) -> Call:
    """Read by generation at a node, as a handle does, without a word with the catalog."""
    generation = world.watch.some_generation()
    if generation:
        node = world.node(world.holder_of(generation) or world.some_node())
        yield from open_at(world, program, node, generation)


_CALLS: tuple[Action, ...] = (
    put,
    read,
    peek,
    publish,
    destroy,
    ensure,
    migrate,
    release,
    pin,
    alias,
    view,
    drain,
    register,
    load,
    save,
    call,
    plan,
)
#: By what they are good for.
_WEIGHTS = {
    "everything": (5, 4, 2, 2, 2, 3, 2, 2, 1, 2, 1, 1, 1, 1, 1, 0, 0),
    "moving": (4, 1, 1, 1, 0, 4, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "crowding": (6, 3, 1, 0, 1, 9, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0),
    "ending": (6, 2, 4, 1, 8, 3, 1, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0),
    "naming": (3, 2, 0, 4, 2, 0, 0, 0, 4, 8, 2, 0, 1, 1, 0, 0, 0),
    "lending": (2, 4, 0, 8, 2, 1, 0, 1, 0, 1, 0, 0, 6, 1, 1, 0, 0),
    "calling": (2, 3, 1, 1, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 9, 6),
}
