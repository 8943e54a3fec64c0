"""The catalog against a naive model, over restarts, deaths and stalls.

The model is two dictionaries. After every step each name must mean in the catalog what it
means in the model, exactly; a restart on the journal's rows must change nothing of it; and
every replica that the catalog lists must lie where it says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tensorcast_dask.exceptions import (
    AbsentError,
    AlreadyExists,
    CapacityError,
    CatalogUnavailable,
    Mismatch,
)
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    Generation,
    NodeId,
    RequestId,
    Version,
)
from tests.kit.catalogs import Desk, Program

NAMES = ("x", "y")
NODES = (("a", "h1"), ("b", "h2"), ("c", "h2"))
names = st.sampled_from(NAMES)
nodes = st.sampled_from([name for name, _ in NODES]).map(NodeId)
versions = st.sampled_from([0, -1, 1, 2, 3])


@dataclass
class Model:
    """What names mean, without any of the machinery."""

    versions: dict[tuple[str, int], Generation] = field(default_factory=dict)
    published: set[Generation] = field(default_factory=set)
    highest: dict[str, int] = field(default_factory=dict)
    aliases: dict[str, tuple[Generation, int]] = field(default_factory=dict)

    def numbers(self, name: str) -> list[int]:
        return sorted(number for one, number in self.versions if one == name)

    def latest(self, name: str) -> int:
        public = [
            number
            for number in self.numbers(name)
            if self.versions[name, number] in self.published
        ]
        return max(public, default=0)

    def means(self, name: str) -> int:
        return self.latest(name) or max(self.numbers(name), default=0)

    def next_number(self, name: str, version: int) -> int | None:
        """The number that a put gets; None when it is refused."""
        if version == 0:
            return None if self.numbers(name) else self.highest.get(name, 0) + 1
        if version == -1:
            return self.highest.get(name, 0) + 1
        return version if version > self.highest.get(name, 0) else None


class CatalogMachine(RuleBasedStateMachine):
    """Programs, nodes and a scheduler that live and die."""

    @initialize()
    def begin(self) -> None:
        self.desk = Desk()
        self.model = Model()
        for name, host in NODES:
            self.desk.node(name, host)
        self.program: Program = self.desk.program(host="h1")

    # ------------------------------------------------------------ changes
    @rule(
        name=names, version=versions, replicas=st.integers(1, 2), at_once=st.booleans()
    )
    def put(self, name: str, version: int, replicas: int, at_once: bool) -> None:
        wanted = self.model.next_number(name, version)
        try:
            info = self.program.put(
                name, version=version, replicas=replicas, at_once=at_once
            )
        except (CapacityError, CatalogUnavailable):
            return
        except (AlreadyExists, Mismatch):
            assert wanted is None
            return
        assert info.version == wanted
        self.model.versions[name, info.version] = info.generation
        self.model.highest[name] = info.version

    @rule(name=names, commit=st.booleans())
    def put_that_is_given_up(self, name: str, commit: bool) -> None:
        try:
            created = self.program.create(name, version=-1)
        except (CapacityError, CatalogUnavailable):
            return
        if commit:
            self.program.fill(name, created)
        abort = m.AbortCreated(rid=self.program.rid(), generation=created.generation)
        self.program.call(abort, type(None))

    @rule(name=names, number=st.integers(1, 4))
    def publish(self, name: str, number: int) -> None:
        generation = self.model.versions.get((name, number))
        if generation is None:
            return
        try:
            self.program.publish(generation)
        except (AbsentError, CatalogUnavailable):
            return
        self.model.published.add(generation)

    @rule(name=names, number=st.sampled_from([0, 1, 2, 3]))
    def destroy(self, name: str, number: int) -> None:
        generation = self.model.versions.get((name, number), Generation(0))
        if number and not generation:
            return
        numbers = [number] if number else self.model.numbers(name)
        try:
            ended = self.destroyed(name, generation)
        except CatalogUnavailable:
            return
        assert list(ended) == numbers
        for one in numbers:
            del self.model.versions[name, one]

    def destroyed(self, name: str, generation: Generation) -> tuple[Version, ...]:
        """Destroy, and wait out nodes that do not answer."""
        ask = m.Destroy(
            rid=self.program.rid(), id=ArtifactId(name), generation=generation
        )
        self.program.ask(ask)
        self.desk.flush()
        if not self.program.answered(ask.rid):
            self.desk.pass_time(8.0)
        return self.program.result(ask.rid, m.Destroyed).versions

    @rule(name=names, number=st.integers(1, 3), expect=st.sampled_from([-1, 0, 1, 2]))
    def alias(self, name: str, number: int, expect: int) -> None:
        generation = self.model.versions.get((name, number))
        if generation is None:
            return
        _, at = self.model.aliases.get("al", (Generation(0), 0))
        ask = m.SetAlias(
            rid=self.program.rid(),
            name=ArtifactId("al"),
            generation=generation,
            expect=expect,
        )
        try:
            state = self.program.call(ask, m.AliasState)
        except CatalogUnavailable:
            return
        except Mismatch:
            assert expect not in (-1, at)
            return
        assert state.alias_generation == at + 1
        self.model.aliases["al"] = (generation, at + 1)

    @rule(name=names, node=nodes)
    def ensure(self, name: str, node: NodeId) -> None:
        generation = self.model.versions.get((name, self.model.means(name)))
        if generation is None:
            return
        ask = m.Ensure(
            rid=self.program.rid(), generation=generation, node=node, deadline_s=1.0
        )
        self.program.ask(ask)
        self.desk.pass_time(1.5)
        assert self.program.answered(ask.rid)

    @rule(name=names, node=nodes)
    def may_drop(self, name: str, node: NodeId) -> None:
        one = self.desk.nodes[node]
        if one.link:
            held = tuple(one.held)
            one.say(m.MayDrop(rid=RequestId("d"), generations=held))

    # ------------------------------------------------------------ faults
    @rule(node=nodes)
    def node_loses_its_link(self, node: NodeId) -> None:
        if self.desk.nodes[node].link:
            self.desk.nodes[node].lose_link()

    @rule(node=nodes, reborn=st.booleans(), empty=st.booleans())
    def node_joins(self, node: NodeId, reborn: bool, empty: bool) -> None:
        one = self.desk.nodes[node]
        if reborn:
            one.incarnation += 1
        if empty:
            one.held = {}
        one.join()

    @rule(seconds=st.sampled_from([0.5, 3.0, 8.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.desk.pass_time(seconds)

    @rule()
    def scheduler_restarts(self) -> None:
        if self.desk.stalled:
            self.desk.unstall()
        self.desk.flush()
        before = self.meaning()
        self.desk = self.desk.restart()
        self.program.open(settled=self.program.count)
        for node in self.desk.nodes.values():
            node.join()
        assert self.meaning() == before

    @rule(name=names, filled=st.booleans())
    def put_over_a_restart(self, name: str, filled: bool) -> None:
        if self.desk.stalled:
            self.desk.unstall()
        try:
            created = self.program.create(name, version=-1)
        except CapacityError:
            return
        if filled:
            self.program.fill(name, created)
        self.scheduler_restarts()
        if not filled:
            self.program.fill(name, created)
        commit = m.CommitCreated(
            rid=self.program.rid(), generation=created.generation, deadline_s=5.0
        )
        info = self.program.call(commit, m.ArtifactInfo)
        assert info.version == self.model.next_number(name, -1)
        self.model.versions[name, info.version] = info.generation
        self.model.highest[name] = info.version

    @precondition(lambda self: not self.desk.stalled)
    @rule()
    def journal_stalls(self) -> None:
        self.desk.stall()

    @precondition(lambda self: self.desk.stalled)
    @rule()
    def journal_is_back(self) -> None:
        self.desk.unstall()

    # ------------------------------------------------------------ agreement
    def meaning(self) -> dict[tuple[str, int], tuple[Generation, bool]]:
        """What the catalog holds, without what no row holds."""
        return {
            (record.id, record.version): (record.generation, record.published)
            for record in self.desk.catalog.names.versions.values()
            if not record.creating
        }

    @invariant()
    def names_mean_what_the_model_says(self) -> None:
        assert self.meaning() == {
            key: (generation, generation in self.model.published)
            for key, generation in self.model.versions.items()
        }
        for name in NAMES:
            for number in (0, 1, 2, 3):
                self.check_name(name, number)

    def check_name(self, name: str, number: int) -> None:
        wanted = number or self.model.means(name)
        ask = m.Resolve(rid=self.program.rid(), id=ArtifactId(name), version=number)
        self.program.ask(ask)
        if self.desk.stalled:
            return
        self.desk.flush()
        answer = self.program.answers[ask.rid]
        generation = self.model.versions.get((name, wanted))
        if isinstance(answer, m.Fault):
            assert (answer.kind == "DataLost") == (generation is not None)
        else:
            assert isinstance(answer, m.ArtifactInfo)
            assert (answer.version, answer.generation) == (wanted, generation)

    @invariant()
    def what_is_listed_lies_where_it_says(self) -> None:
        catalog = self.desk.catalog
        for record in catalog.names.versions.values():
            for node in catalog.holders.listed(record):
                held = self.desk.nodes[node.node]
                if held.link:
                    assert record.generation in held.held

    @invariant()
    def numbers_only_go_up(self) -> None:
        for name, highest in self.model.highest.items():
            assert self.desk.catalog.names.numbers.issued(name) == highest

    def teardown(self) -> None:
        if not hasattr(self, "desk"):
            return
        if self.desk.stalled:
            self.desk.unstall()
        for node in self.desk.nodes.values():
            node.join()
        for name in NAMES:
            self.destroyed(name, Generation(0))
        self.desk.flush()
        state = self.desk.catalog.debug_state()
        for what in ("held", "creations", "tasks", "moves", "endings", "operations"):
            assert state[what] == 0, (what, state)
        assert all(not node.held for node in self.desk.nodes.values() if node.link)


TestCatalogMachine = CatalogMachine.TestCase
TestCatalogMachine.settings = hypothesis.settings(stateful_step_count=25, deadline=None)
