"""A whole cluster in one thread: virtual time, a network that fails, real state machines.

    world = World(random.Random(7), faults)
    world.run()          # programs work while faults happen
    world.heal()         # faults stop; everything must come to rest
    check_rest(world)    # (sim_rest) and nothing may be left over

Rules:

1. One source of chance, one clock, no iteration over sets: the same `rng` gives the same
   history. Any `random.Random` will do, hypothesis' too.
2. Oracles are asked after the events of the catalog (every `EVERY`-th) and wherever bytes
   are given up; the promises of the end after healing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from tensorcast_dask.scheduler_plugin.state.events import WorkerGone
from tensorcast_dask.store.state.replicas import Life as CopyLife
from tensorcast_dask.store.state.replicas import Wanted
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import Generation, NodeId
from tests.kit.sim_faults import Faults
from tests.kit.sim_instance import SimInstance
from tests.kit.sim_lender import SimLender
from tests.kit.sim_network import KEEPALIVE_S, Network
from tests.kit.sim_node import SimNode
from tests.kit.sim_oracles import check_instant
from tests.kit.sim_program import SimProgram
from tests.kit.sim_scheduler import SimJournal, SimScheduler
from tests.kit.sim_timeline import Life, Process, Timeline
from tests.kit.sim_watch import Watch
from tests.kit.sim_workload import Habits, work

if TYPE_CHECKING:
    from tests.kit.sim_network import End

__all__ = ["World"]

#: (host, has a disk, has a device): two nodes share a host, so memory is shared and hosts are
#: counted.
NODES = (
    ("h1", True, True),
    ("h1", False, False),
    ("h2", True, False),
    ("h3", False, True),
)
PROGRAMS = ("h1", "h2", "h9")
#: (name, host); there are some where programs call them.
INSTANCES = (("e", "h1"), ("f", "h2"))
SCHEDULER = "h0"
EVERY = 6
CONNECT_S = 1.0


class World:
    """The cluster.

    Parameters
    ----------
    rng : Random
        All chance.
    faults : Faults
        What goes wrong how often.
    habits : Habits, optional
        What programs like to do, and how small nodes are; drawn where not given.
    """

    def __init__(
        self, rng: Random, faults: Faults, habits: Habits | None = None
    ) -> None:
        self.rng, self.faults = rng, faults
        self.habits = habits or Habits.drawn(rng)
        #: The faults that it began with.
        self.start = faults
        self.time = Timeline()
        self.life = Life("world")
        self.network = Network(self.time, rng, faults)
        self.watch = Watch(self)
        self.journal = SimJournal(self)
        self.nodes: list[SimNode] = []
        self.programs: list[SimProgram] = []
        self.lenders: list[SimLender] = []
        self.instances: list[SimInstance] = []
        self.connections = 0
        self.quiet = False
        #: Until when programs and the scheduler could not talk freely.
        self.disturbed_until_s = self.time.now_s + 2.0
        #: Until when nodes and the scheduler could not, or were not there.
        self.troubled_until_s = self.time.now_s
        self.steps = 0
        self.scheduler: SimScheduler | None = None
        self._start_scheduler("")
        for host, disk, device in NODES:
            self._new_node(host, disk=disk, device=device)
        for name, host in INSTANCES if self.habits.calls else ():
            self._new_instance(name, host)
        for host in PROGRAMS:
            self._new_program(host)
        for kind, act in self._chaos():
            rate = getattr(faults, kind)
            if rate:
                self.time.spawn(self.life, self._happens(rate, kind, act))

    # -------------------------------------------------------------- running
    def run(self, seconds: float = 15.0) -> None:
        """Let programs work and faults happen."""
        self.time.run(self.time.now_s + seconds)

    def heal(self) -> None:
        """End all faults, and let everything come to rest."""
        self.quiet = True
        self.faults = self.network.faults = Faults()
        for node in self.nodes:
            node.store.faults = self.faults
        self.network.heal()
        self.journal.stalled_until_s = 0.0
        self.time.run(self.time.now_s + 5.0)
        if self.scheduler is None:
            self._start_scheduler("")
        self.time.run(self.time.now_s + 25.0)

    def unlucky(self, chance: float) -> bool:
        """Draw whether something goes wrong."""
        return chance > 0 and self.rng.random() < chance

    # -------------------------------------------------------------- parts
    def node(self, name: NodeId) -> SimNode | None:
        """The store process of that name, dead or alive."""
        for node in self.nodes:
            if node.node == name:
                return node
        return None

    def lender(self, name: NodeId) -> SimLender | None:
        """The registering process of that name, while it lives."""
        for lender in self.lenders:
            if lender.node == name and lender.life.alive:
                return lender
        return None

    def alive(self) -> list[SimNode]:
        """Store processes that live."""
        return [node for node in self.nodes if node.life.alive]

    def some_node(self) -> NodeId:
        """Draw a node, sometimes a dead one."""
        return self.rng.choice(self.nodes[-6:]).node

    def some_device(self) -> str:
        """Draw a device that a node has; "" when none has."""
        having = [node for node in self.alive() if node.store.offers(m.Tier.DEVICE)]
        return self.rng.choice(having).store.device if having else ""

    def holder_of(self, generation: Generation) -> NodeId:
        """Draw a node that has a generation; "" when none has."""
        holders = [one.node for one in self.alive() if one.store.has(generation)]
        return self.rng.choice(holders) if holders else NodeId("")

    def _new_node(self, host: str, *, disk: bool, device: bool) -> SimNode:
        drift = self.faults.drift
        node = SimNode(
            self,
            f"n{len(self.nodes) + 1}",
            host,
            rate=1.0 + self.rng.choice((-drift, 0.0, drift)),
            disk=disk,
            device=device,
        )
        self.nodes.append(node)
        node.start()
        return node

    def _new_program(self, host: str) -> None:
        program = SimProgram(self, f"s{len(self.programs) + 1}", host)
        self.programs.append(program)
        self.time.spawn(program.life, work(program))

    def _new_instance(self, name: str, host: str) -> None:
        attachment = f"{name}{len(self.instances) + 1}"
        instance = SimInstance(self, attachment, name, host)
        self.instances.append(instance)
        instance.start()

    def _start_scheduler(self, loss: str) -> None:
        self.time.note("world", f"scheduler starts {loss}")
        self.scheduler = SimScheduler(self, self.journal.start(loss))
        self.watch.began(self.scheduler, loss)

    # -------------------------------------------------------------- connecting
    def dial_link(
        self, node: SimNode | SimLender, then: Callable[[End | None], None]
    ) -> None:
        """Open a link to the scheduler; None when nobody is reached."""
        self._dial(node.host, node.name, "link", then)

    def dial_session(
        self, program: SimProgram, then: Callable[[End | None], None]
    ) -> None:
        """Open a comm to the scheduler; None when nobody is reached."""
        self._dial(program.host, program.name, "session", then)

    def _dial(
        self, host: str, name: str, kind: str, then: Callable[[End | None], None]
    ) -> None:
        scheduler = self.scheduler
        if scheduler is None or not self.network.reaches(host, SCHEDULER):
            self.time.after(CONNECT_S, lambda: then(None))
            return

        def arrive() -> None:
            if not scheduler.life.alive:
                then(None)
                return
            ours, theirs = self.network.connect(
                (host, name), (SCHEDULER, f"catalog<{name}")
            )
            if kind == "link":
                scheduler.link(theirs)
            else:
                scheduler.session(theirs)
            then(ours)

        self.time.after(self.network.latency_s(), arrive)

    # -------------------------------------------------------------- news
    def refused(self, node: SimNode, refusal: m.LinkRefused) -> None:
        """A node was not let in: only an earlier life of it may be."""
        self.watch.count("refused")
        assert refusal.fault.kind == "StaleOwner", f"{node.name}: {refusal}"

    def ended(self, node: SimNode) -> None:
        """The catalog ended a node."""
        self.time.note(node.name, f"ends: {node.ended}")
        self.watch.leaving(node)
        self.watch.count("ended")
        self._replace(node, takeover=False)

    def stepped(self, scheduler: SimScheduler) -> None:
        """The catalog has absorbed an event."""
        self.steps += 1
        if self.steps % EVERY == 0:
            check_instant(self, scheduler)

    # -------------------------------------------------------------- faults
    def _chaos(self) -> list[tuple[str, Callable[[], None]]]:
        return [
            ("drop_link", self._drop_link),
            ("one_way_cut", self._cut),
            ("partition", self._partition),
            ("squeeze", self._squeeze),
            ("crash_with_amnesia", lambda: self._crash(takeover=False)),
            ("crash_with_disk", lambda: self._crash(takeover=True)),
            ("device_loss", self._lose_device),
            ("believed_dead", self._believe_dead),
            ("scheduler_restart", self._restart),
            ("journal_stall", self._stall),
            ("busy_loop", self._busy),
            ("session_death", self._kill_program),
            ("instance_death", self._kill_instance),
            ("instance_replaced", self._replace_instance),
            ("all_lapse", self._all_lapse),
            ("all_believed_dead", self._all_believed_dead),
        ]

    def _happens(self, rate: float, kind: str, act: Callable[[], None]) -> Process:
        while True:
            yield self.rng.uniform(0.0, 2.0 / rate)
            if self.quiet:
                return
            self.time.note("FAULT", kind)
            self.watch.count(f"fault {kind}")
            act()

    def _silence_s(self) -> float:
        seconds = self.rng.choice((0.2, 1.0, 4.0, self.faults.silence_s))
        self._disturbed(seconds, KEEPALIVE_S)
        return seconds

    def _disturbed(self, seconds: float, more_s: float = 0.0) -> None:
        until_s = self.time.now_s + seconds
        self.troubled_until_s = max(self.troubled_until_s, until_s)
        self.disturbed_until_s = max(self.disturbed_until_s, until_s + more_s)

    def _drop_link(self) -> None:
        self._disturbed(2.0)
        open_ones = [c for c in self.network.connections if not c.broken]
        if open_ones:
            self.network.break_one(self.rng.choice(open_ones))

    def _cut(self) -> None:
        hosts = [SCHEDULER, "h1", "h2", "h3", "h9"]
        one = hosts.pop(self.rng.randrange(len(hosts)))
        self.network.cut(one, self.rng.choice(hosts), self._silence_s())

    def _partition(self) -> None:
        hosts = [SCHEDULER, "h1", "h2", "h3", "h9"]
        one = hosts.pop(self.rng.randrange(len(hosts)))
        seconds = self._silence_s()
        for two in hosts:
            self.network.cut(one, two, seconds)
            self.network.cut(two, one, seconds)

    def _all_lapse(self) -> None:
        """Silence all nodes for longer than a lease, on one way or on both."""
        seconds = self.rng.choice((4.0, 6.0, 9.0))
        self._disturbed(seconds, KEEPALIVE_S)
        both = self.rng.random() < 0.7
        for host in sorted({host for host, _, _ in NODES}):
            self.network.cut(host, SCHEDULER, seconds)
            if both:
                self.network.cut(SCHEDULER, host, seconds)

    def _crash(self, *, takeover: bool) -> None:
        living = self.alive()
        if living:
            node = self.rng.choice(living)
            self.watch.died(node)
            self._replace(node, takeover=takeover)

    def _replace(self, node: SimNode, *, takeover: bool) -> None:
        self.time.note("world", f"{node.name} is dead")
        node.die()

        def come() -> None:
            heir = self._new_node(node.host, disk=node.disk, device=node.device)
            if takeover:
                self._take_over(heir, node)

        self.time.after(self.rng.choice((0.3, 2.0)), come)

    def _take_over(self, heir: SimNode, dead: SimNode) -> None:
        """Enter what lay in the disk folder of a store that died (`Disk.recover`)."""
        for generation, replica in list(dead.store.table.replicas.items()):
            copy = replica.copy(m.Tier.DISK)
            if copy is None or not copy.filled or copy.life is not CopyLife.COMMITTED:
                continue
            wanted = Wanted(
                generation=generation,
                id=replica.id,
                version=replica.version,
                nbytes=replica.nbytes,
                tier=m.Tier.DISK,
                owner=0,
                deadline_s=heir.now_s(),
                labels=replica.labels,
                published=replica.published,
            )
            filling = heir.store.table.reserve(wanted)
            for at, value in enumerate(dead.store.look(copy)):
                heir.store.write(filling.copy, at, value)
            heir.store.commit(
                generation,
                m.Tier.DISK,
                index=replica.index,
                digest=replica.index_digest,
            )
            self.watch.lost.pop(generation, None)

    def _lose_device(self) -> None:
        having = [node for node in self.alive() if node.store.offers(m.Tier.DEVICE)]
        if not having:
            return
        node = self.rng.choice(having)
        self.watch.device_died(node)
        node.store.lose_device()
        node.after(self.rng.choice((0.3, 2.0)), node.store.find_device)

    def _believe_dead(self) -> None:
        living = self.alive()
        if living:
            self._believe_one_dead(self.rng.choice(living))

    def _all_believed_dead(self) -> None:
        for node in self.alive():
            self._believe_one_dead(node)

    def _believe_one_dead(self, node: SimNode) -> None:
        """Have Dask say that a worker is gone: it is, or finds out and ends; another one adopts."""
        worker = node.card.worker
        if self.rng.random() < 0.5:
            node.orphaned()
        self.time.after(self.rng.choice((0.5, 5.0)), lambda: self._adopt(node))
        if self.scheduler is not None and worker:
            self.scheduler.tell_soon(WorkerGone(address=worker))

    def _adopt(self, node: SimNode) -> None:
        if node.life.alive:
            node.adopted()

    def _squeeze(self) -> None:
        for node in self.alive():
            self.time.spawn(node.life, node.store.squeezed())

    def crash_at_sync(self) -> bool:
        """Kill the scheduler at the worst moment, or not."""
        unlucky = self.unlucky(self.faults.crash_at_sync)
        if unlucky:
            self.time.note("FAULT", "crash at sync")
            self._restart()
        return unlucky

    def _restart(self) -> None:
        if self.scheduler is None:
            return
        self._disturbed(6.0)
        self.scheduler.die()
        self.scheduler = None
        loss = ""
        if self.unlucky(self.faults.journal_loss):
            loss = self.rng.choice(("rows", "all"))

        def start() -> None:
            if self.scheduler is None:
                self._start_scheduler(loss)

        self.time.after(self.rng.choice((0.1, 1.0, 4.0)), start)

    def _stall(self) -> None:
        self.journal.stalled_until_s = self.time.now_s + self._silence_s()

    def _busy(self) -> None:
        if self.scheduler is not None:
            seconds = self.rng.choice((0.1, 1.0, 4.0))
            self._disturbed(seconds)
            self.scheduler.busy_until_s = self.time.now_s + seconds

    def _kill_program(self) -> None:
        living = [one for one in self.programs if one.life.alive]
        program = self.rng.choice(living)
        program.die()
        self._new_program(program.host)

    def _kill_instance(self) -> None:
        living = [one for one in self.instances if not one.over]
        if living:
            instance = self.rng.choice(living)
            instance.die()
            wait_s = self.rng.choice((0.1, 1.0, 3.0))
            come = partial(self._new_instance, instance.name, instance.host)
            self.time.after(wait_s, come)

    def _replace_instance(self) -> None:
        living = [one for one in self.instances if not one.over]
        if living:
            name = self.rng.choice(living).name
            self._new_instance(name, self.rng.choice(INSTANCES)[1])
