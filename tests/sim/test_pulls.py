"""The pull planner in virtual time, with sources that are slow, lie, stall and die."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

from tensorcast_dask.exceptions import NotFound, PeerLost
from tensorcast_dask.store.state import pull
from tensorcast_dask.tensors.messages import Fault

TICK_S = 0.05
DEADLINE_S = 60.0
STALL_S = 2.0


@dataclass
class Peer:
    """One source as it really is."""

    chunk_s: float
    #: Chunks it has now; a receiver gets more with time.
    have: set[int]
    grows_s: float = 0.0
    damages: bool = False
    silent_from_s: float = float("inf")
    dead_from_s: float = float("inf")
    missing: bool = False
    #: Raised by every close: answers of an older connection do not count.
    life: int = 0
    free_s: float = 0.0


@dataclass
class World:
    """The shell of one pull, in virtual time."""

    rng: random.Random
    chunks: int
    peers: list[Peer]
    sums: list[int]
    now_s: float = 0.0
    events: list[tuple[float, int, int, int, pull.Event]] = field(default_factory=list)
    order: itertools.count[int] = field(default_factory=itertools.count)
    #: Which source may still write into which chunk's place.
    writers: dict[int, int] = field(default_factory=dict)
    landed: dict[int, int] = field(default_factory=dict)
    ends: list[pull.Finished | pull.Failed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plan = pull.Pull(
            sources=len(self.peers),
            nbytes=self.chunks * 10 - 3 if self.chunks else 0,
            window=self.rng.choice([1, 2, 8]),
            stall_s=STALL_S,
            deadline_s=DEADLINE_S,
        )

    def later(self, delay_s: float, source: int, event: pull.Event) -> None:
        """Deliver an event of a source, unless its connection is closed first."""
        life = self.peers[source].life if source >= 0 else 0
        heapq.heappush(
            self.events,
            (self.now_s + delay_s, next(self.order), source, life, event),
        )

    def run(self) -> None:
        """Run until the plan has ended."""
        self.do(self.plan.start(now_s=0.0))
        self.later(TICK_S, -1, pull.TimePassed())
        while not self.ends:
            self.now_s, _, source, life, event = heapq.heappop(self.events)
            assert self.now_s <= DEADLINE_S + 2 * TICK_S, "no end at the deadline"
            if source >= 0 and self.peers[source].life != life:
                continue
            if isinstance(event, pull.TimePassed):
                self.later(TICK_S, -1, event)
            if isinstance(event, pull.Arrived):
                self.arrive(event)
            if isinstance(event, pull.Lost):
                self.forget(event.source)
            self.do(self.plan.handle(event, now_s=self.now_s))
        assert self.plan.handle(pull.TimePassed(), now_s=self.now_s) == []

    def arrive(self, event: pull.Arrived) -> None:
        assert self.writers.pop(event.chunk) == event.source
        if event.digest == self.sums[event.chunk]:
            assert event.chunk not in self.landed, "a chunk arrived twice"
            self.landed[event.chunk] = event.digest

    def forget(self, source: int) -> None:
        """Close all connections of a source: nothing of it can come any more."""
        self.peers[source].life += 1
        for chunk in [c for c, who in self.writers.items() if who == source]:
            del self.writers[chunk]

    # ---------------------------------------------------------------- instructions
    def do(self, told: list[pull.Instruction]) -> None:
        for instruction in told:
            match instruction:
                case pull.AskMap():
                    self.ask(instruction.source)
                case pull.Fetch():
                    self.fetch(instruction.source, instruction.chunk)
                case pull.Steal():
                    self.steal(instruction.source, instruction.chunk)
                case pull.Leave():
                    self.leave(instruction.source)
                case pull.Finished() | pull.Failed():
                    self.ends.append(instruction)

    def lost(self, source: int, error: PeerLost | NotFound) -> None:
        event = pull.Lost(source=source, fault=Fault.of(error))
        self.forget(source)
        self.later(self.rng.uniform(0.0, 0.1), source, event)

    def ask(self, source: int) -> None:
        peer = self.peers[source]
        if self.now_s >= peer.silent_from_s:
            return
        if self.now_s >= peer.dead_from_s:
            self.lost(source, PeerLost("dead"))
            return
        if peer.missing:
            self.lost(source, NotFound("not here"))
            return
        if peer.grows_s:
            count = min(self.chunks, int(self.now_s / peer.grows_s) + 1)
            peer.have |= set(range(count))
        bits = bytearray(-(-self.chunks // 8))
        for chunk in peer.have:
            bits[chunk >> 3] |= 1 << (chunk & 7)
        whole = len(peer.have) == self.chunks
        told = pull.Mapped(
            source=source,
            nbytes=self.plan.nbytes,
            chunk_bytes=10,
            index=b"index",
            have=b"" if whole else bytes(bits),
        )
        self.later(self.rng.uniform(0.001, 0.05), source, told)

    def fetch(self, source: int, chunk: int) -> None:
        peer = self.peers[source]
        assert chunk in peer.have, "asked for what the source has not"
        assert chunk not in self.writers, "two sources write into one place"
        assert chunk not in self.landed, "asked for what is here"
        self.writers[chunk] = source
        at_s = max(self.now_s, peer.free_s) + peer.chunk_s
        peer.free_s = at_s
        if at_s >= peer.dead_from_s:
            after_s = max(0.0, peer.dead_from_s - self.now_s)
            died = pull.Lost(source=source, fault=Fault.of(PeerLost("died")))
            self.later(after_s + 0.001, source, died)
        elif at_s < peer.silent_from_s:
            digest = self.sums[chunk]
            sent = digest + 1 if peer.damages and self.rng.random() < 0.3 else digest
            event = pull.Arrived(
                source=source, chunk=chunk, digest=sent, claimed=digest
            )
            self.later(at_s - self.now_s, source, event)

    def steal(self, source: int, chunk: int) -> None:
        """Close one connection: here all of the source's, each chunk said to be dropped."""
        owed = [c for c, who in self.writers.items() if who == source]
        if chunk not in owed:
            return
        self.forget(source)
        self.peers[source].free_s = self.now_s
        for late in owed:
            self.later(0.01, source, pull.Dropped(source=source, chunk=late))

    def leave(self, source: int) -> None:
        self.lost(source, PeerLost("left"))


