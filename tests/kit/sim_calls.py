"""What simulated programs ask of instances: calls, by way of a store or with nobody between, and plans.

Rules:

1. A call ends by its deadline and a moment, whoever dies.
2. What a call is to do has a name of its own, which is its argument: how often it was done is
   counted by that.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors import values
from tensorcast_dask.tensors.ids import Version
from tensorcast_dask.tensors.plans import ArtifactRef, Kind, PlanSpec, Step
from tests.kit.sim_instance import FUNCTIONS
from tests.kit.sim_plans import GRACE_S, LOST
from tests.kit.sim_timeline import Process, Signal, Wait

if TYPE_CHECKING:
    from tests.kit.sim_node import SimNode
    from tests.kit.sim_program import SimProgram
    from tests.kit.world import World

__all__ = ["call_some", "run_some"]

Asking = Generator[Wait, bool, Any]
GONE = m.Fault(kind="Unknown", message="it is gone with the call under way")
LATE = m.Fault(kind="DeadlineExceeded", message="it did not answer in time")


def call_some(world: World, program: SimProgram) -> Asking:
    """Call an instance that is listed."""
    rng = world.rng
    there = yield from program.ask(m.InstancesAsked(rid=program.rid()))
    if isinstance(there, m.Fault) or not there.instances:
        return
    state = rng.choice(there.instances)
    (function,) = rng.choices(FUNCTIONS, (6, 2, 2))
    what = f"call-{program.rid()}"
    key = what if rng.random() < 0.5 else ""
    for attempt in range(rng.choice((1, 3)) if key else 1):
        request = m.CallInstance(
            rid=program.rid(),
            instance=state.record.name,
            function=function,
            args=values.pack([[what], {}], what="the arguments"),
            deadline_s=rng.choice((0.3, 1.0, 4.0)),
            attachment=state.record.attachment,
            key=key,
        )
        came = yield from _made(world, program, state.card, request)
        if world.watch.called(what, came, first=not attempt):
            return
        yield rng.choice((0.0, 0.3, 2.0))


def _made(
    world: World, program: SimProgram, card: m.NodeCard, request: m.CallInstance
) -> Asking:
    yield world.network.latency_s()
    node = world.node(card.node)
    if node is None or not node.life.alive:
        return LOST
    if not world.network.reaches(program.host, node.host):
        return LOST
    if node.host == program.host and world.rng.random() < 0.5:
        return (yield from _directly(world, program, node, request))
    came: list[Any] = []

    def carry() -> Process:
        try:
            came.append((yield from node.desk.call(request)))
        except TensorCastError as error:
            came.append(m.Fault.of(error))

    ended = world.time.spawn(node.life, carry())
    known = yield ended, request.deadline_s + GRACE_S
    assert known or not node.life.alive, f"{request} waits without end"
    yield world.network.latency_s()
    if not came or not world.network.reaches(node.host, program.host):
        return LOST
    return came[0]


def _directly(
    world: World, program: SimProgram, node: SimNode, request: m.CallInstance
) -> Asking:
    """Be led to the instance, and call it with nobody between (`dataplane.direct`)."""
    try:
        instance = node.desk.dial(request)
    except TensorCastError as error:
        return m.Fault.of(error)
    if not instance.life.alive:
        return GONE
    ours, theirs = world.network.connect(
        (program.host, program.name), (node.host, f"{instance.attachment}<call")
    )
    came: list[Any] = []
    ended = Signal()

    def answered(message: Any) -> None:
        came.append(message)
        ended.fire()

    ours.on_message, ours.on_closed = answered, ended.fire
    instance.directly(theirs)
    world.connections += 1
    number = world.connections
    program.connections[number] = lambda: world.network.break_one(ours.connection)
    ours.send(request)
    known = yield ended, request.deadline_s
    del program.connections[number]
    ours.close()
    if not came:
        return GONE if known else LATE
    answer = came[0]
    return answer.fault if isinstance(answer, m.Refused) else answer


def run_some(world: World, program: SimProgram) -> Asking:
    """Have a store drive a plan, and wait for its end."""
    rng = world.rng
    rid = program.rid()
    spec = _plan(world, f"plan-{rid}")
    ask = m.OpenPlan(
        rid=rid,
        key=f"plan-{rid}",
        digest=spec.digest(),
        spec=spec.to_json(),
        deadline_s=6.0,
        rpc=True,
        concurrency=rng.choice((0, 0, 1)),
        wait_s=60.0,
        own_key=rng.random() < 0.5,
    )
    state = yield from program.ask(ask, 8.0)
    if not isinstance(state, m.Fault):
        world.watch.ran(spec, state)


def _plan(world: World, key: str) -> PlanSpec:
    rng = world.rng
    steps: list[Step] = []
    for at in range(rng.randint(1, 4)):
        name = f"s{at}"
        before = [one.name for one in steps]
        more: dict[str, Any] = {
            "name": name,
            "after": tuple(rng.sample(before, k=rng.randint(0, min(2, at)))),
        }
        kind = rng.choice((Kind.NOOP, Kind.PIN, Kind.CALL, Kind.CALL))
        generation = world.watch.some_generation()
        if kind is Kind.PIN and generation:
            artifact, version, nbytes = world.watch.created[generation]
            more["target"] = ArtifactRef(
                id=artifact,
                version=Version(version),
                generation=generation,
                nbytes=nbytes,
            )
            more["options"] = {"ttl": rng.choice((1.0, 4.0))}
        elif kind is Kind.CALL:
            more["instance"] = rng.choice(("e", "f"))
            more["options"] = {"function": rng.choice(FUNCTIONS[:2])}
            what = f"{key}/{name}"
            more["args"] = values.pack([[what], {}], what="the arguments")
        else:
            kind = Kind.NOOP
        steps.append(Step(kind=kind, **more))
    return PlanSpec(steps=tuple(steps)).check()
