"""Policies: who decides, asked one question at a time, and set aside when it fails.

Rules:

1. A policy runs in a process of its own, never here: it is asked by an instruction and answers
   by an event. Nothing waits for it longer than its limit; then the default decides.
2. A policy that raises, stalls or dies is set aside, with an event and a signal, until it is
   installed anew. Whatever waited for it is decided by the default.
3. What it decides is a suggestion: it is carried out as a request of the scheduler's own session,
   checked like anybody's.
4. Of evict, admit and place there is one at a time. Another takes its place once it is loaded;
   until then the one before goes on.
5. Answers of a process that was ended are of no account: each has its number (`life`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from tensorcast_dask.exceptions import InvalidArgument, NotFound
from tensorcast_dask.policies.views import (
    Copy,
    Decided,
    Migrate,
    MoveRequest,
    Role,
    View,
    Wanted,
)
from tensorcast_dask.scheduler_plugin.state.checks import check_name, check_seconds
from tensorcast_dask.scheduler_plugin.state.events import (
    AskPolicy,
    AskSelf,
    Carried,
    EndPolicy,
    PolicyBroke,
    PolicyDecided,
    PolicyLoaded,
    Row,
    StartPolicy,
)
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.operations import Caller, Operation
from tensorcast_dask.scheduler_plugin.state.policy_views import PolicyViews
from tensorcast_dask.scheduler_plugin.state.records import packed, version_row
from tensorcast_dask.scheduler_plugin.state.timers import Timer
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import Generation, NodeId, RequestId
from tensorcast_dask.tensors.signals import Reading

__all__ = ["Policies", "PolicyRow"]

#: How long a process may take to start and to load a policy.
START_S: Final = 30.0
#: Questions that may wait for a policy; further ones go to the default at once.
MAX_WAITING: Final = 256
#: Actions of one decision that are carried out; the others may be suggested again.
MAX_ACTIONS: Final = 32
MOVE_S: Final = 60.0
_SINGLE: Final = (Role.EVICT, Role.ADMIT, Role.PLACE)
_ASKED: Final = (Role.ADMIT, Role.PLACE)

Then: TypeAlias = Callable[[Decided], None]


class PolicyRow(msgspec.Struct, array_like=True, frozen=True):
    """A policy in the journal."""

    name: str = ""
    role: str = ""
    blob: bytes = b""
    every_s: float = 1.0
    limit_s: float = 0.25


@dataclass(slots=True, eq=False)
class _Question:
    number: int
    view: View
    wanted: Wanted | None
    then: Then


@dataclass(slots=True, eq=False)
class _Policy:
    """One that was installed."""

    row: PolicyRow
    role: Role
    life: int
    status: str = "starting"
    why: str = ""
    decisions: int = 0
    #: The first of them is asked.
    waiting: deque[_Question] = field(default_factory=deque)
    limit: Timer | None = None
    #: Who installed it waits for it to be loaded.
    installing: Operation | None = None

    @property
    def state(self) -> m.PolicyState:
        row = self.row
        return m.PolicyState(
            name=row.name,
            role=row.role,
            status=self.status,
            why=self.why,
            decisions=self.decisions,
            every_s=row.every_s,
            limit_s=row.limit_s,
        )


class Policies:
    """All policies that were installed."""

    def __init__(self, ground: Ground, views: PolicyViews) -> None:
        self._outbox = ground.outbox
        self._timers = ground.timers
        self._nodes = ground.nodes
        self._replicas = ground.replicas
        self._holders = ground.holders
        self._operations = ground.operations
        self._numbers = ground.names.numbers
        self._stories = ground.stories
        self._views = views
        self._policies: dict[str, _Policy] = {}
        #: Those that are being loaded, by life.
        self._loading: dict[int, _Policy] = {}
        self._lives = 0
        self._questions = 0
        #: What actions under way are about, by number.
        self._carried: dict[int, tuple[str, Copy | Migrate]] = {}
        self._actions = 0

    def __len__(self) -> int:
        return len(self._carried) + sum(len(o.waiting) for o in self._policies.values())

    # ------------------------------------------------------------ requests
    def install(self, caller: Caller, ask: m.InstallPolicy) -> None:
        """Load a policy; it decides once it is loaded.

        Raises
        ------
        InvalidName, InvalidArgument
            When it has no name, no role, or no sensible time.
        """
        check_name(ask.name, what="the policy's name")
        if ask.role not in list(Role):
            message = f"a policy's role is one of {', '.join(Role)}, not {ask.role!r}"
            raise InvalidArgument(message)
        if not check_seconds(ask.every_s, what="every") > 0:
            message = "every must be more than 0 s"
            raise InvalidArgument(message)
        if not 0 < check_seconds(ask.limit_s, what="limit") <= START_S:
            message = f"limit must be more than 0 s, and at most {START_S:g}"
            raise InvalidArgument(message)
        row = PolicyRow(ask.name, ask.role, ask.blob, ask.every_s, ask.limit_s)
        policy = self._start(row)
        policy.installing = self._operations.open(caller, "install", None, START_S + 1)

    def _start(self, row: PolicyRow) -> _Policy:
        self._lives += 1
        life = self._numbers.epoch << 20 | self._lives
        policy = self._loading[life] = _Policy(row, Role(row.role), life)
        self._outbox.tell(StartPolicy(life=life, name=row.name, blob=row.blob))
        policy.limit = self._timers.at(
            self._outbox.now_s + START_S,
            lambda: self.broke(life, f"it was not loaded within {START_S:g} s"),
        )
        return policy

    def remove(self, caller: Caller, ask: m.RemovePolicy) -> None:
        """Let a policy decide no more.

        Raises
        ------
        NotFound
            When there is none of that name.
        """
        policy = self._policies.get(ask.name)
        if policy is None:
            names = ", ".join(map(repr, self._policies)) or "none"
            message = f"no policy is called {ask.name!r}; there are: {names}"
            raise NotFound(message)
        self._drop(policy)
        self._outbox.persist(Row(kind="policy", key=ask.name, blob=None))
        self._outbox.emit("policy_removed", policy=ask.name, role=policy.row.role)
        self._operations.give(caller, None, durable=True)

    def states(self) -> tuple[m.PolicyState, ...]:
        """List them."""
        return tuple(one.state for one in self._policies.values())

    def readings(self) -> Iterator[tuple[str, Reading]]:
        """Tell them, for signals."""
        for name, one in self._policies.items():
            yield (
                f"policy/{name}",
                {"role": one.row.role, "status": one.status, "why": one.why},
            )

    def recover(self, rows: Iterable[PolicyRow]) -> None:
        """Load the policies of an earlier life again."""
        for row in rows:
            if row.role in list(Role):
                self._policies[row.name] = self._start(row)

    # ------------------------------------------------------------ its life
    def heard(
        self, event: PolicyLoaded | PolicyDecided | PolicyBroke | Carried
    ) -> None:
        """Take what the shell says of a policy's process."""
        match event:
            case PolicyLoaded():
                self.loaded(event.life)
            case PolicyDecided():
                self.decided(event.life, event.number, event.decided)
            case PolicyBroke():
                self.broke(event.life, event.why)
            case Carried():
                self.carried(event.number, event.error)

    def loaded(self, life: int) -> None:
        """Take the news that a policy waits for questions (rule 4)."""
        policy = self._loading.pop(life, None)
        if policy is None:
            return
        row = policy.row
        _disarm(policy)
        for other in list(self._policies.values()):
            single = policy.role in _SINGLE and other.role is policy.role
            if other is not policy and (other.row.name == row.name or single):
                self._drop(other)
                if other.row.name != row.name:
                    gone = Row(kind="policy", key=other.row.name, blob=None)
                    self._outbox.persist(gone)
        self._policies[row.name] = policy
        policy.status = "running"
        if policy.installing is not None:
            self._outbox.persist(packed("policy", row.name, row))
            self._outbox.emit("policy_installed", policy=row.name, role=row.role)
            self._operations.finish(policy.installing, policy.state, durable=True)
            policy.installing = None
        if policy.role not in _ASKED:
            self._tick(policy)

    def broke(self, life: int, why: str) -> None:
        """Set a policy aside (rule 2)."""
        loading = self._loading.pop(life, None)
        policy = loading or self._of(life)
        if policy is None:
            return
        self._outbox.tell(EndPolicy(life=life))
        _disarm(policy)
        if loading is not None and policy.installing is not None:
            message = f"policy {policy.row.name!r} cannot be installed: {why}"
            self._operations.fail(policy.installing, InvalidArgument(message))
            return
        policy.status, policy.why = "aside", why
        name, role = policy.row.name, policy.row.role
        self._outbox.log("warning", f"policy {name!r} ({role}) is set aside: {why}")
        self._outbox.emit("policy_aside", policy=name, role=role, why=why)
        self._default(policy)

    def _of(self, life: int) -> _Policy | None:
        for one in self._policies.values():
            if one.life == life and one.status == "running":
                return one
        return None

    def _drop(self, policy: _Policy) -> None:
        self._loading.pop(policy.life, None)
        self._policies.pop(policy.row.name, None)
        self._outbox.tell(EndPolicy(life=policy.life))
        policy.status = "removed"
        _disarm(policy)
        self._default(policy)

    def _default(self, policy: _Policy) -> None:
        """Let the default decide what waited for a policy, and what it did decide."""
        if policy.role is Role.EVICT:
            self._weigh({})
        waiting, policy.waiting = policy.waiting, deque()
        for question in waiting:
            question.then(Decided())

    # ------------------------------------------------------------ questions
    def admit_and_place(self, wanted: Wanted, *, placed: bool, then: Then) -> bool:
        """Ask who admits and who places; False when nobody is to be asked.

        `then` gets what they decided: a refusal, a node, or neither.
        """
        running = {o.role: o for o in self._policies.values() if o.status == "running"}
        admit = running.get(Role.ADMIT)
        place = None if placed else running.get(Role.PLACE)
        if admit is None and place is None:
            return False

        def choose(decided: Decided) -> None:
            refused = bool(decided.refusal)
            if refused or place is None or place.status != "running":
                then(decided)
            else:
                self._ask(place, self._views.of(Role.PLACE), wanted, then)

        if admit is None:
            choose(Decided())
        else:
            self._ask(admit, self._views.of(Role.ADMIT), wanted, choose)
        return True

    def _ask(
        self, policy: _Policy, view: View, wanted: Wanted | None, then: Then
    ) -> None:
        if len(policy.waiting) >= MAX_WAITING:
            then(Decided())
            return
        self._questions += 1
        policy.waiting.append(_Question(self._questions, view, wanted, then))
        if len(policy.waiting) == 1:
            self._send(policy)

    def _send(self, policy: _Policy) -> None:
        question, life = policy.waiting[0], policy.life
        limit_s = policy.row.limit_s
        self._outbox.tell(
            AskPolicy(
                life=life,
                number=question.number,
                view=question.view,
                wanted=question.wanted,
            )
        )
        policy.limit = self._timers.at(
            self._outbox.now_s + limit_s,
            lambda: self.broke(life, f"it did not decide within {limit_s:g} s"),
        )

    def decided(self, life: int, number: int, decided: Decided) -> None:
        """Take an answer."""
        policy = self._of(life)
        if policy is None or not policy.waiting or policy.waiting[0].number != number:
            return
        _disarm(policy)
        question = policy.waiting.popleft()
        policy.decisions += 1
        if policy.waiting:
            self._send(policy)
        question.then(decided)

    # ------------------------------------------------------------ ticks
    def _tick(self, policy: _Policy) -> None:
        if policy.status != "running":
            return

        def then(decided: Decided) -> None:
            if policy.status != "running":
                return
            self._carry_out(policy, decided)
            at_s = self._outbox.now_s + policy.row.every_s
            self._timers.at(at_s, lambda: self._tick(policy))

        self._ask(policy, self._views.of(policy.role), None, then)

    def _carry_out(self, policy: _Policy, decided: Decided) -> None:
        if policy.role is Role.EVICT:
            self._weigh(decided.weights)
            return
        for action in decided.actions[:MAX_ACTIONS]:
            match action:
                case MoveRequest():
                    self._say(policy, action)
                case Copy() | Migrate():
                    self._move(policy, action)

    def _say(self, policy: _Policy, move: MoveRequest) -> None:
        """Tell whoever routes: a request's tensors are its engine's, not the catalog's."""
        self._outbox.emit(
            "rebalance",
            request=move.request,
            source=move.source,
            target=move.target,
            source_epoch=move.source_epoch,
            target_epoch=move.target_epoch,
            policy=policy.row.name,
            why=move.why,
        )

    def _move(self, policy: _Policy, action: Copy | Migrate) -> None:
        same = (action.generation, action.node)
        if any((o.generation, o.node) == same for _, o in self._carried.values()):
            return
        self._actions += 1
        generation, node = Generation(action.generation), NodeId(action.node)
        request: m.Ensure | m.Migrate
        if isinstance(action, Copy):
            request = m.Ensure(
                rid=RequestId(""),
                generation=generation,
                node=node,
                deadline_s=MOVE_S,
                why=action.why or policy.row.name,
            )
        else:
            request = m.Migrate(
                rid=RequestId(""),
                generation=generation,
                source=NodeId(action.source),
                node=node,
                deadline_s=MOVE_S,
            )
        self._carried[self._actions] = (policy.row.name, action)
        self._outbox.tell(AskSelf(number=self._actions, request=request))

    def carried(self, number: int, error: str) -> None:
        """Take the end of an action."""
        found = self._carried.pop(number, None)
        if found is None:
            return
        name, action = found
        record = self._views.record(action.generation)
        if record is None:
            return
        done = "repaired" if action.why == "repair" else type(action).__name__.lower()
        self._stories.tell(
            self._outbox.now_s,
            (record.id,),
            "policy {}: {} of version {} to {} ({}) {}",
            name,
            done,
            record.version,
            self._nodes.label(NodeId(action.node)),
            action.why,
            f"failed: {error}" if error else "done",
        )
        if record.degraded and len(self._holders.hosts(record)) >= record.replicas:
            record.degraded = ""
            self._outbox.persist(version_row(record), record.generation)
        self._outbox.emit(
            "policy_failed" if error else done,
            policy=name,
            id=record.id,
            version=record.version,
            node=action.node,
            why=error or action.why,
        )

    # ------------------------------------------------------------ weights
    def _weigh(self, weights: dict[int, float]) -> None:
        """Tell each store what its replicas are worth."""
        for node in self._nodes.records.values():
            if not (node.live and node.link and node.is_store):
                continue
            held = self._replicas.by_node.get(node.node, {})
            mine = {
                Generation(generation): weight
                for generation, weight in weights.items()
                if generation in held
            }
            if mine != node.weights:
                node.weights = mine
                self._outbox.send(node.link, m.DoWeigh(weights=mine))


def _disarm(policy: _Policy) -> None:
    if policy.limit is not None:
        policy.limit.cancel()
        policy.limit = None
