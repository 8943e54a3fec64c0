"""What a plan would move, told without moving it.

Rules:

1. Nothing is changed: the catalog is asked where things are, and the steps are gone through in
   their order on paper, each seeing what those before it would have left.
2. What cannot be known is not guessed: what a function, a `load` or a later publish brings
   forth has no price, and neither have the steps that act on it.
3. Seconds are bytes by the bandwidth that transfers on the link had (signal `link/...`). Where none was
   measured they are None: not known.
4. A refusal is a step that would fail as things stand; what needs it is priced no further.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.api.actions import names
from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.tensors.messages import SignalFrame, SignalsAsked, Tier, TierUse
from tensorcast_dask.tensors.plans import ArtifactRef, Kind, NameRef, StepRef
from tensorcast_dask.tensors.requests import find_node

if TYPE_CHECKING:
    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.api.connection.deadlines import Deadline
    from tensorcast_dask.tensors.messages import ArtifactInfo, NodeState
    from tensorcast_dask.tensors.plans import PlanSpec, Step

__all__ = ["DryRun", "StepPrice", "price"]

#: Links that are looked at.
_LINKS: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StepPrice:
    """What one step would cost.

    Attributes
    ----------
    name : str
        The step.
    kind : str
        What it does.
    bytes : int or None
        Bytes that it would move; None where that cannot be known.
    link : str
        From which node to which; "" where nothing moves.
    seconds : float or None
        How long that would take; None where it cannot be known or was not measured.
    evicts : int
        Bytes that would have to make room at the target.
    refusal : str
        Why it would fail; "" when it would not.
    """

    name: str
    kind: str
    bytes: int | None = 0
    link: str = ""
    seconds: float | None = 0.0
    evicts: int = 0
    refusal: str = ""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a plan would cost.

    Attributes
    ----------
    steps : dict of str to StepPrice
        By step.
    seconds : float or None
        Of moving, along the chain of steps that takes longest; None where a step's are not known.
    """

    steps: dict[str, StepPrice] = field(default_factory=dict)
    seconds: float | None = 0.0

    @property
    def bytes(self) -> int:
        """All that is known to move."""
        return sum(one.bytes or 0 for one in self.steps.values())

    @property
    def links(self) -> dict[str, int]:
        """Bytes by link."""
        found: dict[str, int] = {}
        for one in self.steps.values():
            if one.link:
                found[one.link] = found.get(one.link, 0) + (one.bytes or 0)
        return found

    @property
    def refusals(self) -> dict[str, str]:
        """Why steps would fail, by step."""
        return {one.name: one.refusal for one in self.steps.values() if one.refusal}

    def __getitem__(self, step: Any) -> StepPrice:
        return self.steps[step if isinstance(step, str) else step.name]

    def __str__(self) -> str:
        return "\n".join(map(_line, self.steps.values()))


def _line(one: StepPrice) -> str:
    if one.refusal:
        return f"{one.name}: refused: {one.refusal}"
    moved = "not known" if one.bytes is None else f"{one.bytes:,} bytes"
    if one.bytes:
        took = "not known" if one.seconds is None else f"{one.seconds:.3g}"
        return f"{one.name}: {moved} {one.link}, seconds: {took}" + _room(one)
    return f"{one.name}: {moved} {one.link}".rstrip() + _room(one)


def _room(one: StepPrice) -> str:
    return f", {one.evicts:,} bytes make room" if one.evicts else ""


async def price(core: Core, spec: PlanSpec, limit: Deadline) -> DryRun:
    """Go through a plan on paper."""
    paper = _Paper(core, limit)
    await paper.look()
    steps: dict[str, StepPrice] = {}
    for step in spec.ordinary:
        refused = next((n for n in step.needs if steps[n].refusal), None)
        if refused is not None:
            why = f"step {refused!r} would fail"
            steps[step.name] = _refused(step, why)
            continue
        try:
            steps[step.name] = await paper.step(step)
        except TensorCastError as error:
            steps[step.name] = _refused(step, error.message)
    return DryRun(steps=steps, seconds=_longest(spec, steps))


def _longest(spec: PlanSpec, steps: dict[str, StepPrice]) -> float | None:
    """Add up along the chain that takes longest."""
    ends: dict[str, float] = {}
    for step in spec.ordinary:
        took = steps[step.name].seconds
        if took is None:
            return None
        ends[step.name] = took + max((ends[one] for one in step.needs), default=0.0)
    return max(ends.values(), default=0.0)


def _refused(step: Step, why: str) -> StepPrice:
    return StepPrice(name=step.name, kind=str(step.kind), refusal=why)


