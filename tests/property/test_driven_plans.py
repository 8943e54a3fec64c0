"""Runs that stores drive, under random schedules: a run ends, and nothing is done twice.

Stores die and come back, links and the scheduler are lost, the journal lags, instances are
replaced. Time is virtual; a seed repeats its history.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors import values
from tensorcast_dask.tensors.messages import RunStatus, StepStatus
from tensorcast_dask.tensors.plans import ArtifactRef, Kind, PlanSpec, Step
from tests.kit.catalogs import Desk, FakeNode
from tests.kit.drives import DrivingStore, FakeInstance
from tests.kit.plans import noop

if TYPE_CHECKING:
    from tensorcast_dask.tensors.ids import RequestId

SEEDS = range(60)
ACTIONS = 120
#: A run that is given no trouble any more is over after so long.
CALM_S = 300.0


class World:
    """A catalog, three stores, one instance and one caller."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.desk = Desk()
        self.nodes = [self.desk.node(name, host="h") for name in ("a", "b", "c")]
        self.caller = self.desk.program("caller", host="h")
        self.info = self.caller.put("x")
        self.desk.auto = False
        self.stores = {node.node: DrivingStore(self.desk, node) for node in self.nodes}
        self.lives = Counter({node.node: 1 for node in self.nodes})
        self.instances: list[FakeInstance] = []
        self.lost = False
        self.attach()
        self.spec = self._plan()
        self.rid: RequestId = self.caller.rid()
        self.own_key = self.rng.random() < 0.5
        self.caller.ask(self._open())

    def _plan(self) -> PlanSpec:
        steps: list[Step] = []
        for at in range(self.rng.randint(2, 8)):
            before = [one.name for one in steps if not one.compensates]
            after = tuple(self.rng.sample(before, k=self.rng.randint(0, min(2, at))))
            more: dict[str, Any] = {"name": f"s{at}", "after": after}
            match self.rng.choice(
                ["noop", "pin", "pin", "pin", "call", "call", "wrong"]
            ):
                case "noop":
                    steps.append(noop(more.pop("name"), *after))
                case "pin":
                    target = ArtifactRef.of(self.info)
                    steps.append(Step(kind=Kind.PIN, target=target, **more))
                    if self.rng.random() < 0.3:
                        undo = noop(f"u{at}", compensates=f"s{at}")
                        steps.append(undo)
                case "call":
                    args = values.pack([[], {}])
                    options: dict[str, Any] = {"function": "f"}
                    steps.append(
                        Step(
                            kind=Kind.CALL,
                            instance="e",
                            options=options,
                            args=args,
                            **more,
                        )
                    )
                case _:
                    gone = ArtifactRef(id="x", version=9, generation=5)  # type: ignore[arg-type]
                    if self.rng.random() < 0.3:
                        steps.append(Step(kind=Kind.PUBLISH, target=gone, **more))
                    else:
                        steps.append(noop(more.pop("name"), *after))
        return PlanSpec(steps=tuple(steps)).check()

    def _open(self) -> m.OpenPlan:
        return m.OpenPlan(
            rid=self.rid,
            key="k",
            digest=self.spec.digest(),
            spec=self.spec.to_json(),
            deadline_s=120.0,
            rpc=True,
            concurrency=self.rng.choice([0, 1, 2]),
            wait_s=1e6,
            own_key=self.own_key,
        )

    # ---------------------------------------------------------------- what happens
    def attach(self) -> None:
        """Have another process be the instance.

        Not while something is not on disk, or after it was lost: where a call went is forgotten
        when scheduler and instance die at once.
        """
        if self.lost:
            return
        self.desk.flush()
        for one in self.instances:
            one.alive = False
        fresh = FakeInstance("e", f"life-{len(self.instances)}")
        self.instances.append(fresh)
        self._tell_instance(self.nodes[0])

    def _tell_instance(self, node: FakeNode) -> None:
        if node is self.nodes[0] and node.link:
            record = m.InstanceRecord(
                name="e", attachment=self.instances[-1].attachment
            )
            node.say(m.InstancesHere(records=(record,), whole=True))

    def kill(self, node: FakeNode) -> None:
        """kill -9 of a store; a later one comes in its place."""
        if node.link:
            node.lose_link()
        self.stores.pop(node.node, None)
        node.inbox.clear()

    def start(self, node: FakeNode) -> None:
        """Have the next life of a store, or its next link."""
        if node.node in self.stores:
            if not node.link:
                node.join()
                self.stores[node.node].reopen()
        else:
            node.incarnation += 1
            self.lives[node.node] += 1
            node.join()
            life = self.lives[node.node]
            self.stores[node.node] = DrivingStore(self.desk, node, life)
        self._tell_instance(node)

    def restart(self) -> None:
        """kill -9 of the scheduler."""
        self.lost = self.lost or bool(self.desk.queue)
        self.desk = self.desk.restart()
        self.caller.open()
        for node in self.nodes:
            if node.node in self.stores:
                node.join()
                self.stores[node.node].reopen()
                self._tell_instance(node)
        if not self.caller.answered(self.rid):
            self.caller.ask(self.caller.asked[self.rid])

    def act(self) -> None:
        """One thing, by chance."""
        dice = self.rng.random()
        node = self.rng.choice(self.nodes)
        drives = [
            one
            for one in self.nodes
            if one.node in self.stores and self.stores[one.node].drives
        ]
        if drives and self.rng.random() < 0.7:
            node = drives[0]
        if dice < 0.55:
            self.turn(node)
        elif dice < 0.7:
            self.desk.flush()
        elif dice < 0.8:
            self.kill(node)
        elif dice < 0.94:
            self.start(node)
        elif dice < 0.96 and node.link:
            node.lose_link()
        elif dice < 0.97:
            self.attach()
        elif dice < 0.985:
            self.restart()
        else:
            self.desk.pass_time(self.rng.choice([0.05, 1.0, 20.0]))

    def turn(self, node: FakeNode) -> bool:
        """Let a store do one thing."""
        store = self.stores.get(node.node)
        if store is None or not node.link:
            return False
        return store.turn({"e": self.instances[-1]})

    def calm(self) -> None:
        """Give no trouble any more, until nothing goes on."""
        end_s = self.desk.now_s + CALM_S
        while self.desk.now_s < end_s and (
            not self.caller.answered(self.rid)
            or any(store.drives for store in self.stores.values())
        ):
            for node in self.nodes:
                self.start(node)
                while self.turn(node):
                    self.desk.flush()
            self.desk.flush()
            self.desk.pass_time(1.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_ends_and_nothing_is_done_twice_whatever_dies(seed: int) -> None:
    world = World(seed)
    for _ in range(ACTIONS):
        world.act()
    world.calm()
    state = world.caller.result(world.rid, m.PlanState)
    assert state.status is not RunStatus.RUNNING
    kinds = {step.name: step.kind for step in world.spec.steps}
    for name, outcome in state.outcomes.items():
        done = outcome.status is StepStatus.DONE
        made = [
            count
            for instance in world.instances
            for key, count in instance.made.items()
            if key.startswith(f"k/{name}/")
        ]
        if kinds[name] is Kind.CALL:
            assert sum(made) <= 1
            assert not done or sum(made) == 1
    pins = len(world.desk.catalog.pins)
    done_pins = [
        name
        for name, outcome in state.outcomes.items()
        if kinds[name] is Kind.PIN and outcome.status is StepStatus.DONE
    ]
    begun_pins = [name for name, kind in kinds.items() if kind is Kind.PIN]
    assert len(done_pins) <= pins <= len(begun_pins)
    if state.status is RunStatus.DONE:
        assert pins == len(done_pins)
    assert not any(store.drives for store in world.stores.values())
