"""What a dry run says, asked of a catalog whose nodes are on paper."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tensorcast_dask.api.connection.deadlines import deadline
from tensorcast_dask.api.plans.pricing import DryRun, price
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import NodeId, RequestId
from tensorcast_dask.tensors.plans import ArtifactRef, Kind, PlanSpec, Step, StepRef
from tests.kit.catalogs import Desk, Program

MIB = 1 << 20


class Asking:
    """What pricing needs of a session, over a catalog's desk."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.link = self.stores = self

    def next_rid(self) -> RequestId:
        return self._program.rid()

    def learn(self, cards: object) -> None:
        """It talks to no store."""

    async def ask(self, request: Any, kind: Any, limit: object) -> Any:
        return self._program.call(request, kind)


def scene() -> tuple[Desk, Program]:
    d = Desk()
    for name in "abc":
        d.node(name)
    return d, d.program()


def move(name: str, info: m.ArtifactInfo | str, node: str, **more: object) -> Step:
    target = StepRef(step=info) if isinstance(info, str) else ArtifactRef.of(info)
    return Step(name=name, kind=Kind.REPLICATE, target=target, node=node, **more)  # type: ignore[arg-type]


def priced(program: Program, *steps: Step) -> DryRun:
    spec = PlanSpec(steps=steps).check()
    return asyncio.run(price(Asking(program), spec, deadline(9.0)))  # type: ignore[arg-type]


def bring(p: Program, info: m.ArtifactInfo, node: str) -> None:
    ask = m.Ensure(
        rid=p.rid(), generation=info.generation, node=NodeId(node), deadline_s=60.0
    )
    p.call(ask, m.Moved)


def test_seconds_are_those_of_the_measured_link_and_else_not_known() -> None:
    _, p = scene()
    bring(p, p.put("first", nbytes=8 * MIB, node=NodeId("a")), "b")
    info = p.put("x", nbytes=4 * MIB, node=NodeId("a"))
    told = priced(p, move("to b", info, "b"), move("to c", info, "c"))
    assert told["to b"].seconds == pytest.approx(0.05, rel=1e-2)
    assert told["to c"].seconds is None
    assert told.seconds is None
    assert str(told).splitlines() == [
        "to b: 4,194,304 bytes w-a -> w-b, seconds: 0.05",
        "to c: 4,194,304 bytes w-a -> w-c, seconds: not known",
    ]


def test_the_plan_takes_as_long_as_its_longest_chain_from_the_fastest_sources() -> None:
    _, p = scene()
    for source, node in ("ab", "ac", "bc"):
        bring(p, p.put(f"{source}{node}", nbytes=8 * MIB, node=NodeId(source)), node)
    info = p.put("x", nbytes=8 * MIB, node=NodeId("a"))
    told = priced(
        p,
        move("one", info, "b"),
        move("two", "one", "c"),
        move("beside", info, "b"),
        move("again", "two", "c"),
    )
    assert told.bytes == 16 * MIB
    assert told["again"].seconds == told["beside"].seconds == 0.0
    assert told.seconds == pytest.approx(0.2, rel=1e-2)


def test_what_nobody_can_know_has_no_seconds() -> None:
    _, p = scene()
    info = p.put("x")
    made = Step(
        name="made",
        kind=Kind.COPY,
        target=ArtifactRef.of(info),
        options={"id": "y"},
    )
    told = priced(p, made, move("later", "made", "b"))
    assert (told["made"].seconds, told["later"].bytes, told.seconds) == (None,) * 3
