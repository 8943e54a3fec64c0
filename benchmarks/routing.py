"""Four simulated instances, sessions of agents, a clock that nobody waits for.

Rules:

1. Sessions have the shape of chains in a published request trace (Mooncake's conversation
   trace, Apache-2.0): turns of a session, first prompt, what each turn adds, and answers are
   drawn from its quantiles, written down here. Delays between turns are LogNormal; the presets
   are those of the TensorCast paper (T3).
2. An instance prefills one prompt after the other, at `PREFILL` tokens a second, and decodes
   `slots` sequences at once. A session's KV is where it was served last: there only what is new
   is prefilled, elsewhere all of it.
3. *Queueing* of a turn is from its arrival to the begin of its prefill.
4. Sessions, delays and hot spots are drawn before any policy acts, from one seed: policies meet
   the same load.
5. The policy is the very object that a cluster installs; it sees the same views.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from tensorcast_dask.policies import InstanceView, Rebalance, RequestView, View

__all__ = ["PRESETS", "Outcome", "simulate"]

#: (mu, sigma) of the delay between turns, sessions at once, decode slots of an instance.
PRESETS = {
    "fast": (2.1, 0.6, 128, 24),
    "medium": (3.0, 0.8, 256, 24),
    "slow": (4.1, 1.0, 256, 8),
}
INSTANCES = 4
PREFILL = 20_000.0  # tokens a second
DECODE = 40.0  # tokens a second and sequence
KV_BYTES, LINK = 262_144, 5e9  # bytes of a token; bytes a second of a move
WARM_S = 300.0  # until when nothing is counted: all sessions begin at once
HOT, HOT_S = (
    0.55,
    300.0,
)  # part of new sessions that one instance gets, and for how long
#: Twenty-quantiles of the trace: turns of sessions with more than one, tokens of the first prompt,
#: tokens that a turn adds, tokens of an answer.
# fmt: off
TURNS: tuple[int, ...] = (2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4, 5, 6)
FIRST: tuple[int, ...] = (
    898, 907, 965, 1157, 1459, 2120, 3466, 4357, 5065, 5933, 7109, 8511, 10144, 12085,
    14284, 16913, 20272, 26292, 38165,
)
GROWS: tuple[int, ...] = (
    46, 99, 163, 231, 290, 336, 373, 409, 447, 481, 524, 569, 627, 710, 897, 1470, 3101,
    4699, 7599,
)
ANSWER: tuple[int, ...] = (
    10, 24, 46, 100, 156, 213, 256, 291, 322, 350, 375, 399, 423, 447, 472, 504, 543,
    597, 698,
)
# fmt: on


def draw(random: Random, quantiles: tuple[int, ...]) -> int:
    """A value between two neighbouring quantiles."""
    at = random.random() * (len(quantiles) - 1)
    low = int(at)
    high = min(low + 1, len(quantiles) - 1)
    return round(quantiles[low] + (at - low) * (quantiles[high] - quantiles[low]))


@dataclass(slots=True)
class Session:
    """One agent's session: what it will ask is drawn when it is made."""

    name: str
    #: (seconds after the last answer, tokens that are new, tokens of the answer).
    turns: deque[tuple[float, int, int]]
    home: int
    tokens: int = 0
    #: Tokens that its home has.
    cached: int = 0
    active_s: float = 0.0
    migrations: int = 0
    #: "idle", "queued", "running" or "moving".
    state: str = "idle"
    arrived_s: float = 0.0
    turn: tuple[float, int, int] = (0.0, 0, 0)
    #: It asked while it was moved.
    asked: bool = False


