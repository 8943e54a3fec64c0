"""Plans by chance, and plans in short."""

from __future__ import annotations

from hypothesis import strategies as st

from tensorcast_dask.tensors.contexts import Context
from tensorcast_dask.tensors.ids import ArtifactId, Generation, Version
from tensorcast_dask.tensors.plans import (
    ArtifactRef,
    Kind,
    NameRef,
    PlanSpec,
    Step,
    StepRef,
)
from tensorcast_dask.tensors.views import View

__all__ = ["chain", "contexts", "noop", "specs"]

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
                node=draw(NODES),
                target=_target(draw, kind, ordinary),
                options=_options(kind),
                after=after,
                retries=draw(st.integers(0, 3)),
                compensates=undoes,
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
        case Kind.SAVE:
            return {"path": "/p"}
        case Kind.DRAIN:
            return {"worker": "n1"}
        case Kind.PIN:
            return {"ttl": 5.0}
        case _:
            return {}