def _unknown(step: Step) -> StepPrice:
    return StepPrice(name=step.name, kind=str(step.kind), bytes=None, seconds=None)


class _Paper:
    """Where everything would be."""

    def __init__(self, core: Core, limit: Deadline) -> None:
        self._core = core
        self._limit = limit
        self._nodes: dict[str, NodeState] = {}
        self._all: Any = None
        #: Bytes that may still be placed at a node without anything going.
        self._free: dict[str, int] = {}
        self._holders: dict[int, set[str]] = {}
        self._made: dict[str, ArtifactInfo | None] = {}
        #: Bytes a second by signal, where they were measured.
        self._speeds: dict[str, float] = {}

    async def look(self) -> None:
        """See how things are."""
        self._all = await names.nodes(self._core, self._limit)
        for state in self._all.nodes:
            use = state.uses.get(Tier.HOST, TierUse())
            taken = use.used_bytes + use.reserved_bytes
            self._nodes[state.card.node] = state
            self._free[state.card.node] = use.capacity_bytes - taken
        asked = SignalsAsked(
            rid=self._core.link.next_rid(), prefixes=("link/",), limit=_LINKS
        )
        frame = await self._core.ask(asked, SignalFrame, self._limit)
        for one in frame.changed:
            speed = one.value.get("bytes_per_s")
            if isinstance(speed, int | float) and speed > 0:
                self._speeds[one.name] = float(speed)

    async def step(self, step: Step) -> StepPrice:
        """Price one step and note what it would leave."""
        info = await self._target(step)
        self._made[step.name] = None if step.kind is Kind.COPY else info
        plain = StepPrice(name=step.name, kind=str(step.kind))
        node = find_node(self._all, step.node) if step.node else ""
        match step.kind:
            case Kind.SUBMIT | Kind.LOAD | Kind.COPY | Kind.DRAIN | Kind.CALL:
                return _unknown(step)
            case Kind.PREFETCH | Kind.REPLICATE | Kind.MIGRATE if info is None:
                return _unknown(step)
            case Kind.PREFETCH | Kind.REPLICATE | Kind.MIGRATE:
                assert info is not None
                moved = await self._move(step, info, node)
                if step.kind is Kind.MIGRATE:
                    source = find_node(self._all, step.source)
                    self._holders[info.generation].discard(source)
                return moved
            case Kind.RELEASE if info is not None and node:
                held = await self._held(info)
                held.discard(node)
                return plain
            case _:
                return plain

    async def _target(self, step: Step) -> ArtifactInfo | None:
        match step.target:
            case ArtifactRef() as ref:
                return ref.info()
            case NameRef(id=name):
                wants = step.kind is Kind.LATEST
                return await names.resolve(
                    self._core, name, published=wants, limit=self._limit
                )
            case StepRef(step=earlier):
                return self._made[earlier]
            case None:
                return None

    async def _held(self, info: ArtifactInfo) -> set[str]:
        held = self._holders.get(info.generation)
        if held is None:
            places = await names.locate(self._core, info.generation, self._limit)
            held = {place.card.node for place in places}
            self._holders[info.generation] = held
        return held

    async def _move(self, step: Step, info: ArtifactInfo, node: str) -> StepPrice:
        kind = str(step.kind)
        held = await self._held(info)
        if not node or node in held:
            return StepPrice(name=step.name, kind=kind)
        card = self._nodes[node].card
        near = [
            one
            for one in sorted(held)
            if one in self._nodes and self._nodes[one].card.host == card.host
        ]
        held.add(node)
        if near:
            link = f"{self._nodes[near[0]].card.name} = {card.name} (shared)"
            return StepPrice(name=step.name, kind=kind, link=link)
        over = max(0, info.nbytes - self._free[node])
        capacity = self._nodes[node].uses.get(Tier.HOST, TierUse()).capacity_bytes
        if info.nbytes > capacity:
            why = f"{card.name} has {capacity} bytes, {info.id!r} takes {info.nbytes}"
            return _refused(step, why)
        self._free[node] -= info.nbytes
        start, speed = self._source(held - {node}, node)
        return StepPrice(
            name=step.name,
            kind=kind,
            bytes=info.nbytes,
            link=f"{start} -> {card.name}",
            seconds=info.nbytes / speed if speed else None,
            evicts=over,
        )

    def _source(self, held: set[str], node: str) -> tuple[str, float]:
        """Give who would send, the fastest that was measured, and how fast; 0 where none was."""
        found = sorted(
            (-self._speeds.get(f"link/{one}/{node}", 0.0), self._nodes[one].card.name)
            for one in held
            if one in self._nodes
        )
        speed, name = found[0] if found else (0.0, "nobody")
        return name, -speed