@dataclass(slots=True)
class Instance:
    """One engine."""

    queue: deque[Session] = field(default_factory=deque)
    running: int = 0
    prefill_until_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What a run came to."""

    queueing_s: list[float] = field(default_factory=list)
    migrations: int = 0
    prefilled: int = 0

    @property
    def p95_s(self) -> float:
        return statistics.quantiles(self.queueing_s, n=20)[-1]

    def facts(self) -> dict[str, float]:
        return {
            "p95 s": round(self.p95_s, 3),
            "mean s": round(statistics.fmean(self.queueing_s), 3),
            "turns": len(self.queueing_s),
            "migrations": self.migrations,
            "tokens prefilled": self.prefilled,
        }


class Simulation:
    """One run."""

    def __init__(self, preset: str, routing: str, seed: int, seconds: float) -> None:
        self.mu, self.sigma, sessions, self.slots = PRESETS[preset]
        self.routing = routing
        self.until_s = seconds
        self.load = Random(f"{seed}-{preset}")
        self.dice = Random(f"{seed}-{routing}")
        count = int(seconds // HOT_S) + 1
        self.hot = [self.load.randrange(INSTANCES) for _ in range(count)]
        self.plans = [self.plan_of() for _ in range(sessions * 400)]
        self.next_plan = itertools.count()
        self.now_s = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.instances = [Instance() for _ in range(INSTANCES)]
        self.sessions: dict[str, Session] = {}
        self.outcome = Outcome()
        for _ in range(sessions):
            self.at(self.load.uniform(0.0, 20.0), self.begin)
        if routing == "rebalance":
            self.policy = Rebalance()
            self.at(1.0, self.tick)

    def plan_of(self) -> tuple[float, deque[tuple[float, int, int]]]:
        """Draw one session: where chance puts it, and its turns."""
        random = self.load
        turns = deque(
            (
                random.lognormvariate(self.mu, self.sigma),
                draw(random, FIRST if turn == 0 else GROWS),
                draw(random, ANSWER),
            )
            for turn in range(draw(random, TURNS))
        )
        return random.random(), turns

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (seconds, next(self.order), act))

    def run(self) -> Outcome:
        while self.events and self.events[0][0] <= self.until_s:
            self.now_s, _, act = heapq.heappop(self.events)
            act()
        return self.outcome

    # ------------------------------------------------------------ sessions
    def begin(self) -> None:
        number = next(self.next_plan)
        where, turns = self.plans[number]
        hot = self.hot[int(self.now_s // HOT_S)]
        others = [one for one in range(INSTANCES) if one != hot]
        cuts = [HOT + (1 - HOT) * (n + 1) / len(others) for n in range(len(others))]
        home = hot if where < HOT else others[min(bisect.bisect(cuts, where), 2)]
        session = Session(f"s{number:06}", deque(turns), home)
        if self.routing == "two choices, then stays":
            session.home = self.of_two()
        self.sessions[session.name] = session
        self.ask(session)

    def ask(self, session: Session) -> None:
        session.turn = session.turns.popleft()
        session.tokens += session.turn[1]
        session.arrived_s = session.active_s = self.now_s
        if session.state == "moving":
            session.asked = True
            return
        if self.routing == "two choices a turn":
            chosen = self.of_two()
            if chosen != session.home:
                session.home, session.cached = chosen, 0
        self.enqueue(session)

    def of_two(self) -> int:
        pair = self.dice.sample(range(INSTANCES), 2)
        return min(pair, key=self.load_of)

    def load_of(self, number: int) -> int:
        one = self.instances[number]
        return len(one.queue) + one.running

    def enqueue(self, session: Session) -> None:
        session.state = "queued"
        self.instances[session.home].queue.append(session)
        self.serve(session.home)

    def serve(self, number: int) -> None:
        one = self.instances[number]
        while one.queue and one.running < self.slots:
            if one.prefill_until_s > self.now_s:
                return  # the end of that prefill looks again
            session = one.queue.popleft()
            session.state = "running"
            one.running += 1
            new = session.tokens - session.cached
            if session.arrived_s > WARM_S:
                self.outcome.queueing_s.append(self.now_s - session.arrived_s)
                self.outcome.prefilled += new
            one.prefill_until_s = self.now_s + new / PREFILL
            self.at(one.prefill_until_s, lambda: self.serve(number))
            ends_s = one.prefill_until_s + session.turn[2] / DECODE
            self.at(ends_s, partial(self.answered, number, session))

    def answered(self, number: int, session: Session) -> None:
        self.instances[number].running -= 1
        session.tokens += session.turn[2]
        session.cached = session.tokens
        session.active_s = self.now_s
        session.state = "idle"
        if session.turns:
            self.at(self.now_s + session.turns[0][0], lambda: self.ask(session))
        else:
            del self.sessions[session.name]
            self.at(self.now_s + session.turn[0], self.begin)
        self.serve(number)

    # ------------------------------------------------------------ moves
    def tick(self) -> None:
        for move in self.policy.decide(self.view()):
            self.move(self.sessions[move.request], int(move.target[1:]))
        self.at(self.now_s + 1.0, self.tick)

    def view(self) -> View:
        requests: list[list[RequestView]] = [[] for _ in self.instances]
        for one in self.sessions.values():
            requests[one.home].append(
                RequestView(
                    request=one.name,
                    tokens=one.tokens,
                    last_active_s=one.active_s,
                    migrations=one.migrations,
                    running=one.state == "running",
                    migrating=one.state == "moving",
                )
            )
        return View(
            now_s=self.now_s,
            instances=tuple(
                InstanceView(
                    instance=f"i{number}",
                    values={"queue": float(self.load_of(number))},
                    requests=tuple(requests[number]),
                )
                for number in range(INSTANCES)
            ),
        )

    def move(self, session: Session, target: int) -> None:
        source = self.instances[session.home]
        session.asked = session.state == "queued"
        if session.asked:
            source.queue.remove(session)
        session.state = "moving"
        session.migrations += 1
        self.outcome.migrations += 1

        def moved() -> None:
            session.home, session.state = target, "idle"
            if session.asked:
                session.asked = False
                self.enqueue(session)

        self.at(self.now_s + session.cached * KV_BYTES / LINK, moved)


def simulate(preset: str, routing: str, *, seed: int, seconds: float) -> Outcome:
    """Run one preset under one routing.

    Parameters
    ----------
    preset : str
        Of `PRESETS`.
    routing : str
        `none` (a session stays where chance put it), `two choices a turn`, `two choices, then
        stays` or `rebalance` (as none, and `policies.Rebalance` once a second).
    seed : int
        Of sessions, delays and hot spots.
    seconds : float
        Of the virtual clock.
    """
    return Simulation(preset, routing, seed, seconds).run()
