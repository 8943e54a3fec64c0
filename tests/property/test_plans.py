"""Plans as values: they survive their JSON, and nothing else passes for one."""

from __future__ import annotations

import contextlib

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.tensors.plans import PlanSpec
from tests.kit.plans import specs

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["steps", "context", "name", "kind", "after", "ddl", "is"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(specs())
def test_a_plan_is_itself_again_with_the_same_digest(spec: PlanSpec) -> None:
    again = PlanSpec.from_json(spec.to_json())
    assert again == spec
    assert again.to_json() == spec.to_json()
    assert again.digest() == spec.digest()


@given(specs())
def test_the_order_of_members_in_the_json_changes_nothing(spec: PlanSpec) -> None:
    def turned(value: object) -> object:
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return [turned(one) for one in value] if isinstance(value, list) else value

    text = msgspec.json.encode(turned(msgspec.json.decode(spec.to_json())))
    assert PlanSpec.from_json(text).digest() == spec.digest()


@given(specs())
def test_every_step_comes_after_what_it_needs(spec: PlanSpec) -> None:
    seen: set[str] = set()
    for step in spec.steps:
        assert set(step.needs) <= seen
        seen.add(step.name)


@given(specs(), st.integers(0, 5), st.integers(0, 5))
def test_two_plans_have_one_digest_when_their_steps_are_equal(
    spec: PlanSpec, at: int, retries: int
) -> None:
    if at >= len(spec.steps):
        return
    changed = msgspec.structs.replace(spec.steps[at], retries=retries)
    steps = (*spec.steps[:at], changed, *spec.steps[at + 1 :])
    other = PlanSpec(steps=steps)
    assert (other.digest() == spec.digest()) == (steps == spec.steps)


@given(JSON | st.binary(max_size=40))
def test_hostile_json_is_a_plan_or_a_typed_error(value: object) -> None:
    raw = value if isinstance(value, bytes) else msgspec.json.encode(value)
    try:
        spec = PlanSpec.from_json(raw)
    except InvalidArgument:
        return
    assert PlanSpec.from_json(spec.to_json()) == spec


@given(specs(), st.data())
def test_damaged_json_is_a_plan_or_a_typed_error(
    spec: PlanSpec, data: st.DataObject
) -> None:
    raw = bytearray(spec.to_json())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(InvalidArgument):
        PlanSpec.from_json(bytes(raw)).check()
