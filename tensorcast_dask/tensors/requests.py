"""Requests to the catalog that need more than their arguments put in place.

Rule: what a session checks before it asks, and what a step of a plan checks, is checked here, once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from tensorcast_dask.exceptions import InvalidArgument, Mismatch, NotFound
from tensorcast_dask.tensors.ids import ArtifactId, Generation, NodeId, check_name
from tensorcast_dask.tensors.messages import (
    ArtifactInfo,
    Nodes,
    Pin,
    Publish,
    RegisterView,
    SetAlias,
)
from tensorcast_dask.tensors.views import View, view_id

if TYPE_CHECKING:
    from tensorcast_dask.tensors.ids import RequestId
    from tensorcast_dask.tensors.specs import Index

__all__ = [
    "check_replicas",
    "check_version",
    "find_node",
    "pin",
    "publish",
    "register_view",
    "set_alias",
]


#: What is more, a whole number may be, means for ever.
_MOST_S: Final = math.nextafter(math.inf, 0.0)


def check_version(version: object) -> int:
    """Return a version number as the wire wants it: 0 for none, -1 for "next"."""
    if version is None:
        return 0
    if version == "next":
        return -1
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        message = f'version must be a positive integer, "next" or None, not {version!r}'
        raise InvalidArgument(message)
    return version


def check_replicas(replicas: object) -> int:
    """Return how many replicas are wanted."""
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        message = f"replicas must be a positive integer, not {replicas!r}"
        raise InvalidArgument(message)
    return replicas


def find_node(all_nodes: Nodes, wanted: str) -> NodeId:
    """Give the node that a name, Dask address or node id means.

    Raises
    ------
    NotFound
        When none does; the message lists those there are.
    """
    for state in all_nodes.nodes:
        if wanted in (state.card.node, state.card.name, state.card.worker):
            return state.card.node
    names = ", ".join(
        repr(state.card.name or state.card.node) for state in all_nodes.nodes
    )
    message = f"no node {wanted!r}; there are: {names or 'none'}"
    raise NotFound(message)


def publish(rid: RequestId, info: ArtifactInfo, version: object) -> Publish:
    """Ask that a version be visible to `latest`; another number than its own is Mismatch."""
    if version is not None and check_version(version) != info.version:
        message = (
            f"{info.id!r} is version {info.version}, not {version}; "
            f"publish it as {info.version}, or put it with version={version}"
        )
        raise Mismatch(message)
    return Publish(rid=rid, generation=info.generation)


def pin(rid: RequestId, generation: int, ttl_s: object, node: str) -> Pin:
    """Ask for a promise not to evict."""
    if not isinstance(ttl_s, int | float) or ttl_s is True or not ttl_s > 0:
        message = f"ttl must be positive seconds or math.inf, not {ttl_s!r}"
        raise InvalidArgument(message)
    return Pin(
        rid=rid,
        generation=Generation(generation),
        ttl_s=math.inf if ttl_s > _MOST_S else float(ttl_s),
        node=NodeId(node),
    )


def set_alias(rid: RequestId, name: str, generation: int, expect: object) -> SetAlias:
    """Ask that a name mean a generation (0: nothing), by compare-and-set."""
    if expect is None:
        expected = -1
    elif isinstance(expect, int) and not isinstance(expect, bool) and expect >= 0:
        expected = expect
    else:
        message = f"expect must be the alias generation that you saw, 0 or None, not {expect!r}"
        raise InvalidArgument(message)
    return SetAlias(
        rid=rid,
        name=ArtifactId(check_name(name, what="alias")),
        generation=Generation(generation),
        expect=expected,
    )


def register_view(
    rid: RequestId, info: ArtifactInfo, index: Index, step: View, name: str | None
) -> RegisterView:
    """Ask that a view be findable: of an artifact, or on top of what is a view already."""
    base = View.decode(info.view) if info.view else None
    described = step if base is None else base.then(step)
    resolved = described.resolve(index)
    return RegisterView(
        rid=rid,
        id=ArtifactId(name or view_id(info.base or info.id, info.generation, resolved)),
        generation=info.generation,
        view=resolved.described().encode(),
        index_digest=resolved.packed()[0].digest(),
        nbytes=resolved.nbytes,
        tensors=len(resolved.tensors),
    )
