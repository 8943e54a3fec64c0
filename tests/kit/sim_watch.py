"""What the outside of a simulated cluster was told, and the promises that follow from it.

The oracles of one catalog stand in `oracles`; those here take a whole World. They know more
than any part of it: every copy of every node, and every answer that was ever given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensorcast_dask.scheduler_plugin.state.events import Reply
from tensorcast_dask.scheduler_plugin.state.records import NodeRecord
from tensorcast_dask.store.records import NO_NODE
from tensorcast_dask.store.state.replicas import Life
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ArtifactId, Generation, NodeId, RequestId
from tests.kit import oracles
from tests.kit.sim_instance import SimInstance, what_of
from tests.kit.sim_store import CHUNK_BYTES, values_of

if TYPE_CHECKING:
    from tensorcast_dask.tensors.plans import PlanSpec
    from tests.kit.sim_lender import Lent
    from tests.kit.sim_node import SimNode
    from tests.kit.sim_program import SimProgram
    from tests.kit.sim_scheduler import SimScheduler
    from tests.kit.world import World

__all__ = ["Watch"]

#: A catalog may believe so long that a node lives which died: lease, doubt, and the time
#: that its word needs to a node that is hard to reach.
BELIEF_S = 25.0
#: What an answer may wait for, from when it was decided on.
JUST_S = 1.0
#: A repeat may be refused in these ways without the first answer being taken back.
_FOR_NOW = ("CatalogUnavailable", "StaleOwner", "Unknown")
#: The journal is looked at here, not asked for its sequence number.
_ALL = 1 << 62
_QUESTIONS = (
    m.Resolve,
    m.Locate,
    m.ListArtifacts,
    m.NodesAsked,
    m.InstancesAsked,
    m.OpenPlan,
)
#: So ends a call that was not handed to its instance, or not carried out by it.
_NOT_CARRIED_OUT = ("NotFound", "OwnerGone", "Poisoned", "Unimplemented")


@dataclass(eq=False)
class Watch:
    """The memory of everybody outside."""

    world: World
    told_of: oracles.Told = field(default_factory=oracles.Told)
    #: Id, version and length of each generation that was given out.
    created: dict[Generation, tuple[ArtifactId, int, int]] = field(default_factory=dict)
    #: Content of what was copied from lent memory.
    copies_of: dict[Generation, list[int]] = field(default_factory=dict)
    #: What is, or was, lent.
    lent: dict[Generation, Lent] = field(default_factory=dict)
    #: Acknowledged, and no loss has been said since.
    committed: dict[Generation, None] = field(default_factory=dict)
    published: dict[Generation, None] = field(default_factory=dict)
    destroyed: dict[Generation, None] = field(default_factory=dict)
    #: Somebody asked for their end: they may be gone.
    doomed: dict[Generation, None] = field(default_factory=dict)
    #: The last copy went with a node that died.
    lost: dict[Generation, None] = field(default_factory=dict)
    died_s: dict[Generation, float] = field(default_factory=dict)
    aliases: dict[ArtifactId, int] = field(default_factory=dict)
    moved_by: dict[tuple[ArtifactId, int], RequestId] = field(default_factory=dict)
    pins: dict[int, RequestId] = field(default_factory=dict)
    requests: dict[RequestId, Any] = field(default_factory=dict)
    answers: dict[RequestId, m.Answer] = field(default_factory=dict)
    #: Who was given up when a destroy was answered, and was not waited for, by request.
    away: dict[RequestId, set[NodeId]] = field(default_factory=dict)
    #: The same by what was destroyed.
    unwaited: dict[Generation, set[NodeId]] = field(default_factory=dict)
    #: Asked before rows were lost: an answer may be of what is lost.
    unbound: dict[RequestId, None] = field(default_factory=dict)
    #: What was carried out, by its name: by which lives.
    made: dict[str, list[str]] = field(default_factory=dict)
    #: What was refused for sure: nobody may carry it out any more.
    refused: dict[str, None] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, what: str) -> None:
        """Count how often something interesting happened."""
        self.counts[what] = self.counts.get(what, 0) + 1

    def some_generation(self) -> Generation:
        """Draw a generation that may be there; 0 when there is none."""
        known = list(self.created)[-8:]
        return self.world.rng.choice(known) if known else Generation(0)

    # -------------------------------------------------------------- requests
    def asked(self, program: SimProgram | SimInstance, request: Any) -> None:
        """Note a request before it is sent."""
        self.requests[request.rid] = request
        if isinstance(request, m.Destroy):
            for generation, (name, _, _) in self.created.items():
                if generation == request.generation or (
                    not request.generation and name == request.id
                ):
                    self.doomed[generation] = None

    def told(self, scheduler: SimScheduler, reply: Reply) -> None:
        """Note an answer that leaves the catalog."""
        self.told_of.answered(scheduler.catalog, reply, _ALL)
        if isinstance(reply.value, m.ArtifactInfo):
            self._on_disk(reply.value)
        request = self.requests.get(reply.rid)
        if isinstance(reply.value, m.Destroyed):
            self.away[reply.rid] = self._away(scheduler)
        if isinstance(request, m.Create) and isinstance(reply.value, m.Created):
            value = reply.value
            facts = (request.id, int(value.version), request.nbytes)
            known = self.created.setdefault(value.generation, facts)
            assert known == facts, f"generation {value.generation} was minted twice"
            self._doom(request.id)
        elif isinstance(reply.value, m.ArtifactInfo) and self._makes(
            request, reply.value
        ):
            info = reply.value
            facts = (info.id, int(info.version), info.nbytes)
            self.created.setdefault(info.generation, facts)
            self._doom(info.id)

    def _away(self, scheduler: SimScheduler) -> set[NodeId]:
        """Who is given up, or has just come back: the destroy was decided on before.

        One that a scheduler has not heard yet is waited for.
        """
        now_s, found = self.world.time.now_s, set()
        for node in self.world.alive():
            record = scheduler.catalog.nodes.records.get(node.node)
            if record is None or not record.lease_until_s:
                continue
            given_up = (
                record.gone != NodeRecord(node=record.node, card=record.card).gone
            )
            if given_up and (not record.live or now_s - node.welcomed_s < JUST_S):
                found.add(node.node)
        return found

    def _makes(self, request: Any, info: m.ArtifactInfo) -> bool:
        """Whether this is the answer to what made the version by itself."""
        if isinstance(request, m.Publish):
            return info.generation != request.generation
        return isinstance(request, m.LoadFile)

    def _on_disk(self, info: m.ArtifactInfo) -> None:
        """Nothing is told that is not on disk."""
        ever = self.world.journal.ever
        what = f"{info.id} v{info.version} ({info.generation})"
        assert info.generation in ever, f"{what} was told before it was on disk"
        if info.stage is m.Stage.PUBLISHED:
            assert ever[info.generation], f"{what} was told as published too early"

    def _doom(self, name: ArtifactId) -> None:
        """A destroy of a whole id that is under way may take a new version too."""
        for request in self.requests.values():
            if (
                isinstance(request, m.Destroy)
                and request.id == name
                and not request.generation
                and request.rid not in self.answers
            ):
                for generation, (one, _, _) in self.created.items():
                    if one == name:
                        self.doomed[generation] = None

    def answered(self, program: SimProgram, answer: m.Answer) -> None:
        """Note an answer that arrived."""
        request = self.requests.get(answer.rid)
        if request is None:
            return
        first = self.answers.get(answer.rid)
        fault = "" if answer.fault is None else answer.fault.kind
        self.count(f"{type(request).__name__} {fault or 'ok'}")
        if fault in _FOR_NOW:
            return
        if first is None:
            self.answers[answer.rid] = answer
        elif not isinstance(request, _QUESTIONS):
            assert first == answer, f"{request} was answered {first}, then {answer}"
            return
        binding = answer.rid not in self.unbound
        if not fault and binding and answer.rid in program.pending:
            self._learn(request, answer)

    def _learn(self, request: Any, answer: m.Answer) -> None:
        match request:
            case m.CommitCreated():
                self._commit(request.generation)
            case m.LoadFile():
                self._commit(m.decode(answer.value, m.ArtifactInfo).generation)
            case m.Publish():
                made = m.decode(answer.value, m.ArtifactInfo).generation
                self.published[made] = None
                if made != request.generation:
                    self._commit(made)
            case m.Destroy():
                self._destroyed(request, m.decode(answer.value, m.Destroyed))
            case m.SetAlias():
                state = m.decode(answer.value, m.AliasState)
                if state.alias_generation:
                    key = (request.name, state.alias_generation)
                    known = self.moved_by.setdefault(key, request.rid)
                    assert known == request.rid, f"{key} was given twice"
                at = max(self.aliases.get(request.name, 0), state.alias_generation)
                self.aliases[request.name] = at
            case m.Pin():
                pinned = m.decode(answer.value, m.Pinned)
                known = self.pins.setdefault(pinned.pin, request.rid)
                assert known == request.rid, f"pin {pinned.pin} was given twice"
            case _:
                pass

    def _commit(self, generation: Generation) -> None:
        """Hold the cluster to a version: what is lent is its owner's."""
        if generation not in self.doomed and generation not in self.lent:
            self.committed[generation] = None

    def _destroyed(self, request: m.Destroy, ended: m.Destroyed) -> None:
        for generation, (name, version, _) in self.created.items():
            meant = generation == request.generation or (
                name == request.id and version in ended.versions
            )
            if meant and generation in self.doomed:
                self.destroyed[generation] = None
                away = self.away.get(request.rid, set())
                self.unwaited.setdefault(generation, set()).update(away)

    # -------------------------------------------------------------- calls
    def carried_out(self, instance: SimInstance, call: m.Call) -> None:
        """An effect is made at most once, by one that lives and holds no half of an update."""
        what = what_of(call.args)
        self.count(f"carried out {call.function}")
        assert instance.life.alive
        assert not instance.calls.poisoned or call.function in m.REPAIRS, (
            f"{instance.attachment} holds half of an update, and does {call}"
        )
        assert what not in self.refused, f"{what} was refused, and is carried out"
        lives = self.made.setdefault(what, [])
        # A step's name rests on its run's row, where others may have the plan's key; where it
        # went is forgotten when scheduler and instance die at once.
        journal, a_step = self.world.journal, what.startswith("plan-")
        again = instance.attachment in lives
        assert not again or (a_step and journal.losses), f"{what} was carried out twice"
        assert not lives or (a_step and journal.crashes), (
            f"{what} was carried out by {lives} too"
        )
        lives.append(instance.attachment)

    def called(self, what: str, came: m.CallAnswered | m.Fault, *, first: bool) -> bool:
        """What a caller is told of a call is so; whether it was refused at first."""
        if not isinstance(came, m.Fault):
            self.count("call ok")
            assert self.made.get(what), f"{what} was answered, and not carried out"
            return False
        self.count(f"call {came.kind}")
        refused = first and came.kind in _NOT_CARRIED_OUT
        if refused:
            assert what not in self.made, f"{what} was carried out, and {came}"
            self.refused[what] = None
        return refused

    def ran(self, spec: PlanSpec, state: m.PlanState) -> None:
        """A run that was waited for is over, and what is told of its steps is so."""
        self.count(f"plan {state.status}")
        assert state.status is not m.RunStatus.RUNNING, f"{state} is not over"
        for step in spec.steps:
            outcome = state.outcomes.get(step.name)
            done = outcome is not None and outcome.status is m.StepStatus.DONE
            assert done or state.status is not m.RunStatus.DONE
            if done and step.instance:
                self.count("step ok")
                assert self.made.get(what_of(step.args)), f"{step} was not carried out"

    # -------------------------------------------------------------- bytes
    def read(self, node: SimNode, generation: Generation, values: list[int]) -> None:
        """What is read of a generation is what was put: immutable, of one content."""
        assert values == self.content(generation, len(values)), (
            f"{node.name} gave {values} for generation {generation}"
        )
        self.count("read")

    def content(self, generation: Generation, chunks: int) -> list[int]:
        """The right bytes of a generation."""
        copied = self.copies_of.get(generation)
        if copied is not None:
            return copied
        if generation in self.created:
            return values_of(generation, self.created[generation][2])
        return values_of(generation, chunks * CHUNK_BYTES)

    def lends(self, generation: Generation, lent: Lent) -> None:
        """Somebody lends memory."""
        self.lent[generation] = lent

    def copied(
        self, source: Generation, generation: Generation, values: list[int]
    ) -> None:
        """What is copied of lent memory is what it held at one moment of rest."""
        lent = self.lent[source]
        assert values in list(lent.contents.values()), (
            f"{generation} is a copy of {source} as it never was: {values}"
        )
        self.copies_of[generation] = list(values)
        self.count("copied")

    def read_lent(self, lent: Lent, stamp: int, values: list[int]) -> None:
        """What is read of lent memory is what it held at one moment of rest."""
        assert values == lent.contents[stamp]
        self.count("read lent")

    def is_over(self, generation: Generation) -> bool:
        """Whether the end of a version that somebody was told of was acknowledged.

        A catalog that has lost rows does not know who holds what it does not know.
        """
        scheduler = self.world.scheduler
        rebuilding = scheduler is None or scheduler.catalog.inventories.rebuilding
        known = generation in self.destroyed and generation in self.committed
        return known and not rebuilding

    def read_after_its_end(self, node: SimNode, generation: Generation) -> None:
        """No read that begins after destroy was answered finds it.

        Except at a node that has lost its lease, or had: it was not waited for.
        """
        self.count("read after its end")
        was_away = node.node in self.unwaited.get(generation, ())
        assert was_away or node.lease_left_s() <= 0.0, (
            f"{node.name} gave generation {generation} after its end was acknowledged"
        )

    def copies(self, generation: Generation, *, but: NodeId = NO_NODE) -> int:
        """How many nodes that live can serve a generation."""
        return sum(
            node.life.alive and node.node != but and node.store.has(generation)
            for node in self.world.nodes
        )

    def dropping(
        self, node: SimNode, generation: Generation, tier: m.Tier | None, *, final: bool
    ) -> None:
        """Never the last copy dropped by us."""
        if generation in self.doomed or generation in self.lost:
            return
        if tier is not None:
            replica = node.store.table.replicas[generation]
            if any(
                copy.tier is not tier and copy.filled and not copy.mark
                for copy in replica.copies
            ):
                return
        self._gone_from(node, generation)

    def leaving(self, node: SimNode) -> None:
        """A node ends in order: it alone held nothing."""
        for generation, _ in node.store.committed():
            if generation not in self.doomed and generation not in self.lost:
                self._gone_from(node, generation)

    def _gone_from(self, node: SimNode, generation: Generation) -> None:
        if self.copies(generation, but=node.node):
            return
        since_s = self.world.time.now_s - self.died_s.get(generation, float("-inf"))
        if since_s < BELIEF_S:
            self.lost[generation] = None
            return
        assert generation not in self.committed, (
            f"{node.name} gives up the last copy of generation {generation}"
        )

    def died(self, node: SimNode) -> None:
        """A node died with what it held."""
        for generation, _ in node.store.committed():
            self.died_s[generation] = self.world.time.now_s
            if not self.copies(generation, but=node.node):
                self.lost[generation] = None

    def device_died(self, node: SimNode) -> None:
        """The device of a node died with what it held."""
        for generation, replica in node.store.table.replicas.items():
            held = [copy.tier for copy in replica.copies if copy.life is Life.COMMITTED]
            if m.Tier.DEVICE in held and not {m.Tier.HOST, m.Tier.DISK} & {*held}:
                self.died_s[generation] = self.world.time.now_s
                if not self.copies(generation, but=node.node):
                    self.lost[generation] = None

    # -------------------------------------------------------------- lives
    def began(self, scheduler: SimScheduler, loss: str) -> None:
        """A scheduler has started: what was told is there, or its loss is said."""
        catalog = scheduler.catalog
        if loss:
            assert catalog.said, "a loss was not said"
            self.unbound.update(dict.fromkeys(self.requests))
            self.committed.clear()
            self.published.clear()
            self.destroyed.clear()
            self.aliases.clear()
            self.moved_by.clear()
            self.told_of = oracles.Told(epoch=catalog.epoch)
            return
        assert not catalog.said, catalog.said
        self.told_of = oracles.Told(
            content=self.told_of.content,
            published=self.told_of.published,
            destroyed=set(self.destroyed),
            epoch=self.told_of.epoch,
        )
        self.nothing_told_is_forgotten(scheduler)

    def nothing_told_is_forgotten(self, scheduler: SimScheduler) -> None:
        """Durable before told."""
        names = scheduler.catalog.names
        for generation in self.committed:
            record = names.versions.get(generation)
            if generation not in self.doomed:
                assert record is not None, f"commit of {generation} was forgotten"
                assert not record.creating
            if record is not None and generation in self.published:
                assert record.published, f"publish of {generation} was forgotten"
        for generation in self.destroyed:
            assert generation not in names.versions, (
                f"destroy of {generation} was forgotten"
            )
        for name, at in self.aliases.items():
            found = names.aliases.get(name)
            assert found is not None or not at, f"alias {name} was forgotten"
            assert found is None or found.alias_generation >= at
