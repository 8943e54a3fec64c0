"""What only the catalog is asked: names, versions, aliases, pins, lists.

Rules:

1. Arguments are checked here, before a message is made; the catalog checks them again.
2. Every function is a coroutine on the session's loop and moves no bytes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tensorcast_dask.exceptions import AbsentError, InvalidArgument
from tensorcast_dask.tensors import requests
from tensorcast_dask.tensors.ids import ArtifactId, Generation, check_name
from tensorcast_dask.tensors.messages import (
    AliasState,
    ArtifactInfo,
    Describe,
    Described,
    Destroy,
    Destroyed,
    ListArtifacts,
    Listed,
    Locate,
    Located,
    Location,
    Nodes,
    NodesAsked,
    Pinned,
    Query,
    Resolve,
    Rows,
    Unpin,
)

if TYPE_CHECKING:
    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.api.connection.deadlines import Deadline
    from tensorcast_dask.api.connection.operation import Operation
    from tensorcast_dask.tensors.specs import Index

__all__ = [
    "check_labels",
    "describe",
    "destroy",
    "exists",
    "list_artifacts",
    "locate",
    "nodes",
    "pin",
    "publish",
    "query",
    "resolve",
    "set_alias",
    "unpin",
    "warn_of_shortfall",
]

_LOG = logging.getLogger(__name__)

_PAGE = 1000


def warn_of_shortfall(info: ArtifactInfo) -> None:
    """Say in the log that a version has fewer replicas than were asked for."""
    if info.degraded:
        _LOG.warning(
            "%r v%d has fewer replicas than asked for: %s",
            info.id,
            info.version,
            info.degraded,
        )


def check_labels(labels: object) -> dict[str, str]:
    """Return labels as plain text to text."""
    if labels is not None and not isinstance(labels, Mapping):
        message = f"labels must map text to text, not be {type(labels).__name__}"
        raise InvalidArgument(message)
    checked = dict(labels or {})
    for key, value in checked.items():
        check_name(key, what="label")
        if not isinstance(value, str):
            message = f"label {key!r} must be text, not {type(value).__name__}"
            raise InvalidArgument(message)
    return checked


async def resolve(
    core: Core,
    artifact_id: str,
    *,
    version: int = 0,
    published: bool = False,
    limit: Deadline,
) -> ArtifactInfo:
    """Which generation a name means now."""
    name = ArtifactId(check_name(artifact_id))
    request = Resolve(
        rid=core.link.next_rid(), id=name, version=version, published=published
    )
    return await core.ask(request, ArtifactInfo, limit)


async def exists(
    core: Core, artifact_id: str, *, version: int, limit: Deadline
) -> bool:
    """Whether the name can be read; no pin, lease or touch."""
    try:
        await resolve(core, artifact_id, version=version, limit=limit)
    except AbsentError:
        return False
    return True


async def describe(core: Core, generation: int, limit: Deadline) -> Index:
    """Give the index of a generation; kept, since it never changes."""
    known = core.stores.indices.get(generation)
    if known is None:
        request = Describe(rid=core.link.next_rid(), generation=Generation(generation))
        described = await core.ask(request, Described, limit)
        known = core.stores.remember_index(generation, described.index)
    return known


async def locate(core: Core, generation: int, limit: Deadline) -> tuple[Location, ...]:
    """Replicas that are believed alive, best first."""
    request = Locate(rid=core.link.next_rid(), generation=Generation(generation))
    located = await core.ask(request, Located, limit)
    core.stores.learn(location.card for location in located.locations)
    return located.locations


async def nodes(core: Core, limit: Deadline) -> Nodes:
    """All nodes whose lease runs."""
    answer = await core.ask(NodesAsked(rid=core.link.next_rid()), Nodes, limit)
    core.stores.learn(state.card for state in answer.nodes)
    return answer


async def publish(
    core: Core,
    operation: Operation[Any],
    info: ArtifactInfo,
    version: object,
    limit: Deadline,
) -> ArtifactInfo:
    """Make a version visible to `latest`."""
    request = requests.publish(core.link.next_rid(), info, version)
    return await core.ask(request, ArtifactInfo, limit, operation=operation)


async def destroy(
    core: Core,
    operation: Operation[Any],
    artifact_id: str,
    generation: int,
    limit: Deadline,
) -> Destroyed:
    """End a version, or all of an id."""
    request = Destroy(
        rid=core.link.next_rid(),
        id=ArtifactId(check_name(artifact_id)),
        generation=Generation(generation),
        deadline_s=limit.left_s(),
    )
    return await core.ask(request, Destroyed, limit, operation=operation)


async def pin(
    core: Core, generation: int, *, ttl_s: object, node: str, limit: Deadline
) -> Pinned:
    """Promise not to evict."""
    request = requests.pin(core.link.next_rid(), generation, ttl_s, node)
    return await core.ask(request, Pinned, limit)


async def unpin(core: Core, generation: int, number: int, limit: Deadline) -> None:
    """Take a pin back."""
    request = Unpin(
        rid=core.link.next_rid(), generation=Generation(generation), pin=number
    )
    await core.ask(request, type(None), limit)


async def set_alias(
    core: Core, name: str, generation: int, expect: object, limit: Deadline
) -> AliasState:
    """Move a name by compare-and-set."""
    request = requests.set_alias(core.link.next_rid(), name, generation, expect)
    return await core.ask(request, AliasState, limit)


async def list_artifacts(
    core: Core,
    *,
    prefix: str,
    labels: Mapping[str, str] | None,
    all_versions: bool,
    after: object = None,
    most: object = None,
    limit: Deadline,
) -> list[ArtifactInfo]:
    """Every artifact that matches, by id; paged, so that the scheduler is never held up."""
    wanted = check_labels(labels)
    left = _check_most(most)
    found: list[ArtifactInfo] = []
    after = _cursor_of(after)
    while True:
        request = ListArtifacts(
            rid=core.link.next_rid(),
            prefix=prefix,
            labels=wanted,
            after=after,
            limit=_PAGE if left is None else min(_PAGE, left - len(found)),
            all_versions=all_versions,
        )
        page = await core.ask(request, Listed, limit)
        found += page.infos
        after = page.after
        if not after or len(found) == left:
            return found


def _check_most(most: object) -> int | None:
    if most is None:
        return None
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        message = f"limit must be a positive whole number or None, not {most!r}"
        raise InvalidArgument(message)
    return most


def _cursor_of(after: object) -> str:
    """Say after which artifact a list begins, as the catalog does: given as (id, version)."""
    match after:
        case None:
            return ""
        case (str(name), int(version)) if not isinstance(version, bool):
            return f"{check_name(name)}\0{version}"
    message = f"after must be an id and a version, not {after!r}"
    raise InvalidArgument(message)


async def query(core: Core, sql: object, *, rows: int, limit: Deadline) -> Rows:
    """One SELECT over the catalog's tables."""
    if not isinstance(sql, str) or not sql.strip():
        message = "sql must be the text of one SELECT"
        raise InvalidArgument(message)
    if math.isnan(rows) or rows < 1:
        message = f"limit must be at least 1, not {rows}"
        raise InvalidArgument(message)
    request = Query(
        rid=core.link.next_rid(), sql=sql, limit=rows, deadline_s=limit.left_s()
    )
    return await core.ask(request, Rows, limit)
