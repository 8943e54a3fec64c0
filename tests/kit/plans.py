"""Plans by chance, and plans in short."""

from __future__ import annotations

from hypothesis import strategies as st

from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.contexts import Context
from tensorcast_dask.tensors.ids import ArtifactId, Generation, RequestId, Version
from tensorcast_dask.tensors.plans import (
    ArtifactRef,
    Kind,
    NameRef,
    PlanSpec,
    Step,
    StepRef,
)
from tensorcast_dask.tensors.values import pack
from tensorcast_dask.tensors.views import View
from tests.kit.catalogs import Program

__all__ = ["Runner", "chain", "contexts", "noop", "specs"]

NAMES = st.text("abcxyz-/é", min_size=1, max_size=8).filter(lambda t: t.strip() == t)
NODES = st.sampled_from(["", "n1", "n2", "tcp://10.0.0.1:9"])


def noop(name: str, *after: str, **more: object) -> Step:
    """A step that does nothing."""
    return Step(name=name, kind=Kind.NOOP, after=after, **more)  # type: ignore[arg-type]


def chain(*names: str) -> PlanSpec:
    """Steps that do nothing, one after the other."""
    steps = [
        noop(name, *names[at - 1 : at] if at else ()) for at, name in enumerate(names)
    ]
    return PlanSpec(steps=tuple(steps)).check()


@st.composite
def contexts(draw: st.DrawFn) -> Context:
    """A caller."""
    return Context(
        id=draw(NAMES),
        ddl=draw(st.none() | st.floats(min_value=0, allow_nan=False, max_value=1e6)),
        key=draw(st.just("") | NAMES),
        priority=draw(st.integers(-100, 100)),
        tags=tuple(draw(st.lists(NAMES, max_size=2))),
        labels=draw(st.dictionaries(NAMES, st.text(max_size=3), max_size=2)),
    )


@st.composite
def specs(draw: st.DrawFn, *, kinds: tuple[Kind, ...] = tuple(Kind)) -> PlanSpec:
    """A whole plan that can be run."""
    steps: list[Step] = []
    for at in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(kinds))
        ordinary = [one.name for one in steps if not one.compensates]
        after: tuple[str, ...] = ()
        if ordinary:
            after = tuple(draw(st.lists(st.sampled_from(ordinary), max_size=2)))
        undoes = draw(st.sampled_from(["", *ordinary]))
        steps.append(
            Step(
                name=f"s{at}",
                kind=kind,
                node="" if kind is Kind.CALL else draw(NODES),
                target=_target(draw, kind, ordinary),
                options=_options(kind),
                after=after,
                retries=draw(st.integers(0, 3)),
                compensates=undoes,
                instance="e" if kind is Kind.CALL else "",
                args=pack([[], {}]) if kind is Kind.CALL else b"",
                source="n1" if kind is Kind.MIGRATE else "",
                token="t" if kind is Kind.SUBMIT else "",
                view=View.of({"a": 0}).encode() if kind is Kind.VIEW else b"",
            )
        )
    return PlanSpec(context=draw(contexts()), steps=tuple(steps)).check()


def _target(
    draw: st.DrawFn, kind: Kind, ordinary: list[str]
) -> StepRef | NameRef | ArtifactRef | None:
    if kind in {Kind.LOAD, Kind.DRAIN, Kind.SUBMIT}:
        return None
    one = ArtifactRef(
        id=ArtifactId("x"), version=Version(2), generation=Generation(7), nbytes=3
    )
    refs: list[StepRef | NameRef | ArtifactRef] = [NameRef(id="x"), one]
    refs += [StepRef(step=name) for name in ordinary]
    return draw(st.sampled_from(refs))


def _options(kind: Kind) -> dict[str, str | int | float | bool | None]:
    match kind:
        case Kind.ALIAS:
            return {"name": "a"}
        case Kind.LOAD:
            return {"path": "/p", "id": "x"}
        case Kind.COPY:
            return {"id": "y"}
        case Kind.SAVE:
            return {"path": "/p"}
        case Kind.DRAIN:
            return {"worker": "n1"}
        case Kind.CALL:
            return {"function": "f"}
        case Kind.PIN:
            return {"ttl": 5.0}
        case _:
            return {}


class Runner:
    """Who carries a plan on at a catalog's desk."""

    def __init__(self, program: Program, key: str = "k") -> None:
        self.program = program
        self.key = key
        self.run = 0

    def open(
        self, spec: PlanSpec, *, deadline_s: float = 60.0, **more: object
    ) -> m.PlanState:
        ask = m.OpenPlan(
            rid=self.program.rid(),
            key=self.key,
            digest=spec.digest(),
            spec=spec.to_json(),
            deadline_s=deadline_s,
            **more,  # type: ignore[arg-type]
        )
        state = self.program.call(ask, m.PlanState)
        self.run = state.run
        return state

    def begin(self, step: str) -> m.StepState:
        ask = m.BeginStep(rid=self.program.rid(), key=self.key, run=self.run, step=step)
        return self.program.call(ask, m.StepState)

    def effect(
        self, step: str, request: m.Message, *, number: int = 1, attempt: int = 1
    ) -> RequestId:
        """Ask for a change; the answer is the program's."""
        ask = m.StepEffect(
            rid=self.program.rid(),
            key=self.key,
            run=self.run,
            step=step,
            number=number,
            attempt=attempt,
            request=m.encode(request),
        )
        rid = self.program.ask(ask)
        self.program.desk.flush()
        return rid

    def ended(
        self, step: str, status: m.StepStatus = m.StepStatus.DONE, **more: object
    ) -> m.StepOutcome:
        outcome = m.StepOutcome(status=status, **more)  # type: ignore[arg-type]
        ask = m.EndStep(
            rid=self.program.rid(),
            key=self.key,
            run=self.run,
            step=step,
            outcome=outcome,
        )
        return self.program.call(ask, m.StepOutcome)

    def end(self, *, cancel: bool = False) -> m.PlanState:
        ask = m.EndPlan(
            rid=self.program.rid(), key=self.key, run=self.run, cancel=cancel
        )
        return self.program.call(ask, m.PlanState)

    def look(self, **more: object) -> m.PlanState:
        ask = m.PlanAsked(rid=self.program.rid(), key=self.key, **more)  # type: ignore[arg-type]
        return self.program.call(ask, m.PlanState)

    def resume(self) -> m.PlanState:
        ask = m.ResumePlan(
            rid=self.program.rid(), key=self.key, run=self.run, deadline_s=1e6
        )
        state = self.program.call(ask, m.PlanState)
        self.run = state.run
        return state