def world(seed: int) -> tuple[World, bool]:
    """Make a world, and say whether an honest source with all chunks lives all along."""
    rng = random.Random(seed)
    chunks = rng.choice([0, 1, 2, 7, 40])
    everything = set(range(chunks))
    peers = []
    for _ in range(rng.randint(1, 4)):
        peer = Peer(chunk_s=rng.choice([0.001, 0.01, 0.2, 0.5]), have=set(everything))
        kind = rng.choice(
            ["honest", "partial", "grows", "damages", "silent", "dies", "missing"]
        )
        match kind:
            case "partial":
                peer.have = {c for c in everything if rng.random() < 0.5}
            case "grows":
                peer.have, peer.grows_s = set(), rng.choice([0.05, 0.3])
            case "damages":
                peer.damages = True
            case "silent":
                peer.silent_from_s = rng.uniform(0.0, 5.0)
            case "dies":
                peer.dead_from_s = rng.uniform(0.0, 5.0)
            case "missing":
                peer.missing = True
            case _:
                pass
        peers.append(peer)
    sure = any(
        peer.have == everything
        and not (peer.damages or peer.missing)
        and peer.silent_from_s == peer.dead_from_s == float("inf")
        for peer in peers
    )
    sums = [rng.getrandbits(63) + 1 for _ in range(chunks)]
    return World(rng, chunks, peers, sums), sure


def test_a_pull_ends_once_with_all_its_bytes_or_typed(sim_seed: int) -> None:
    made, sure = world(sim_seed)
    made.run()
    (end,) = made.ends
    if isinstance(end, pull.Finished):
        assert made.landed == dict(enumerate(made.sums))
        assert sum(made.plan.share()) == made.chunks
    else:
        assert not sure, f"an honest source lives, and yet: {end.fault.message}"
        assert end.fault.kind in {
            "PeerLost",
            "NotFound",
            "DeadlineExceeded",
            "Mismatch",
        }


def test_the_same_seed_gives_the_same_history() -> None:
    for seed in range(20):
        histories = []
        for _ in range(2):
            made, _ = world(seed)
            made.run()
            histories.append((made.now_s, made.ends, made.landed, made.plan.share()))
        assert histories[0] == histories[1]


def test_a_slow_source_does_not_hold_up_the_end() -> None:
    rng = random.Random(0)
    everything = set(range(10))
    fast = Peer(chunk_s=0.01, have=set(everything))
    slow = Peer(chunk_s=1.9, have=set(everything))
    made = World(rng, 10, [fast, slow], list(range(1, 11)))
    made.run()
    assert isinstance(made.ends[0], pull.Finished)
    assert made.now_s < 1.0
