"""Where the nodes and instances are that a plan's steps name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorcast_dask.api.actions import instances, names
from tensorcast_dask.api.connection.deadlines import deadline
from tensorcast_dask.api.plans.graph import Place, place_of
from tensorcast_dask.exceptions import NotFound
from tensorcast_dask.tensors.requests import find_node

if TYPE_CHECKING:
    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.api.plans.graph import Places
    from tensorcast_dask.tensors.plans import PlanSpec

__all__ = ["places_of"]


async def places_of(core: Core, spec: PlanSpec) -> tuple[Places, dict[Any, list[str]]]:
    """Find the nodes that steps name, and the workers that have the roles they ask for."""
    found = await names.nodes(core, deadline(60.0))
    cards = {state.card.node: state.card for state in found.nodes}
    places: Places = {}
    roles: dict[Any, list[str]] = {}
    for step in spec.steps:
        if step.node and step.node not in places:
            try:
                node = find_node(found, step.node)
            except NotFound:
                places[step.node] = Place(step.node)  # its step says so, typed
            else:
                places[step.node] = Place(node, cards[node].worker)
        if step.roles and step.roles not in roles:
            roles[step.roles] = [
                card.worker
                for card in cards.values()
                if card.worker and set(step.roles) <= set(card.roles)
            ]
            if not roles[step.roles]:
                message = (
                    f"step {step.name!r}: no node has the roles {', '.join(step.roles)}"
                )
                raise NotFound(message)
    if any(step.instance for step in spec.steps):
        places |= await _instances_of(core, spec)
    return places, roles


async def _instances_of(core: Core, spec: PlanSpec) -> Places:
    """Find the instances that steps name, each with the worker of its node."""
    there = await instances.listed(core, deadline(60.0))
    known = {state.record.name: state for state in there}
    places: Places = {}
    for step in spec.steps:
        if step.instance:
            state = known.get(step.instance)
            places[place_of(step)] = (
                Place("")  # its step says so, typed
                if state is None
                else Place(state.card.node, state.card.worker, state.record.attachment)
            )
    return places
